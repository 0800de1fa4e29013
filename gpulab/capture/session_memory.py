"""How much memory a session of torch's profiler takes: torch tells no number of events while it records."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from time import perf_counter_ns

MIB = 1 << 20
# An event of torch 2.13 takes 228 bytes while it is recorded, and 1.5 KiB more when the session ends. A core made
# 400,000 of them a second, 90 MiB (small CPU operators, no gradients): what grows faster than this is the user's.
EVENTS_BYTES_PER_S = 128 * MIB


def resident_bytes() -> int:
    """Memory of this process that is in RAM; 0 where the system does not tell."""
    import psutil

    with suppress(psutil.Error):
        return int(psutil.Process().memory_info().rss)
    return 0


def give_back() -> None:
    """Let the system have what was freed: the C library keeps it otherwise, as it lies between small objects."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # only the GNU library has it
            ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


class SessionMemory:
    """Of a session that begins now. `event_bytes`: about what its events take, by the last look."""

    def __init__(self) -> None:
        self.event_bytes = 0
        self._resident_bytes = resident_bytes()
        self._at_ns = perf_counter_ns()

    def exceeds(self, limit_bytes: int) -> bool:
        """Look again, from one thread. Memory that comes or goes by leaps and bounds is that of tensors."""
        before, since_ns = self._resident_bytes, self._at_ns
        self._resident_bytes, self._at_ns = resident_bytes(), perf_counter_ns()
        growth = self._resident_bytes - before
        if abs(growth) <= EVENTS_BYTES_PER_S * (self._at_ns - since_ns) / 1e9:
            self.event_bytes = max(0, self.event_bytes + growth)
        return self.event_bytes > limit_bytes
