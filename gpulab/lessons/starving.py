"""Lesson 03, the starving GPU: images that arrive slowly, and an exercise whose answer is a DataLoader."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gpulab.analysis.facts import facts
from gpulab.capture.short_run import ShortRun
from gpulab.demo.digits import PIXEL_MEAN, PIXEL_STD, SAMPLE_PIXELS, DigitsFolder
from gpulab.formatting import factor, percent
from gpulab.lessons.check import Checked, is_unanswered, right, unanswered, undecided, wrong
from gpulab.views.running.waiting import waiting

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from gpulab.run import Run

EVERY = 3  # of the 1797 digits: an epoch is short, a cache soon filled
COUNTED = 16  # steps of a measurement: whole rounds of 1, 2, 4 or 8 workers
ROUNDS = 2
WANTED = 3.0  # times as fast
APART = 1.25  # times: rounds that differ by more are no two measurements of one thing
HARDLY_WAITS = 0.15  # of a step: then the loader is not what to improve

Train = Callable[[Any], object]


class DistantDigits(DigitsFolder):
    """Handwritten digits from PNG files on a storage far away: `fetch_ms` pass before a file is there.

    The time is spent waiting, as for a network, so that several workers can wait at once also where cores are few.
    The same file gives the same sample each time. Raises GpulabError where the files cannot be written on first use.
    """

    def __init__(self, fetch_ms: float = 3.0, root: Path | str | None = None) -> None:
        super().__init__(root)
        self.fetch_ms = fetch_ms
        self.paths, self.labels = self.paths[::EVERY], self.labels[::EVERY]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.fetch_ms / 1e3)
        return _read(self.paths[index]), self.labels[index]


def _read(path: Path) -> torch.Tensor:
    from PIL import Image

    with Image.open(path) as file:
        small = file.convert("L").resize((SAMPLE_PIXELS, SAMPLE_PIXELS), Image.Resampling.BICUBIC)
    grey = np.asarray(small, dtype=np.float32) / 255
    return torch.from_numpy((grey - PIXEL_MEAN) / PIXEL_STD).unsqueeze(0)


def waiting_share(run: Run) -> float | None:
    """The share of a step that a run waited for data, as its report has it; None where that was not measured."""
    return facts(run).data_wait_fraction


@dataclass(frozen=True, slots=True)
class Fed:
    """What one loader makes of a training: seconds of a step, and how many of them it waits for data."""

    step_s: float
    wait_s: float

    @property
    def work_s(self) -> float:
        """All but the wait."""
        return self.step_s - self.wait_s


def check_loader(answer: object, given: DataLoader[Any], train: Train) -> Checked:
    """Whether `answer` feeds the batches of `given` to `train(loader)` fast enough. Runs both, a few steps each."""
    from torch.utils.data import DataLoader

    if is_unanswered(answer):
        return unanswered("Put a DataLoader(…) in place of the dots, then run that cell and this one again.")
    if not isinstance(answer, DataLoader):
        return wrong(f"That is a {type(answer).__name__}, and a DataLoader is wanted: DataLoader(digits, …).")
    other = _other_training(answer, given)
    if other:
        return wrong(other)
    try:
        with waiting("training some steps with each loader, in turn"):
            rounds = _rounds(answer, given, train)
    except Exception as e:
        return wrong(f"The training does not run with it. {type(e).__name__}: {e}")
    return _judged_rounds(answer.num_workers, rounds)


def _other_training(answer: DataLoader[Any], given: DataLoader[Any]) -> str:
    """What would make the training another one, not only a faster one."""
    if answer.dataset is not given.dataset:
        return "It reads another dataset than the loader you were given: the training would learn something else."
    if answer.batch_size != given.batch_size:
        return (
            f"Its batches have {answer.batch_size} samples instead of {given.batch_size}. That is another training, "
            "and it hides the wait instead of ending it: lesson 05 is about the batch size."
        )
    if type(answer.sampler) is not type(given.sampler):
        return "It takes the samples in another order (shuffle): keep shuffle=True, or the training learns less."
    if answer.drop_last != given.drop_last:
        return f"It treats the last, smaller batch differently: keep drop_last={given.drop_last}."
    return ""


def _judged_rounds(workers: int, rounds: Sequence[tuple[Fed, Fed]]) -> Checked:
    """By the best of each; undecided where the rounds answer differently and lie far apart."""
    states = {_judged(workers, mine, before).state for mine, before in rounds}
    faster = [before.step_s / mine.step_s for mine, before in rounds]
    if len(states) > 1 and max(faster) > APART * min(faster):
        return undecided(
            f"It was {factor(min(faster))} times as fast in one round and {factor(max(faster))} times in another. If "
            "other programs are running, run this cell again when they have ended."
        )
    mine, before = (min(of_one, key=lambda fed: fed.step_s) for of_one in zip(*rounds, strict=True))
    return _judged(workers, mine, before)


def _judged(workers: int, mine: Fed, before: Fed) -> Checked:
    faster = before.step_s / mine.step_s
    waiting = mine.wait_s / mine.step_s
    measured = f"{factor(faster)} times as fast as before, waiting {percent(waiting)} of each step"
    if faster >= WANTED or (waiting <= HARDLY_WAITS and faster > 1.1):
        return right(f"{_workers(workers)}: {measured}.")
    if not workers:
        return wrong(
            f"{measured.capitalize()}: images are still loaded one after the other, in the process that trains. "
            "Which option lets other processes load them?"
        )
    longer = before.wait_s / max(before.work_s, 1e-6)
    return wrong(
        f"{_workers(workers)}: {measured}. To load a batch takes {factor(longer)} times "
        f"as long as to train on it, so about {min(math.ceil(longer), 8)} workers could keep up."
    )


def _workers(count: int) -> str:
    return "No worker" if not count else "1 worker" if count == 1 else f"{count} workers"


def _rounds(answer: DataLoader[Any], given: DataLoader[Any], train: Train) -> list[tuple[Fed, Fed]]:
    """The answer's loader and the given one in turn, so that a change of the machine meets both."""
    rounds = []
    for _ in range(ROUNDS):
        before = _fed(given, train)
        rounds.append((_fed(answer, train), before))
    return rounds


def _fed(loader: DataLoader[Any], train: Train) -> Fed:
    dropped = 2 + loader.num_workers * (loader.prefetch_factor or 0)
    run = ShortRun(dropped + COUNTED)
    with run:
        train(loader)
    wall_ns, wait_ns = run.steps.wall_ns[dropped:], run.steps.data_wait_ns[dropped:]
    if not len(wall_ns):
        raise ValueError(f"it ended after {len(run.steps)} steps, too early to measure")
    return Fed(float(wall_ns.mean()) / 1e9, float(wait_ns.mean()) / 1e9)
