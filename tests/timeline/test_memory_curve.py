"""The allocators' curves against a running sum by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulab.run import MemoryEvents
from gpulab.timeline.memory_curve import HOST, memory
from tests.support import loaded_traces

changes = st.lists(st.tuples(st.sampled_from([HOST, 0, 1]), st.integers(-50, 50)), max_size=20)


def events(raw: list[tuple[int, int]], before: int | None) -> MemoryEvents:
    """One event a microsecond; `before`: what each device held before the first, None: totals not recorded."""
    held: dict[int, int] = {}
    totals = []
    for device, change in raw:
        held[device] = held.get(device, before or 0) + change
        totals.append(-1 if before is None else held[device])
    n = len(raw)
    return MemoryEvents(
        t_ns=np.arange(n, dtype=np.int64) * 1000,
        bytes=np.array([change for _, change in raw], dtype=np.int64),
        address=np.zeros(n, dtype=np.int64),
        total_allocated_bytes=np.array(totals, dtype=np.int64),
        total_reserved_bytes=np.array([-1 if t < 0 else t + 7 for t in totals], dtype=np.int64),
        device_index=np.array([device for device, _ in raw], dtype=np.int32),
    )


@given(changes, st.sampled_from([None, 5000]))
def test_curves(raw: list[tuple[int, int]], before: int | None) -> None:
    curves = {curve.device_index: curve for curve in memory(events(raw, before))}
    assert set(curves) == {device for device, _ in raw} and memory(None) == ()
    for device, curve in curves.items():
        mine = [(i * 1000, change) for i, (d, change) in enumerate(raw) if d == device]
        held, best, at = before or 0, None, 0
        for t, change in mine:
            held += change
            if best is None or held > best:
                best, at = held, t
        assert (curve.peak_bytes, curve.peak_t_ns) == (best, at)
        assert curve.absolute is (before is not None)
        assert curve.t_ns.tolist() == [t for t, _ in mine]
        assert curve.allocated_bytes[-1] == held
        assert curve.growth_bytes == held - (before or 0)
        assert curve.allocations == sum(c > 0 for _, c in mine)
        assert curve.releases == sum(c < 0 for _, c in mine)
        recorded = before is not None and device != HOST
        assert curve.reserved_peak_bytes == ((best or 0) + 7 if recorded else None)


@pytest.mark.parametrize(
    ("name", "absolute", "peak_mib"),
    [("v100_resnet50_workers0", False, 2662.3), ("h100_owlv2_starved", True, 2582.4)],
)
def test_real_traces(name: str, absolute: bool, peak_mib: float) -> None:
    curve = next(c for c in memory(loaded_traces.trace(name).memory_events) if c.device_index == 0)
    assert curve.absolute is absolute
    assert curve.peak_bytes / 2**20 == pytest.approx(peak_mib, abs=0.1)
