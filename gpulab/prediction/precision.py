"""Other number formats by Amdahl over the classes of kernels: matrix products gain the ratio of the peaks, at most.

Kernels that move data gain half, for they move half the bytes; what autocast keeps in fp32 and the optimizer nothing.
Played again in the window: a step that waits for its launches gains nothing (definitions.md, "Mixed precision").
"""

from __future__ import annotations

import re

import numpy as np
from msgspec.structs import replace

from gpulab.analysis.gpu.device_peaks import Peaks, peaks_of
from gpulab.formatting import factor
from gpulab.prediction.baseline import Refused, is_on
from gpulab.prediction.calibration import LEAST_GAIN, PRECISION_SD
from gpulab.prediction.evidence import PriorEvidence
from gpulab.prediction.replay import Changes
from gpulab.prediction.step import Projection
from gpulab.run import Float64
from gpulab.timeline.kernel_names import reading

MOVED = 0.5  # of the bytes remain
_KEPT = re.compile(r"softmax|layer_?norm|nll|loss|exp|pow", re.IGNORECASE)  # autocast keeps these in fp32


def amp(projection: Projection, value: str, evidence: PriorEvidence) -> Projection:
    """Mixed precision: "bf16" or "fp16"."""
    if not projection.today.on_gpu:
        raise Refused("what 16-bit numbers bring on a CPU depends on its instructions, which no formula here knows")
    if value not in ("bf16", "fp16"):
        raise Refused("what leaving out mixed precision would cost is not predicted")
    peaks = _peaks(projection)
    fast = peaks.fp16_tflops if value == "fp16" else peaks.bf16_tflops
    if fast is None:
        raise Refused(f"{projection.today.run.device.name} has no units for {value}: fp16 is the format it has")
    full, gain = fast / peaks.fp32_tflops, fast / (peaks.tf32_tflops or peaks.fp32_tflops)
    fp32, tf32, moved = _classes(projection)
    best, least = np.ones(len(moved)), np.ones(len(moved))
    for rows, of_peaks in ((fp32, full), (tf32, gain)):
        best[rows], least[rows] = 1 / of_peaks, 1 / min(LEAST_GAIN, of_peaks)
    best[moved], least[moved] = MOVED, (1 + MOVED) / 2
    words = f"matrix products of 32 bits become up to {factor(full)}× as fast, kernels that move data up to twice"
    return _between(projection, best, least, words)


def tf32(projection: Projection, value: str, evidence: PriorEvidence) -> Projection:
    """fp32 matrix products on the matrix units, with fewer digits."""
    if not projection.today.on_gpu:
        raise Refused("TF32 is a number format of NVIDIA's GPUs")
    if not is_on(value):
        raise Refused("what leaving out TF32 would cost is not predicted")
    peaks = _peaks(projection)
    if peaks.tf32_tflops is None or "AMD" in projection.today.run.device.name:
        raise Refused(f"{projection.today.run.device.name} has no units for TF32 that torch switches")
    gain = peaks.tf32_tflops / peaks.fp32_tflops
    fp32, _, _ = _classes(projection)
    words = f"matrix products of 32 bits become up to {factor(gain)}× as fast"
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
        raise Refused(f"how fast {name} computes in each number format is not known here")
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
