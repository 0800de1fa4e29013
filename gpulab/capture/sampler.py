"""Starts the process that reads the meters, collects its readings and ends it.

Nothing here raises into a run: a child that cannot start, dies or hangs becomes a `Missing`, and the run goes on. The
child also reads how long the training thread had a core and what else used the cores. The training thread takes such
readings itself only at both ends of the run and of the profiler's window; all counts are from the same fixed times.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import threading
import time
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import perf_counter_ns
from typing import Any, Literal

import numpy as np
from msgspec.structs import asdict, astuple

from gpulab.capture.sampler_process import Order
from gpulab.devices.core_clock import MachineClock, MachineReading, ThreadClock
from gpulab.devices.machine import usable_cores
from gpulab.devices.own_processes import ending, start_child
from gpulab.live_feed import SeriesInfo
from gpulab.run import CoreTimes, CoreUse, Device, Float32, Int64, Missing, Samples, Series
from gpulab.store.run_format import READING, READINGS
from gpulab.store.table_file import Writer

MOST_READINGS = 100_000  # of the thread: a quarter of an hour; beyond it every other one is dropped, repeatedly
MOST_OF_MACHINE = 20_000  # of the machine: an hour and a half; likewise
_COUNTS = MachineReading.__struct_fields__


class CoreReadings:
    """The core times of one run, which began at `origin_ns` (`time.perf_counter_ns`). Made on the training thread."""

    def __init__(self, origin_ns: int, thread: ThreadClock | None = None, machine: MachineClock | None = None) -> None:
        self._origin_ns = origin_ns
        self._thread = thread or ThreadClock()
        self._machine = machine or MachineClock()
        self._lock = threading.Lock()
        # time, three counts, and 1 if the profiler was started or stopped since the previous reading
        self._times = ThinnedRows(5, MOST_READINGS)
        self._uses = ThinnedRows(1 + len(_COUNTS), MOST_OF_MACHINE)

    def begin(self) -> None:
        """The user's code begins."""
        self._read_machine()
        self._read_thread(0)

    def after_profiler(self) -> None:
        """The profiler was just started or stopped."""
        self._read_thread(1)

    def end(self) -> None:
        """The user's code has ended."""
        self._read_thread(0)
        self._read_machine()
        self._thread.close()

    def add(self, times: Sequence[Sequence[int]], uses: Sequence[Sequence[int]]) -> None:
        """Add readings of the sampling process: times since the run began, and counts. From any thread."""
        with self._lock:
            for row in times:
                self._times.append((*row, 0))
            for row in uses:
                self._uses.append(row)

    def times(self) -> CoreTimes | None:
        """The readings of the thread; None with fewer than two."""
        with self._lock:
            columns = _in_order(self._times, slice(1, 4))
        if columns is None:
            return None
        t_ns, cpu, wait, process, profiler = columns
        return CoreTimes(t_ns, cpu, wait, process, profiler.astype(np.uint8))

    def use(self) -> CoreUse | None:
        """The readings of the machine; None with fewer than two."""
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
    """Rows of numbers, the first of which is a time. When there are more than `most`, every other row is dropped.

    Counters that only grow, and readings of a state, keep their meaning with fewer rows.
    """

    def __init__(self, width: int, most: int, type_code: Literal["q", "d"] = "q") -> None:
        self._width, self._most = width, most
        self._numbers: array[Any] = array(type_code)
        self._every, self.count = 1, 0  # `count` includes rows that were dropped

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
    """The table's columns, sorted by time; None with fewer than two rows.

    Two processes have read the columns `counts`, one of them a tick late, so the columns are kept from decreasing.
    """
    rows = table.rows()
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    rows[:, counts] = np.maximum.accumulate(rows[:, counts], axis=0)
    return [np.ascontiguousarray(column) for column in rows.T] if len(rows) >= 2 else None


MOST_POINTS = 36_000  # per series: an hour at 10 Hz; beyond it every other point is dropped, repeatedly
MOST_PENDING = 6_000  # points per series that wait for a slow or absent live view
END_TIMEOUT_S = 5.0


