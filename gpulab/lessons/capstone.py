"""Lesson 15, the capstone: a training that does everything wrong, and a ladder of measured rungs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct, field
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

import gpulab
from gpulab.analysis.facts import Facts
from gpulab.api.climb import climbs
from gpulab.formatting import percent, plural, settings_words, speedup
from gpulab.lessons.check import Checked, Note, NotMeasured, Table, check_speed, exercise, right, undecided, wrong
from gpulab.lessons.digits import DistantDigits
from gpulab.lessons.figures import BARE, BLUE, GREY, fill_rows, ink, ink_lines, plot, share_row
from gpulab.lessons.guesses import Question, share, times
from gpulab.lessons.measured import latest_experiment, latest_facts, notes, working_share
from gpulab.lessons.training import weights_of
from gpulab.tuning.record import Comparison
from gpulab.views.wording import PARTS, part_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST_SPEEDUP = 3.0  # speedup over the given training
SAMPLES = 256  # of a measurement
FETCH_MS = 16  # of the exercise: long enough for eight workers to gain more than their start costs, even on one core
FEWEST_UPDATES = 3  # with that many samples: fewer would be a different training

BASELINE = "baseline"  # the run that the lesson begins with
DATA, BATCH, BATCH_ON_DATA, PRECISION = "data-first", "batch-first", "then-batch", "then-amp"
GOAL = 0.9  # share of the profiled steps in which the device works
GOAL_MARGIN = 0.02  # closer to the goal, one profiled run cannot decide whether it is reached
LEAST_REST = 0.01  # a smaller part of the rest is not named
MOST_PARTS = 3  # named parts of the rest
CORE_WAIT = PARTS["core_wait"].label
_PALE = "#B9C7D3"  # of a bar that does not count

Interval = tuple[float, float]
NO_GAIN: Interval = (1.0, 1.0)  # no speedup


def wide_network() -> nn.Module:
    """Convolutions and a wide layer for digits of 32 x 32 pixels: a quarter of a million weights to update."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2048, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def small_network() -> nn.Module:
    """Convolutions for digits of 32 x 32 pixels: the model of the exercise, cheap to train on one core."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


# -- the ladder --------------------------------------------------------------------------------------------------------


class Rung(Struct, frozen=True):
    """One step up, measured against the baseline: the comparison, and the device's activity with that setting.

    `working` is the share of the profiled steps in which the device works, `before` the same share of the baseline in
    the same experiment; `rest` has the shares of the other parts, by label. `on` names the rung below.
    """

    name: str  # of its experiment
    comparison: Comparison
    before: float | None = None
    working: float | None = None
    rest: Mapping[str, float] = field(default_factory=dict)
    on: str = ""

    @classmethod
    def of(cls, name: str, comparison: Comparison, on: str = "") -> Rung:
        """The rung of the B side of a comparison with the baseline."""
        a, b = comparison.a.facts, comparison.b.facts
        return cls(name, comparison, working_share(a), working_share(b), _rest(b), on)

    @property
    def label(self) -> str:
        """The settings, as in `--ab`."""
        return self.comparison.b.label

    @property
    def times(self) -> float | None:
        return self.comparison.times_as_fast

    @property
    def interval(self) -> Interval | None:
        return self.comparison.times_as_fast_interval

    @property
    def counts(self) -> bool:
        """Whether it is a step up: decidedly faster."""
        return self.comparison.verdict == "faster" and self.times is not None

    @property
    def words(self) -> str:
        """ "speedup 3.1× (2.9–3.3)", or that it is undecided."""
        if self.times is None:
            return "not measured"
        verdict = self.comparison.verdict
        return speedup(self.times, self.interval) + ("" if verdict in ("faster", "slower") else f", {verdict}")

    def gain_on(self, below: Rung | None) -> tuple[str, Interval] | None:
        """The speedup over another rung, in words, and its interval; both were measured against the baseline.

        The interval spans all quotients of both intervals, so it is too wide rather than too narrow.
        """
        if below is None or not self.times or not below.times or not self.interval or not below.interval:
            return None
        interval = self.interval[0] / below.interval[1], self.interval[1] / below.interval[0]
        return speedup(self.times / below.times, interval), interval


def _rest(figures: Facts | None) -> dict[str, float]:
    """The shares of the parts in which the device does not work, by label, the largest first."""
    breakdown, shares = (figures.breakdown, figures.shares) if figures is not None else (None, None)
    if breakdown is None or shares is None:
        return {}
    on_gpu = breakdown.busy_fraction is not None
    work = ("compute", "memcpy", "memset", "communication") if on_gpu else ("compute", "optimizer")
    idle = {part_of(name, breakdown).label: part for name, part in shares.share.items() if name not in work}
    return dict(sorted(idle.items(), key=lambda item: -item[1]))


def _ahead(mine: Interval | None, other: Interval | None) -> bool | None:
    """Whether the first is decidedly larger; None if the intervals overlap or one is missing."""
    if mine is None or other is None:
        return None
    return True if mine[0] > other[1] else False if mine[1] < other[0] else None


class Ladder(Struct):
    """The rungs that a learner has measured; each is added under the name of its experiment."""

    rungs: list[Rung] = field(default_factory=list)

    @notes
    def add(self, experiment: str, on: str = "") -> Ladder:
        """Add the experiment of that name to the ladder, or replace its rung. `on`: the rung below."""
        comparison = latest_experiment(experiment).comparisons[0]
        if on and self.rung(on) is None:
            raise NotMeasured(f"There is no rung {on!r} to stand on yet: add that one first.")
        names = [rung.name for rung in self.rungs]
        place = names.index(experiment) if experiment in names else len(names)
        self.rungs[place : place + 1] = [Rung.of(experiment, comparison, on)]
        return self

    def rung(self, name: str) -> Rung | None:
        """The rung of that experiment; None if it was not added."""
        return next((rung for rung in self.rungs if rung.name == name), None)

    def best(self, of: str = "times") -> Rung | None:
        """Among the rungs that count, the one with the largest `times` or `working`; None if no rung has it."""
        possible = [rung for rung in self.rungs if rung.counts and getattr(rung, of) is not None]
        return max(possible, key=lambda rung: float(getattr(rung, of)), default=None)

    @property
    def before(self) -> float | None:
        """The share in which the device works in the baseline: from that run, else from the first rung's experiment."""
        with suppress(NotMeasured):
            return working_share(latest_facts(BASELINE))
        return self.rungs[0].before if self.rungs else None

    def __repr__(self) -> str:
        """Each rung, the share in which its device works, and its speedup; the baseline comes first."""
        if not self.rungs:
            return "The ladder is empty."
        rows = [(BASELINE, _share_words(self.before), "–")]
        for rung in self.rungs:
            words, gain = rung.words, rung.gain_on(self.rung(rung.on))
            words += "" if rung.counts else ": does not count"
            if gain is not None:
                words += f"; {gain[0]} on top of {rung.on}{', undecided' if _ahead(gain[1], NO_GAIN) is None else ''}"
            rows.append((f"{rung.name}: {rung.label}", _share_words(rung.working), words))
        return repr(Table.of(("rung", "the device works", "speedup vs. baseline"), rows))


