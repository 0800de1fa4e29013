"""Keeps what the training thread had of the processor, and who else used it.

The sampling process reads both while the steps run (`sampler_process`), the training thread itself only at both ends
of the run and of the profiler's window. All count from the same fixed times.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter_ns
from typing import Any, Literal

import numpy as np
from msgspec.structs import astuple

from gpulab.devices.core_clock import MachineClock, MachineReading, ThreadClock
from gpulab.run import CoreTimes, CoreUse, Int64

MOST_READINGS = 100_000  # of the thread: the first quarter of an hour; then every other one goes, again and again
MOST_OF_MACHINE = 20_000  # of the machine: the first hour and a half; then likewise
_COUNTS = MachineReading.__struct_fields__


class CoreWatch:
    """Of one run, on the training thread, which makes it; the run began at `origin_ns` (`time.perf_counter_ns`)."""

    def __init__(self, origin_ns: int, thread: ThreadClock | None = None, machine: MachineClock | None = None) -> None:
        self._origin_ns = origin_ns
        self._thread = thread or ThreadClock()
        self._machine = machine or MachineClock()
        self._lock = threading.Lock()
        # time, three counts, 1: since the reading before the profiler was touched
        self._times = ThinnedRows(5, MOST_READINGS)
        self._uses = ThinnedRows(1 + len(_COUNTS), MOST_OF_MACHINE)

    def begin(self) -> None:
        """The user's code is about to run."""
        self._read_machine()
        self._read_thread(0)

    def after_profiler(self) -> None:
        """Since the last reading the profiler was started or stopped."""
        self._read_thread(1)

    def end(self) -> None:
        """The user's code has ended."""
        self._read_thread(0)
        self._read_machine()
        self._thread.close()

    def add(self, times: Sequence[Sequence[int]], uses: Sequence[Sequence[int]]) -> None:
        """Readings of the sampling process: times since the run began, and counts. From any thread."""
        with self._lock:
            for row in times:
                self._times.append((*row, 0))
            for row in uses:
                self._uses.append(row)

    def times(self) -> CoreTimes | None:
        """None where nothing was read twice."""
        with self._lock:
            columns = _in_order(self._times, slice(1, 4))
        if columns is None:
            return None
        t_ns, cpu, wait, process, profiler = columns
        return CoreTimes(t_ns, cpu, wait, process, profiler.astype(np.uint8))

    def use(self) -> CoreUse | None:
        """None where nothing was read twice."""
        with self._lock:
            columns = _in_order(self._uses, slice(1, None))
        return CoreUse(columns[0], **dict(zip(_COUNTS, columns[1:], strict=True))) if columns is not None else None

    def _read_thread(self, profiler: int) -> None:
        now_ns = perf_counter_ns() - self._origin_ns
        reading = self._thread.read()
        with self._lock:
            self._times.append((now_ns, *reading, profiler))

    def _read_machine(self) -> None:
        now_ns = perf_counter_ns() - self._origin_ns
        with suppress(OSError):
            reading = astuple(self._machine.read())
            with self._lock:
                self._uses.append((now_ns, *reading))


class ThinnedRows:
    """Rows of numbers, the first of which is a time. Where there are more than `most`, every other one goes.

    What counts on or is a reading loses nothing by that.
    """

    def __init__(self, width: int, most: int, type_code: Literal["q", "d"] = "q") -> None:
        self._width, self._most = width, most
        self._numbers: array[Any] = array(type_code)
        self._every, self.count = 1, 0  # the count is of all that came

    def append(self, row: Sequence[float]) -> None:
        if self.count % self._every == 0:
            self._numbers.extend(row)
        self.count += 1
        if len(self._numbers) > self._width * self._most:
            self._numbers = array(self._numbers.typecode, self.rows()[::2].tobytes())
            self._every *= 2

    def rows(self) -> np.ndarray[tuple[int, int], np.dtype[Any]]:
        return np.array(self._numbers).reshape(-1, self._width)


def _in_order(table: ThinnedRows, counts: slice) -> list[Int64] | None:
    """Its columns, by time. Two processes have read the `counts`, one of them a tick late: none goes back.

    None where nothing was read twice.
    """
    rows = table.rows()
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    rows[:, counts] = np.maximum.accumulate(rows[:, counts], axis=0)
    return [np.ascontiguousarray(column) for column in rows.T] if len(rows) >= 2 else None
