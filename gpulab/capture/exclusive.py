"""One thread measures at a time: torch has one profiler per process, and two trainings at once slow each other down."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from gpulab.errors import UsageError

BUSY = (
    "Another run is being measured in this process, on the thread {name!r}: wait for its end, or stop it. "
    "Two at once would slow each other down."
)

_owners: list[threading.Thread] = []  # for each run under way one entry; those alive are of one thread
_lock = threading.Lock()


def take() -> None:
    """Begin to measure on this thread, also inside another run of it. Raises UsageError where another thread does."""
    me = threading.current_thread()
    with _lock:
        _owners[:] = [owner for owner in _owners if owner.is_alive()]
        other = next((owner for owner in _owners if owner is not me), None)
        if other is not None:
            raise UsageError(BUSY.format(name=other.name))
        _owners.append(me)


def is_mine() -> bool:
    """Whether a run is under way on this thread."""
    return threading.current_thread() in _owners


def give_back() -> None:
    """The innermost run of this thread has ended; nothing where there is none."""
    with _lock:
        if is_mine():
            _owners.remove(threading.current_thread())


@contextmanager
def taken() -> Iterator[None]:
    """For all that runs inside. Raises UsageError."""
    take()
    try:
        yield
    finally:
        give_back()
