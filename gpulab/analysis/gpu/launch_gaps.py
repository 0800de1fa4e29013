"""Whether the GPU's idle time is made of launches: a launch costs microseconds, so a long gap has another cause."""

from __future__ import annotations

import numpy as np

from gpulab.analysis.gpu.device_work import DeviceWork
from gpulab.intervals import Intervals, subtract, union
from gpulab.timeline import spans

# Ten times the 99th percentile of the time from one operator to the next in a launch-bound program (b200_moe: 123 µs).
LONGEST_NS = 1_000_000


def not_launching_us(work: DeviceWork, elsewhere: Intervals) -> float:
    """Idle time per step in gaps with fewer than one launch per `LONGEST_NS`: starting up, loading, other work.

    `elsewhere` is time that is accounted to another cause anyway.
    """
    t = work.timeline
    begun = t.start_ns[spans.launches(t)]
    gaps = work.idle
    launches = np.searchsorted(begun, gaps[:, 1], side="left") - np.searchsorted(begun, gaps[:, 0], side="left")
    sparse = gaps[(gaps[:, 1] - gaps[:, 0]) > LONGEST_NS * (launches + 1)]
    return work.per_step_us(subtract(sparse, elsewhere))


def small_kernels_fraction(work: DeviceWork) -> float | None:
    """Share of kernel time in kernels of fewer blocks than the GPU has multiprocessors; None where not recorded."""
    blocks = work.timeline.extra.get("blocks_per_sm")
    kernel = work.kernel & ~work.of("communication")
    if blocks is None or not kernel.any():
        return None
    rows = work.rows[kernel]
    duration = work.timeline.duration_ns[rows]
    recorded = blocks[rows] >= 0
    total = int(duration[recorded].sum())
    return float(duration[recorded & (blocks[rows] < 1)].sum() / total) if total else None


def exposed_upload_us(work: DeviceWork) -> tuple[float, float, Intervals]:
    """Copies to the GPU from ordinary memory, per step: µs with no kernel beside them, bytes, and when they ran."""
    t = work.timeline
    copies = work.rows[spans.named(t, spans.starting_with("Memcpy HtoD (Pageable"))[work.rows]]
    kernels = work.rows[work.kernel]
    copying = union(t.start_ns[copies], t.end_ns[copies])
    exposed = subtract(copying, union(t.start_ns[kernels], t.end_ns[kernels]))
    size = t.extra.get("bytes")
    moved = float(np.nansum(size[copies])) / work.steps if size is not None and len(copies) else 0.0
    return work.per_step_us(exposed), moved, copying
