"""How much more memory this process may take: of a GPU, or of the host within the limits set for the process."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from gpulab.devices.cgroups import free_host_bytes, memory_limit_bytes
from gpulab.devices.gpus import torch_with_cuda
from gpulab.memory_record import ADDRESS_SPACE, Pool, Room

STATUS, STATM = Path("/proc/self/status"), Path("/proc/self/statm")


def room_of(gpu: int | None) -> Room | None:
    """The room on that GPU, or on the host if it is None. None if it cannot be read."""
    with suppress(Exception):
        return _host_room() if gpu is None else _gpu_room(gpu)
    return None


def _gpu_room(index: int) -> Room | None:
    """What the driver still has, and what the allocator holds without using it."""
    torch = torch_with_cuda()
    if torch is None:
        return None
    free, total = torch.cuda.mem_get_info(index)
    cached = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    return Room(free + cached, total, "GPU")


def _address_space_limit() -> int | None:
    try:
        import resource
    except ImportError:  # on Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def _host_room() -> Room | None:
    rooms = []
    soft, used = _address_space_limit(), address_space_bytes()
    if soft is not None and used is not None:
        rooms.append(Room(max(0, soft - used), soft, ADDRESS_SPACE))
    free, group = free_host_bytes(), memory_limit_bytes()
    if free is not None:
        import psutil

        machine = psutil.virtual_memory()
        limited = group is not None and group < machine.total and free < machine.available
        rooms.append(
            Room(free, group if limited and group else machine.total, "control group" if limited else "machine")
        )
    return min(rooms, key=lambda room: room.free_bytes, default=None)


class _Mallinfo2(ctypes.Structure):
    """The result of glibc's `mallinfo2`; `fordblks` is free memory that malloc keeps for later."""

    _fields_ = [(f"field{i}", ctypes.c_size_t) for i in range(8)] + [
        (n, ctypes.c_size_t) for n in ("fordblks", "keepcost")
    ]


def address_space_bytes() -> int | None:
    """Address space in use, without what the C library has and does not use; None if it cannot be read.

    Takes about 3 µs.
    """
    with suppress(OSError, ValueError, IndexError):
        pages = int(STATM.read_bytes().split()[0])
        return pages * mmap.PAGESIZE - _malloc_free_bytes()
    return None


@cache
def _mallinfo2() -> Any:
    with suppress(OSError, AttributeError, TypeError):  # only glibc has it
        mallinfo2 = ctypes.CDLL(None).mallinfo2
        mallinfo2.restype = _Mallinfo2
        return mallinfo2
    return None


def _malloc_free_bytes() -> int:
    mallinfo2 = _mallinfo2()
    return int(mallinfo2().fordblks) if mallinfo2 is not None else 0


def status_bytes(field: str) -> int | None:
    """A figure of /proc/self/status in bytes: VmSize, VmRSS, VmHWM; None on other systems."""
    with suppress(OSError, ValueError, IndexError):
        for line in STATUS.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None


def pool_of(index: int) -> Pool | None:
    """The caching allocator of that GPU; None for another allocator."""
    torch = torch_with_cuda()
    if torch is None:
        return None
    with suppress(Exception):
        return pool_from(torch.cuda.memory_stats(index), torch.cuda.memory_snapshot(), index)
    return None


def pool_from(stats: dict[str, Any], segments: list[dict[str, Any]], index: int) -> Pool:
    """The figures of torch's allocator: `memory_stats()` and `memory_snapshot()`, plain lists and dictionaries."""
    free = [
        block["size"]
        for segment in segments
        if segment.get("device") == index
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    return Pool(
        stats["allocated_bytes.all.current"],
        stats["reserved_bytes.all.current"],
        max(free, default=0),
        stats.get("num_alloc_retries", 0),
    )
