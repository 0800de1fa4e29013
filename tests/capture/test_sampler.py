"""The sampling process: what it brings home, and that it never stays, whatever happens to it or to us."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from gpulab.capture import sampler as sampling
from gpulab.capture.sampler import Sampler
from gpulab.devices import own_processes
from gpulab.devices.meters import host_meter
from gpulab.devices.own_processes import import_path
from gpulab.live_feed import SeriesInfo
from gpulab.run import Device, Float32
from tests.support import fake_nvml as fakes
from tests.support.paths import ROOT, TESTS

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and process groups")

CPU = Device("cpu", "a CPU")
H100 = Device("cuda", "NVIDIA H100", 0, "00000000-0000-0000-0000-0000000000a0")
PATIENCE_S = 120.0


def until(true: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline_s, f"waited in vain for {what}"
        time.sleep(0.01)


def ours() -> tuple[set[str], set[int], set[str]]:
    folder = Path("/proc/self/fd")
    fds = {fd.name for fd in folder.iterdir() if fd.exists()} if folder.exists() else set()
    return (
        {t.name for t in threading.enumerate()},
        {c.pid for c in psutil.Process().children(recursive=True)},
        fds,
    )


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine keeps a child for long from answering."""
    monkeypatch.setattr(sampling, "END_TIMEOUT_S", PATIENCE_S)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before = ours()
    yield
    after = ours()
    assert after[0] - before[0] == set(), "a thread is left"
    assert after[1] - before[1] == set(), "a process is left"
    assert len(after[2]) <= len(before[2]), "a file handle is left"


def started(device: Device = CPU, script: fakes.FakeScript | None = None, period_s: float = 0.01) -> Sampler:
    """A sampler at work; its child reads the GPU that `script` plays."""
    sampler = Sampler(os.getpid(), device, time.perf_counter_ns(), period_s)
    with pytest.MonkeyPatch.context() as patch:
        if script is not None:
            folders = [str(TESTS / "support" / "scripted_nvml"), str(TESTS.parent), *import_path()]
            patch.setattr(own_processes, "import_path", lambda: folders)
            patch.setenv("SCRIPTED_NVML", json.dumps(script))
        sampler.start()
    return sampler


def child_of(sampler: Sampler) -> subprocess.Popen[bytes]:
    assert sampler._process is not None
    return sampler._process


def drained(sampler: Sampler, name: str) -> Float32:
    return sampler.drain().get(name, np.empty((0, 2), np.float32))


def test_on_a_cpu_the_process_tree_is_read() -> None:
    origin_ns = time.perf_counter_ns()
    sampler = started()
    until(sampler.series, "the legend")
    points = [drained(sampler, "cpu_pct")]

    def enough() -> bool:
        points.append(drained(sampler, "cpu_pct"))
        return sum(map(len, points)) > 3

    until(enough, "CPU readings")
    samples, missing, extremes = sampler.stop()
    assert [s.name for s in samples.series] == ["cpu_pct", "rss_bytes", "process_count"]
    assert missing == ()
    rss = samples.get("rss_bytes")
    assert rss is not None and rss.value.min() > 2**20
    assert extremes["peak_rss_bytes"] == rss.value.max()
    assert (np.diff(rss.t_ns) > 0).all()
    assert 0 < rss.t_ns[0] < rss.t_ns[-1] <= time.perf_counter_ns() - origin_ns, "on the clock of the run"
    assert points[-1].dtype == np.float32 and points[-1].shape[1] == 2


def test_a_gpu_is_read_beside_the_process_tree() -> None:
    sampler = started(H100, fakes.h100(), period_s=0.1)
    until(lambda: len(drained(sampler, "sm_active_fraction")), "a GPM reading")
    samples, missing, extremes = sampler.stop()
    sm = samples.get("sm_active_fraction")
    assert sm is not None and sm.source == "NVML GPM" and sm.value == pytest.approx(0.42)
    assert extremes["throttle_reasons"] == 4 and "peak_throttle_reasons" not in extremes
    assert {m.what for m in missing} <= {"other processes on the GPU"}


