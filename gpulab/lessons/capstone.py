"""Lesson 15, the capstone: a training that does everything wrong, a ladder of measured rungs, and a certificate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

import gpulab
from gpulab.api.climb import climbs
from gpulab.formatting import factor, percent, plural
from gpulab.lessons.check import Checked, Note, is_unanswered, right, unanswered, undecided, wrong
from gpulab.lessons.guesses import Question, share, times
from gpulab.lessons.measured import experiment_named, run_named, working_share
from gpulab.lessons.pairs import Speed, judge_speed, seconds_of, time_pairs
from gpulab.lessons.starving import DistantDigits
from gpulab.tuning.record import Comparison
from gpulab.verdict import Verdict

WANTED = 3.0  # times as fast as the given training
SAMPLES = 256  # of a measurement
FETCH_MS = 16  # of the exercise: what eight workers gain is more than what starting them costs, on one core too
FEWEST_UPDATES = 3  # of so many samples: fewer would be another training
BEGIN = "Write the body of the function in place of the dots, then run that cell and this one again."


def small_network() -> nn.Module:
    """Convolutions for digits of 32 x 32 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def distant_digits() -> DistantDigits:
    """Images that take 2 ms each to arrive."""
    return DistantDigits(fetch_ms=2)


# -- the ladder --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rung:
    """One step up, measured: how many times as fast as the cell as written, and what the device then does."""

    name: str
    times: float | None
    interval: tuple[float, float] | None
    verdict: Verdict
    working: float | None  # share of the profiled steps in which the device works

    @classmethod
    def of(cls, name: str, comparison: Comparison) -> Rung:
        """Of the B side of a comparison with the cell as written."""
        facts = comparison.b.facts
        working = working_share(facts.run) if facts is not None else None
        return cls(name, comparison.times_as_fast, comparison.times_as_fast_interval, comparison.verdict, working)

    @property
    def words(self) -> str:
        """ "3.1 times as fast (2.9 to 3.3)", or that it is undecided."""
        if self.times is None:
            return "not measured"
        interval = "" if self.interval is None else f" ({factor(self.interval[0])} to {factor(self.interval[1])})"
        doubt = "" if self.verdict in ("faster", "slower") else f", {self.verdict}"
        return f"{factor(self.times)} times as fast{interval}{doubt}"


@dataclass
class Ladder:
    """The rungs that a learner has measured; each is added under the name of its experiment."""

    rungs: list[Rung] = field(default_factory=list)

    def add(self, experiment: str) -> Ladder | Note:
        """Put the experiment of that name onto the ladder, or put it there again."""
        record = experiment_named(experiment)
        if record is None or not record.comparisons:
            return Note("Not measured.", f"There is no experiment {experiment!r} yet: run its cell first.")
        rung = Rung.of(f"{experiment}: {record.comparisons[0].b.label}", record.comparisons[0])
        self.rungs = [r for r in self.rungs if not r.name.startswith(f"{experiment}: ")] + [rung]
        return self

    @property
    def best(self) -> Rung | None:
        """The fastest that is faster for certain."""
        faster = [rung for rung in self.rungs if rung.verdict == "faster" and rung.times]
        return max(faster, key=lambda rung: rung.times or 0.0, default=None)

    def rows(self) -> list[tuple[str, str, str]]:
        """Name, speed and share of each rung, as shown."""
        return [
            (rung.name, rung.words, "unknown" if rung.working is None else percent(rung.working)) for rung in self.rungs
        ]

    def __repr__(self) -> str:
        if not self.rungs:
            return "The ladder is empty."
        width = max(len(name) for name, _, _ in self.rows())
        head = f"{'rung':{width}}  against the cell as written; in its profiled run the device works"
        return "\n".join((head, *(f"{name:{width}}  {words}; {works}" for name, words, works in self.rows())))

    def _repr_html_(self) -> str:
        cell = 'style="text-align:left;padding:3px 10px"'
        rows = "".join(f"<tr>{''.join(f'<td {cell}>{escape(text)}</td>' for text in row)}</tr>" for row in self.rows())
        names = "".join(
            f"<th {cell}>{text}</th>" for text in ("rung", "against the cell as written", "the device works")
        )
        return f"<table><tr>{names}</tr>{rows}</table>"


def compare_with_climb(ladder: Ladder) -> Note:
    """Who got further: the learner's ladder or gpulab's latest climb."""
    if not climbs:
        return Note("Not measured.", "There is no climb yet: run %gpulab climb first.")
    climbed = climbs[-1]
    kept = ", ".join(f"{name}={value}" for name, value in climbed.kept.items()) or "nothing"
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
    words += f" Your best rung, {mine.name}: {mine.words}."
    if mine.interval is not None and theirs.interval is not None:
        if mine.interval[0] > theirs.interval[1]:
            return Note("You got further.", words)
        if theirs.interval[0] > mine.interval[1]:
            return Note("The climb got further.", f"{words} What did it turn that you did not?")
    return Note("Nobody is ahead for certain.", words)


