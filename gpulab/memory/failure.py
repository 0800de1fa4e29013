"""What a run that ran out of memory asked for, and who held the memory then."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from contextlib import suppress

from gpulab.memory.owners import Root
from gpulab.memory.room import pool_of, room_of
from gpulab.memory.storages import live
from gpulab.memory.survey import named
from gpulab.memory_record import Holding, OutOfMemory

# The messages of torch, CUDA's libraries, the C library, NumPy and the kernel's killer.
_WORDS = re.compile(
    r"out of memory|can.?t allocate memory|cannot allocate memory|not enough memory"
    r"|unable to allocate (?!shared memory)|CUBLAS_STATUS_ALLOC_FAILED|killed by signal: Killed",
    re.I,
)
_MAYBE = re.compile(r"could not (?:create|execute) a (?:primitive|memory)", re.I)  # oneDNN
SHORT_BYTES = 64 << 20  # ours
_REQUEST = re.compile(r"(?:tried to allocate|Unable to allocate) ([\d.]+) ?(bytes|[KMGT]i?B|B)\b", re.I)
_UNITS = {"b": 1, "bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_ON_GPU, _GPU = re.compile(r"CUDA|CUBLAS|HIP|GPU \d"), re.compile(r"GPU (\d+)")
NAMING_NS = 2_000_000_000


def out_of_memory(error: BaseException | None) -> bool:
    """Whether the device or the host ran out of memory."""
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    if not isinstance(error, RuntimeError | OSError):
        return False
    return _WORDS.search(str(error)) is not None or (_MAYBE.search(str(error)) is not None and _is_short())


def _is_short() -> bool:
    """Whether the host has hardly any memory left, so that an unclear error of a library means just that."""
    room = room_of(None)
    return room is not None and room.free_bytes < SHORT_BYTES


def memory_error(error: BaseException | None) -> BaseException | None:
    """The error itself, its cause or its context that says that memory ran out; None if none does."""
    visited = set[int]()
    while error is not None and id(error) not in visited:
        if out_of_memory(error):
            return error
        visited.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def request_bytes(text: str) -> int | None:
    """The bytes that the failing call asked for, from its message; None if that does not say."""
    match = _REQUEST.search(text)
    if match is None:
        return None
    unit = match[2].lower()
    return round(float(match[1]) * _UNITS.get(unit, _UNITS.get(unit.replace("b", "ib"), 1)))


def explain(
    error: BaseException, steps: int, line: str, stages: Iterable[list[Root]], barriers: Iterable[object]
) -> OutOfMemory:
    """The account of a failure, while its traceback, one of the `stages`, still holds what the code held."""
    text = str(error)
    number = _GPU.search(text)
    index = int(number[1]) if number else 0 if _ON_GPU.search(text) else None
    device = "cpu" if index is None else f"cuda:{index}"
    room, pool = room_of(index), None if index is None else pool_of(index)
    rows: dict[str, tuple[Holding, ...]] = {}
    with suppress(Exception):  # even the search may find no memory
        rows, _ = named(live(), stages, NAMING_NS, barriers)
    return OutOfMemory(device, request_bytes(text), line, steps, rows.get(device, ()), room, pool)
