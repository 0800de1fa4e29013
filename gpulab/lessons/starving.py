"""Lesson 03, the starving GPU: a claim about loaders, and an exercise whose answer is a DataLoader."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from gpulab.analysis.cores import LEAST_OTHERS
from gpulab.capture.pilot import ShortRun
from gpulab.formatting import factor, percent, plural
from gpulab.lessons.check import (
    Checked,
    Note,
    NotMeasured,
    Speed,
    exercise,
    judge_speed,
    right,
    time_pairs,
    wrong,
)
from gpulab.lessons.guesses import Question, share, times
from gpulab.lessons.measured import (
    ONE_OF_THE_SWEEP,
    check_enough,
    data_wait_share,
    latest_experiment,
    latest_facts,
    notes,
    working_share,
)
from gpulab.verdict import is_decided

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


MEASURED_STEPS = 8  # steps of a measurement: complete rounds of 1, 2, 4 or 8 workers
PAIRS, BUDGET_S = 5, 20.0
LEAST_SPEEDUP = 2.0  # speedup
CLAIMED = 0.9  # share of a step in which the device works, with a good pipeline
CLOSE = 0.03  # the accuracy of a share from one profiled run: closer to the claim, it decides nothing
USUAL_STEP_US, LONGEST_MS = 10_000.0, 250.0  # without a measured step; on a busy machine
HARDLY_WAITS = 0.15  # share of a step: below it, the loader is not the bottleneck

Train = Callable[[Any], object]


@exercise("Put a DataLoader(…) in place of the dots, then run that cell and this one again.")
def check_loader(my_loader: object, slow_loader: DataLoader[Any], train: Train) -> Checked:
    """Whether `my_loader` feeds the batches of `slow_loader` to `train(loader)` fast enough. Runs both in turn."""
    from torch.utils.data import DataLoader

    if not isinstance(my_loader, DataLoader):
        return wrong(f"That is a {type(my_loader).__name__}; expected a DataLoader: DataLoader(digits, …).")
    if my_loader.dataset is not slow_loader.dataset:
        return wrong(
            "It reads another dataset than the loader you were given: the training would learn something else."
        )
    if my_loader.batch_size != slow_loader.batch_size:
        return wrong(
            f"Its batches have {my_loader.batch_size} samples instead of {slow_loader.batch_size}. That is another "
            "training, and it hides the wait instead of ending it: lesson 05 is about the batch size."
        )
    if type(my_loader.sampler) is not type(slow_loader.sampler):
        return wrong("It takes the samples in another order (shuffle): keep shuffle=True, or the training learns less.")
    if my_loader.drop_last != slow_loader.drop_last:
        return wrong(f"It treats the last, smaller batch differently: keep drop_last={slow_loader.drop_last}.")
    mine, slow = Feeding(my_loader, train), Feeding(slow_loader, train)
    speed = time_pairs(slow.step_s, mine.step_s, pairs=PAIRS, budget_s=BUDGET_S)
    return _verdict(my_loader.num_workers, speed, mine)


class Feeding:
    """One loader in a training: each measurement runs some steps, and drops the steps fed from the workers' buffer."""

    def __init__(self, loader: DataLoader[Any], train: Train) -> None:
        self._loader, self._train = loader, train
        self._steps_s: list[float] = []
        self._waits_s: list[float] = []

    def step_s(self) -> float:
        """The mean time of the steps that count. Errors of the training propagate."""
        dropped = 2 + self._loader.num_workers * (self._loader.prefetch_factor or 0)
        run = ShortRun(dropped + MEASURED_STEPS)
        with run:
            self._train(self._loader)
        wall_ns, wait_ns = run.steps.wall_ns[dropped:], run.steps.data_wait_ns[dropped:]
        if not len(wall_ns):
            raise ValueError(f"it ended after {len(run.steps)} steps, too early to measure")
        self._steps_s.append(float(wall_ns.mean()) / 1e9)
        self._waits_s.append(float(wait_ns.mean()) / 1e9)
        return self._steps_s[-1]

    @property
    def wait_s(self) -> float:
        """Of a typical step."""
        return float(np.median(self._waits_s))

    @property
    def wait_fraction(self) -> float:
        """Of a typical step."""
        return float(np.median(np.array(self._waits_s) / np.array(self._steps_s)))