def test_without_a_driver_the_host_is_read_and_the_reason_kept() -> None:
    sampler = started(H100, fakes.no_driver())
    until(sampler.drain, "a reading")
    samples, missing, _ = sampler.stop()
    assert samples.get("rss_bytes") is not None
    assert [(m.what, m.since_ns, m.key) for m in missing] == [("GPU curves", None, "curves")]


def test_a_query_that_dies_is_missing_since_then() -> None:
    sampler = started(H100, {**fakes.h100(), "fails_after": {"nvmlDeviceGetPowerUsage": (4, "GpuIsLost")}})
    until(lambda: len(sampler.drain().get("cpu_pct", ())) > 0 and len(sampler._missing) > 0, "the loss")
    samples, missing, _ = sampler.stop()
    power = samples.get("power_w")
    lost = next(m for m in missing if m.what == "power")
    assert power is not None
    assert lost.since_ns is not None and lost.key == "curve"
    assert power.t_ns[-1] < lost.since_ns < samples.series[0].t_ns[-1], "on the clock of the run"


def test_a_child_that_dies_costs_only_its_curves() -> None:
    sampler = started(H100, {**fakes.h100(), "exits_after": 3})
    until(lambda: sampler._failure, "its death")
    samples, missing, _ = sampler.stop()
    assert [m.what for m in missing if m.since_ns is not None] == ["device curves"]
    (death,) = [m for m in missing if m.what == "device curves"]
    assert death.reason == "the sampling process ended: exit code 3"
    utilization = samples.get("gpu_utilization_pct")
    assert utilization is not None and len(utilization.t_ns) == 2, "what it brought home before is kept"
    assert death.since_ns is not None and death.since_ns > utilization.t_ns[-1]


CANNOT_BEGIN = {
    "killed": (None, "killed by signal 9"),
    "it cannot import": ((own_processes, "_CALL", "import no_such_module_at_all"), "no_such_module_at_all"),
    "no such program": ((sys, "executable", "/no/such/python"), "could not be started"),
}


@pytest.mark.parametrize(("broken", "said"), CANNOT_BEGIN.values(), ids=CANNOT_BEGIN)
def test_why_there_are_no_curves_is_said(
    broken: tuple[Any, str, str] | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken is not None:
        monkeypatch.setattr(*broken)
    sampler = started()
    if broken is None:
        until(sampler.series, "the legend")
        child_of(sampler).kill()
    until(lambda: sampler._failure, "its death")
    samples, missing, _ = sampler.stop()
    assert said in missing[0].reason and (broken is None or samples.series == ())


def is_quiet(sampler: Sampler) -> bool:
    """Whether a while passed without a reading."""
    before_ns = sampler._last_ns
    time.sleep(0.5)
    return sampler._last_ns == before_ns


def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "END_TIMEOUT_S", 0.2)
    sampler = started()
    until(sampler.series, "the legend")
    until(sampler.drain, "a reading")
    child = psutil.Process(child_of(sampler).pid)
    child.suspend()
    until(lambda: child.status() == psutil.STATUS_STOPPED and is_quiet(sampler), "the end of what it has written")
    newest_ns = sampler._last_ns
    samples, missing, _ = sampler.stop()
    assert "did not end when asked" in missing[0].reason
    assert missing[0].since_ns == samples.series[0].t_ns[-1] == newest_ns, "nothing was read after that"
    assert missing[0].key == "curves"


def test_stop_at_once_twice_and_without_start() -> None:
    sampler = started()
    child = child_of(sampler)
    assert sampler.stop()[1] == ()
    assert child.returncode == 0 and child.stdin is not None and child.stdout is not None
    assert child.stdin.closed and child.stdout.closed
    assert sampler.stop()[1] == ()
    assert Sampler(os.getpid(), CPU, 0).stop()[1] == ()


def test_an_interrupt_of_the_notebook_does_not_reach_the_child() -> None:
    sampler = started()
    until(sampler.series, "the legend")
    assert os.getpgid(child_of(sampler).pid) != os.getpgid(0)
    child_of(sampler).send_signal(signal.SIGINT)
    sampler.drain()
    until(sampler.drain, "another reading")
    assert sampler.stop()[1] == ()


