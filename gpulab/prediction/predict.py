"""One door for all predictions: what a setting of the knobs would bring, from the figures of one run.

What leaving something out would bring: a wait for the device, a save, logging, a pause of Python's own.

These are no knobs but edits of the code. A wait is played again without waiting; a pause is taken off the account of
all counted steps and of the time between them, for it rarely falls into the few profiled ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
from msgspec import Struct

from gpulab.analysis.breakdown import DEVICE_PARTS, StepParts
from gpulab.analysis.facts import Facts
from gpulab.formatting import capitalized, duration, number, plural
from gpulab.intervals import Intervals, clip, intersect, joined, measure, paint, union, union_of
from gpulab.prediction import batches, kernels
from gpulab.prediction.prediction import NOTHING, TO_TRY, Pauses, Prediction, PriorEvidence, Waits, recalibrated
from gpulab.prediction.replay import Changes
from gpulab.prediction.step import Z_975, Baseline, Projection, Refused, plan_of
from gpulab.run import Int64, Run, Timeline
from gpulab.timeline.labels import WAITS, What, labels

# Times the pause, and at most times what a CPU has to do beside it: that falls away too, for the pause had emptied its
# caches. Least, likely and most. On planted cells of two machines, 2026: 0 to 0.45, median 0.08 and 0.17.
COLD = (0.0, 0.1, 0.45)
# Of the time in pauses, over the root of their number: how far a short run may be off. Ours.
FEW = 0.5
# Of the time in pauses: what they cost beside it (a thread that goes on). Ours.
GONE_SD = 0.05
REPLAY_SD = 0.03  # of a window played without some waits; ours

Predictor = Callable[[Projection, str, PriorEvidence], Projection]

CLEARLY = 1.25  # ratio, up or down; ours, more than most knobs bring
WIDEST = 5.0  # times, from end to end of a range that holds the speed of now; ours: four times the batch has 4.3

Memory = Literal["unchanged", "predicted", "unknown"]


class Formula(Struct, frozen=True):
    """What one knob does to a step, and to the GPU's memory: `predicted` by the projection itself."""

    apply: Predictor
    memory: Memory = "unknown"


_CHECKS = "try it: the finding says what the check takes, and only a run shows that nothing else takes its place"
_OF_RANKS = "try it: only a run shows how much communication the ranks overlap with computing"

# By knob, in the order in which they are asked: what changes the making of data before what rests on it. A text in
# place of a formula is the reason why nothing can be predicted.
PREDICTORS: dict[str, Formula | str] = {
    "cache": Formula(batches.cache, "unchanged"),
    "workers": Formula(batches.workers, "unchanged"),
    "prefetch": "try it: batches loaded ahead even out slow ones, and only a run shows by how much",
    "pin_memory": "try it: only a run shows how much of each copy to the GPU is already overlapped",
    "persistent_workers": Formula(batches.persistent_workers, "unchanged"),
    "compute_threads": "try it: only a run shows how threads and DataLoader workers compete for cores",
    "anomaly": _CHECKS,
    "validate_args": _CHECKS,
    "bucket_cap_mb": _OF_RANKS,
    "gradient_as_bucket_view": _OF_RANKS,
    "static_graph": _OF_RANKS,
    "comm_hook": _OF_RANKS,
    "local_sgd": _OF_RANKS,
    "reshard_after_forward": _OF_RANKS,
    "amp": Formula(kernels.amp),
    "tf32": Formula(kernels.tf32, "unchanged"),
    "attention": Formula(kernels.attention),
    "fused_optimizer": Formula(kernels.fused_optimizer),
    "compile": Formula(kernels.compiled),
    "channels_last": "try it: depending on its convolutions, a model becomes faster or slower in this layout",
    "accumulate": Formula(kernels.accumulate),
    "batch_size": Formula(batches.batch_size, "predicted"),
}


