"""All predictions from one run: the gain of a setting of the knobs, or of an edit that leaves something out.

An edit leaves out a wait for the device, a save, logging, or garbage collection. The window is replayed without a wait.
A pause is subtracted from all counted steps and the time between them, because few pauses fall into profiled steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
from msgspec import Struct

from gpulab.analysis.breakdown import DEVICE_PARTS
from gpulab.analysis.facts import Facts
from gpulab.formatting import capitalized, duration, number, plural
from gpulab.intervals import Intervals, clip, intersect, measure, paint, union
from gpulab.prediction import batches, kernels
from gpulab.prediction.prediction import NOTHING, TO_TRY, Prediction, PriorEvidence, Removal, recalibrated
from gpulab.prediction.replay import Changes
from gpulab.prediction.step import Z_975, Baseline, NoPrediction, Projection, plan_of
from gpulab.run import Int64, Timeline
from gpulab.timeline.labels import WAITS, What, labels

CLEARLY = 1.25  # ratio, up or down; ours: more than the gain of most knobs
WIDEST = 5.0  # highest over lowest, for a range that includes the current speed; ours: 4 × the batch has 4.3

Memory = Literal["unchanged", "predicted", "unknown"]


class Formula(Struct, frozen=True):
    """What one knob does to a step, and to the GPU's memory; `predicted` means that the projection has the memory."""

    apply: Callable[[Projection, str, PriorEvidence], Projection]
    memory: Memory = "unknown"


_CHECKS = "try it: the finding says what the check takes, and only a run shows that nothing else takes its place"
_OF_RANKS = "try it: only a run shows how much communication the ranks overlap with computing"

# By knob, in order of application: first knobs that change how data are made, then knobs that depend on it. A text in
# place of a formula is the reason why there is no prediction.
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
    "checkpointing": "try it: only a run shows the memory that is saved, and the time to compute the blocks again",
    "accumulate": Formula(kernels.accumulate),
    "batch_size": Formula(batches.batch_size, "predicted"),
}
_ORDER = {name: place for place, name in enumerate(PREDICTORS)}


class Predictor:
    """Predictions from one run, sharing the analysis of its step.

    Predictions never raise: `Prediction.refused` says why there is none. `refusal`: why no change can be predicted;
    empty if the run's step is known.
    """

    def __init__(self, facts: Facts, evidence: PriorEvidence = NOTHING) -> None:
        self._evidence = evidence
        self._plan: Projection | None = None
        self.refusal = ""
        try:
            self._plan = plan_of(facts)
        except NoPrediction as why:
            self.refusal = str(why)

    def of(self, settings: Mapping[str, str]) -> Prediction:
        """The predicted effect of these settings.

        The interval of the formula is widened or narrowed by the errors of `knob_names(settings)`.
        """
        try:
            predicted = self._projected(settings)
        except NoPrediction as why:
            return refusal(settings, str(why))
        return _telling(recalibrated(predicted, self._evidence.errors.get(knob_names(settings), ())))

    def _projected(self, settings: Mapping[str, str]) -> Prediction:
        """Raises NoPrediction, also if a replay is needed but the GPU's work was not recorded."""
        if self._plan is None:
            raise NoPrediction(self.refusal)
        projection, memories = self._plan, set()
        for name in sorted(settings, key=lambda n: _ORDER.get(n, len(_ORDER))):
            formula = PREDICTORS.get(name, f"there is no formula for another {name}")
            if isinstance(formula, str):
                raise NoPrediction(formula)
            memories.add(formula.memory)
            try:
                projection = formula.apply(projection, settings[name], self._evidence)
            except ValueError:
                raise NoPrediction(f"{name}={settings[name]} is no value of this setting") from None
        if not settings:
            raise NoPrediction("nothing is changed")
        if len(projection.already) == len(settings):
            raise NoPrediction(f"nothing changes: {'; '.join(projection.already)}")
        middle, low, high = projection.ratio()
        memory_ratio, memory_basis = _memory(projection, memories)
        return Prediction(
            dict(settings),
            middle,
            (low, high),
            capitalized("; ".join(dict.fromkeys(projection.basis))),
            memory_ratio,
            projection.only_sign,
            memory_basis=memory_basis,
            setup_s=projection.setup_s,
        )

    def without(self, removal: Removal, times: Intervals, key: str = "") -> Prediction:
        """The predicted effect of leaving out `times`; its settings are empty, because no knob does it.

        `times`: the removed time, [n, 2] in ns by the run's clock; for waits, the calls in it no longer wait. The ratio
        compares the time of the whole loop, including time between steps. `key`: key of the finding, under which the
        errors of earlier such predictions are stored.
        """
        try:
            if not len(times):
                raise NoPrediction("when exactly it happens was not recorded")
            if self._plan is None:
                raise NoPrediction(self.refusal)
            without = _without_waits if removal == "waits" else _without_pauses
            predicted = without(self._plan.today, times)
        except NoPrediction as why:
            return refusal({}, str(why))
        return recalibrated(predicted, self._evidence.errors.get(key, ()))