@pytest.mark.parametrize("workers", [False, True], ids=["alone", "a forked worker holds our pipe"])
def test_the_child_ends_when_its_parent_is_killed(workers: bool) -> None:
    program = f"""
        import os, sys, time
        from gpulab.capture.sampler import Sampler
        from gpulab.run import Device
        s = Sampler(os.getpid(), Device("cpu", "a CPU"), time.perf_counter_ns(), 0.01)
        s.start()
        while not s.series():
            time.sleep(0.01)
        worker = os.fork() if {workers} else 0
        if {workers} and worker == 0:
            time.sleep(30)
            os._exit(0)
        print(s._process.pid, worker, flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, cwd=ROOT)
    assert parent.stdout is not None
    child, worker = map(int, parent.stdout.readline().split())
    assert psutil.pid_exists(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not alive(child), "the end of the child")
    if worker:
        os.kill(worker, signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_child_imports_nothing_heavy() -> None:
    program = (
        "import sys, gpulab.capture.sampler_process, gpulab.devices.meters, gpulab.devices.nvml;"
        "print([m for m in ('torch', 'numpy', 'matplotlib', 'IPython') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_cpu_is_that_of_the_tree_in_percent_of_the_usable_cores() -> None:
    worker = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    stopped = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        stopped.send_signal(signal.SIGSTOP)
        until(lambda: psutil.Process(stopped.pid).status() == psutil.STATUS_STOPPED, "its stop")
        meters = [host_meter(worker.pid, 1), host_meter(worker.pid, 8), host_meter(stopped.pid, 1)]
        computed_s = cpu_s(worker) + 0.5
        until(lambda: cpu_s(worker) > computed_s, "a little work")
        of_one, of_eight, of_none = (meter.read()[0] for meter in meters)
        assert of_one is not None and of_eight is not None
        assert of_one > 3 * of_eight > 0
        assert of_none == 0
    finally:
        for process in (worker, stopped):
            process.kill()
            process.wait()


def cpu_s(process: subprocess.Popen[bytes]) -> float:
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


def test_a_tree_whose_root_ended_is_lost_and_not_zero() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    meter = host_meter(process.pid, 1.0)
    process.kill()
    process.wait()
    rows = [meter.read() for _ in range(4)]
    assert rows == [[None, None, None]] * 4
    assert {m.reason for m in meter.missing()} == {"the profiled process ended"}


def test_long_runs_are_thinned_evenly_and_keep_their_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MOST_POINTS", 100)
    curve = sampling._Curve(SeriesInfo("x", "W", "x", "test"))
    for i in range(10_000):
        curve.add(i, 1e6 if i == 7777 else float(i))
    series = curve.series()
    assert 50 <= len(series.t_ns) <= 100
    assert set(np.diff(series.t_ns)) == {128}, "the same distance everywhere, so that means stay means"
    assert curve.extreme() == ("peak_x", 1e6)


def test_a_watcher_that_never_drains_costs_bounded_memory() -> None:
    curve = sampling._Curve(SeriesInfo("x", "W", "x", "test"))
    for i in range(sampling.MOST_PENDING + 500):
        curve.add(i, 0.0)
    assert len(curve.drain()) == sampling.MOST_PENDING
    assert curve.drain().shape == (0, 2)


def test_the_mean_since_the_last_time_takes_no_room() -> None:
    curve = sampling._Curve(SeriesInfo("x", "W", "x", "test"))
    assert curve.take_mean() is None
    for t_ns, value in enumerate((2.0, 4.0, 9.0)):
        curve.add(t_ns, value)
    assert curve.take_mean() == (2, 5.0) and curve.take_mean() is None
    bits = sampling._Curve(SeriesInfo("throttle_reasons", "bits", "x", "test"))
    for value in (1.0, 4.0, 1.0):
        bits.add(7, value)
    assert bits.take_mean() == (7, 5.0) and bits.extreme() == ("throttle_reasons", 5)
    sizes = {name: sys.getsizeof(value) for name, value in vars(curve).items() if name.startswith("_fresh")}
    for t_ns in range(1000):
        curve.add(t_ns, 1.0)
    assert {name: sys.getsizeof(getattr(curve, name)) <= 32 for name in sizes} == dict.fromkeys(sizes, True)
