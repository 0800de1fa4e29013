"""On which GPU a run really was, and the peaks of memory, as far as the device and the sampling process tell them.

Before the user's code starts CUDA nobody knows the GPU, and the first one is assumed.
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

READING_SHARE = 0.005  # of the time at most goes to readings
APART_NS = 20_000_000  # readings at the same place of a step are no closer
_ALLOCATED = "GPU memory allocated by tensors"


class _Reading(Struct, frozen=True):
    """What torch's allocator says of one GPU: now, and the most since the last reset of its statistics."""

    allocated: int = 0
    allocated_peak: int = 0
    reserved: int = 0
    reserved_peak: int = 0


class PeakMemory:
    """The peaks of one run, which begins when this is made. Makes no CUDA context and resets nothing.

    torch keeps one peak for the life of the process, which may be the user's. A run that stays below an earlier one
    has no exact peak: there the most that was read before backward passes and at step boundaries stands for it.
    """

    def __init__(self) -> None:
        self._before = dict(enumerate(_readings() or ()))
        self._most: dict[int, tuple[int, int]] = {}  # allocated and reserved, as read
        self._due_ns = [0, 0]

    def at_step(self) -> None:
        """A step ends. Costs 0.1 µs, and rarely a reading."""
        self._sample(0)

    def at_backward(self) -> None:
        """A backward pass begins: the activations of the whole forward pass are there."""
        self._sample(1)

    def busiest(self) -> int | None:
        """The GPU on which tensors grew most during the run; None where none did."""
        grown = [(self._on_gpu(i)[0] or 0) - self._start(i).allocated for i in range(len(_readings() or ()))]
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
        """The peaks of what tensors and of what the allocator holds there.

        Where an earlier run of this process hides one: the most that was read, which the true one is not below.
        """
        now = _readings()
        is_known = now is not None and index < len(now)
        after, before = now[index] if now and is_known else _Reading(), self._start(index)
        if not after.allocated_peak:
            why = "no tensor was on this GPU" if is_known else "this GPU memory allocator has no statistics"
            why = "CUDA was never used in this process" if now == [] else why
            return None, None, (Missing(f"peak of the {_ALLOCATED}", why, key="memory"),)
        allocated, reserved = self._most.get(index, (0, 0))
        allocated, reserved = max(allocated, after.allocated), max(reserved, after.reserved)
        # a peak that was now when the run began: any later one belongs to the run
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


class Moved(Struct, frozen=True):
    """The device of a run that was on another GPU than assumed, its curves without the wrong GPU's, and what to say."""

    device: Device
    samples: Samples
    choices: tuple[Choice, ...] = ()
    missing: tuple[Missing, ...] = ()


def working_gpus(timeline: Timeline | None) -> list[int]:
    """The numbers of the GPUs that worked in a trace, the one that worked longest first."""
    if timeline is None:
        return []
    spans = labels(timeline)
    busy = {i: measure(spans.times(spans.on_device(i))) for i in spans.devices}
    return sorted(busy, key=lambda i: -busy[i])


def moved(device: Device, worked: Sequence[int], samples: Samples) -> Moved:
    """The same device and curves where it worked, too, or nobody knows; else those of the GPU that worked most.

    `worked` are numbers of GPUs, the busiest first.
    """
    if device.kind != "cuda" or not worked or device.index in worked:
        return Moved(device, samples)
    used = worked[0]
    try:
        device_used = detect_device(f"cuda:{used}")
    except UsageError:
        return Moved(device, samples)
    reason = f"the code ran on GPU {used}, and not on GPU {device.index}, which was assumed when the run began"
    others = tuple(s for s in samples.series if not s.source.startswith("NVML"))
    lost = (Missing("GPU curves", f"they were of GPU {device.index}: {reason}", key="curves"),)
    return Moved(
        device_used,
        Samples(others),
        (Choice("device", f"GPU {used}: {device_used.name}", reason),),
        lost if len(others) < len(samples.series) else (),
    )
