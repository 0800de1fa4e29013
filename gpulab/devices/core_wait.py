"""How long a thread has waited for a processor core. By itself, as workers of a DataLoader import it."""

from __future__ import annotations

import os
from contextlib import suppress

with suppress(ImportError):  # Windows
    import resource


OWN = "/proc/thread-self/schedstat"


class CoreWait:
    """How long the kernel has kept a thread from a core while it was ready to run; Linux tells."""

    def __init__(self, file: str = OWN) -> None:
        self._file = -1
        with suppress(OSError):
            self._file = os.open(file, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> int:
        """In ns since the thread began; -1: not known."""
        return self.times()[1]

    def times(self) -> tuple[int, int]:
        """CPU time up to the system's last tick, and that; -1: not known."""
        if self._file < 0:
            return -1, -1
        try:
            cpu, wait, *_ = os.pread(self._file, 64, 0).split()
            return int(cpu), int(wait)
        except (OSError, ValueError):
            return -1, -1

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    __del__ = close


def voluntary_switches() -> int:
    """How often the calling thread has gone to sleep: for a disk, a lock, a network, a while. -1: not known."""
    try:
        return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    except (NameError, AttributeError):  # not Linux
        return -1