def predict(facts: Facts, settings: Mapping[str, str], evidence: PriorEvidence = NOTHING) -> Prediction:
    """The predicted effect of these settings on the run: one prediction of a `Predictor`."""
    return Predictor(facts, evidence).of(settings)


def _telling(prediction: Prediction) -> Prediction:
    """The prediction, or a refusal if its range is useless: clearly faster to clearly slower, or wide around 1."""
    assert prediction.interval is not None, "a refused one has returned before"
    low, high = prediction.interval
    if low >= 1 or high <= 1 or ((low * CLEARLY > 1 or high < CLEARLY) and high <= WIDEST * low):
        return prediction
    speedup = f"{number(1 / high)}× to {number(1 / low)}×"
    why = f"{TO_TRY}this run allows a speedup of {speedup}, which is too wide to be useful"
    return refusal(prediction.settings, why)


def refusal(settings: Mapping[str, str], why: str) -> Prediction:
    """A prediction that only says why there is no figure."""
    return Prediction(dict(settings), None, None, "", refused=why)


def knob_names(settings: Mapping[str, str]) -> str:
    """The scoreboard's name for such predictions: "workers", "amp + workers"."""
    return " + ".join(sorted(settings))


def _memory(projection: Projection, memories: set[Memory]) -> tuple[float | None, str]:
    """The predicted peak of the GPU's memory over today's, and the basis of that figure."""
    if not projection.today.on_gpu:
        return None, ""
    if memories <= {"unchanged"}:
        return 1.0, "GPU memory stays the same"
    if projection.memory_ratio is None or "unknown" in memories:
        return None, "its effect on GPU memory is not predicted"
    return projection.memory_ratio, "GPU memory by a linear fit through the peaks of short runs"


# -- leaving something out ---------------------------------------------------------------------------------------------

# Extra gain as a factor on the pause (at most this factor on the CPU's other work), because the pause had emptied the
# caches: least, likely, most. On planted cells of two machines, 2026: 0 to 0.45, median 0.08 and 0.17.
COLD = (0.0, 0.1, 0.45)
# Error of a short run, as a share of the time in pauses, divided by the square root of their number. Ours.
FEW = 0.5
# Of the time in pauses: their cost outside it (a thread that goes on). Ours.
GONE_SD = 0.05
REPLAY_SD = 0.03  # of a window replayed without some waits; ours


