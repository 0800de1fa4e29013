"""What leaving something out would bring: a wait for the device, a save, logging, a pause of Python's own.

These are no knobs but edits of the code. A wait is played again without waiting; a pause is taken off the account of
all counted steps and of the time between them, for it rarely falls into the few profiled ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from gpulab.analysis.blocking_calls import Direction
from gpulab.analysis.breakdown import DEVICE_PARTS, StepParts
from gpulab.analysis.facts import Facts
from gpulab.formatting import capitalized, duration, plural
from gpulab.intervals import Intervals, clip, intersect, joined, measure, paint, union, union_of
from gpulab.prediction.baseline import Baseline, Refused
from gpulab.prediction.calibration import COLD, FEW, GONE_SD, REPLAY_SD, recalibrated
from gpulab.prediction.predict import refused
from gpulab.prediction.prediction import Prediction
from gpulab.prediction.replay import Changes
from gpulab.prediction.step import Z_975
from gpulab.run import Category, Int64, PauseKind, Run, Timeline
from gpulab.timeline import spans


class Pauses(Struct, frozen=True):
    """Pauses of these kinds no longer happen."""

    kinds: tuple[PauseKind, ...]


class Waits(Struct, frozen=True):
    """Calls that move data in these directions no longer make the program wait."""

    directions: tuple[Direction, ...]


def predict_removal(
    facts: Facts,
    cause: Pauses | Waits,
    intervals: Intervals | None = None,
    errors: Sequence[float] = (),
    today: Baseline | None = None,
) -> Prediction:
    """What leaving out that cause would bring: the settings are empty, for no knob does it.

    `intervals`: the time that falls away, [n, 2] in ns by the run's clock; of a wait, the calls in it no longer wait.
    Without (None): all pauses of that kind that the run holds, all waiting calls of that direction. The ratio is of the
    time of the whole loop, what lies between steps included. Never raises: `refused` says why nothing is predicted.
    `errors`: measured over predicted ratio of earlier predictions of the same cause. `today`: the baseline of these
    facts, where the caller has it already.
    """
    try:
        if intervals is not None and not len(intervals):
            raise Refused("when exactly it happens was not recorded")
        today = today or Baseline.of(facts)
        if isinstance(cause, Waits):
            removed = _without_waits(today, cause, intervals)
        else:
            gone = intervals if intervals is not None else pauses_of(facts.run, cause)
            begin, end = _loop(today)
            computed = 0.0 if today.on_gpu else today.compute_us / today.step.median
            paused = _without_pauses(begin, end, gone, computed, _busy_ns(today) * len(begin))
            removed = _without_traced(today, gone) if paused is None else paused
    except Refused as why:
        return refused({}, str(why))
    return recalibrated(removed, errors)


def pauses_of(run: Run, cause: Pauses) -> Intervals:
    """The pauses of the run that fall away; of those within another only once."""
    return union_of((p.start_ns, p.end_ns) for p in run.pauses if p.kind in cause.kinds)


def _without_pauses(begin: Int64, end: Int64, pauses: Intervals, computed: float, least_ns: float) -> Prediction | None:
    """Over the steps that count, each up to the begin of the next; None where no pause falls into them.

    `computed`: of a step, what a CPU computes. `least_ns`: what a GPU works in all these steps, which remains.
    """
    each = paint(np.stack((begin, end), axis=1), [pauses])[:, 0]
    count, whole = len(intersect(union(begin, end), pauses)), max(int((end - begin).sum()), round(least_ns))
    if not count:
        return None
    gone = max(0.0, min(whole - least_ns, float(each.sum())))
    doubt, rest = Z_975 * (FEW / np.sqrt(count) + GONE_SD), max(whole - gone, 1)
    warmed = min(gone, rest * computed)
    ratio, low, high = (
        max(1.0, rest - cold * warmed) / (rest + max(0.0, by) * gone)
        for by, cold in ((1, COLD[1]), (1 + doubt, COLD[2]), (1 - doubt, COLD[0]))
    )
    words = f"{duration(gone / 1e3)} of {duration(whole / 1e3)} of training, in {plural(int(count), 'place')}"
    return Prediction({}, ratio, (low, max(high, ratio)), capitalized(words))


def _busy_ns(today: Baseline) -> float:
    """What a GPU works in a typical step; 0 on a CPU."""
    account = today.facts.breakdown
    if account is None or account.device_index is None or not account.steps:
        return 0.0
    return float(np.median([sum(s.parts_ns[p] for p in DEVICE_PARTS) for s in account.steps]))


def _loop(today: Baseline) -> tuple[Int64, Int64]:
    """Begin and end of each counted step, with the time up to the next step."""
    steps, rows = today.run.steps, today.facts.selection.rows
    if not len(rows):
        raise Refused("no step was measured without the profiler")
    following = np.minimum(rows + 1, len(steps) - 1)
    end = np.where(following > rows, steps.start_ns[following], steps.end_ns[rows])
    return steps.start_ns[rows], np.maximum(end, steps.end_ns[rows])


def _without_waits(today: Baseline, cause: Waits, intervals: Intervals | None) -> Prediction:
    timeline = today.run.timeline
    if timeline is None:
        raise Refused("there is no trace that shows the waits")
    if not today.on_gpu:
        return _without_traced(today, intervals)
    if intervals is None:
        intervals = joined(*(b.times for b in today.facts.blocking if b.direction in cause.directions))
    rows = waiting_rows(timeline, intervals)
    if not len(rows):
        raise Refused("the trace shows no call that waits for the GPU there")
    ratio = min(1.0, today.played_with_us(Changes(free_waits=rows)) / today.played.step_us)
    sd = float(np.hypot(REPLAY_SD, today.sampling_sd))
    words = f"Replay of the traced steps without the wait in {plural(len(rows), 'call')}"
    return Prediction({}, ratio, (ratio * float(np.exp(-Z_975 * sd)), ratio * float(np.exp(Z_975 * sd))), words)


def _traced_shares(steps: Sequence[StepParts], intervals: Intervals) -> list[float]:
    return [measure(clip(intervals, s.start_ns, s.end_ns)) / max(1, s.end_ns - s.start_ns) for s in steps]


def _without_traced(today: Baseline, intervals: Intervals | None) -> Prediction:
    """On a CPU nothing runs beside the training thread: what falls away in the profiled steps is gained in all."""
    if intervals is None:
        raise Refused("on a CPU no call waits for a device")
    account = today.facts.breakdown
    if account is None or not account.steps:
        raise Refused("there is no traced step")
    if today.on_gpu or not len(intersect(intervals, account.covered)):
        raise Refused("none of this time lies in the measured steps")
    shares = _traced_shares(account.steps, intervals)
    ratio = 1 - float(np.median(shares))
    spread = float(np.std(shares)) / np.sqrt(len(shares)) + REPLAY_SD
    return Prediction(
        {},
        ratio,
        (max(1e-3, ratio - Z_975 * spread), min(1.0, ratio + Z_975 * spread)),
        "Its time per traced step",
    )


def waiting_rows(timeline: Timeline, intervals: Intervals) -> np.ndarray:
    """Copying and synchronizing calls of the training threads that touch the intervals."""
    host = spans.in_category(timeline, Category.CUDA_RUNTIME, Category.CUDA_DRIVER)
    waiting = spans.named(timeline, spans.may_wait)
    rows = np.flatnonzero(host & waiting & spans.on_training_threads(timeline))
    begun = np.searchsorted(intervals[:, 0], timeline.end_ns[rows], side="left")
    ended = np.searchsorted(intervals[:, 1], timeline.start_ns[rows], side="right")
    inside: np.ndarray = rows[begun > ended]
    return inside