def _share_words(working: float | None) -> str:
    return "not measurable" if working is None else percent(working)


@notes
def draw_ladder(ladder: Ladder) -> Figure:
    """A bar for each rung: the share in which the device works, next to its speedup."""
    if not ladder.rungs:
        raise NotMeasured("The ladder is empty: measure a rung, and add it.")
    rows, speeds = [share_row(BASELINE, ladder.before, BLUE, "not measurable", whole=100)], [""]
    for rung in ladder.rungs:
        name = "\n".join([ink(rung.name), *ink_lines(rung.label, 40, 2)])
        colour, hatch = (BLUE, "") if rung.counts else (_PALE, "///")
        rows.append(share_row(name, rung.working, colour, "not measurable", whole=100, hatch=hatch))
        speeds.append(rung.words if rung.counts else f"{rung.words}:\ndoes not count")
    title, x = "your ladder (dashed: 90 %)", "share of each step in which the device works, %"
    with plot(9, 0.52 * len(rows) + 0.95, title, x, bare=BARE) as (figure, axes):
        fill_rows(axes, rows, height=0.62, size=9)
        for at, words in enumerate(speeds):
            axes.text(102, at, "\n".join(ink(line) for line in words.splitlines()), va="center", size=9)
        axes.axvline(100 * GOAL, color=GREY, lw=1, ls="--", zorder=0)
        axes.set_xlim(0, 100)
        axes.set_xticks((0, 25, 50, 75, 90, 100))
    return figure


