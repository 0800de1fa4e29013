"""Lesson 15, the capstone: a training that does everything wrong, and a ladder of measured rungs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from html import escape
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct, field
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

import gpulab
from gpulab.analysis.facts import facts
from gpulab.api.climb import climbs
from gpulab.formatting import percent, plural, speedup
from gpulab.lessons.check import (
    Checked,
    NoAnswer,
    Note,
    exercise,
    judge_speed,
    right,
    seconds_of,
    time_pairs,
    unanswered,
    undecided,
    wrong,
)
from gpulab.lessons.figures import GREY, ink, ink_lines, plot
from gpulab.lessons.guesses import Question, share, times
from gpulab.lessons.measured import experiment_named, run_named, working_share
from gpulab.lessons.starving import DistantDigits
from gpulab.run import Run
from gpulab.tuning.record import Comparison
from gpulab.verdict import Verdict
from gpulab.views.wording import PARTS, part_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WANTED = 3.0  # speedup over the given training
SAMPLES = 256  # of a measurement
FETCH_MS = 16  # of the exercise: what eight workers gain is more than what starting them costs, on one core too
FEWEST_UPDATES = 3  # of so many samples: fewer would be another training

BASELINE = "baseline"  # the run that the lesson begins with
DATA, BATCH, BATCH_ON_DATA, PRECISION = "data-first", "batch-first", "then-batch", "then-amp"
EVERYTHING = "then-metric"
GOAL = 0.9  # share of the profiled steps in which the device works
GOAL_MARGIN = 0.02  # nearer to the goal than this, one profiled run does not decide whether it is reached
LEAST_REST = 0.01  # a smaller part of what is left is not named
MOST_PARTS = 3  # of what is left
CORE_WAIT = PARTS["core_wait"].label

Interval = tuple[float, float]
NO_GAIN: Interval = (1.0, 1.0)  # no speedup


def wide_network() -> nn.Module:
    """Convolutions and a wide layer for digits of 32 x 32 pixels: a quarter of a million weights to update."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2048, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def small_network() -> nn.Module:
    """Convolutions for digits of 32 x 32 pixels: the exercise's, cheap to train on one core."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def distant_digits() -> DistantDigits:
    """Images that take 1.5 ms each to arrive."""
    return DistantDigits(fetch_ms=1.5)


# -- the ladder --------------------------------------------------------------------------------------------------------


class Gain(Struct, frozen=True):
    """A speedup, and between which values it lies."""

    times: float
    interval: Interval

    @property
    def words(self) -> str:
        """ "speedup 1.5× (1.3–1.7)"."""
        return speedup(self.times, self.interval)


class Rung(Struct, frozen=True):
    """One step up, measured: its speedup over the baseline, and what the device then does.

    `working` is the share of the profiled steps in which the device works, `before` that of the baseline in the
    same experiment; `rest` has the shares of the other parts, by their labels. `on` names the rung that it stands on.
    """

    name: str  # of its experiment
    label: str  # what was set, as in `--ab`
    times: float | None
    interval: Interval | None
    verdict: Verdict
    unit: str = "sample"
    settings: Mapping[str, str] = field(default_factory=dict)
    before: float | None = None
    working: float | None = None
    rest: Mapping[str, float] = field(default_factory=dict)
    on: str = ""

    @classmethod
    def of(cls, name: str, comparison: Comparison, on: str = "") -> Rung:
        """Of the B side of a comparison with the baseline."""
        a, b = (None if side.facts is None else side.facts.run for side in (comparison.a, comparison.b))
        return cls(
            name=name,
            label=comparison.b.label,
            times=comparison.times_as_fast,
            interval=comparison.times_as_fast_interval,
            verdict=comparison.verdict,
            unit=comparison.unit,
            settings=comparison.b.settings,
            before=working_share(a),
            working=working_share(b),
            rest=_rest(b),
            on=on,
        )

    @property
    def counts(self) -> bool:
        """Only what is faster for certain is a step up."""
        return self.verdict == "faster" and self.times is not None

    @property
    def words(self) -> str:
        """ "speedup 3.1× (2.9–3.3)", or that it is undecided."""
        if self.times is None:
            return "not measured"
        doubt = "" if self.verdict in ("faster", "slower") else f", {self.verdict}"
        return f"{speedup(self.times, self.interval)}{doubt}"

    def gain_on(self, below: Rung) -> Gain | None:
        """Against another rung; both were measured against the baseline.

        The interval has all quotients of both intervals, so it is rather too wide than too narrow.
        """
        if self.times is None or below.times is None or self.interval is None or below.interval is None:
            return None
        low, high = self.interval[0] / below.interval[1], self.interval[1] / below.interval[0]
        return Gain(self.times / below.times, (low, high))


def _rest(run: Run | None) -> dict[str, float]:
    """The shares of the parts in which the device does not work, by label, the largest first."""
    figures = facts(run) if run is not None else None
    breakdown, shares = (figures.breakdown, figures.shares) if figures is not None else (None, None)
    if breakdown is None or shares is None:
        return {}
    on_gpu = breakdown.busy_fraction is not None
    work = ("compute", "memcpy", "memset", "communication") if on_gpu else ("compute", "optimizer")
    idle = {part_of(name, breakdown).label: part for name, part in shares.share.items() if name not in work}
    return dict(sorted(idle.items(), key=lambda item: -item[1]))


def _ahead(mine: Interval | None, other: Interval | None) -> bool | None:
    """Whether the first is more for certain; None where the intervals overlap, or one is missing."""
    if mine is None or other is None:
        return None
    return True if mine[0] > other[1] else False if mine[1] < other[0] else None


class Ladder(Struct):
    """The rungs that a learner has measured; each is added under the name of its experiment."""

    rungs: list[Rung] = field(default_factory=list)

    def add(self, experiment: str, on: str = "") -> Ladder | Note:
        """Put the experiment of that name onto the ladder, or put it there again. `on`: the rung that it stands on."""
        record = experiment_named(experiment)
        if record is None or not record.comparisons:
            return Note("Not measured.", f"There is no experiment {experiment!r} yet: run its cell first.")
        if on and self.rung(on) is None:
            return Note("Not yet.", f"There is no rung {on!r} to stand on: add that one first.")
        rung = Rung.of(experiment, record.comparisons[0], on)
        names = [r.name for r in self.rungs]
        place = names.index(experiment) if experiment in names else len(names)
        self.rungs[place : place + 1] = [rung]
        return self

    def rung(self, name: str) -> Rung | None:
        """The one of that experiment; None where it was not added."""
        return next((rung for rung in self.rungs if rung.name == name), None)

    @property
    def best(self) -> Rung | None:
        """The fastest of those that count."""
        return max((r for r in self.rungs if r.counts), key=lambda rung: rung.times or 0.0, default=None)

    @property
    def busiest(self) -> Rung | None:
        """Of those that count the one whose device works most."""
        with_share = [rung for rung in self.rungs if rung.counts and rung.working is not None]
        return max(with_share, key=lambda rung: rung.working or 0.0, default=None)

    @property
    def before(self) -> float | None:
        """The share in which the device works in the baseline: of that run, else of the first rung's own."""
        measured = working_share(run_named(BASELINE))
        return measured if measured is not None or not self.rungs else self.rungs[0].before

    def rows(self) -> list[tuple[str, str, str]]:
        """Each rung, the share in which its device works, and its speed, as shown; the baseline comes first."""
        first = (BASELINE, _share_words(self.before), "–")
        rows = [
            (f"{rung.name}: {rung.label}", _share_words(rung.working), self.speed_words(rung)) for rung in self.rungs
        ]
        return [first, *rows]

    def speed_words(self, rung: Rung) -> str:
        """How fast it is, what it adds to the rung that it stands on, and that it does not count where that is so."""
        below = self.rung(rung.on)
        gain = rung.gain_on(below) if below is not None else None
        words = rung.words if rung.counts else f"{rung.words}: does not count"
        if gain is None:
            return words
        doubt = ", undecided" if _ahead(gain.interval, NO_GAIN) is None else ""
        return f"{words}; {gain.words} on top of {rung.on}{doubt}"

    def __repr__(self) -> str:
        if not self.rungs:
            return "The ladder is empty."
        rows = [_HEAD, *self.rows()]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{name:{widths[0]}}  {works:>{widths[1]}}  {speed}" for name, works, speed in rows)

    def _repr_html_(self) -> str:
        """Without colours of its own, so that it can be read on light and dark pages."""
        cell = 'style="text-align:left;padding:3px 10px"'
        rows = "".join(f"<tr>{''.join(f'<td {cell}>{escape(text)}</td>' for text in row)}</tr>" for row in self.rows())
        names = "".join(f"<th {cell}>{text}</th>" for text in _HEAD)
        return f'<table style="color:inherit"><tr>{names}</tr>{rows}</table>' if self.rungs else f"<div>{self!r}</div>"