def _without_pauses(today: Baseline, pauses: Intervals) -> Prediction:
    """Without these pauses: over the counted steps, each up to the begin of the next; if they contain none, over traced
    steps.

    The GPU's work in these steps remains.
    """
    begin, end = _loop(today)
    each = paint(np.stack((begin, end), axis=1), [pauses])[:, 0]
    count, least_ns = len(intersect(union(begin, end), pauses)), _busy_ns(today) * len(begin)
    if not count:
        return _without_traced(today, pauses)
    whole = max(int((end - begin).sum()), round(least_ns))
    gone = max(0.0, min(whole - least_ns, float(each.sum())))
    doubt, rest = Z_975 * (FEW / np.sqrt(count) + GONE_SD), max(whole - gone, 1)
    computed = 0.0 if today.on_gpu else today.compute_us / today.step.median  # share of a step, for a CPU
    warmed = min(gone, rest * computed)
    ratio, low, high = (
        max(1.0, rest - cold * warmed) / (rest + max(0.0, by) * gone)
        for by, cold in ((1, COLD[1]), (1 + doubt, COLD[2]), (1 - doubt, COLD[0]))
    )
    words = f"{duration(gone / 1e3)} of {duration(whole / 1e3)} of training, in {plural(int(count), 'place')}"
    return Prediction({}, ratio, (low, max(high, ratio)), capitalized(words))


def _busy_ns(today: Baseline) -> float:
    """How long the GPU works in a typical step, in ns; 0 on a CPU."""
    account = today.facts.breakdown
    if account is None or account.device_index is None or not account.steps:
        return 0.0
    return float(np.median([sum(s.parts_ns[p] for p in DEVICE_PARTS) for s in account.steps]))


def _loop(today: Baseline) -> tuple[Int64, Int64]:
    """Begin and end of each counted step, with the time up to the next step."""
    steps, rows = today.run.steps, today.facts.selection.rows
    if not len(rows):
        raise NoPrediction("no step was measured without the profiler")
    following = np.minimum(rows + 1, len(steps) - 1)
    end = np.where(following > rows, steps.start_ns[following], steps.end_ns[rows])
    return steps.start_ns[rows], np.maximum(end, steps.end_ns[rows])


def _without_waits(today: Baseline, times: Intervals) -> Prediction:
    timeline = today.run.timeline
    if timeline is None:
        raise NoPrediction("there is no trace that shows the waits")
    if not today.on_gpu:
        return _without_traced(today, times)
    rows = _waiting_rows(timeline, times)
    if not len(rows):
        raise NoPrediction("the trace shows no call that waits for the GPU there")
    ratio = min(1.0, today.played_with_us(Changes(free_waits=rows)) / today.played.step_us)
    off = Z_975 * float(np.hypot(REPLAY_SD, today.sampling_sd))
    words = f"Replay of the traced steps without the wait in {plural(len(rows), 'call')}"
    return Prediction({}, ratio, (ratio * float(np.exp(-off)), ratio * float(np.exp(off))), words)


def _without_traced(today: Baseline, times: Intervals) -> Prediction:
    """On a CPU, nothing overlaps the training thread: time removed from the profiled steps is saved in every step."""
    account = today.facts.breakdown
    if account is None or not account.steps:
        raise NoPrediction("there is no traced step")
    if today.on_gpu or not len(intersect(times, account.covered)):
        raise NoPrediction("none of this time lies in the measured steps")
    shares = [measure(clip(times, s.start_ns, s.end_ns)) / max(1, s.end_ns - s.start_ns) for s in account.steps]
    ratio = 1 - float(np.median(shares))
    off = Z_975 * (float(np.std(shares)) / np.sqrt(len(shares)) + REPLAY_SD)
    return Prediction({}, ratio, (max(1e-3, ratio - off), min(1.0, ratio + off)), "Its time per traced step")


def _waiting_rows(timeline: Timeline, intervals: Intervals) -> np.ndarray:
    """Copying and synchronizing calls of the training threads that touch the intervals."""
    rows = np.flatnonzero(labels(timeline).training(*WAITS, What.COPY_CALL))
    begun = np.searchsorted(intervals[:, 0], timeline.end_ns[rows], side="left")
    ended = np.searchsorted(intervals[:, 1], timeline.start_ns[rows], side="right")
    inside: np.ndarray = rows[begun > ended]
    return inside
