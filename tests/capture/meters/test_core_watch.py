"""When the clocks of the processor are read, and what becomes of the readings."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest

from gpulab.capture.meters import core_watch
from gpulab.capture.meters.core_watch import CoreWatch
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


def script() -> CoreWatch:
    """Of a thread and of the machine."""
    thread = Script(lambda n: (n, 10 * n, 100 * n))
    return CoreWatch(SECOND_NS, thread, Script(lambda n: MachineReading(n, 10 * n, 0, 0, 0, -1, -1, -1)))


@pytest.fixture
def now_ns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The time, which the test sets."""
    time = [SECOND_NS]
    monkeypatch.setattr(core_watch, "perf_counter_ns", lambda: time[0])
    return time


def watched(now_ns: list[int], steps: int, step_ns: int) -> CoreWatch:
    watch = script()
    watch.begin()
    for _ in range(steps):
        now_ns[0] += step_ns
        watch.at_step(now_ns[0])
    watch.end()
    return watch


def test_long_steps_have_a_reading_each(now_ns: list[int]) -> None:
    times = watched(now_ns, 5, 20 * MS).times()
    assert times is not None
    assert times.t_ns.tolist() == [i * 20 * MS for i in (0, 1, 2, 3, 4, 5, 5)]
    assert times.cpu_ns.tolist() == list(range(7))
    assert times.wait_ns.tolist() == [10 * i for i in range(7)]
    assert times.process_cpu_ns.tolist() == [100 * i for i in range(7)]


def test_short_steps_share_a_reading(now_ns: list[int]) -> None:
    times = watched(now_ns, 1000, MS // 20).times()
    assert times is not None
    assert (np.diff(times.t_ns)[:-1] >= MS).all()
    assert len(times) == 52


def test_the_machine_is_read_at_both_ends_and_seldom(now_ns: list[int]) -> None:
    use = watched(now_ns, 100, 10 * MS).use()
    assert use is not None
    assert use.t_ns[0] == 0 and use.t_ns[-1] == 1000 * MS
    assert 3 <= len(use) <= 7
    assert use.others_cpu_ns.tolist() == [10 * i for i in range(len(use))]


def test_the_profilers_own_time_is_marked(now_ns: list[int]) -> None:
    watch = script()
    watch.begin()
    now_ns[0] += MS
    watch.after_profiler()
    watch.end()
    times = watch.times()
    assert times is not None and times.profiler.tolist() == [0, 1, 0]


def test_a_long_run_keeps_a_bounded_count(now_ns: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_watch, "MOST_READINGS", 64)
    times = watched(now_ns, 3000, 2 * MS).times()
    assert times is not None and 32 <= len(times) <= 66
    assert times.t_ns[0] == 0 and times.t_ns[-1] == 6000 * MS
    assert (np.diff(times.cpu_ns) > 0).all()