_HEAD = ("rung", "the device works", "speedup vs. baseline")


def _share_words(working: float | None) -> str:
    return "not measurable" if working is None else percent(working)


# -- the picture -------------------------------------------------------------------------------------------------------

_ROW_IN, _MARGIN_IN, _WIDTH_IN = 0.52, 0.95, 9.0
_LABEL_LETTERS = 40
_PALE = "#B9C7D3"  # of a bar that does not count


def draw_ladder(ladder: Ladder) -> Figure | Note:
    """A bar for each rung: the share in which the device works; beside it its speedup."""
    if not ladder.rungs:
        return Note("Not measured.", "The ladder is empty: measure a rung, and add it.")
    rows = len(ladder.rungs) + 1
    title, x = "your ladder (dashed: 90 %)", "share of each step in which the device works, %"
    with plot(_WIDTH_IN, _ROW_IN * rows + _MARGIN_IN, title, x, bare="top right left") as (figure, axes):
        _bar(axes, 0, ladder.before, "", counts=True)
        for row, rung in enumerate(ladder.rungs, 1):
            speed = rung.words if rung.counts else f"{rung.words}:\ndoes not count"
            _bar(axes, row, rung.working, speed, counts=rung.counts)
        axes.axvline(100 * GOAL, color=GREY, lw=1, ls="--", zorder=0)
        names = ([ink(rung.name), *ink_lines(rung.label, _LABEL_LETTERS, 2)] for rung in ladder.rungs)
        labels = [BASELINE, *map("\n".join, names)]
        axes.set_yticks(range(rows), labels, fontsize=9)
        axes.set_ylim(rows - 0.5, -0.6)
        axes.set_xlim(0, 100)
        axes.set_xticks((0, 25, 50, 75, 90, 100))
        axes.tick_params(length=0, labelsize=9)
    return figure


