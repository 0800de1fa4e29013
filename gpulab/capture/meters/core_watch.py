"""Reads, at the ends of steps, what the training thread had of the processor, and now and then who else used it.

Both have a bound: the thread's clocks (3 µs) are read once in a millisecond at most, the machine's counts only so often
that they take `READING_SHARE` of the time.
"""

from __future__ import annotations

from array import array
from time import perf_counter_ns
from typing import Protocol

import numpy as np

from gpulab.devices.core_clock import MachineClock, MachineReading, ThreadClock
from gpulab.run import CoreTimes, CoreUse, Int64

READING_SHARE = 0.003  # of the time at most goes to readings of the machine
MACHINE_APART_NS = 250_000_000
THREAD_APART_NS = 1_000_000
MOST_READINGS = 100_000  # of the thread; then every other one goes, again and again
MOST_OF_MACHINE = 20_000  # readings of the machine: the first hour and a half; then likewise
_COUNTS = (
    "tree_cpu_ns",
    "others_cpu_ns",
    "stolen_ns",
    "pool_wait_ns",
    "workers_wait_ns",
    "pressure_ns",
    "quota_periods",
    "throttled_periods",
)


class OfThread(Protocol):
    """`ThreadClock`, or a script of one."""

    def read(self) -> tuple[int, int, int]:
        """CPU time of the thread, its wait for a core, and the process's CPU time."""

    def close(self) -> None:
        """Nothing is read any more."""


class OfMachine(Protocol):
    """`MachineClock`, or a script of one."""

    def read(self) -> MachineReading:
        """The counts of now."""


class CoreWatch:
    """Of one run, on the training thread, which makes it; the run began at `origin_ns` (`time.perf_counter_ns`)."""

    def __init__(self, origin_ns: int, thread: OfThread | None = None, machine: OfMachine | None = None) -> None:
        self._origin_ns = origin_ns
        self._thread = thread or ThreadClock()
        self._machine = machine or MachineClock()
        self._times = array("q")
        self._uses = array("q")
        self._due_ns = self._machine_due_ns = 0
        self._apart_ns = THREAD_APART_NS
        self._machine_apart_ns = MACHINE_APART_NS

    def begin(self) -> None:
        """The user's code is about to run."""
        self._read_machine()
        self._read_thread(0)

    def at_step(self, now_ns: int) -> None:
        """A step has ended at `now_ns`. Costs 0.1 µs, and seldom a reading."""
        if now_ns >= self._due_ns:
            self._read_thread(0)
            if now_ns >= self._machine_due_ns:
                self._read_machine()

    def after_profiler(self) -> None:
        """Since the last reading the profiler was started or stopped."""
        self._read_thread(1)

    def end(self) -> None:
        """The user's code has ended."""
        self._read_thread(0)
        self._read_machine()
        self._thread.close()

    def times(self) -> CoreTimes | None:
        """None where nothing was read twice."""
        rows = np.array(self._times, np.int64).reshape(-1, 5)
        if len(rows) < 2:
            return None
        t_ns, cpu, wait, process, profiler = (np.ascontiguousarray(c) for c in rows.T)
        return CoreTimes(t_ns, cpu, wait, process, profiler.astype(np.uint8))

    def use(self) -> CoreUse | None:
        """None where nothing was read twice."""
        rows = np.array(self._uses, np.int64).reshape(-1, 1 + len(_COUNTS))
        if len(rows) < 2:
            return None
        counts: dict[str, Int64] = {name: np.ascontiguousarray(rows[:, 1 + i]) for i, name in enumerate(_COUNTS)}
        return CoreUse(np.ascontiguousarray(rows[:, 0]), **counts)

    def _read_thread(self, profiler: int) -> None:
        now_ns = perf_counter_ns()
        self._times.extend((now_ns - self._origin_ns, *self._thread.read(), profiler))
        if len(self._times) > 5 * MOST_READINGS:
            # every other reading goes; one that tells of the profiler stays
            rows = np.array(self._times, np.int64).reshape(-1, 5)
            near = (rows[:, 4] == 1) | (np.append(rows[1:, 4], 1) == 1)
            kept = rows[near | (np.arange(len(rows)) % 2 == 0)]
            self._times = array("q", kept.tobytes())
            self._apart_ns *= 2
        self._due_ns = now_ns + self._apart_ns

    def _read_machine(self) -> None:
        began_ns = perf_counter_ns()
        reading = self._machine.read()
        self._uses.append(began_ns - self._origin_ns)
        self._uses.extend(getattr(reading, name) for name in _COUNTS)
        if len(self._uses) > (1 + len(_COUNTS)) * MOST_OF_MACHINE:
            # counts grow, so the readings that stay lose nothing; the first one does
            width = 1 + len(_COUNTS)
            rows = np.array(self._uses, np.int64).reshape(-1, width)
            self._uses = array("q", rows[::2].tobytes())
            self._machine_apart_ns *= 2
        took_ns = perf_counter_ns() - began_ns
        self._machine_due_ns = began_ns + max(self._machine_apart_ns, int(took_ns / READING_SHARE))
