"""Finds the GPU that a run used, and its peaks of memory.

Before the user's code starts CUDA the GPU is unknown, and the first one is assumed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any

from msgspec import Struct

from gpulab.devices.gpus import torch_with_cuda
from gpulab.devices.machine import detect_device
from gpulab.errors import UsageError
from gpulab.formatting import size
from gpulab.intervals import measure
from gpulab.run import Choice, Device, Memory, Missing, Samples, Timeline
from gpulab.timeline.labels import labels

READING_SHARE = 0.005  # share of the time, at most, for readings
APART_NS = 20_000_000  # least time between readings at the same place of a step
_ALLOCATED = "GPU memory allocated by tensors"


class _Reading(Struct, frozen=True):
    """Bytes in torch's allocator on one GPU: now, and at most since the last reset of its statistics."""

    allocated: int = 0
    allocated_peak: int = 0
    reserved: int = 0
    reserved_peak: int = 0


class PeakMemory:
    """The peaks of one run, from the creation of this object on. Makes no CUDA context and resets nothing.

    torch keeps one peak per process. If an earlier run had a higher peak, this run's peak is not known exactly: then
    the highest reading before backward passes and at step boundaries takes its place.
    """

    def __init__(self) -> None:
        self._before = dict(enumerate(_readings() or ()))
        self._most: dict[int, tuple[int, int]] = {}  # highest readings: allocated and reserved
        self._due_ns = [0, 0]

    def at_step(self) -> None:
        """A step ends. Costs 0.1 µs, and sometimes a reading."""
        self._sample(0)

    def at_backward(self) -> None:
        """A backward pass begins, when all activations of the forward pass are in memory."""
        self._sample(1)

    def busiest(self) -> int | None:
        """The GPU on which memory grew most during the run; None if it grew on none."""
        grown = [(self._on_gpu(i)[0] or 0) - self._start(i).allocated for i in range(len(_readings() or ()))]
        most = max(grown, default=0)
        return grown.index(most) if most > 0 else None

    def peaks(self, device: Device, extremes: dict[str, float]) -> tuple[Memory, tuple[Missing, ...]]:
        """The peaks on that device, and which of them are unknown. `extremes` come from the sampling process."""
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
        """The peaks of allocated and of reserved memory on that GPU.

        If an earlier run of this process hides a peak, the highest reading replaces it, which is a lower bound.
        """
        now = _readings()
        has_reading = now is not None and index < len(now)
        after, before = now[index] if now and has_reading else _Reading(), self._start(index)
        if not after.allocated_peak:
            why = "no tensor was on this GPU" if has_reading else "this GPU memory allocator has no statistics"
            why = "CUDA was never used in this process" if now == [] else why
            return None, None, (Missing(f"peak of the {_ALLOCATED}", why, key="memory"),)
        allocated, reserved = self._most.get(index, (0, 0))
        allocated, reserved = max(allocated, after.allocated), max(reserved, after.reserved)
        # if memory was at its peak when the run began, any higher peak belongs to the run
        if after.allocated_peak > before.allocated_peak or before.allocated_peak == before.allocated:
            exact = after.reserved_peak > before.reserved_peak or before.reserved_peak == before.reserved
            return after.allocated_peak, after.reserved_peak if exact else reserved, ()
        why = (
            f"an earlier peak of this process ({size(after.allocated_peak)}) hides it: shown is the most that was read "
            "before backward passes and at step ends"
        )
        return allocated, reserved, (Missing(f"exact peak of the {_ALLOCATED}", why, key="memory"),)

    def _start(self, index: int) -> _Reading:
        return self._before.get(index, _Reading())

    def _sample(self, place: int) -> None:
        began_ns = perf_counter_ns()
        if began_ns < self._due_ns[place]:
            return
        for i, reading in enumerate(_readings() or ()):
            allocated, reserved = self._most.get(i, (0, 0))
            self._most[i] = max(allocated, reading.allocated), max(reserved, reading.reserved)
        took_ns = perf_counter_ns() - began_ns
        self._due_ns[place] = began_ns + max(APART_NS, int(2 * took_ns / READING_SHARE))


def count_anew() -> Choice | None:
    """Reset torch's peaks, for a run that is one of several; returns a note for the user, if it did."""
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
    """The peak of memory allocated on the GPU in this process so far, without initialising CUDA."""
    now = _readings() if device.kind == "cuda" else None
    index = device.index or 0
    return now[index].allocated_peak if now and index < len(now) else 0


def _readings() -> list[_Reading] | None:
    """One reading for each GPU that torch sees; empty before CUDA is used, None for an allocator without statistics."""
    torch = torch_with_cuda()
    if torch is None:
        return []
    with contextlib.suppress(RuntimeError, KeyError):  # an allocator of the user's own
        return [_reading(torch.cuda.memory_stats_as_nested_dict(index)) for index in range(torch.cuda.device_count())]
    return None


def _reading(stats: dict[str, Any]) -> _Reading:
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    return _Reading(allocated["current"], allocated["peak"], reserved["current"], reserved["peak"])


def working_gpus(timeline: Timeline | None) -> list[int]:
    """The numbers of the GPUs that worked in a trace, the busiest first."""
    if timeline is None:
        return []
    spans = labels(timeline)
    busy = {i: measure(spans.times(spans.on_device(i))) for i in spans.devices}
    return sorted(busy, key=lambda i: -busy[i])


def other_device(
    device: Device, worked: Sequence[int], samples: Samples
) -> tuple[Device, Samples, Choice, tuple[Missing, ...]] | None:
    """The busiest GPU, the curves without those of the assumed GPU, and notes; None if the assumed GPU worked.

    `worked` are numbers of GPUs, the busiest first.
    """
    if device.kind != "cuda" or not worked or device.index in worked:
        return None
    try:
        other = detect_device(f"cuda:{worked[0]}")
    except UsageError:
        return None
    reason = f"the code ran on GPU {worked[0]}, and not on GPU {device.index}, which was assumed when the run began"
    curves = Samples(tuple(s for s in samples.series if not s.source.startswith("NVML")))
    missing = (Missing("GPU curves", f"they were of GPU {device.index}: {reason}", key="curves"),)
    choice = Choice("device", f"GPU {worked[0]}: {other.name}", reason)
    return other, curves, choice, missing if len(curves.series) < len(samples.series) else ()
