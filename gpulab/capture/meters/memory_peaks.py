"""The peaks of memory over a run, as far as the device and the sampling process tell them."""

from __future__ import annotations

import contextlib
from time import perf_counter_ns
from typing import Any

from msgspec import Struct

from gpulab.devices.gpus_in_use import torch_with_cuda
from gpulab.formatting import size
from gpulab.run import Choice, Device, Memory, Missing

READING_SHARE = 0.005  # of the time at most goes to readings
APART_NS = 20_000_000  # readings at the same place of a step are no closer
_ALLOCATED = "GPU memory allocated by tensors"


class _Reading(Struct, frozen=True):
    """What torch's allocator says of one GPU: now, and the most since the last reset of its statistics."""

    allocated: int = 0
    allocated_peak: int = 0
    reserved: int = 0
    reserved_peak: int = 0

    @property
    def peak_is_now(self) -> bool:
        """Then any later peak belongs to what comes now."""
        return self.allocated_peak == self.allocated


class PeakWatch:
    """The peaks of one run, which begins when this is made. Makes no CUDA context and resets nothing.

    torch keeps one peak for the life of the process, which may be the user's. A run that stays below an earlier one
    has no exact peak: there the most that was read before backward passes and at step boundaries stands for it.
    """

    def __init__(self) -> None:
        self._before = _readings()
        self._most: list[tuple[int, int]] = []
        self._due_ns = [0, 0]

    def at_step(self) -> None:
        """A step ends. Costs 0.1 µs, and rarely a reading."""
        self._look(0)

    def at_backward(self) -> None:
        """A backward pass begins: the activations of the whole forward pass are there."""
        self._look(1)

    def busiest(self) -> int | None:
        """The GPU on which tensors grew most during the run; None where none did."""
        grown = [(self._on_gpu(i)[0] or 0) - self._start(i).allocated for i in range(len(_readings() or []))]
        most = max(grown, default=0)
        return grown.index(most) if most > 0 else None

    def peaks(self, device: Device, extremes: dict[str, float]) -> tuple[Memory, tuple[Missing, ...]]:
        """The peaks on that device, and what of them is hidden. `extremes` are the sampling process's."""
        allocated, reserved, missing = self._on_gpu(device.index or 0) if device.kind == "cuda" else (None, None, ())
        rss = extremes.get("peak_rss_bytes")
        memory = Memory(
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=reserved,
            peak_rss_bytes=int(rss) if rss is not None else None,
            total_bytes=device.memory_total_bytes,
        )
        return memory, missing

    def _on_gpu(self, index: int) -> tuple[int | None, int | None, tuple[Missing, ...]]:
        now = _readings()
        if not now or index >= len(now):
            why = "CUDA was never used in this process" if now == [] else "this GPU memory allocator has no statistics"
            return None, None, (Missing(f"peak of the {_ALLOCATED}", why, key="memory"),)
        after, before = now[index], self._start(index)
        if not after.allocated_peak:
            why = "no tensor was on this GPU"
            return None, None, (Missing(f"peak of the {_ALLOCATED}", why, key="memory"),)
        if after.allocated_peak > before.allocated_peak or before.peak_is_now:
            return after.allocated_peak, self._reserved(index, after), ()
        return self._as_read(index, after)

    def _reserved(self, index: int, after: _Reading) -> int:
        """The peak of what the allocator holds; the most that was read where an earlier run held more."""
        before = self._start(index)
        if after.reserved_peak > before.reserved_peak or before.reserved_peak == before.reserved:
            return after.reserved_peak
        read = self._most[index][1] if index < len(self._most) else 0
        return max(read, after.reserved)

    def _as_read(self, index: int, after: _Reading) -> tuple[int, int, tuple[Missing, ...]]:
        """An earlier run of this process hides the peak: the most that was read, which the true one is not below."""
        allocated, reserved = self._most[index] if index < len(self._most) else (0, 0)
        why = (
            f"an earlier peak of this process ({size(after.allocated_peak)}) hides it: shown is the most that was read "
            "before backward passes and at step ends"
        )
        exact = Missing(f"exact peak of the {_ALLOCATED}", why, key="memory")
        return max(allocated, after.allocated), max(reserved, after.reserved), (exact,)

    def _start(self, index: int) -> _Reading:
        return self._before[index] if self._before and index < len(self._before) else _Reading()

    def _look(self, place: int) -> None:
        began = perf_counter_ns()
        if began < self._due_ns[place]:
            return
        now = _readings() or []
        before = self._most + [(0, 0)] * (len(now) - len(self._most))
        self._most = [(max(a, r.allocated), max(b, r.reserved)) for (a, b), r in zip(before, now, strict=False)]
        took = perf_counter_ns() - began
        self._due_ns[place] = began + max(APART_NS, int(2 * took / READING_SHARE))


def count_anew() -> Choice | None:
    """Let torch count peaks from now on, for a run that is one of several; what to tell the user, if it did."""
    torch = torch_with_cuda()
    if torch is None:
        return None
    try:
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)
    except RuntimeError:  # an allocator of the user's own
        return None
    reason = (
        "torch keeps one peak per process, which would hide that of a leaner run; "
        "torch.cuda.max_memory_allocated() now counts from the last run of the experiment"
    )
    return Choice("peak of the GPU memory", "counted anew for each run", reason)


def gpu_peak_bytes(device: Device) -> int:
    """Most memory that tensors held on the GPU so far in this process, without waking CUDA up."""
    now = _readings() if device.kind == "cuda" else None
    index = device.index or 0
    return now[index].allocated_peak if now and index < len(now) else 0


def _readings() -> list[_Reading] | None:
    """One for each GPU that torch sees; empty before CUDA is used, None where the allocator tells nothing."""
    torch = torch_with_cuda()
    if torch is None:
        return []
    with contextlib.suppress(RuntimeError, KeyError):  # an allocator of the user's own
        return [_reading(torch.cuda.memory_stats_as_nested_dict(index)) for index in range(torch.cuda.device_count())]
    return None


def _reading(stats: dict[str, Any]) -> _Reading:
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    return _Reading(allocated["current"], allocated["peak"], reserved["current"], reserved["peak"])
