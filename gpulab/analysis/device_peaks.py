"""Compares what a run used of a GPU with the GPU's peaks: number formats, matrix units, clock, memory.

Peaks are dense TFLOP/s by number format, from the makers' data sheets. An unknown GPU has no row: figures of another
GPU are never used for it. Which format a kernel multiplies in, and whether its sizes fit the matrix units, is read from
its name and from recorded shapes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from gpulab.analysis.kernels import DeviceWork, names_tell
from gpulab.run import THROTTLE_NAMES, Category, Device, Run
from gpulab.timeline.kernel_names import reading
from gpulab.timeline.labels import Mask, distinct
from gpulab.timeline.launches import replay_of

if TYPE_CHECKING:
    from gpulab.analysis.facts import Facts


class Peaks(Struct, frozen=True):
    """Dense peaks in TFLOP/s, without sparsity. None: the GPU has no such units."""

    fp32_tflops: float
    tf32_tflops: float | None
    fp16_tflops: float
    bf16_tflops: float | None
    bandwidth_gb_s: float


# the first match counts; from makers' data sheets (definitions.md, "Hardware table"); a laptop's GPU of that name is
# another chip
_TABLE: tuple[tuple[str, Peaks], ...] = (
    (r"\bT4\b", Peaks(8.1, None, 65, None, 320)),
    (r"V100", Peaks(15.7, None, 125, None, 900)),
    (r"\bA10\b|\bA10G\b", Peaks(31.2, 62.5, 125, 125, 600)),
    (r"A100.*80", Peaks(19.5, 156, 312, 312, 2039)),
    (r"A100", Peaks(19.5, 156, 312, 312, 1555)),
    (r"\bL4\b", Peaks(30.3, 60, 121, 121, 300)),
    (r"\bL40S\b", Peaks(91.6, 183, 362, 362, 864)),
    (r"RTX 3090(?! Ti| Laptop)", Peaks(35.6, 35.6, 71, 71, 936)),
    (r"RTX 4090(?! D| Laptop)", Peaks(82.6, 82.6, 165.2, 165.2, 1008)),
    (r"RTX 5090(?! D| Laptop)", Peaks(104.8, 104.8, 209.5, 209.5, 1792)),
    (r"H100.*NVL", Peaks(60, 418, 835, 835, 3900)),
    (r"H100.*PCIe", Peaks(51, 378, 756, 756, 2000)),
    (r"H100", Peaks(67, 494.5, 989, 989, 3350)),
    (r"\bH200\b", Peaks(67, 494.5, 989, 989, 4800)),
    (r"\bB200\b", Peaks(80, 1125, 2250, 2250, 8000)),
    (r"MI300X", Peaks(163.4, 653.7, 1307, 1307, 5300)),
)

# Cards of compute capability 7.5 that have no matrix units: NVIDIA's GTX 16 series and its workstation relatives.
_WITHOUT_UNITS = re.compile(r"GTX 16|\bMX\d{3}|\bT[456]00\b|\bT1[02]00\b|\bT1000\b|\bT2000\b")
_OTHER_MAKERS = re.compile(r"AMD|Radeon|Instinct|Intel", re.IGNORECASE)
UNITS_SINCE = (7, 0)
BF16_SINCE = (8, 0)


def peaks_of(name: str) -> Peaks | None:
    """The peaks of a GPU by its driver's name ("NVIDIA A100-SXM4-80GB"); None if the table does not list it."""
    return next((peaks for pattern, peaks in _TABLE if re.search(pattern, name, re.IGNORECASE)), None)


def compute_capability(device: Device) -> tuple[int, int] | None:
    """The capability of an NVIDIA GPU, such as (9, 0); None if unknown, or for a GPU of another maker."""
    version = re.fullmatch(r"(\d+)\.(\d+)", str(device.details.get("compute_capability") or ""))
    if version is None or _OTHER_MAKERS.search(device.name):
        return None
    return int(version[1]), int(version[2])


def has_units(device: Device) -> bool | None:
    """Whether the GPU has units that multiply matrices of 16-bit numbers; None if unknown."""
    if peaks_of(device.name) is not None:
        return True
    if _WITHOUT_UNITS.search(device.name):
        return False
    generation = compute_capability(device)
    return None if generation is None else generation >= UNITS_SINCE


def narrow_ratio(device: Device) -> float | None:
    """Peak of 16-bit products divided by that of float32; None for a GPU that the table does not list.

    No other GPU is used for it (definitions.md, "Hardware table"): even within a generation the ratios differ.
    """
    peaks = peaks_of(device.name)
    return None if peaks is None else peaks.fp16_tflops / peaks.fp32_tflops