def _bar(axes: Axes, row: int, working: float | None, speed: str, *, counts: bool) -> None:
    colour = PARTS["compute"].colour if counts else _PALE
    if working is not None:
        axes.barh(row, 100 * working, height=0.62, color=colour, hatch=None if counts else "///", edgecolor="white")
    is_long = working is not None and working > 0.2
    axes.text(
        100 * (working or 0.0) + (-1 if is_long else 1),
        row,
        ink(_share_words(working)),
        ha="right" if is_long else "left",
        va="center",
        color="white" if is_long and counts else "black",
        size=9,
    )
    axes.text(102, row, "\n".join(ink(line) for line in speed.splitlines()), va="center", size=9)


# -- what the rungs say ------------------------------------------------------------------------------------------------


def judge_order(ladder: Ladder) -> Note:
    """Whether "data, then batch, then mixed precision" was the order here, by the learner's own rungs."""
    data, batch, on_data = (ladder.rung(name) for name in (DATA, BATCH, BATCH_ON_DATA))
    if data is None or batch is None or on_data is None:
        return Note("Not measured.", f"This needs the rungs {DATA}, {BATCH} and {BATCH_ON_DATA}: add them first.")
    parts = (_data_before_batch(data, batch), _batch_once_fed(batch, on_data.gain_on(data)), _precision(ladder))
    holds = [part for _, part in parts]
    opening = "It holds here." if all(holds) else "Not all of it holds here." if False in holds else "Undecided."
    return Note(opening, " ".join(words for words, _ in parts))


