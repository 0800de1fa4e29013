"""How long a thread has waited for a processor core. By itself, as workers of a DataLoader import it."""

from __future__ import annotations

import os
from contextlib import suppress

with suppress(ImportError):  # Windows
    import resource


class CoreWait:
    """How long the kernel has kept the calling thread from a core while it was ready to run; Linux tells."""

    def __init__(self) -> None:
        self._file = -1
        with suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> int:
        """In ns since the thread began; -1: not known."""
        if self._file < 0:
            return -1
        try:
            return int(os.pread(self._file, 64, 0).split()[1])
        except (OSError, ValueError, IndexError):
            return -1

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
