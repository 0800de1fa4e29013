"""Other kernels for the same work: attention without its large matrices, a compiled model."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from gpulab.intervals import covers
from gpulab.prediction.baseline import Refused, training_spans_us
from gpulab.prediction.calibration import COMPILED_SLOWER, FUSED_AWAY
from gpulab.prediction.evidence import PriorEvidence
from gpulab.prediction.replay import Changes
from gpulab.prediction.step import Projection
from gpulab.timeline import spans

_MATH_ATTENTION = "aten::_scaled_dot_product_attention_math"


def attention(projection: Projection, value: str, evidence: PriorEvidence) -> Projection:
    """Flash or memory-efficient attention writes no matrix of all pairs: what only moves it falls away."""
    timeline = projection.today.run.timeline
    plain = None if timeline is None else spans.named(timeline, spans.among(_MATH_ATTENTION))
    if timeline is None or plain is None or not plain.any():
        raise Refused("no attention by its plain formula was seen in the trace")
    if value == "math":
        return projection.as_it_is("it is computed by its plain formula already")
    if not projection.today.on_gpu:
        share = min(0.9, training_spans_us(projection.today, plain) / projection.today.step.median)
        words = "attention by its plain formula takes part of a step; without large matrices it takes less of it"
        return _ranged(projection, 1 - share, 1.02, words)
    work = projection.today.work
    launched = work.call >= 0
    inside = np.zeros(len(work.rows), dtype=bool)
    inside[launched] = covers(spans.covered(timeline, plain), timeline.start_ns[work.call[launched]])
    backward = np.array(["softmax" in n.lower() and "backward" in n.lower() for n in work.names_of(work.rows)], bool)
    low = _played_ratio(projection, (inside & ~work.of("matrix")) | backward, 0.0)
    return _ranged(projection, low, 1.0, "kernels that only write and read the matrix of all pairs fall away")


def compiled(projection: Projection, value: str, evidence: PriorEvidence) -> Projection:
    """A sign and a range: which kernels a compiler fuses is not known before."""
    if value == "off":
        return projection.as_it_is("it is not compiled already")
    if not projection.today.on_gpu:
        raise Refused(
            "try it: what a compiler saves on a CPU, and what its checks before each call cost, only a run shows"
        )
    words = "how many kernels a compiler fuses is not known before: only a range"
    account = projection.today.facts.breakdown
    low = _played_ratio(projection, projection.today.work.of("pointwise", "normalization", "reduction"), FUSED_AWAY)
    launching = account.typical_share("launch") if account is not None else 0.0
    return _ranged(projection, max(0.1, low - launching), COMPILED_SLOWER, words)


def _ranged(projection: Projection, low: float, high: float, words: str) -> Projection:
    middle = float(np.sqrt(low * high))
    ranged = replace(projection, pure_factor=projection.pure_factor * middle, only_sign=True)
    return ranged.doubted(0.0, words).reached(low / middle, high / middle)


def _played_ratio(projection: Projection, chosen: np.ndarray, remains: float) -> float:
    """Of the window in which that share of the chosen rows of the device's work remains."""
    work = projection.today.work
    factor = np.ones(len(work.timeline))
    factor[work.rows[chosen]] = remains
    return projection.today.played_with_us(Changes(device_factor=factor)) / projection.today.played.step_us
