"""The machine's limits, the device that is profiled, and the doctor's account of both."""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gpulab.api.doctor import Examination
from gpulab.devices import doctor, gpus, machine, nvml
from gpulab.devices.gpus import visible_gpus
from gpulab.errors import UsageError
from tests.devices.test_cgroups import written
from tests.support import fake_nvml as fakes
from tests.support.paths import ROOT


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "affinity_cores", lambda: 8)


V2, V1 = "sys/fs/cgroup/cpu.max", "sys/fs/cgroup/cpu/x/cpu.cfs_"


@pytest.mark.parametrize(
    ("group", "files", "cores"),
    [
        ("", {}, 8),
        ("0::/", {V2: "150000 100000"}, 1.5),
        ("0::/", {V2: "max 100000"}, 8),
        ("0::/", {V2: "garbage"}, 8),
        ("0::/", {V2: "6400000 100000"}, 8),
        ("0::/a/b", {"sys/fs/cgroup/a/cpu.max": "200000 100000"}, 2),
        ("0::/a/b", {"sys/fs/cgroup/a/cpu.max": "200000 100000", "sys/fs/cgroup/a/b/cpu.max": "400000 100000"}, 2),
        ("3:cpu:/x", {f"{V1}quota_us": "-1", f"{V1}period_us": "100000"}, 8),
        (
            "3:cpu,cpuacct:/docker/x\n1:memory:/docker/x",
            {
                f"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_{n}_us": f"{us}\n"
                for n, us in (("quota", 300000), ("period", 100000))
            },
            3,
        ),
    ],
)
def test_usable_cores_are_affinity_cut_by_the_quota(
    group: str, files: Mapping[str, str], cores: float, tmp_path: Path
) -> None:
    assert machine.usable_cores(written(tmp_path, {"proc/self/cgroup": f"{group}\n", **files})) == cores


def test_environment_names_what_matters() -> None:
    env = machine.environment()
    assert env.packages["numpy"] == importlib.metadata.version("numpy")
    assert env.python == ".".join(map(str, sys.version_info[:3]))
    assert env.usable_cores and env.memory_total_bytes and env.cpu


