"""Threads that compute for the training and go on while the training process makes a batch.

PyTorch's pool spins for some milliseconds after its last operator, ready for the next: CPU time of the process that no
dataset has used. A thread without Python belongs to it where it uses a core beside the batches, too; a pool that only
works for the dataset (a tokenizer's, a decoder's) rests then.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

BESIDE = 0.01  # ours: of a thread's CPU time, beside the batches; what rests there uses none
EVERY = 32  # batches: whether there are new threads
_THREAD_CLOCK = 6  # low bits of Linux's clock of a thread's CPU time; the others hold the thread's number, inverted

Clock = Callable[[int], int]  # a thread's CPU time in ns; -1 where it has ended


def thread_cpu_ns(thread: int) -> int:
    """By the number that the system gives it."""
    try:
        return time.clock_gettime_ns(~thread << 3 | _THREAD_CLOCK)
    except OSError:
        return -1


def native_threads() -> list[int]:
    """Of this process, those that run no Python; empty where the system does not list them."""
    if sys.platform != "linux":
        return []
    try:
        every = map(int, os.listdir("/proc/self/task"))
    except OSError:
        return []
    in_python = {thread.native_id for thread in threading.enumerate()}
    main = os.getpid()  # Python 3.11 has its number of before a fork
    return sorted(set(every) - in_python - {main})


class ComputeThreads:
    """Of the training process; `begin` and `end` enclose each batch."""

    def __init__(self, threads: Callable[[], list[int]] = native_threads, clock: Clock = thread_cpu_ns) -> None:
        self._threads, self._clock = threads, clock
        self._last: dict[int, int] = {}
        self._within: dict[int, int] = {}
        self._beside: dict[int, int] = {}
        self._batches = 0

    def begin(self) -> None:
        """A batch is about to be made."""
        if self._last:
            self._pass_on(self._beside)
        if self._batches % EVERY == 0 or self._batches & (self._batches - 1) == 0:  # the first step starts the pool
            for thread in self._threads():
                self._last.setdefault(thread, self._clock(thread))
        self._batches += 1

    def end(self) -> int:
        """It is made: CPU time in ns that threads of the training have used meanwhile."""
        if not self._last:
            return 0
        used = self._pass_on(self._within)
        return sum(ns for thread, ns in used.items() if self._trains(thread))

    def _trains(self, thread: int) -> bool:
        beside = self._beside.get(thread, 0)
        return beside > BESIDE * (beside + self._within.get(thread, 0))

    def _pass_on(self, sums: dict[int, int]) -> dict[int, int]:
        used = {}
        for thread, before in list(self._last.items()):
            now = self._clock(thread)
            if now < before:  # it has ended; its number may be another's now
                del self._last[thread]
                continue
            used[thread], self._last[thread] = now - before, now
            sums[thread] = sums.get(thread, 0) + now - before
        return used
