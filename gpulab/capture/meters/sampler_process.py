"""The child process that reads the meters, so that the training's GIL never delays a reading.

It is started by `sampler.Sampler` and imports neither NumPy nor torch. On its output it writes one JSON object a line:

    {"series": [[name, unit, label, source], …]}       once, first
    {"packages": {name: version, …}}                   once: the training's process need not look for them
    {"missing": [[what, reason, since_ns | null, key], …]}  whenever something cannot be read
    {"t": ns, "v": [value | null, …]}                  one reading, values in the order of "series"
    {"end": true}                                      last

All times are nanoseconds since the run's origin (`time.perf_counter_ns` is one clock for all processes of a machine).
It ends at the first byte or the end of its input, and when its parent is gone: it never outlives the notebook.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time

from msgspec import Struct

from gpulab.devices.host import host_meter
from gpulab.devices.meters import Meter, Unavailable
from gpulab.devices.nvml import nvml_meter
from gpulab.devices.packages import package_versions
from gpulab.formatting import plain_values


class Order(Struct, frozen=True):
    """What the child is asked to measure."""

    pid: int  # root of the profiled process tree
    parent_pid: int  # whose life bounds the child's
    origin_ns: int  # perf_counter_ns at the start of the run
    period_s: float
    usable_cores: float
    gpu: bool
    uuid: str | None

    def to_json(self) -> str:
        return json.dumps(plain_values(self))

    @classmethod
    def from_json(cls, text: str) -> Order:
        return cls(**json.loads(text))


def _meters(order: Order) -> list[Meter]:
    """Of the process tree, and of the GPU where the run's device is one."""
    host = host_meter(order.pid, order.usable_cores)
    if not order.gpu:
        return [host]
    return [nvml_meter(order.uuid, order.pid), host]


def main(order: Order) -> None:
    """Read the meters until the parent says so or is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C or `scancel` mean the training: we end after it
        signal.signal(number, signal.SIG_IGN)
    ended = threading.Event()
    threading.Thread(target=_await_input, args=(ended,), daemon=True).start()
    meters = _meters(order)
    try:
        _tell({"series": [[s.name, s.unit, s.label, s.source] for m in meters for s in m.series()]})
        _read(meters, order)
        _tell({"packages": dict(package_versions())})
        _read_until(ended, meters, order)
        _tell({"end": True})
    except BrokenPipeError:
        pass  # nobody listens any more
    finally:
        for meter in meters:
            meter.close()


def _read_until(ended: threading.Event, meters: list[Meter], order: Order) -> None:
    missing_count = 0
    due_s = time.perf_counter()
    while True:
        rows = [_missing_row(m, meter, order.origin_ns) for meter in meters for m in meter.missing()]
        if len(rows) > missing_count:
            _tell({"missing": rows})
        missing_count = len(rows)
        due_s = max(due_s + order.period_s, time.perf_counter())  # late: skip, never hurry after
        stop = ended.wait(due_s - time.perf_counter()) or os.getppid() != order.parent_pid
        if stop:
            return
        _read(meters, order)


def _read(meters: list[Meter], order: Order) -> None:
    before_ns = time.perf_counter_ns()
    values = [value for meter in meters for value in meter.read()]
    middle_ns = (before_ns + time.perf_counter_ns()) // 2
    _tell({"t": middle_ns - order.origin_ns, "v": values})


def _missing_row(lost: Unavailable, meter: Meter, origin_ns: int) -> list[object]:
    since_ns = None if lost.since_ns is None else lost.since_ns - origin_ns
    return [lost.what, lost.reason, since_ns, "curve" if meter.series() else "curves"]


def _tell(message: dict[str, object]) -> None:
    line = (json.dumps(message) + "\n").encode()
    while line:
        line = line[os.write(1, line) :]


def _await_input(ended: threading.Event) -> None:
    try:
        os.read(0, 1)
    finally:
        ended.set()
