"""Whether the sizes of matrix products fit the GPU's matrix units, as far as kernel names and recorded shapes tell."""

from __future__ import annotations

import re

import numpy as np
from msgspec import Struct

from gpulab.analysis.gpu.device_work import DeviceWork, names_tell
from gpulab.analysis.gpu.precision_use import short_name
from gpulab.timeline.kernel_names import reading

# CUTLASS names how many numbers a kernel can load at once: all 8 of 16 bits (4 of TF32) only where sizes allow it.
_ALIGNED = re.compile(r"align(\d+)")
SHAPE_COLUMNS = ("product_m", "product_n", "product_k")
# NVIDIA's guide to matrix multiplication: multiples of 16 bytes, 8 numbers of 16 bits. 64: ours, as nanoGPT's.
UNIT = 8
UNIT_OF_VOCABULARY = 64
VOCABULARY = 8192  # ours: a side of this size is a vocabulary, not the width of a layer
_TOLD_BY_NAME = "kernels that load fewer numbers at once than they could"
_TOLD_BY_SHAPE = "sizes that are no multiples of 8 (64 for a vocabulary)"


class Alignment(Struct, frozen=True):
    """Shares of the time of all kernels but communication: matrix kernels on matrix units, those of them whose sizes
    say whether they fit, and those whose sizes do not fit. `how` this was judged; `examples` are sizes, m × n × k.
    """

    on_units: float
    judged: float
    odd: float
    how: str
    costliest: str
    examples: tuple[str, ...]


def alignment(work: DeviceWork) -> Alignment | None:
    """None where names do not tell matrix units (another maker's GPU), or no matrix kernel uses them."""
    if not len(work.rows) or not names_tell(work.timeline):
        return None
    t, matrix = work.timeline, work.of("matrix")
    name = t.name_id[work.rows]
    narrow, aligned = np.zeros(len(t.names), bool), np.full(len(t.names), -1)
    for i in np.unique(name[matrix]).tolist():
        numbers, written = reading(t.names[i]).numbers, _ALIGNED.search(t.names[i])
        narrow[i] = numbers in ("narrow", "tf32")
        if written is not None and narrow[i]:
            aligned[i] = int(written[1]) >= (8 if numbers == "narrow" else 4)
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
        how=_TOLD_BY_SHAPE if by_shape.any() else _TOLD_BY_NAME,
        costliest=_costliest(work, odd),
        examples=_examples(work, by_shape),
    )


def _fits_by_shape(work: DeviceWork) -> np.ndarray:
    """1 where n and k of the product that launched a row fit, 0 where one does not, -1 unknown.

    m is the number of rows: it is not the length of any row that a kernel loads.
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


def _costliest(work: DeviceWork, chosen: np.ndarray) -> str:
    name = work.costliest(chosen)
    inner = re.search(r"cutlass_\w+", name)
    return inner[0] if inner is not None else short_name(name)


def _examples(work: DeviceWork, chosen: np.ndarray) -> tuple[str, ...]:
    """The sizes that take most time, up to two."""
    if not chosen.any():
        return ()
    t, operator = work.timeline, work.operator[chosen]
    sizes = np.stack([t.extra[c][operator] for c in SHAPE_COLUMNS], axis=1).astype(np.int64)
    distinct, group = np.unique(sizes, axis=0, return_inverse=True)
    time = np.bincount(group.reshape(-1), weights=t.duration_ns[work.rows[chosen]])
    return tuple(" × ".join(str(n) for n in distinct[i]) for i in np.argsort(-time, kind="stable")[:2].tolist())