# -- what the rungs say ------------------------------------------------------------------------------------------------


@notes
def judge_order(ladder: Ladder) -> Note:
    """Whether "data, then batch, then mixed precision" was the order here, by the learner's own rungs."""
    data, batch, on_data = (ladder.rung(name) for name in (DATA, BATCH, BATCH_ON_DATA))
    if data is None or batch is None or on_data is None:
        raise NotMeasured(f"This needs the rungs {DATA}, {BATCH} and {BATCH_ON_DATA}: add them first.")
    precision = ladder.rung(PRECISION)
    gain, amp_gain = on_data.gain_on(data), precision.gain_on(ladder.rung(precision.on)) if precision else None
    claims = (  # measurement, its interval, its reference, and the sentence
        (f"Data first: {data.words}. Batch first: {batch.words}.", data.interval, batch.interval, "Data gave more."),
        (
            f"On top of the data, the larger batch: {gain[0]},"
            if gain
            else "The batch on top of the data: not measured,",
            gain and gain[1],
            batch.interval,
            "more than alone.",
        ),
        (
            f"Mixed precision on top of the rest: {amp_gain[0]}:" if amp_gain else "Mixed precision: not measured,",
            amp_gain and amp_gain[1],
            NO_GAIN,
            "it helps here.",
        ),
    )
    contrary = {
        "Data gave more.": ("The batch gave more.", "Which gave more is undecided."),
        "more than alone.": ("less than alone.", "whether that is more than alone is undecided."),
        "it helps here.": ("it costs time here.", "whether it helps here is undecided."),
    }
    holds = [_ahead(mine, other) for _, mine, other, _ in claims]
    sentences = (
        f"{words} {yes if is_so else contrary[yes][is_so is None]}"
        for (words, _, _, yes), is_so in zip(claims, holds, strict=True)
    )
    opening = "It holds here." if all(holds) else "Not all of it holds here." if False in holds else "Undecided."
    return Note(opening, " ".join(sentences))


@notes
def rest_of_step(ladder: Ladder) -> Note:
    """Whether the device works 90 % of the time on a rung that counts, and the parts of the remaining time."""
    top = ladder.best("working")
    if top is None or top.working is None:
        raise NotMeasured("No rung counts yet, or no share was measured: add a rung that is faster.")
    words = f"In the traced run of {top.name} ({top.label}) the device works {percent(top.working)} of each step."
    parts = [f"{percent(part)} {label}" for label, part in top.rest.items() if part >= LEAST_REST][:MOST_PARTS]
    words += f" Most of the rest: {', '.join(parts)}." if parts else " No other part is as much as 1 %."
    if any(CORE_WAIT in part for part in parts):
        words += f" {CORE_WAIT.capitalize()} comes from other programs, or from more processes than cores."
    if abs(top.working - GOAL) < GOAL_MARGIN:
        return Note("Undecided.", f"{words} One traced run cannot decide whether that is 90 % or not.")
    if top.working > GOAL:
        return Note("90 % is reached.", words)
    return Note("90 % is not reached.", f"{words} To come further, that is what would have to go.")


