"""Where a part is played: an NVIDIA GPU or, simulated, the CPU in its place.

Every call that exists only with CUDA is in this file, beside what stands for it on the CPU, so that a part reads the
same on both.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor
from torch.profiler import ProfilerActivity

Work = Callable[[], None]
Mark = Any  # torch.cuda.Event, or seconds of time.perf_counter

CALIBRATION_CYCLES = 50_000_000
CAPTURE_WARMUPS = 2


class Stage(Struct, frozen=True):
    """A GPU, or the CPU in its place. A simulated part is also a small one."""

    simulated: bool

    @classmethod
    def here(cls, *, simulate: bool) -> Stage:
        """The GPU where there is one and nobody asked for less."""
        return cls(simulate or not torch.cuda.is_available())

    @property
    def device(self) -> str:
        """For tensors, and for gpulab's own setting."""
        return "cpu" if self.simulated else "cuda"

    @property
    def name(self) -> str:
        """The GPU's name."""
        return "CPU in place of a GPU" if self.simulated else torch.cuda.get_device_name()

    @property
    def activities(self) -> list[ProfilerActivity]:
        """For torch's profiler."""
        cpu = [ProfilerActivity.CPU]
        return cpu if self.simulated else [*cpu, ProfilerActivity.CUDA]

    def size(self, on_a_gpu: int, simulated: int) -> int:
        """A length or count that a CPU manages in no time."""
        return simulated if self.simulated else on_a_gpu

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.simulated:
            torch.cuda.synchronize()

    def mark(self) -> Mark:
        """A point in the device's time; it lies behind all work launched so far on the current stream."""
        if self.simulated:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def apart_ms(self, earlier: Mark, later: Mark) -> float:
        """Milliseconds of the device's time between two marks. Call `synchronize` before it."""
        if self.simulated:
            return float(1e3 * (later - earlier))
        return float(earlier.elapsed_time(later))

    def graph_of(self, work: Work) -> Work:
        """The work as a CUDA graph: what is given back replays it."""
        if self.simulated:
            return work
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(CAPTURE_WARMUPS):
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def spinner(self) -> Callable[[float], None]:
        """A function that launches one kernel which keeps the device busy for so many milliseconds."""
        if self.simulated:
            square = torch.ones(32, 32)
            return lambda ms: _multiply(square)
        cycles_per_ms = self._cycles_per_ms()
        return lambda ms: torch.cuda._sleep(max(1, round(ms * cycles_per_ms)))

    def _cycles_per_ms(self) -> float:
        torch.cuda._sleep(CALIBRATION_CYCLES)  # the clock rises
        before = self.mark()
        torch.cuda._sleep(CALIBRATION_CYCLES)
        after = self.mark()
        self.synchronize()
        return CALIBRATION_CYCLES / self.apart_ms(before, after)

    def release(self) -> None:
        """Give cached memory back."""
        gc.collect()
        if not self.simulated:
            torch.cuda.empty_cache()


def _multiply(square: Tensor) -> None:
    torch.mm(square, square)
