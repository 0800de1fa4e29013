"""When the clocks of the processor are read, and what becomes of the readings."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest

from gpulab.capture import sampler
from gpulab.capture.sampler import CoreReadings
from gpulab.devices.core_clock import MachineReading
from tests.support.synthetic import MS

SECOND_NS = 10**9


class Script:
    """A clock of which each reading is one more, made a reading by `made`."""

    def __init__(self, made: Callable[[int], Any]) -> None:
        self._readings = map(made, count())

    def read(self) -> Any:
        return next(self._readings)

    def close(self) -> None:
        pass


def script() -> CoreReadings:
    """Of a thread and of the machine."""
    thread: Any = Script(lambda n: (n, 10 * n, 100 * n))
    machine: Any = Script(lambda n: MachineReading(n, 10 * n, 0, 0, 0, -1, -1, -1))
    return CoreReadings(SECOND_NS, thread, machine)


@pytest.fixture
def now_ns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The time, which the test sets."""
    time = [SECOND_NS]
    monkeypatch.setattr(sampler, "perf_counter_ns", lambda: time[0])
    return time


def test_readings_of_both_processes_are_in_order(now_ns: list[int]) -> None:
    watch = script()  # reads 0 at the begin, 1 at the end
    watch.begin()
    now_ns[0] += 100 * MS
    watch.end()
    watch.add([[20 * MS, 5, 4, 7], [10 * MS, 0, 2, 9]], [[10 * MS, 3, 3, 3, 3, -1, -1, -1, -1]])
    times, use = watch.times(), watch.use()
    assert times is not None and use is not None
    assert times.t_ns.tolist() == [0, 10 * MS, 20 * MS, 100 * MS]
    assert times.cpu_ns.tolist() == [0, 0, 5, 5]
    assert times.wait_ns.tolist() == [0, 2, 4, 10]
    assert times.process_cpu_ns.tolist() == [0, 9, 9, 100]
    assert use.t_ns.tolist() == [0, 10 * MS, 100 * MS] and use.others_cpu_ns.tolist() == [0, 3, 10]
    assert use.quota_periods.tolist() == [-1, -1, -1], "what nobody tells stays unknown"


def test_the_profilers_own_time_is_marked(now_ns: list[int]) -> None:
    watch = script()
    watch.begin()
    now_ns[0] += MS
    watch.after_profiler()
    watch.end()
    times = watch.times()
    assert times is not None and times.profiler.tolist() == [0, 1, 0]


def test_a_long_run_keeps_a_bounded_count_evenly(now_ns: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "MOST_READINGS", 64)
    watch = script()
    watch.begin()
    for i in range(1, 3000):
        watch.add([[i * MS, i, i, i]], [])
    times = watch.times()
    assert times is not None and 32 <= len(times) <= 66
    assert times.t_ns[0] == 0 and times.t_ns[-1] > 2900 * MS
    assert len(set(np.diff(times.t_ns).tolist())) == 1