def tf32_ratio(device: Device) -> float | None:
    """Peak of TF32 products divided by that of float32; None if unlisted or without such units."""
    peaks = peaks_of(device.name)
    return None if peaks is None or peaks.tf32_tflops is None else peaks.tf32_tflops / peaks.fp32_tflops


_FORMATS = ("", "fp32", "tf32", "narrow", "unknown")


class PrecisionUse(Struct, frozen=True):
    """Shares of the time of all kernels except communication, by the format of matrix kernels.

    `half_able` is the share of kernels that only move data and take half the time with half the bytes, without those of
    the optimizer, whose data keeps its format. `unknown` is the share of matrix kernels whose names show neither format
    nor use of tensor cores, such as Triton's. `own` is the share of full-precision matrix kernels that no PyTorch
    operator started, so that no PyTorch setting affects them; they are in no other share.

    `costliest` names the float32 kernel with the most time, up to its arguments, `costliest_tf32` the one in TF32.
    """

    fp32: float
    tf32: float
    narrow: float
    half_able: float
    costliest: str
    costliest_tf32: str = ""
    unknown: float = 0.0
    own: float = 0.0
    costliest_own: str = ""


def precision_use(facts: Facts) -> PrecisionUse | None:
    """The shares; None if kernel names do not show formats (GPU of another maker), or no kernel ran."""
    work = facts.work
    if work is None or not len(work.rows) or not names_tell(work.timeline):
        return None
    matrix = work.of("matrix")
    name = work.timeline.name_id[work.rows]
    formats = np.zeros(len(work.timeline.names), dtype=np.int64)
    for i in distinct(name[matrix]):
        formats[i] = _FORMATS.index(_format(work.timeline.names[i]))
    own = _own(work)
    format_of_row = np.where(matrix & ~own, formats[name], 0)
    own &= matrix & np.isin(formats[name], (1, 2))
    return PrecisionUse(
        fp32=work.share(format_of_row == 1),
        tf32=work.share(format_of_row == 2),
        narrow=work.share(format_of_row == 3),
        half_able=work.share(work.of("pointwise", "normalization", "copy", "layout") & ~work.of_optimizer),
        costliest=short_name(work.costliest(format_of_row == 1)),
        costliest_tf32=short_name(work.costliest(format_of_row == 2)),
        unknown=work.share(format_of_row == 4),
        own=work.share(own),
        costliest_own=short_name(work.costliest(own)),
    )


def _own(work: DeviceWork) -> Mask:
    """Rows started outside any operator, if operators are recorded; a replayed graph hides its operators."""
    categories = (Category.CPU_OP, Category.USER_ANNOTATION, Category.PYTHON_FUNCTION)
    host = np.isin(work.timeline.category, categories)
    replayed = replay_of(work.timeline, work.rows) >= 0
    return np.asarray((work.call >= 0) & (work.operator < 0) & ~replayed & host.any())


def _format(name: str) -> str:
    return "unknown" if reading(name).tensor_cores is None else reading(name).numbers


def short_name(kernel: str) -> str:
    """A kernel's name as a person can read it: without return type, template and arguments."""
    name = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    return name.partition("<")[0].partition("(")[0] or kernel[:60]


# CUTLASS names how many numbers a kernel loads at once: 8 of 16 bits (4 of TF32) only if the sizes allow it.
_ALIGNED = re.compile(r"align(\d+)")
SHAPE_COLUMNS = ("product_m", "product_n", "product_k")
# NVIDIA's guide to matrix multiplication: multiples of 16 bytes, 8 numbers of 16 bits. 64: ours, as nanoGPT's.
UNIT = 8
UNIT_OF_VOCABULARY = 64
VOCABULARY = 8192  # ours: a side of this size is a vocabulary, not the width of a layer
_BY_NAME = "kernels that load fewer numbers at once than they could"
_BY_SHAPE = "sizes that are no multiples of 8 (64 for a vocabulary)"


class Alignment(Struct, frozen=True):
    """Shares of the time of all kernels except communication: matrix kernels on matrix units, those of known fit, and
    those whose sizes do not fit. `how`: by which evidence; `examples` are sizes, m × n × k.
    """

    on_units: float
    judged: float
    odd: float
    how: str
    costliest: str
    examples: tuple[str, ...]


