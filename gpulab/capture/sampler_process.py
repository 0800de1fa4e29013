"""The child process that reads the meters, so that the training's GIL never delays a reading.

It is started by `sampler.Sampler` and imports neither NumPy nor torch. On its output it writes one JSON object a line:

    {"series": [[name, unit, label, source], …]}       once, first
    {"packages": {name: version, …}}                   once: saves the training process the search
    {"missing": [[what, reason, since_ns | null, key], …]}  whenever something cannot be read
    {"t": ns, "v": [value | null, …]}                  one reading, values in the order of "series"
    {"thread": [[t, …], …], "machine": [[t, …], …]}    readings of the cores (`core_clock`), after each reading
    {"end": true}                                      last

All times are nanoseconds since the run's origin (`time.perf_counter_ns` is one clock for all processes of a machine).
It ends at the first byte or the end of its input, and when its parent is gone: it never outlives the notebook.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from msgspec import Struct
from msgspec.structs import astuple

from gpulab.devices.core_clock import MachineClock, ThreadClock
from gpulab.devices.meters import Meter, Unavailable, host_meter
from gpulab.devices.nvml import nvml_meter
from gpulab.devices.own_processes import write_message
from gpulab.devices.packages import package_versions


class Order(Struct, frozen=True):
    """What the child has to measure."""

    pid: int  # root of the profiled process tree
    thread: int  # the system's number of the training thread
    parent_pid: int  # the child ends when that process does
    origin_ns: int  # perf_counter_ns at the start of the run
    period_s: float
    usable_cores: float
    gpu: bool
    uuid: str | None


CORE_SHARE = 0.003  # of this process's time, at most, for reading the thread; the same for the machine
THREAD_APART_NS = 10_000_000
MACHINE_APART_NS = 250_000_000


class Cores:
    """Reads how long the training thread had a core, and what else used cores; nothing if that is unknown."""

    def __init__(self, order: Order) -> None:
        self._origin_ns = order.origin_ns
        self._thread: ThreadClock | None = ThreadClock(order.pid, order.thread)
        self._machine = MachineClock(pid=order.pid, thread=order.thread)
        self._due_ns = self._machine_due_ns = 0
        self._rows: tuple[list[list[int]], list[list[int]]] = [], []

    def until_due_s(self) -> float:
        return (self._due_ns - time.perf_counter_ns()) / 1e9 if self._thread is not None else float("inf")

    def read(self) -> None:
        """Take the readings that are due."""
        began_ns = time.perf_counter_ns()
        if self._thread is None or began_ns < self._due_ns:
            return
        try:
            self._rows[0].append([began_ns - self._origin_ns, *self._thread.read()])
            now_ns = time.perf_counter_ns()
            self._due_ns = began_ns + max(THREAD_APART_NS, int((now_ns - began_ns) / CORE_SHARE))
            if began_ns >= self._machine_due_ns:
                self._rows[1].append([now_ns - self._origin_ns, *astuple(self._machine.read())])
                took_ns = time.perf_counter_ns() - now_ns
                self._machine_due_ns = now_ns + max(MACHINE_APART_NS, int(took_ns / CORE_SHARE))
        except (OSError, ValueError):  # the thread has ended, or cannot be read at all
            self._thread = None

    def write(self) -> None:
        """Write the new readings."""
        times, uses = self._rows
        if times:
            self._rows = [], []
            write_message({"thread": times, "machine": uses})


def main(fields: dict[str, Any]) -> None:
    """Read the meters until the parent requests the end or is gone. `fields` are those of an `Order`."""
    order = Order(**fields)
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C and `scancel` are for the training; this process ends later
        signal.signal(number, signal.SIG_IGN)
    ended = threading.Event()
    threading.Thread(target=_await_input, args=(ended,), daemon=True).start()
    meters = [nvml_meter(order.uuid, order.pid)] if order.gpu else []
    meters.append(host_meter(order.pid, order.usable_cores))
    try:
        write_message({"series": [[s.name, s.unit, s.label, s.source] for m in meters for s in m.series()]})
        _read(meters, order)
        write_message({"packages": dict(package_versions())})
        _read_until(ended, meters, order)
        write_message({"end": True})
    except BrokenPipeError:
        pass  # the parent has closed the pipe
    finally:
        for meter in meters:
            meter.close()


def _read_until(ended: threading.Event, meters: list[Meter], order: Order) -> None:
    missing_count = 0
    cores = Cores(order)
    due_s = time.perf_counter()
    while True:
        rows = [_missing_row(m, meter, order.origin_ns) for meter in meters for m in meter.missing()]
        if len(rows) > missing_count:
            write_message({"missing": rows})
        missing_count = len(rows)
        due_s = max(due_s + order.period_s, time.perf_counter())  # a late reading is not made up for
        while (rest_s := due_s - time.perf_counter()) > 0:
            if ended.wait(min(rest_s, max(cores.until_due_s(), 0.0))):
                return
            cores.read()
        if ended.is_set() or os.getppid() != order.parent_pid:
            return
        _read(meters, order)
        cores.write()


def _read(meters: list[Meter], order: Order) -> None:
    before_ns = time.perf_counter_ns()
    values = [value for meter in meters for value in meter.read()]
    middle_ns = (before_ns + time.perf_counter_ns()) // 2
    write_message({"t": middle_ns - order.origin_ns, "v": values})


def _missing_row(reason: Unavailable, meter: Meter, origin_ns: int) -> list[object]:
    since_ns = None if reason.since_ns is None else reason.since_ns - origin_ns
    return [reason.what, reason.reason, since_ns, "curve" if meter.series() else "curves"]


def _await_input(ended: threading.Event) -> None:
    try:
        os.read(0, 1)
    finally:
        ended.set()