def _data_before_batch(data: Rung, batch: Rung) -> tuple[str, bool | None]:
    words = f"Data first: {data.words}. Batch first: {batch.words}."
    holds = _ahead(data.interval, batch.interval)
    said = {True: "Data gave more.", False: "The batch gave more.", None: "Which gave more is undecided."}
    return f"{words} {said[holds]}", holds


def _batch_once_fed(alone: Rung, on_data: Gain | None) -> tuple[str, bool | None]:
    if on_data is None:
        return "The batch on top of the data is not measured.", None
    holds = _ahead(on_data.interval, alone.interval)
    said = {
        True: "more than alone.",
        False: "less than alone.",
        None: "whether that is more than alone is undecided.",
    }
    return f"On top of the data, the larger batch: {on_data.words}, {said[holds]}", holds


def _precision(ladder: Ladder) -> tuple[str, bool | None]:
    rung = ladder.rung(PRECISION)
    below = ladder.rung(rung.on) if rung is not None else None
    gain = rung.gain_on(below) if rung is not None and below is not None else None
    if gain is None:
        return "Mixed precision is not measured.", None
    holds = _ahead(gain.interval, NO_GAIN)
    said = {True: "it helps here.", False: "it costs time here.", None: "whether it helps here is undecided."}
    return f"Mixed precision on top of the rest: {gain.words}: {said[holds]}", holds


def what_is_left(ladder: Ladder) -> Note:
    """Whether the device works 90 % of the time on a rung that counts, and what the rest of its steps is."""
    top = ladder.busiest
    if top is None or top.working is None:
        return Note("Not measured.", "No rung counts yet, or no share was measured: add a rung that is faster.")
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


def compare_with_climb(ladder: Ladder) -> Note:
    """Who got further, the learner's ladder or gpulab's latest climb, as far as the intervals tell."""
    if not climbs:
        return Note("Not measured.", "There is no climb yet: run %gpulab climb first.")
    climbed = climbs[-1]
    kept = ", ".join(f"{name}={value}" for name, value in climbed.kept.items())
    whole = climbed.result.whole
    if not climbed.kept:
        return Note("Undecided.", "The climb kept nothing: no setting that it tried was faster for certain.")
    if whole is None or whole.times_as_fast is None:
        return Note("Undecided.", f"The climb kept {kept}, and had no time to compare it as a whole.")
    theirs = Rung.of("climb", whole)
    mine = ladder.best
    words = f"The climb kept {kept}: {theirs.words}."
    if mine is None:
        return Note("So far.", f"{words} No rung of yours is faster for certain yet.")
    words += f" Your best rung, {mine.name} ({mine.label}): {mine.words}."
    if mine.unit != theirs.unit:
        words += f" Yours is per {mine.unit}, the climb's per {theirs.unit}: with equal batches both are the same."
    mine_is_ahead = _ahead(mine.interval, theirs.interval)
    if mine_is_ahead is None:
        return Note("Nobody is ahead for certain.", words)
    return Note("You got further." if mine_is_ahead else "The climb got further.", words)


# -- the exercise ------------------------------------------------------------------------------------------------------