# -- the certificate ---------------------------------------------------------------------------------------------------

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>gpulab: certificate</title><style>
body {{ font: 16px/1.5 Georgia, serif; max-width: 46em; margin: 3em auto; padding: 2.5em 3em;
        border: 3px double #0072B2; color: #1b1b1b; background: #fff; }}
h1 {{ font-size: 1.9em; margin: 0; color: #0072B2; }} .name {{ font-size: 1.6em; margin: 0.6em 0 0.2em; }}
table {{ border-collapse: collapse; width: 100%; margin: 1em 0; font: 14px/1.4 sans-serif; }}
td, th {{ text-align: left; padding: 6px 10px; border-bottom: 1px solid #ddd; }}
.small {{ font: 12px sans-serif; color: #555; }}
@media print {{ body {{ margin: 0; }} }}
</style></head><body>
<h1>From the first figure to a proven cure</h1>
<div class="name">{name}</div>
<p>{sentence}</p>
<table><tr><th>rung</th><th>against the cell as written</th><th>the device works</th></tr>{rows}</table>
<p>{climb}</p>
<p class="small">Each factor is the median of pairs of blocks that ran in turn on this machine, with its 95 % interval.
What is undecided is called so. {machine} {when}. gpulab {version}, torch {torch}.</p>
</body></html>
"""


def certificate(name: str, ladder: Ladder, path: Path | str = "certificate.html") -> Note:
    """Write a page with the learner's own figures. A name is shown as it is, and never run."""
    if not ladder.rungs:
        return Note("Not yet.", "The ladder is empty: measure a rung, and add it.")
    best = ladder.best
    before = working_share(run_named("as-found"))
    sentence = (
        "has measured a training, turned its knobs and kept what helped."
        if best is None
        else f"has made a training {best.words}, with {best.name}."
    )
    if best is not None and before is not None and best.working is not None:
        sentence += f" The device worked {percent(before)} of the time before, and {percent(best.working)} after it."
    rows = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in ladder.rows())
    machine = (
        "A GPU: " + torch.cuda.get_device_name() + "." if torch.cuda.is_available() else "No GPU: the CPU computed."
    )
    page = _PAGE.format(
        name=escape(" ".join(str(name).split()) or "A learner"),
        sentence=escape(sentence),
        rows=rows,
        climb=escape(compare_with_climb(ladder).words if climbs else ""),
        machine=escape(machine),
        when=escape(datetime.now().astimezone().strftime("%Y-%m-%d")),
        version=escape(gpulab.__version__),
        torch=escape(torch.__version__),
    )
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as e:
        return Note("Not written.", f"{str(path)!r} cannot be written: {e.strerror or e}.")
    return Note("Written.", f"Your certificate is in {str(path)!r}: open it, print it, show it.")


# -- the exercise ------------------------------------------------------------------------------------------------------


def given_train(dataset: Any, model: nn.Module, samples: int) -> None:
    """The training as found: one image after the other, small batches, and an accuracy counted in Python."""
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


@dataclass
class _Training:
    """What one call of a training did to a model of its own."""

    samples: int = 0
    updates: int = 0
    moved: bool = False


def check_train(my_train: Any) -> Checked:
    """Whether `my_train(dataset, model, samples)` trains on as many samples, and at least three times as fast."""
    if is_unanswered(my_train):
        return unanswered(BEGIN)
    dataset = DistantDigits(fetch_ms=FETCH_MS)
    mine = _tried(my_train, dataset)
    if not mine.samples and not mine.updates:
        return unanswered(BEGIN)
    if mine.samples < SAMPLES:
        return wrong(f"The model was given {mine.samples} samples in training, and {SAMPLES} are wanted.")
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
    return _judged(speed, my_train, dataset)


def _judged(speed: Speed, my_train: Any, dataset: Any) -> Checked:
    checked = judge_speed(speed, WANTED, good="The same samples, and the same kind of training.")
    if checked.state != "wrong":
        return checked
    return wrong(f"{checked.hint} {_what_is_left(my_train, dataset)}".strip())


def _tried(my_train: Any, dataset: Any) -> _Training:
    model, tried = small_network(), _Training()
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()

    def count(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            tried.samples += len(inputs[0])

    hook = register_optimizer_step_pre_hook(lambda *_: _count_update(tried))
    handle = model.register_forward_pre_hook(count)
    try:
        my_train(dataset, model, SAMPLES)
    finally:
        hook.remove()
        handle.remove()
    tried.moved = not torch.equal(before, nn.utils.parameters_to_vector(model.parameters()).detach())
    return tried


def _count_update(tried: _Training) -> None:
    tried.updates += 1


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
        _shares["as-found"] = measured
    return measured


def check_order(order: object) -> Checked:
    """Which of the two first rungs brought more: "data" or "batch"; by the learner's own measurements."""
    if is_unanswered(order):
        return unanswered('Put "data" or "batch" in place of the dots, then run that cell and this one again.')
    if order not in ("data", "batch"):
        return wrong(f'{order!r} is neither "data" nor "batch".')
    records = {name: experiment_named(name) for name in ("data-first", "batch-first")}
    rungs = {name: Rung.of(name, r.comparisons[0]) for name, r in records.items() if r is not None and r.comparisons}
    if len(rungs) < 2:
        return unanswered("The cells data-first and batch-first measure what this needs: run them first.")
    data, batch = rungs["data-first"], rungs["batch-first"]
    words = f"Data first: {data.words}. Batch first: {batch.words}."
    if data.interval is None or batch.interval is None:
        return undecided(words)
    if data.interval[0] > batch.interval[1]:
        better = "data"
    elif batch.interval[0] > data.interval[1]:
        better = "batch"
    else:
        return undecided(f"{words} The intervals overlap, so neither is ahead for certain.")
    return right(words) if order == better else wrong(words)


QUESTIONS: Mapping[str, Question] = {
    "working": share(
        "What share of each step does the device work, as found?",
        lambda: _shares.get("as-found"),
        "of each step the device works",
    ),
    "all": times("How many times as fast will it be with all of your knobs?", "everything", "with all of them"),
}
EXERCISES: Mapping[str, Callable[..., Checked]] = {"order": check_order, "train": check_train}