def test_the_cpu_is_a_device_without_torch() -> None:
    program = (
        "import sys; from gpulab.devices.machine import detect_device;"
        "print(detect_device('cpu').kind, 'torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True).split() == ["cpu", "False"]


@pytest.mark.parametrize("requested", ["gpu", "mps", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "auto:1", "", "cuda:0:1"])
def test_an_unknown_device_is_named(requested: str) -> None:
    with pytest.raises(UsageError, match='use "auto", "cpu", "cuda"') as error:
        machine.detect_device(requested)
    assert f'"{requested}"' in str(error.value)


class FakeCuda(SimpleNamespace):
    """torch.cuda of a machine with two GPUs, the second one current; before it runs, every question is a fault."""

    def is_initialized(self) -> bool:
        return bool(self.running)

    def device_count(self) -> Any:
        return self._answer(2)

    def current_device(self) -> Any:
        return self._answer(1)

    def get_device_properties(self, index: int) -> Any:
        known = {"total_memory": 2**34, "multi_processor_count": 40, "major": 7, "minor": 5}
        return self._answer(SimpleNamespace(name=f"GPU {index}", uuid=f"0000-{index}", **known))

    def _answer(self, value: Any) -> Any:
        assert self.running, "CUDA is started"
        return value


def with_torch(
    monkeypatch: pytest.MonkeyPatch, script: fakes.FakeScript, *, running: bool = False, cuda: str | None = "12.6"
) -> None:
    """A PyTorch that fails where it is asked to start CUDA, on a machine as `script` has it."""
    torch = SimpleNamespace(
        cuda=FakeCuda(running=running), version=SimpleNamespace(cuda=cuda, hip=None), __version__="2.13.0"
    )
    module = fakes.fake_nvml(script)
    monkeypatch.setattr(machine, "_torch", lambda: torch)
    monkeypatch.setattr(nvml, "load_nvml", lambda: module)
    monkeypatch.setattr(gpus, "ask", lambda question: pytest.fail("no other process is needed"))
    gpus._gpus.cache_clear()
    for name in gpus.DECIDING:
        monkeypatch.delenv(name, raising=False)


def two_t4() -> fakes.FakeScript:
    script = fakes.t4()
    script["devices"] = [
        {"name": "Tesla T4", "uuid": f"GPU-0000-{i}", "cores": 2560, "capability": (7, 5), "memory_bytes": 2**34}
        for i in (1, 0)
    ]
    return script


def test_before_cuda_runs_nvml_tells_what_the_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with_torch(monkeypatch, two_t4())
    device = machine.detect_device("auto")
    assert (device.kind, device.index, device.name, device.uuid) == ("cuda", 0, "Tesla T4", "0000-1")
    assert device.memory_total_bytes == 2**34
    assert device.details == {
        "sm_count": 40,
        "compute_capability": "7.5",
        "cuda": "12.6",
        "nvml_index": 0,
        "driver": "450.80.02",
        "power_limit_w": 700.0,
    }
    assert machine.detect_device("cuda:1").uuid == "0000-0"


def test_once_cuda_runs_its_current_gpu_is_matched_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    with_torch(monkeypatch, two_t4(), running=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # changed after CUDA was started: without effect
    device = machine.detect_device("auto")
    assert (device.kind, device.index, device.name, device.uuid) == ("cuda", 1, "GPU 1", "0000-1")
    assert device.details["nvml_index"] == 0, "torch's order is not NVML's"
    assert device.details["driver"] == "450.80.02"
    assert machine.detect_device("cuda:0").details["nvml_index"] == 1


def test_without_nvml_a_running_cuda_is_still_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with_torch(monkeypatch, fakes.no_driver(), running=True)
    device = machine.detect_device("cuda")
    assert (device.kind, device.details["driver"], device.details["nvml_index"]) == ("cuda", None, None)


@pytest.mark.parametrize(
    ("asked", "uuids"),
    [
        (None, ["a", "b", "c"]),
        ("0,1,2", ["a", "b", "c"]),
        ("2,0", ["c", "a"]),
        (" 1 , +2", ["b", "c"]),
        ("1,7,0", ["b"]),
        ("0,-1,1", ["a"]),
        ("1,1", []),
        ("", []),
        ("-1", []),
        ("none", []),
        ("GPU-c,GPU-A", ["c", "a"]),
        ("GPU-c,GPU-unknown,GPU-a", ["c"]),
        ("GPU-b,GPU-b", []),
        ("GPU-", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(asked: str | None, uuids: list[str]) -> None:
    script: fakes.FakeScript = {"devices": [{"name": "Tesla T4", "uuid": f"GPU-{c}"} for c in "abc"]}
    environ = {} if asked is None else {"CUDA_VISIBLE_DEVICES": asked}
    gpus = visible_gpus(environ, fakes.fake_nvml(script))
    assert gpus is not None and [g.uuid for g in gpus] == uuids


def split_h100() -> fakes.FakeScript:
    """A whole H100, and one in two MIG parts."""
    script = fakes.h100("GPU-whole")
    name = "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
    parts: list[fakes.FakeDevice] = [
        {"name": f"{name} {n}", "uuid": f"MIG-{n}", "memory_bytes": 40 * 2**30, "sm_count": 60} for n in "xy"
    ]
    script["devices"].append({"name": "NVIDIA H100 80GB HBM3", "uuid": "GPU-split", "parts": parts})
    return script


def test_a_mig_part_is_a_device_with_its_own_memory_and_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    with_torch(monkeypatch, split_h100())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-y")
    device = machine.detect_device("cuda")
    assert (device.index, device.uuid, device.name) == (0, "MIG-y", "NVIDIA H100 80GB HBM3 MIG 3g.40gb y")
    assert (device.memory_total_bytes, device.details["sm_count"]) == (40 * 2**30, 60)
    assert device.details["nvml_index"] == 1, "the GPU it is a part of"


T4S, HIDDEN, PART = two_t4(), {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "MIG-y"}
TOO_OLD: fakes.FakeScript = {**T4S, "cuda": 11040}


@pytest.mark.parametrize(
    ("script", "cuda", "environ", "requested", "said"),
    [
        (T4S, "12.6", {}, "cuda:2", '"cuda:2" does not exist: PyTorch sees 2 GPUs'),
        (split_h100(), "12.6", PART, "cuda:1", "PyTorch sees 1 GPU"),
        (T4S, "12.6", HIDDEN, "cuda", "PyTorch finds no GPU"),
        (fakes.no_driver(), "12.6", {}, "cuda", "PyTorch finds no GPU"),  # and no other process is asked
        (T4S, None, {}, "cuda", "built for the CPU only"),
        (TOO_OLD, "12.6", {}, "cuda:0", r"needs CUDA 12\.6, the NVIDIA driver runs CUDA 11\.4 at most"),
    ],
)
def test_why_a_gpu_cannot_be_used_is_said(
    monkeypatch: pytest.MonkeyPatch,
    script: fakes.FakeScript,
    cuda: str | None,
    environ: Mapping[str, str],
    requested: str,
    said: str,
) -> None:
    with_torch(monkeypatch, script, cuda=cuda)
    monkeypatch.setattr(gpus, "DEVICE_FILES", ("/dev/no-such-device",))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=said):
        machine.detect_device(requested)
    assert machine.detect_device("auto").kind == ("cuda" if "PyTorch sees" in said else "cpu")


ANSWER = {"name": "H100", "uuid": "whole", "memory_total_bytes": 2**36, "sm_count": 132, "compute_capability": "9.0"}


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({}, ["H100", "T4"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["H100", "T4"]),
        ({"CUDA_VISIBLE_DEVICES": "0"}, ["H100", "split"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-split"}, ["H100", "split"]),
    ],
)
def test_cuda_is_asked_in_a_child_where_nvml_cannot_tell(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], names: list[str]
) -> None:
    script = split_h100() if "split" in names else {"devices": [{"name": n, "uuid": f"GPU-{n}"} for n in names]}
    with_torch(monkeypatch, script)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    answers_with(monkeypatch, json.dumps({"gpus": [ANSWER]}))
    device = machine.detect_device("cuda")
    assert (device.name, device.uuid, device.details["sm_count"]) == ("H100", "whole", 132)


def test_the_order_of_different_gpus_follows_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    with_torch(monkeypatch, {"devices": [{"name": n, "uuid": f"GPU-{n}"} for n in ("T4", "H100")]})
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert [machine.detect_device(f"cuda:{i}").name for i in (0, 1)] == ["T4", "H100"]


def answers_with(monkeypatch: pytest.MonkeyPatch, stdout: str, stderr: str = "", code: int = 0) -> None:
    """The other process's answer, without the process."""
    gpus._gpus.cache_clear()
    monkeypatch.setattr(gpus, "DEVICE_FILES", ("/dev/null",))
    done = subprocess.CompletedProcess([], code, f"a line of another library\n{stdout}\n", stderr)
    monkeypatch.setattr(gpus, "ask", lambda question: done)


def test_the_other_process_really_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(gpus, "DEVICE_FILES", ("/dev/null",))
    gpus._gpus.cache_clear()
    assert gpus.gpus_by_cuda() == []
    done = gpus.ask("gpus")
    assert done is not None and (done.returncode, done.stdout) == (0, '{"gpus": []}\n'), done
    trial = gpus.try_tracing()
    assert trial.kernels == 0 and "Error" in trial.reason, trial


NO_KERNEL, PRIVILEGES = '{"kernels": 0}', "function failed: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"


@pytest.mark.parametrize(
    ("stdout", "stderr", "code", "reason"),
    [
        ('{"kernels": 63}', "CUPTI says something harmless", 0, ""),
        (NO_KERNEL, "", 0, "a kernel ran and did not come back"),
        (NO_KERNEL, f"a line\n[W802 10:11:12.1 CuptiActivityApi.cpp:1] {PRIVILEGES}\n", 0, PRIVILEGES),
        (NO_KERNEL, "WARNING:2026-08-02 10:11:12 7:7 init.cpp:1] CUPTI failed\n", 0, "CUPTI failed"),
        ("", "Traceback\nRuntimeError: CUDA error: out of memory\n", 1, "RuntimeError: CUDA error: out of memory"),
        ("", "", -11, "the trial was ended by signal 11"),
        ("[]", "", 3, "the trial ended with exit code 3"),
    ],
)
def test_the_doctor_says_whether_kernels_come_back(
    monkeypatch: pytest.MonkeyPatch, stdout: str, stderr: str, code: int, reason: str
) -> None:
    with_torch(monkeypatch, fakes.h100())
    answers_with(monkeypatch, stdout, stderr, code)
    checks = doctor.examine()
    check, text = trial(checks), " ".join(repr(Examination(checks)).split())
    if reason:
        assert (check.state, check.evidence) == ("refused", f"refused: {reason}")
        assert "GPU kernels cannot be traced." in text and "no GPU work in the trace refused:" in text
    else:
        assert (check.state, check.evidence) == ("ok", "63 of 64 test kernels were traced (CUPTI)")
        assert "GPU kernels are traced one by one." in text
    assert ("NVreg_" in check.next_step) is ("PRIVILEGES" in reason)


def trial(checks: Sequence[doctor.Check]) -> doctor.Check:
    return next(check for check in checks if check.name == "GPU work in the trace")


def test_a_gpu_without_curves_and_kernels_is_still_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with_torch(monkeypatch, fakes.no_driver(), running=True)
    answers_with(monkeypatch, '{"kernels": 0}')
    text = " ".join(repr(Examination(doctor.examine())).split())
    assert "There is no NVIDIA GPU" not in text
    assert "GPU kernels cannot be traced. GPU utilization, memory and power cannot be read." in text


def test_copies_and_waits_are_no_kernels_of_the_trial() -> None:
    def event(name: str, device: str = "CUDA") -> SimpleNamespace:
        return SimpleNamespace(name=name, device_type=SimpleNamespace(name=device))

    others = [event("Memset (Device)"), event("Memcpy HtoD"), event("Context Sync"), event("aten::add", "CPU")]
    assert gpus.kernels_among([*others, *[event("vectorized_elementwise_kernel<4, …>")] * 3]) == 3


def test_a_trial_that_does_not_end_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*args: object, **options: object) -> None:
        raise subprocess.TimeoutExpired("python", 1.0)

    monkeypatch.setattr(subprocess, "run", slow)
    assert gpus.try_tracing() == gpus.ProbeResult(0, "the trial did not end within 60 s")


@pytest.mark.skipif(machine.nvml_sees_a_gpu(), reason="this machine has a GPU")
def test_without_a_gpu_the_doctor_tries_nothing() -> None:
    check = trial(doctor.examine(try_tracing=lambda: pytest.fail("tried")))
    assert (check.state, check.evidence, check.next_step) == ("absent", "not tried: no GPU", "")


def checks_by_name(script: fakes.FakeScript, store: Path | None = None) -> dict[str, doctor.Check]:
    return {c.name: c for c in doctor.examine(store, fakes.fake_nvml(script))}


REFUSED: fakes.FakeScript = {**fakes.h100(), "errors": {"nvmlDeviceGetPowerUsage": "NotSupported"}, "processes": [1]}


@pytest.mark.parametrize(
    ("script", "name", "state", "said"),
    [
        (fakes.no_driver(), "NVIDIA driver", "absent", "CPU"),
        (fakes.t4(), "GPU 0 hardware counters", "absent", "not measurable"),
        (fakes.t4(), "GPU 0 other processes", "limited", "container"),
        (REFUSED, "GPU 0 curves", "limited", "not power (not supported"),
        (REFUSED, "GPU 0 hardware counters", "ok", ""),
        (REFUSED, "GPU 0 other processes", "limited", "pid 1"),
    ],
)
def test_what_the_doctor_says_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, script: fakes.FakeScript, name: str, state: str, said: str
) -> None:
    monkeypatch.setattr(nvml, "sees_host_pids", lambda: "processes" in script)
    check = checks_by_name(script)[name]
    assert check.state == state and said in f"{check.evidence} {check.next_step}"


def test_the_doctor_names_what_narrows_a_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda n: "11.5.0" if n == "pynvml" else real(n))
    monkeypatch.setattr(machine, "usable_cores", lambda: 0.5)
    monkeypatch.setattr(machine, "shared_memory_bytes", lambda: 64 * 2**20)
    monkeypatch.setattr(machine, "memory_total_bytes", lambda: 2**30)
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: "spawn")
    checks = checks_by_name(fakes.no_driver(), tmp_path)
    for name in ("nvidia-ml-py", "CPU cores", "shared memory", "memory", "run store", "DataLoader workers"):
        assert checks[name].state == "limited" and checks[name].next_step, name
    assert "uninstall pynvml" in checks["nvidia-ml-py"].next_step


def test_a_look_that_breaks_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> float:
        raise OSError("no such thing")

    monkeypatch.setattr(machine, "usable_cores", broken)
    checks = checks_by_name(fakes.no_driver())
    assert "no such thing" in checks["CPU cores"].evidence and "memory" in checks


def test_the_doctors_output_in_a_notebook_is_escaped_and_whole() -> None:
    torch = doctor.Check("PyTorch\x1b[31m", "ok", "there\x1b[0m\n", "next\x07")
    checks = [doctor.Check("a <b>", "limited", "seen & <script>", "do <this>"), torch]
    shown = Examination(checks)
    html = shown._repr_html_()
    assert "<script>" not in html and "<this>" not in html and "<b>" not in html
    for words in ("a &lt;b&gt;", "seen &amp; &lt;script&gt;", "→ do &lt;this&gt;", ">partly<", "PyTorch", "One point"):
        assert words in html
    assert all(ch.isprintable() or ch == "\n" for ch in repr(shown)), "it holds no escape sequences"


def test_another_thread_may_be_importing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", ModuleType("torch"))
        assert machine.environment({}).compute_threads is None