def given_train(dataset: Any, model: nn.Module, samples: int) -> None:
    """The training to speed up: one image after the other, small batches, and an accuracy counted in Python."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen = correct = 0
    for images, labels in DataLoader(dataset, batch_size=8, shuffle=True, drop_last=True):
        logits = model(images)
        loss = functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        correct += sum(int(row.argmax() == label) for row, label in zip(logits, labels, strict=True))
        seen += len(labels)
        if seen >= samples:
            return


class _Training(Struct):
    """What one call of a training did to a model of its own."""

    samples: int
    updates: int
    moved: bool


@exercise()
def check_train(my_train: Any) -> Checked:
    """Whether `my_train(dataset, model, samples)` trains on as many samples, and with a speedup of at least 3×."""
    dataset = DistantDigits(fetch_ms=FETCH_MS)
    mine = _tried(my_train, dataset)
    if not mine.samples and not mine.updates:
        raise NoAnswer
    if mine.samples < SAMPLES:
        return wrong(f"The model was given {mine.samples} samples in training; expected {SAMPLES}.")
    if mine.updates < FEWEST_UPDATES or not mine.moved:
        return wrong(
            f"The weights were updated {plural(mine.updates, 'time')} for {mine.samples} samples. With fewer than "
            f"{FEWEST_UPDATES} updates it is another training."
        )
    speed = time_pairs(
        seconds_of(lambda: given_train(dataset, small_network(), SAMPLES)),
        seconds_of(lambda: my_train(dataset, small_network(), SAMPLES)),
        pairs=5,
        budget_s=40.0,
    )
    checked = judge_speed(speed, WANTED, good="The same samples, and the same kind of training.")
    if checked.state != "wrong":
        return checked
    return wrong(f"{checked.hint} {_what_is_left(my_train, dataset)}".strip())


def _tried(my_train: Any, dataset: Any) -> _Training:
    model, samples, updates = small_network(), [0], [0]
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    hook = register_optimizer_step_pre_hook(lambda *_: updates.append(1))
    handle = model.register_forward_pre_hook(lambda _, given: samples.append(len(given[0]) * torch.is_grad_enabled()))
    try:
        my_train(dataset, model, SAMPLES)
    finally:
        hook.remove()
        handle.remove()
    moved = not torch.equal(before, nn.utils.parameters_to_vector(model.parameters()).detach())
    return _Training(sum(samples), sum(updates), moved)


def _what_is_left(my_train: Any, dataset: Any) -> str:
    """What gpulab's own report says of the answer, and the lesson about it; empty where it says nothing."""
    with suppress(Exception):  # a hint is worth no failure of the check
        with gpulab.profile("answer", live=False, save=False, show=False) as profiled:
            my_train(dataset, small_network(), SAMPLES)
        first = profiled.report.diagnosis.findings[0]
        return f"gpulab's report of your training says: {first.summary}"
    return ""


_shares: dict[str, float] = {}


def note_share(run: str) -> float | None:
    """Keep the share of a run in which the device works, for the guess."""
    measured = working_share(run_named(run))
    if measured is not None:
        _shares[BASELINE] = measured
    return measured


@exercise('Put "data" or "batch" in place of the dots, then run that cell and this one again.')
def check_order(order: object) -> Checked:
    """Which of the two first rungs brought more: "data" or "batch"; by the learner's own measurements."""
    if order not in ("data", "batch"):
        return wrong(f'{order!r} is neither "data" nor "batch".')
    records = {name: experiment_named(name) for name in (DATA, BATCH)}
    rungs = {name: Rung.of(name, r.comparisons[0]) for name, r in records.items() if r is not None and r.comparisons}
    if len(rungs) < len(records):
        return unanswered(f"The cells {DATA} and {BATCH} measure what this needs: run them first.")
    data, batch = rungs[DATA], rungs[BATCH]
    words = f"Data first: {data.words}. Batch first: {batch.words}."
    data_is_ahead = _ahead(data.interval, batch.interval)
    if data_is_ahead is None:
        return undecided(f"{words} The intervals overlap or are missing, so neither is ahead for certain.")
    return right(words) if (order == "data") == data_is_ahead else wrong(words)


QUESTIONS: Mapping[str, Question] = {
    "working": share(
        "In what share of each step does the device work?",
        lambda: _shares.get(BASELINE),
        "of each step the device works",
    ),
    "all": times("What speedup do all of your settings give together?", EVERYTHING, "with all of them"),
}
EXERCISES: Mapping[str, Callable[..., Checked]] = {"order": check_order, "train": check_train}
