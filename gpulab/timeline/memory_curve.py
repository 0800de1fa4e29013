"""The memory that the allocators held over the profiled window: a curve, its peak and the peak's time, per device."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from gpulab.run import Int64, MemoryEvents

HOST = -1


class MemoryCurve(Struct, frozen=True):
    """One device's allocator; `device_index` is -1 for host memory.

    `allocated_bytes[i]` is valid from `t_ns[i]` on. `absolute`: the values are the allocator's own totals; otherwise
    the trace has only changes, and the curve counts from 0 at the first event (and falls below 0 if memory from before
    the window is released). `reserved_peak_bytes`: the most that the caching allocator took from the driver, None if
    not recorded.
    """

    device_index: int
    t_ns: Int64
    allocated_bytes: Int64
    absolute: bool
    peak_bytes: int
    peak_t_ns: int
    reserved_peak_bytes: int | None
    allocations: int
    releases: int
    growth_bytes: int  # allocated and not released within the window, minus releases of older memory


def memory(events: MemoryEvents | None) -> tuple[MemoryCurve, ...]:
    """The curves of all devices, by index; empty if the profiler did not record memory."""
    if events is None or len(events) == 0:
        return ()
    return tuple(
        _curve(events, int(device), np.flatnonzero(events.device_index == device))
        for device in np.unique(events.device_index)
    )


def _curve(events: MemoryEvents, device: int, rows: Int64) -> MemoryCurve:
    change, total = events.bytes[rows], events.total_allocated_bytes[rows]
    absolute = bool((total >= 0).all())
    allocated: Int64 = total if absolute else np.cumsum(change)
    reserved = events.total_reserved_bytes[rows]
    peak = int(allocated.argmax())
    return MemoryCurve(
        device_index=device,
        t_ns=events.t_ns[rows],
        allocated_bytes=allocated,
        absolute=absolute,
        peak_bytes=int(allocated[peak]),
        peak_t_ns=int(events.t_ns[rows[peak]]),
        reserved_peak_bytes=int(reserved.max()) if (reserved >= 0).any() and device != HOST else None,
        allocations=int((change > 0).sum()),
        releases=int((change < 0).sum()),
        growth_bytes=int(change.sum()),
    )