def predict(facts: Facts, settings: Mapping[str, str], evidence: PriorEvidence = NOTHING) -> Prediction:
    """What these settings would bring to that run. Never raises: `refused` says why nothing is predicted.

    The interval is the formula's own, made wider or narrower by `known.errors` of `knobs_named(settings)`.
    """
    try:
        projection = plan_of(facts)
    except Refused as why:
        return refused(settings, str(why))
    return predict_from(projection, settings, evidence)


def predict_from(projection: Projection, settings: Mapping[str, str], evidence: PriorEvidence = NOTHING) -> Prediction:
    """As `predict`, of a projection that changes nothing yet: what it has found out serves several predictions."""
    chosen = dict(settings)
    try:
        for name in [*(n for n in PREDICTORS if n in chosen), *(n for n in chosen if n not in PREDICTORS)]:
            formula = _formula(name)
            try:
                projection = formula.apply(projection, chosen[name], evidence)
            except ValueError:
                raise Refused(f"{name}={chosen[name]} is no value of this setting") from None
        if not chosen:
            raise Refused("nothing is changed")
        if len(projection.already) == len(chosen):
            raise Refused(f"nothing changes: {'; '.join(projection.already)}")
        predicted = _of(projection, chosen)
    except Refused as why:
        return refused(chosen, str(why))
    return _telling(recalibrated(predicted, evidence.errors.get(knobs_named(chosen), ())))


def _telling(prediction: Prediction) -> Prediction:
    """The same, refused where its range tells a user nothing: it reaches clearly faster and clearly slower, or it holds
    the time of now and is wide."""
    assert prediction.interval is not None, "a refused one has returned before"
    low, high = prediction.interval
    if low >= 1 or high <= 1 or ((low * CLEARLY > 1 or high < CLEARLY) and high <= WIDEST * low):
        return prediction
    speedup = f"{number(1 / high)}× to {number(1 / low)}×"
    why = f"{TO_TRY}this run allows a speedup of {speedup}, which is too wide to be useful"
    return refused(prediction.settings, why)


def _formula(name: str) -> Formula:
    """Raises Refused."""
    formula = PREDICTORS.get(name, f"there is no formula for another {name}")
    if isinstance(formula, str):
        raise Refused(formula)
    return formula


def refused(settings: Mapping[str, str], why: str) -> Prediction:
    """A prediction that says only why there is none."""
    return Prediction(dict(settings), None, None, "", refused=why)


def knobs_named(settings: Mapping[str, str]) -> str:
    """Under which name the scoreboard keeps such predictions: "workers", "amp + workers"."""
    return " + ".join(sorted(settings))


def _of(projection: Projection, settings: Mapping[str, str]) -> Prediction:
    """Raises Refused where the step has to be played again, and the GPU's work was not recorded."""
    middle, low, high = projection.ratio()
    basis = "; ".join(dict.fromkeys(projection.basis))
    memory, its_basis = _memory(projection, settings)
    return Prediction(
        dict(settings),
        middle,
        (low, high),
        capitalized(basis),
        memory,
        projection.only_sign,
        memory_basis=its_basis,
        setup_s=projection.setup_s,
    )


def _memory(projection: Projection, settings: Mapping[str, str]) -> tuple[float | None, str]:
    """What becomes of the peak of the GPU's memory, and from what that is known."""
    if not projection.today.on_gpu:
        return None, ""
    kinds = {_formula(name).memory for name in settings}
    if kinds <= {"unchanged"}:
        return 1.0, "GPU memory stays the same"
    if projection.memory_ratio is None or "unknown" in kinds:
        return None, "its effect on GPU memory is not predicted"
    return projection.memory_ratio, "GPU memory by a linear fit through the peaks of short runs"


__all__ = ["NOTHING", "PREDICTORS", "PriorEvidence", "knobs_named", "predict", "predict_from", "refused"]


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
    rows = np.flatnonzero(labels(timeline).training(*WAITS, What.COPY_CALL))
    begun = np.searchsorted(intervals[:, 0], timeline.end_ns[rows], side="left")
    ended = np.searchsorted(intervals[:, 1], timeline.start_ns[rows], side="right")
    inside: np.ndarray = rows[begun > ended]
    return inside
