"""The parent's side of the sampling process: starts it, gathers its readings, ends it without a trace.

Nothing here raises into a run: a child that cannot start, dies or hangs becomes a `Missing`, and the run goes on. The
child also reads what the training thread had of the processor and who else used it; the training thread reads that
itself only at both ends of the run and of the profiler's window. All count from the same fixed times.
"""

from __future__ import annotations

import contextlib
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
from gpulab.devices.own_processes import marked, python_command
from gpulab.live_feed import SeriesInfo
from gpulab.run import CoreTimes, CoreUse, Device, Float32, Int64, Missing, Samples, Series
from gpulab.store.run_format import READING, READINGS
from gpulab.store.table_file import Writer

MOST_READINGS = 100_000  # of the thread: the first quarter of an hour; then every other one goes, again and again
MOST_OF_MACHINE = 20_000  # of the machine: the first hour and a half; then likewise
_COUNTS = MachineReading.__struct_fields__


class CoreReadings:
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


MOST_POINTS = 36_000  # per series: an hour at 10 Hz; then every other point is dropped, again and again
MOST_PENDING = 6_000  # points a slow or absent live view may leave behind, per series
END_TIMEOUT_S = 5.0


# -S and no PYTHON* variables: nothing of the site starts up; the parent's own import path is handed over instead.
class Sampler:
    """Reads the device and the process tree of `pid` from another process, every `period_s`.

    `origin_ns` is `time.perf_counter_ns()` at the start of the run. `start`, `stop` from the main thread, which is the
    one that trains; `series` and `drain` from any one other thread. `cores` is given what it had of the processor.
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
        self._last_ns: int | None = None  # of the newest reading
        self._last_words: deque[str] = deque(maxlen=5)
        self.packages: dict[str, str] | None = None  # versions; None: not told yet

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
            environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON") or k == "PYTHONHOME"}
            process = subprocess.Popen(
                python_command("gpulab.capture.sampler_process:main", asdict(order)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=-1,
                env=marked(environment),
                start_new_session=True,  # an interrupt goes to the whole group of the notebook; we must outlive it
            )
        except (OSError, ValueError, subprocess.SubprocessError) as e:
            self._lost(f"could not be started: {e}", None)
            return
        self._process = process
        self._reader = threading.Thread(target=self._listen, args=(process,), name="gpulab-sampler", daemon=True)
        self._reader.start()

    def series(self) -> tuple[SeriesInfo, ...]:
        """The curves that are read; empty until the child has answered."""
        with self._lock:
            return tuple(c.info for c in self._curves)

    def drain(self) -> dict[str, Float32]:
        """Points since the last call, per series: float32 [k, 2], s since the origin and value. One reader only."""
        with self._lock:
            return {c.info.name: c.drain() for c in self._curves if c.pending}

    def write(self, journal: Writer) -> None:
        """Append the mean of each curve since the last time. From one thread at a time. Raises OSError."""
        with self._lock:
            means = [(i, *mean) for i, c in enumerate(self._curves) if (mean := c.take_mean()) is not None]
        journal.append(READINGS, np.array(means, READING).tobytes())

    def stop(self) -> tuple[Samples, tuple[Missing, ...], dict[str, float]]:
        """End the child and its thread, close every pipe; then all curves, what is missing, and extremes.

        The extremes are over every reading, also those thinned out: `peak_<series name>`; a series of bits under its
        own name, all bits ever set together. Waits at most a few seconds, then kills. May be called twice.
        """
        self._end_child()
        with self._lock:
            curves = [c for c in self._curves if c.readings.count]
            failure = () if self._failure is None else (self._failure,)
            series = Samples(tuple(c.finished() for c in curves))
            return series, (*self._missing, *failure), dict(c.extreme() for c in curves)

    def _end_child(self) -> None:
        process, self._process = self._process, None
        if process is None or process.stdin is None or process.stdout is None:
            return
        try:
            with contextlib.suppress(OSError):  # it is gone already
                os.write(process.stdin.fileno(), b".")
            if self._reader is not None:  # to its end, which `wait` would only see in steps
                self._reader.join(END_TIMEOUT_S)
                if self._reader.is_alive():
                    with self._lock:
                        last_ns = self._last_ns
                    self._lost("hung: it did not end when asked", last_ns)
        finally:  # also when an interrupt lands here
            if process.poll() is None:
                process.kill()
                process.wait()
            if self._reader is not None:
                self._reader.join(END_TIMEOUT_S)
            process.stdin.close()
            process.stdout.close()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        ended = False
        for line in process.stdout or ():
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                self._last_words.append(line.decode(errors="replace").strip())
            else:
                ended = ended or "end" in message
                with self._lock:
                    self._take(message)
        if not ended:
            now_ns = time.perf_counter_ns() - self._origin_ns
            self._lost(f"ended: {self._epitaph(process)}", now_ns)

    def _lost(self, how: str, since_ns: int | None) -> None:
        """The child gives nothing from `since_ns` on (None: it never did). The first reason counts."""
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

    def _take(self, message: Mapping[str, object]) -> None:
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
    """One series as it grows."""

    def __init__(self, info: SeriesInfo) -> None:
        self.info = info
        self.pending: deque[tuple[int, float]] = deque(maxlen=MOST_PENDING)
        self.readings = ThinnedRows(2, MOST_POINTS, "d")  # a time in ns is exact for 104 days
        self._maximum, self._bits = -math.inf, 0
        self._fresh_count, self._fresh_sum, self._fresh_bits = 0, 0.0, 0  # since a mean of them was taken
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
        """The pending points, which are then no longer pending."""
        points = [(t_ns / 1e9, value) for t_ns, value in self.pending]
        self.pending.clear()
        return np.array(points, np.float32).reshape(-1, 2)

    def take_mean(self) -> tuple[int, float] | None:
        """Of what is new, at the time of the last of it: of bits all that were set. None where nothing is new."""
        count, total, bits = self._fresh_count, self._fresh_sum, self._fresh_bits
        self._fresh_count, self._fresh_sum, self._fresh_bits = 0, 0.0, 0
        if not count:
            return None
        return self._fresh_ns, float(bits) if self.info.unit == "bits" else total / count

    def extreme(self) -> tuple[str, float]:
        """The highest reading of all, or every bit ever set."""
        if self.info.unit == "bits":
            return self.info.name, float(self._bits)
        return f"peak_{self.info.name}", self._maximum

    def finished(self) -> Series:
        t_ns, value = self.readings.rows().T
        return Series(**asdict(self.info), t_ns=t_ns.astype(np.int64), value=np.ascontiguousarray(value))
