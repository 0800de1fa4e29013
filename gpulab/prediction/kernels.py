"""Other kernels for the same work: other number formats, attention without its large matrices, a compiled model.

Number formats by Amdahl over the classes of kernels: matrix products gain the ratio of the peaks, at most. Kernels that
move data gain half, for they move half the bytes; what autocast keeps in fp32 and the optimizer nothing. Played again
in the window: a step that waits for its launches gains nothing (definitions.md, "Mixed precision").
"""

from __future__ import annotations

import re

import numpy as np
from msgspec.structs import replace

from gpulab.analysis.device_peaks import Peaks, peaks_of
from gpulab.formatting import factor
from gpulab.intervals import covers
from gpulab.prediction.baseline import Refused, is_on, training_spans_us
from gpulab.prediction.calibration import COMPILED_SLOWER, FUSED_AWAY, LEAST_GAIN, PRECISION_SD
from gpulab.prediction.prediction import PriorEvidence
from gpulab.prediction.replay import Changes
from gpulab.prediction.step import Projection
from gpulab.run import Float64
from gpulab.timeline import spans
from gpulab.timeline.kernel_names import reading

_MATH_ATTENTION = "aten::_scaled_dot_product_attention_math"


def attention(projection: Projection, value: str, evidence: PriorEvidence) -> Projection:
    """Flash or memory-efficient attention writes no matrix of all pairs: what only moves it falls away."""
    timeline = projection.today.run.timeline
    plain = None if timeline is None else spans.named(timeline, spans.among(_MATH_ATTENTION))
    if timeline is None or plain is None or not plain.any():
        raise Refused("the trace has no math attention")
    if value == "math":
        return projection.as_it_is("it is already math attention")
    if not projection.today.on_gpu:
        share = min(0.9, training_spans_us(projection.today, plain) / projection.today.step.median)
        words = "math attention takes part of a step; fused attention writes no large matrices and takes less"
        return _ranged(projection, 1 - share, 1.02, words)
    work = projection.today.work
    launched = work.call >= 0
    inside = np.zeros(len(work.rows), dtype=bool)
    inside[launched] = covers(spans.covered(timeline, plain), timeline.start_ns[work.call[launched]])
    backward = np.array(["softmax" in n.lower() and "backward" in n.lower() for n in work.names_of(work.rows)], bool)
    low = _played_ratio(projection, (inside & ~work.of("matrix")) | backward, 0.0)
    return _ranged(projection, low, 1.0, "kernels that only write and read the attention matrix are saved")


def compiled(projection: Projection, value: str, evidence: PriorEvidence) -> Projection:
    """A sign and a range: which kernels a compiler fuses is not known before."""
    if value == "off":
        return projection.as_it_is("the model is not compiled")
    if not projection.today.on_gpu:
        raise Refused("try it: only a run shows what torch.compile saves on a CPU, and what its guards cost")
    words = "the number of kernels that torch.compile fuses is not known in advance: only a range"
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


MOVED = 0.5  # of the bytes remain
_KEPT = re.compile(r"softmax|layer_?norm|nll|loss|exp|pow", re.IGNORECASE)  # autocast keeps these in fp32


def amp(projection: Projection, value: str, evidence: PriorEvidence) -> Projection:
    """Mixed precision: "bf16" or "fp16"."""
    if not projection.today.on_gpu:
        raise Refused("the speedup of 16 bits on a CPU depends on its instruction set, for which there is no formula")
    if value not in ("bf16", "fp16"):
        raise Refused("the cost of turning mixed precision off is not predicted")
    peaks = _peaks(projection)
    fast = peaks.fp16_tflops if value == "fp16" else peaks.bf16_tflops
    if fast is None:
        raise Refused(f"{projection.today.run.device.name} has no {value} units; its 16-bit format is fp16")
    full, gain = fast / peaks.fp32_tflops, fast / (peaks.tf32_tflops or peaks.fp32_tflops)
    fp32, tf32, moved = _classes(projection)
    best, least = np.ones(len(moved)), np.ones(len(moved))
    for rows, of_peaks in ((fp32, full), (tf32, gain)):
        best[rows], least[rows] = 1 / of_peaks, 1 / min(LEAST_GAIN, of_peaks)
    best[moved], least[moved] = MOVED, (1 + MOVED) / 2
    words = f"fp32 matmuls: speedup up to {factor(full)}×; memory-bound kernels: up to 2×"
    return _between(projection, best, least, words)


def tf32(projection: Projection, value: str, evidence: PriorEvidence) -> Projection:
    """fp32 matrix products on the matrix units, with fewer digits."""
    if not projection.today.on_gpu:
        raise Refused("TF32 is a number format of NVIDIA's GPUs")
    if not is_on(value):
        raise Refused("the cost of turning TF32 off is not predicted")
    peaks = _peaks(projection)
    if peaks.tf32_tflops is None or "AMD" in projection.today.run.device.name:
        raise Refused(f"{projection.today.run.device.name} has no TF32 units that PyTorch can switch")
    gain = peaks.tf32_tflops / peaks.fp32_tflops
    fp32, _, _ = _classes(projection)
    words = f"fp32 matmuls: speedup up to {factor(gain)}×"
    return _between(projection, np.where(fp32, 1 / gain, 1.0), np.where(fp32, 1 / np.sqrt(gain), 1.0), words)


def _between(projection: Projection, best: Float64, least: Float64, words: str) -> Projection:
    """The likely gain is half-way between the two, as a product; the interval holds both."""
    work, gains = projection.today.work, []
    for of_rows in (best, np.sqrt(best * least), least):
        factor = np.ones(len(work.timeline))
        factor[work.rows] = of_rows
        gains.append(Changes(device_factor=factor))
    best_us, likely_us, least_us = map(projection.today.played_with_us, gains)
    changed = replace(projection, changes=projection.changes.and_also(gains[1]))
    return changed.doubted(PRECISION_SD, words).reached(min(1.0, best_us / likely_us), max(1.0, least_us / likely_us))


def _peaks(projection: Projection) -> Peaks:
    name = projection.today.run.device.name
    peaks = peaks_of(name)
    if peaks is None:
        raise Refused(f"the peaks of {name} per number format are not known")
    return peaks


def _classes(projection: Projection) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which rows of the device's work are matrix products of 32 bits, of TF32, and kernels that move data.

    Data in 16 bits already is told by the name of the kernel.
    """
    work = projection.today.work
    names = work.names_of(work.rows)
    formats = {name: reading(str(name)).numbers for name in set(names.tolist())}
    of = np.array([formats[name] for name in names.tolist()], dtype=object)
    matrix = work.of("matrix", "attention")
    kept = np.array([_KEPT.search(str(name)) is not None for name in names.tolist()], dtype=bool)
    narrow = of == "narrow"
    moved = work.of("pointwise", "normalization", "reduction", "layout") & ~kept & ~narrow
    return matrix & (of == "fp32"), matrix & (of == "tf32"), moved
