"""What it costs that worker processes start anew with each epoch: seen where it happened, estimated where it will."""

from __future__ import annotations

import numpy as np

from gpulab.intervals import clip, measure, union_of
from gpulab.prediction.baseline import Baseline, hand_off_us
from gpulab.prediction.calibration import BASE_US, EACH_US, SPAWNED_US
from gpulab.prediction.step import Projection
from gpulab.run import Run, StepFlag


def start_us(run: Run, workers: int) -> float:
    """An estimate of what starting and ending so many workers takes, in µs."""
    if not _forks(run):
        return SPAWNED_US * max(1.0, workers / (run.environment.usable_cores or workers))
    return BASE_US + workers * EACH_US


def _forks(run: Run) -> bool:
    """Whether Python starts processes by copying this one: on Linux, before Python 3.14."""
    version = tuple(int(n) for n in run.environment.python.split(".")[:2] if n.isdigit())
    return run.environment.platform.startswith("Linux") and version < (3, 14)


def seen_us(run: Run) -> tuple[float, float] | None:
    """What an epoch's first step and the time before it take beyond a usual step, and its deviation; in µs.

    Pauses that are told by themselves (evaluation, saving) are no part of it. None without a second epoch.
    """
    steps = run.steps
    first = np.flatnonzero((steps.flags & StepFlag.EPOCH_START) != 0)
    first = first[first > 0]
    if not len(first):
        return None
    paused = union_of((p.start_ns, p.end_ns) for p in run.pauses)
    begin, end = steps.end_ns[first - 1], steps.end_ns[first]
    took = [e - b - measure(clip(paused, b, e)) for b, e in zip(begin.tolist(), end.tolist(), strict=True)]
    extra_us = np.maximum(0.0, (np.array(took) - float(np.median(steps.wall_ns))) / 1e3)
    return float(np.median(extra_us)), float(np.std(extra_us) / np.sqrt(len(extra_us)))


def first_batch_us(projection: Projection) -> float | None:
    """What the loop waits for an epoch's first batch although its workers are there; None where it is not known."""
    if projection.making is None or projection.today.facts.loading is None:
        return None
    return projection.making.batch_us + hand_off_us(projection.today)


def epoch_us(today: Baseline, steps: float) -> float:
    """So many steps with all that lies between them but the start of an epoch."""
    run, rows = today.run, today.facts.selection.rows
    followed = rows[rows + 1 < len(run.steps)]
    followed = followed[(run.steps.flags[followed + 1] & StepFlag.EPOCH_START) == 0]
    if not len(followed):
        return steps * today.step.median
    return steps * float(np.mean(run.steps.start_ns[followed + 1] - run.steps.start_ns[followed])) / 1e3