@notes
def compare_with_climb(ladder: Ladder) -> Note:
    """Which got further, the learner's ladder or gpulab's latest climb, as far as the intervals decide."""
    if not climbs:
        raise NotMeasured("There is no climb yet: run %gpulab climb first.")
    climbed = climbs[-1]
    settings = settings_words(climbed.kept)
    whole = climbed.result.whole
    if not climbed.kept:
        return Note("Undecided.", "The climb kept nothing: no setting that it tried was faster for certain.")
    if whole is None or whole.times_as_fast is None:
        return Note("Undecided.", f"The climb kept {settings}, and had no time to compare it as a whole.")
    theirs, mine = Rung.of("climb", whole), ladder.best()
    words = f"The climb kept {settings}: {theirs.words}."
    if mine is None:
        return Note("So far.", f"{words} No rung of yours is faster for certain yet.")
    words += f" Your best rung, {mine.name} ({mine.label}): {mine.words}."
    if mine.comparison.unit != whole.unit:
        words += (
            f" Yours is per {mine.comparison.unit}, the climb's per {whole.unit}: with equal batches both are the same."
        )
    ahead = _ahead(mine.interval, theirs.interval)
    openings = {True: "You got further.", False: "The climb got further.", None: "Nobody is ahead for certain."}
    return Note(openings[ahead], words)


# -- the exercises -----------------------------------------------------------------------------------------------------


@exercise('Put "data" or "batch" in place of the dots, then run that cell and this one again.')
def check_order(order: object) -> Checked:
    """Which of the first two rungs gained more, "data" or "batch", by the learner's own measurements."""
    if order not in ("data", "batch"):
        return wrong(f'{order!r} is neither "data" nor "batch".')
    data, batch = (Rung.of(name, latest_experiment(name).comparisons[0]) for name in (DATA, BATCH))
    words = f"Data first: {data.words}. Batch first: {batch.words}."
    data_is_ahead = _ahead(data.interval, batch.interval)
    if data_is_ahead is None:
        return undecided(f"{words} The intervals overlap or are missing, so neither is ahead for certain.")
    return right(words) if (order == "data") == data_is_ahead else wrong(words)


def slow_train(dataset: Any, model: nn.Module, samples: int) -> None:
    """The training to speed up: one image after the other, small batches, and an accuracy counted in Python."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    count = correct = 0
    for images, labels in DataLoader(dataset, batch_size=8, shuffle=True, drop_last=True):
        logits = model(images)
        loss = functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        correct += sum(int(row.argmax() == label) for row, label in zip(logits, labels, strict=True))
        count += len(labels)
        if count >= samples:
            return


@exercise()
def check_train(my_train: Any) -> Checked:
    """Whether `my_train(dataset, model, samples)` trains on as many samples, and with a speedup of at least 3×."""
    dataset, model = DistantDigits(fetch_ms=FETCH_MS), small_network()
    samples, updates, before = [0], [0], weights_of(model)
    hook = register_optimizer_step_pre_hook(lambda *_: updates.append(1))
    model.register_forward_pre_hook(lambda _, inputs: samples.append(len(inputs[0]) * torch.is_grad_enabled()))
    try:
        my_train(dataset, model, SAMPLES)
    finally:
        hook.remove()
    trained, updated = sum(samples), sum(updates)
    if trained < SAMPLES:
        return wrong(f"The model was given {trained} samples in training; expected {SAMPLES}.")
    if updated < FEWEST_UPDATES or torch.equal(before, weights_of(model)):
        return wrong(
            f"The weights were updated {plural(updated, 'time')} for {trained} samples. With fewer than "
            f"{FEWEST_UPDATES} updates it is another training."
        )
    checked = check_speed(
        lambda: slow_train(dataset, small_network(), SAMPLES),
        lambda: my_train(dataset, small_network(), SAMPLES),
        LEAST_SPEEDUP,
        good="The same samples, and the same kind of training.",
        pairs=5,
        budget_s=40.0,
    )
    if checked.state == "wrong":
        with suppress(Exception):  # a hint must not fail the check
            with gpulab.profile("answer", live=False, save=False, show=False) as profiled:
                my_train(dataset, small_network(), SAMPLES)
            first = profiled.report.diagnosis.findings[0]
            return wrong(f"{checked.hint} gpulab's report of your training says: {first.summary}")
    return checked


QUESTIONS: Mapping[str, Question] = {
    "working": share(
        "In what share of each step does the device work?",
        lambda: working_share(latest_facts(BASELINE)),
        "of each step the device works",
    ),
    "all": times("What speedup do all of your settings give together?", "then-metric", "with all of them"),
}