class Sampler:
    """Reads the device and the process tree of `pid` from another process, every `period_s`.

    `origin_ns` is `time.perf_counter_ns()` at the start of the run. Call `start` and `stop` on the training thread,
    `series` and `drain` on one other thread. `cores` gets the readings of the cores.
    """

    def __init__(
        self, pid: int, device: Device, origin_ns: int, period_s: float = 0.1, cores: CoreReadings | None = None
    ) -> None:
        self._cores = cores
        self._pid, self._device, self._origin_ns, self._period_s = pid, device, origin_ns, period_s
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._lock = threading.Lock()
        self._curves: list[_Curve] = []
        self._missing: tuple[Missing, ...] = ()
        self._failure: Missing | None = None
        self._last_ns: int | None = None  # time of the newest reading
        self._last_words: deque[str] = deque(maxlen=5)
        self.packages: dict[str, str] | None = None  # versions; None: the child has not sent them yet

    def start(self) -> None:
        """Start the child and return at once; curves appear when it answers. Never raises."""
        try:
            order = Order(
                pid=self._pid,
                thread=threading.get_native_id(),
                parent_pid=os.getpid(),
                origin_ns=self._origin_ns,
                period_s=self._period_s,
                usable_cores=usable_cores(),
                gpu=self._device.kind == "cuda",
                uuid=self._device.uuid if self._device.kind == "cuda" else None,
            )
            process = start_child("gpulab.capture.sampler_process:main", asdict(order), stderr=subprocess.STDOUT)
        except (OSError, ValueError, subprocess.SubprocessError) as e:
            self._lost(f"could not be started: {e}", None)
            return
        self._process = process
        self._reader = threading.Thread(target=self._listen, args=(process,), name="gpulab-sampler", daemon=True)
        self._reader.start()

    def series(self) -> tuple[SeriesInfo, ...]:
        """The curves that the child reads; empty until its first message."""
        with self._lock:
            return tuple(c.info for c in self._curves)

    def drain(self) -> dict[str, Float32]:
        """Points since the last call, per series: float32 [k, 2], s since the origin and value. One reader only."""
        with self._lock:
            return {c.info.name: c.drain() for c in self._curves if c.pending}

    def write(self, journal: Writer) -> None:
        """Append the mean of each curve since the last call. From one thread at a time. Raises OSError."""
        with self._lock:
            means = [(i, *mean) for i, c in enumerate(self._curves) if (mean := c.take_mean()) is not None]
        journal.append(READINGS, np.array(means, READING).tobytes())

    def stop(self) -> tuple[Samples, tuple[Missing, ...], dict[str, float]]:
        """End the child and its thread; returns all curves, what is missing, and the extremes.

        The extremes are of all readings, including dropped ones: `peak_<series name>` or, for a series of bits, all
        bits ever set, under its own name. Waits at most a few seconds, then kills. May be called twice.
        """
        self._end_child()
        with self._lock:
            curves = [c for c in self._curves if c.readings.count]
            failure = () if self._failure is None else (self._failure,)
            series = Samples(tuple(c.series() for c in curves))
            return series, (*self._missing, *failure), dict(c.extreme() for c in curves)

    def _end_child(self) -> None:
        process, self._process = self._process, None
        if process is None or self._reader is None or process.stdout is None:
            return
        with ending(process):
            self._reader.join(END_TIMEOUT_S)  # returns at once when the child ends, while `process.wait` polls
            if self._reader.is_alive():
                with self._lock:
                    last_ns = self._last_ns
                self._lost("hung: it did not end when asked", last_ns)
        self._reader.join(END_TIMEOUT_S)
        process.stdout.close()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        ended = False
        for line in process.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                self._last_words.append(line.decode(errors="replace").strip())
            else:
                ended = ended or "end" in message
                with self._lock:
                    self._receive(message)
        if not ended:
            now_ns = time.perf_counter_ns() - self._origin_ns
            self._lost(f"ended: {self._epitaph(process)}", now_ns)

    def _lost(self, how: str, since_ns: int | None) -> None:
        """The child sends nothing from `since_ns` on (None: it never sent). The first reason counts."""
        with self._lock:
            if self._failure is None:
                self._failure = Missing("device curves", f"the sampling process {how}", since_ns, "curves")

    def _epitaph(self, process: subprocess.Popen[bytes]) -> str:
        try:
            code = process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "it stopped answering"
        last_words = self._last_words[-1] if self._last_words else ""
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"{how}: {last_words}" if last_words else how

    def _receive(self, message: Mapping[str, object]) -> None:
        t_ns, values = message.get("t"), message.get("v")
        if isinstance(t_ns, int) and isinstance(values, list):
            self._last_ns = t_ns
            for curve, value in zip(self._curves, values, strict=True):
                if value is not None:
                    curve.add(t_ns, value)
        times, uses = message.get("thread"), message.get("machine")
        if self._cores is not None and isinstance(times, list) and isinstance(uses, list):
            self._cores.add(times, uses)
        legend, missing = message.get("series"), message.get("missing")
        if isinstance(legend, list):
            self._curves = [_Curve(SeriesInfo(*row)) for row in legend]
        packages = message.get("packages")
        if isinstance(packages, dict):
            self.packages = packages
        if isinstance(missing, list):
            self._missing = tuple(Missing(*row) for row in missing)


class _Curve:
    """One series that still grows."""

    def __init__(self, info: SeriesInfo) -> None:
        self.info = info
        self.pending: deque[tuple[int, float]] = deque(maxlen=MOST_PENDING)
        self.readings = ThinnedRows(2, MOST_POINTS, "d")  # a time in ns is exact for 104 days
        self._maximum, self._bits = -math.inf, 0
        self._fresh_count, self._fresh_sum, self._fresh_bits = 0, 0.0, 0  # since the last mean was taken
        self._fresh_ns = 0

    def add(self, t_ns: int, value: float) -> None:
        self.pending.append((t_ns, value))
        self.readings.append((t_ns, value))
        bits = int(value) if self.info.unit == "bits" else 0
        self._fresh_count += 1
        self._fresh_sum += value
        self._fresh_bits |= bits
        self._fresh_ns = t_ns
        self._maximum = max(self._maximum, value)
        self._bits |= bits

    def drain(self) -> Float32:
        """The points since the last call."""
        points = [(t_ns / 1e9, value) for t_ns, value in self.pending]
        self.pending.clear()
        return np.array(points, np.float32).reshape(-1, 2)

    def take_mean(self) -> tuple[int, float] | None:
        """Time of the newest point and mean of the points since the last call; of bits, all that were set."""
        count, total, bits = self._fresh_count, self._fresh_sum, self._fresh_bits
        self._fresh_count, self._fresh_sum, self._fresh_bits = 0, 0.0, 0
        if not count:
            return None
        return self._fresh_ns, float(bits) if self.info.unit == "bits" else total / count

    def extreme(self) -> tuple[str, float]:
        """Name and value: the highest reading of all, or every bit ever set."""
        if self.info.unit == "bits":
            return self.info.name, float(self._bits)
        return f"peak_{self.info.name}", self._maximum

    def series(self) -> Series:
        t_ns, value = self.readings.rows().T
        return Series(**asdict(self.info), t_ns=t_ns.astype(np.int64), value=np.ascontiguousarray(value))
