"""Measures the peak of what a memory limit counts: a GPU's allocator, the process's memory, or its address space."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any, Protocol

from gpulab.devices.gpus import torch_with_cuda
from gpulab.memory.room import address_space_bytes, room_of, status_bytes
from gpulab.memory_record import ADDRESS_SPACE

CLEAR = Path("/proc/self/clear_refs")
INTERVAL_S = 0.0005  # between two looks at the address space, whose peak the kernel does not reset


class Peak(Protocol):
    """A meter of memory in bytes: what counts now, and the most since the last `reset`; None if unknown."""

    @property
    def used_bytes(self) -> int: ...
    @property
    def bytes(self) -> int | None: ...
    def reset(self) -> None: ...


@contextmanager
def peak_of(gpu: int | None) -> Iterator[Peak]:
    """The peak on that GPU; if None in the memory of the host, or in the address space where that is the limit."""
    torch, room = torch_with_cuda(), room_of(gpu)
    if gpu is not None and torch is not None:
        yield _AllocatorPeak(torch, gpu)
    elif room is None or room.limit != ADDRESS_SPACE:
        yield _ResidentPeak()
    else:
        peak = _AddressSpacePeak()
        thread = Thread(target=peak.look, name="gpulab-memory", daemon=True)
        thread.start()
        try:
            yield peak
        finally:
            peak.end.set()
            thread.join()


class _AllocatorPeak:
    def __init__(self, torch: Any, gpu: int) -> None:
        self._cuda, self._gpu = torch.cuda, gpu

    @property
    def used_bytes(self) -> int:
        return int(self._cuda.memory_allocated(self._gpu))

    @property
    def bytes(self) -> int | None:
        with suppress(Exception):
            return int(self._cuda.max_memory_reserved(self._gpu))
        return None

    def reset(self) -> None:
        with suppress(Exception):
            self._cuda.synchronize(self._gpu)
            self._cuda.reset_peak_memory_stats(self._gpu)


class _ResidentPeak:
    """The kernel's own, of the memory that the process has touched; None elsewhere than on Linux."""

    @property
    def used_bytes(self) -> int:
        return status_bytes("VmRSS") or 0

    @property
    def bytes(self) -> int | None:
        return status_bytes("VmHWM")

    def reset(self) -> None:
        with suppress(OSError):
            CLEAR.write_text("5")


class _AddressSpacePeak:
    """What was asked for, touched or not, as a thread sees it."""

    def __init__(self) -> None:
        self.end = Event()
        self._largest = [0]  # a new list for each reset, so that no look before it counts after it

    def look(self) -> None:
        while not self.end.wait(INTERVAL_S):
            with suppress(MemoryError):
                largest = self._largest
                largest[0] = max(largest[0], self.used_bytes)

    @property
    def used_bytes(self) -> int:
        return address_space_bytes() or 0

    @property
    def bytes(self) -> int | None:
        return self._largest[0] or None

    def reset(self) -> None:
        self._largest = [self.used_bytes]
