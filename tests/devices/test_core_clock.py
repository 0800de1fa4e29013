"""What the system's files say of processor cores, and what is unknown where they say nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpulab.devices.cgroups import quota_periods
from gpulab.devices.core_clock import (
    MachineClock,
    ThreadClock,
    busy_time_ns,
    pressure_ns,
    process_cpu_ns,
    threads_of,
)
from tests.devices.test_cgroups import written

TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")


def test_only_cores_that_may_be_used_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2})
    rows = "cpu 9 9 9 9 9 9 9 9 9 9\ncpu0 5 5 5 5 5 5 5 5 5 5\ncpu1 1 2 4 100 100 8 16 32 64 64\ncpu2 1 0 0 0 0 0 0 1\n"
    assert busy_time_ns(written(tmp_path, {"proc/stat": rows})) == (65 * TICK_NS, 33 * TICK_NS)


@pytest.mark.parametrize("text", ["", "cpu1 x\n", "intr 5\n"])
def test_a_machine_that_does_not_tell_is_unknown(text: str, tmp_path: Path) -> None:
    assert busy_time_ns(tmp_path) == (-1, -1)
    assert busy_time_ns(written(tmp_path, {"proc/stat": text})) == (-1, -1)
    assert pressure_ns(written(tmp_path, {"proc/pressure/cpu": text})) == -1
    assert MachineClock(tmp_path).read().others_cpu_ns == -1


def test_pressure_is_read(tmp_path: Path) -> None:
    text = "some avg10=0.02 avg60=0.03 avg300=0.65 total=213\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n"
    assert pressure_ns(written(tmp_path, {"proc/pressure/cpu": text})) == 213_000


@pytest.mark.parametrize(
    ("group", "stat"),
    [("0::/box\n", "sys/fs/cgroup/box/cpu.stat"), ("4:cpu,cpuacct:/box\n", "sys/fs/cgroup/cpu/box/cpu.stat")],
)
def test_a_quota_that_runs_out_is_counted(group: str, stat: str, tmp_path: Path) -> None:
    files = {"proc/self/cgroup": group, stat: "usage_usec 9\nnr_periods 40\nnr_throttled 30\nthrottled_usec 9\n"}
    assert quota_periods(written(tmp_path, files)) == (40, 30)
    assert quota_periods(written(tmp_path, {stat: "nr_periods 0\nnr_throttled 0\n"})) is None


def test_a_thread_knows_its_own_time() -> None:
    clock = ThreadClock()
    before = clock.read()
    sum(range(200_000))
    after = clock.read()
    clock.close()
    assert after[0] > before[0] and after[2] > before[2]
    assert after[1] >= before[1]
    assert clock.read()[1] == -1


def test_another_process_is_read_like_ones_own() -> None:
    """Of a child that computes for a while and has a child that did: as its own clocks say at the end."""
    code = (
        "import os, subprocess, sys, time\n"
        "subprocess.run([sys.executable, '-S', '-c', 'sum(range(3_000_000))'])\n"
        "while time.thread_time() < 0.3: pass\n"
        "ended = sum(os.times()[2:4])\n"
        "print(time.thread_time_ns(), time.process_time_ns(), ended, flush=True)\n"
        "input()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdin is not None
        thread_ns, process_ns, ended_s = map(float, child.stdout.readline().split())
        clock, machine = ThreadClock(child.pid, child.pid), MachineClock(pid=child.pid, thread=child.pid)
        cpu_ns, wait_ns, together_ns = clock.read()
        assert cpu_ns == pytest.approx(thread_ns, rel=0.2) and wait_ns >= 0
        assert together_ns == process_cpu_ns(child.pid) == pytest.approx(process_ns, rel=0.2)
        reading = machine.read()
        assert reading.tree_cpu_ns == pytest.approx(process_ns + ended_s * 1e9, rel=0.2)
        assert reading.pool_wait_ns == 0
        child.stdin.write("\n")
        child.stdin.flush()
        child.wait()
    with pytest.raises(OSError, match=r"\d"):
        clock.read()
    clock.close()


def test_the_threads_of_a_process_that_ended_are_none() -> None:
    assert threads_of(2**22 + 1) == []
    assert len(threads_of(os.getpid())) in (0, len(os.listdir("/proc/self/task")))