def _verdict(workers: int, speed: Speed, mine: Feeding) -> Checked:
    waits = f"It waits {percent(mine.wait_fraction)} of each step"
    who = plural(workers, "worker") if workers else "no worker"
    if mine.wait_fraction <= HARDLY_WAITS and speed.interval[0] > 1.1:
        return right(f"{speed.words} with {who}. {waits}: there is nothing left to gain here.")
    if not workers:
        hint = (
            "Images are still loaded one after the other, in the process that trains. Which option lets other "
            "processes load them?"
        )
    else:
        loading_s = speed.before_s - (speed.after_s - mine.wait_s)
        times_longer = max(loading_s / max(speed.after_s - mine.wait_s, 1e-6), 1.0)
        hint = (
            f"{waits}. Loading a batch takes {factor(times_longer)}× the time of training on it, so about "
            f"{min(math.ceil(times_longer), 8)} workers could keep up."
        )
    return judge_speed(speed, LEAST_SPEEDUP, good=f"That is with {who}. {waits}.", hint=hint)


# -- a claim, and a dataset in the rhythm of the training --------------------------------------------------------------


@notes
def judge_claim(*names: str) -> Note:
    """Whether the device works for more than `CLAIMED` of each step with the best loader of those experiments."""
    loaders = []  # working share, its loader, whether it is decided, share of other programs
    for name in names:
        with suppress(NotMeasured):
            for one in latest_experiment(name).comparisons:
                works, cores = working_share(one.b.facts), one.b.facts.cores if one.b.facts is not None else None
                others = (cores.others_fraction if cores is not None else None) or 0.0
                if works is not None:
                    loaders.append((works, one.b.label, is_decided(one.verdict), others))
    if not loaders:
        raise NotMeasured("Run the experiments above first.")
    works, label, is_sure, _ = max(loaders, key=lambda loader: loader[0])
    figures = f"The most is {percent(works)}, with {label}; the claim is above {percent(CLAIMED)}."
    if not is_sure:
        return Note("Undecided.", f"{figures} Its experiment did not decide whether that loader is faster.")
    if abs(works - CLAIMED) < CLOSE:
        return Note("Undecided.", f"{figures} That is too close for one traced run to decide.")
    if works > CLAIMED:
        return Note("It holds here.", figures)
    if any(others >= LEAST_OTHERS for *_, others in loaders):
        return Note("Undecided.", f"{figures} But other programs took cores meanwhile: without them it may be more.")
    return Note("It does not hold here.", figures)


def steps_ms(name: str, count: int) -> float:
    """The time of `count` steps of the experiment's last setting, within the time limits of a lesson."""
    step_us = None
    with suppress(NotMeasured):
        step_us = latest_experiment(name).sides[-1].us_per_step
    return min(count * (step_us or USUAL_STEP_US) / 1e3, LONGEST_MS)


# -- what the notebook asks --------------------------------------------------------------------------------------------


@exercise(ONE_OF_THE_SWEEP)
def check_enough_workers(enough_workers: object) -> Checked:
    """Whether `enough_workers` is the smallest number of workers that is as good as the fastest of the sweep."""
    return check_enough(enough_workers, "how-many", "workers", as_written=0)


QUESTIONS: Mapping[str, Question] = {
    "waiting": share(
        "What share of each step waits for data?",
        lambda: data_wait_share(latest_facts("starving")),
        "of each step waits for data",
    ),
    "workers": times("What speedup do two workers give?", "two-workers", "with two workers"),
    "limit": times("What speedup is there if loading costs nothing?", "no-loading", "with all data in memory"),
}