def alignment(work: DeviceWork) -> Alignment | None:
    """The shares; None if names do not show matrix units (GPU of another maker), or no matrix kernel uses them."""
    if not len(work.rows) or not names_tell(work.timeline):
        return None
    t, matrix = work.timeline, work.of("matrix")
    name = t.name_id[work.rows]
    narrow, aligned = np.zeros(len(t.names), bool), np.full(len(t.names), -1)
    for i in distinct(name[matrix]):
        numbers, spelling = reading(t.names[i]).numbers, _ALIGNED.search(t.names[i])
        narrow[i] = numbers in ("narrow", "tf32")
        if spelling is not None and narrow[i]:
            aligned[i] = int(spelling[1]) >= (8 if numbers == "narrow" else 4)
    on_units = matrix & narrow[name]
    if not on_units.any():
        return None
    by_name = np.where(on_units, aligned[name], -1)
    fits = _fits_by_shape(work)
    judged = on_units & ((by_name >= 0) | (fits >= 0))
    odd = on_units & np.where(by_name >= 0, by_name == 0, fits == 0)
    by_shape = odd & (fits == 0)
    return Alignment(
        on_units=work.share(on_units),
        judged=work.share(judged),
        odd=work.share(odd),
        how=_BY_SHAPE if by_shape.any() else _BY_NAME,
        costliest=_costliest(work, odd),
        examples=_examples(work, by_shape),
    )


def _fits_by_shape(work: DeviceWork) -> np.ndarray:
    """1 if n and k of the product that launched a row fit, 0 if one does not, -1 if unknown.

    m is the number of rows and not the length of a row that a kernel loads, so it need not fit.
    """
    fits = np.full(len(work.rows), -1, dtype=np.int64)
    columns = [work.timeline.extra.get(column) for column in SHAPE_COLUMNS[1:]]
    launched = work.operator >= 0
    if any(c is None for c in columns) or not launched.any():
        return fits
    sizes = np.stack([c[work.operator[launched]] for c in columns if c is not None])
    recorded = np.isfinite(sizes).all(axis=0)
    whole = np.where(np.isfinite(sizes), sizes, 0).astype(np.int64)
    unit = np.where(whole >= VOCABULARY, UNIT_OF_VOCABULARY, UNIT)
    good = (whole % unit == 0).all(axis=0)
    fits[np.flatnonzero(launched)[recorded]] = good[recorded]
    return fits


def _costliest(work: DeviceWork, mine: np.ndarray) -> str:
    name = work.costliest(mine)
    inner = re.search(r"cutlass_\w+", name)
    return inner[0] if inner is not None else short_name(name)


def _examples(work: DeviceWork, mine: np.ndarray) -> tuple[str, ...]:
    """The up to two sizes that take most time."""
    if not mine.any():
        return ()
    t, operator = work.timeline, work.operator[mine]
    sizes = np.stack([t.extra[c][operator] for c in SHAPE_COLUMNS], axis=1).astype(np.int64)
    distinct, group = np.unique(sizes, axis=0, return_inverse=True)
    time = np.bincount(group.reshape(-1), weights=t.duration_ns[work.rows[mine]])
    return tuple(" × ".join(str(n) for n in distinct[i]) for i in np.argsort(-time, kind="stable")[:2].tolist())


def slowed_fraction(run: Run) -> float | None:
    """Mean fraction by which the clock was below its highest reading while limits held it; None if not read."""
    clock, reasons = run.samples.get("sm_clock_mhz"), run.samples.get("throttle_reasons")
    if clock is None or reasons is None or not len(reasons.value) or not len(clock.value) or clock.value.max() <= 0:
        return None
    bits = reasons.value.astype(np.int64)
    after = np.searchsorted(reasons.t_ns, clock.t_ns, side="right") - 1
    limited = (bits[np.maximum(after, 0)] & sum(THROTTLE_NAMES)) != 0
    return float(1 - clock.value[limited].mean() / clock.value.max()) if limited.any() else None


def memory_fraction(run: Run) -> float | None:
    """The peak memory of tensors as a share of the GPU's memory; None if either is unknown."""
    total = run.memory.total_bytes or run.device.memory_total_bytes
    return run.memory.peak_allocated_bytes / total if run.memory.peak_allocated_bytes and total else None


def exact_memory_fraction(run: Run) -> float | None:
    """The same if the peak is exact; None if an earlier run hides it, so that it may have been higher."""
    return None if peak_is_hidden(run) else memory_fraction(run)


def peak_is_hidden(run: Run) -> bool:
    """Whether an earlier run of the process took more, so that this one's peak is not known."""
    return any(m.key == "memory" for m in run.missing)
