"""The machine's limits, the device that is profiled, and the doctor's account of both."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpulab.errors import UsageError
from gpulab.sources import checkup, machine, nvml
from gpulab.sources import fake_nvml as fakes
from gpulab.views.doctor import render


def tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "affinity_cores", lambda: 8)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "200000 100000\n"}, 2),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/docker/x\n1:memory:/docker/x\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/x\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "garbage"}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "6400000 100000\n"}, 8),
    ],
)
def test_usable_cores_are_affinity_cut_by_the_quota(files: Mapping[str, str], cores: float, tmp_path: Path) -> None:
    assert machine.usable_cores(tree(tmp_path, files)) == cores


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, None),
        ({"proc/self/cgroup": "0::/j\n", "sys/fs/cgroup/j/memory.max": "2147483648\n"}, 2**31),
        ({"proc/self/cgroup": "4:memory:/d\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "1073741824"}, 2**30),
        ({"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096)}, None),
    ],
)
def test_memory_limit(files: Mapping[str, str], limit: int | None, tmp_path: Path) -> None:
    assert machine.memory_limit_bytes(tree(tmp_path, files)) == limit


def test_environment_names_what_matters() -> None:
    env = machine.environment()
    assert env.packages["numpy"] == importlib.metadata.version("numpy")
    assert env.python == ".".join(map(str, sys.version_info[:3]))
    assert env.usable_cores
    assert env.memory_total_bytes
    assert env.cpu


def test_the_cpu_is_a_device_without_torch() -> None:
    program = (
        "import sys; from gpulab.sources.machine import detect_device;"
        "print(detect_device('cpu').kind, 'torch' in sys.modules)"
    )
    folder = Path(machine.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["cpu", "False"]


@pytest.mark.parametrize("requested", ["gpu", "mps", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "auto:1", "", "cuda:0:1"])
def test_an_unknown_device_is_named(requested: str) -> None:
    with pytest.raises(UsageError, match='use "auto", "cpu", "cuda"') as error:
        machine.detect_device(requested)
    assert f'"{requested}"' in str(error.value)


class FakeCuda(SimpleNamespace):
    """torch.cuda of a machine with two GPUs, the second one current."""

    def is_available(self) -> bool:
        return bool(self.count > 0)

    def device_count(self) -> int:
        return int(self.count)

    def current_device(self) -> int:
        return 1

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(
            name=f"GPU {index}",
            uuid=f"0000-{index}",
            total_memory=2**34,
            multi_processor_count=40,
            major=7,
            minor=5,
        )


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int, cuda: str | None = "12.6") -> None:
    torch = SimpleNamespace(
        cuda=FakeCuda(count=count), version=SimpleNamespace(cuda=cuda, hip=None), __version__="2.13.0"
    )
    monkeypatch.setattr(machine, "_torch", lambda: torch)
    monkeypatch.setattr(machine, "nvml_sees_a_gpu", lambda: count > 0)


def test_the_current_gpu_is_chosen_and_mapped_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 2)
    script = fakes.t4()
    script["devices"] = [{"name": "T4", "uuid": "GPU-0000-1"}, {"name": "T4", "uuid": "GPU-0000-0"}]
    monkeypatch.setattr(nvml, "load_nvml", lambda: fakes.fake_nvml(script))
    device = machine.detect_device("auto")
    assert (device.kind, device.index, device.name, device.uuid) == ("cuda", 1, "GPU 1", "0000-1")
    assert device.details["nvml_index"] == 0, "torch's order is not NVML's"
    assert device.details["driver"] == "450.80.02"
    assert machine.detect_device("cuda:0").details["nvml_index"] == 1


def test_a_gpu_that_is_not_there_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 2)
    with pytest.raises(UsageError, match='"cuda:2" is not there: PyTorch sees 2 GPUs'):
        machine.detect_device("cuda:2")
    with_gpus(monkeypatch, 0, cuda=None)
    with pytest.raises(UsageError, match="built for the CPU only"):
        machine.detect_device("cuda")
    assert machine.detect_device("auto").kind == "cpu"


def test_without_nvml_a_gpu_is_still_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 2)
    monkeypatch.setattr(nvml, "load_nvml", lambda: fakes.fake_nvml(fakes.no_driver()))
    device = machine.detect_device("cuda")
    assert (device.kind, device.details["driver"], device.details["nvml_index"]) == ("cuda", None, None)


def checks_by_name(script: fakes.FakeScript, store: Path | None = None) -> dict[str, checkup.Check]:
    return {c.name: c for c in checkup.examine(store, fakes.fake_nvml(script))}


def test_the_doctor_without_a_driver() -> None:
    checks = checks_by_name(fakes.no_driver())
    assert checks["NVIDIA driver"].state == "absent"
    assert "CPU" in checks["NVIDIA driver"].next_step


def test_the_doctor_on_a_hopper_with_a_refused_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "sees_host_pids", lambda: True)
    script = fakes.h100()
    script["errors"] = {"nvmlDeviceGetPowerUsage": "NotSupported"}
    script["processes"] = [1]
    checks = checks_by_name(script)
    assert checks["GPU 0 curves"].state == "limited"
    assert "not power (not supported" in checks["GPU 0 curves"].found
    assert checks["GPU 0 hardware counters"].state == "ok"
    assert "pid 1" in checks["GPU 0 other processes"].found


def test_the_doctor_on_an_older_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "sees_host_pids", lambda: False)
    checks = checks_by_name(fakes.t4())
    assert checks["GPU 0 hardware counters"].state == "absent"
    assert "not measurable" in checks["GPU 0 hardware counters"].next_step
    assert "container" in checks["GPU 0 other processes"].found


def test_the_doctor_names_what_narrows_a_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda n: "11.5.0" if n == "pynvml" else real(n))
    monkeypatch.setattr(machine, "usable_cores", lambda: 0.5)
    monkeypatch.setattr(machine, "shared_memory_bytes", lambda: 64 * 2**20)
    monkeypatch.setattr(machine, "memory_total_bytes", lambda: 2**30)
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: "spawn")
    checks = checks_by_name(fakes.no_driver(), tmp_path)
    for name in ("package pynvml", "CPU cores", "shared memory", "memory", "run store", "loader workers"):
        assert checks[name].state == "limited", name
        assert checks[name].next_step, name
    assert "uninstall pynvml" in checks["package pynvml"].next_step


def test_a_look_that_breaks_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> float:
        raise OSError("no such thing")

    monkeypatch.setattr(machine, "usable_cores", broken)
    checks = checks_by_name(fakes.no_driver())
    assert "no such thing" in checks["CPU cores"].found
    assert "memory" in checks


def test_the_doctors_text_is_aligned_and_fits() -> None:
    text = render(checkup.examine(Path("/"), fakes.fake_nvml(fakes.h100())), width=80)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if line.startswith(("  ok ", "  partly ", "  no "))]
    starts = {len(line) - len(line[line.index(name) + len(name) :].lstrip()) for line in rows for name in [named(line)]}
    assert len(starts) == 1, "all findings start in one column"
    assert "hardware counters" in text


def named(row: str) -> str:
    return row[2:].split("  ", 1)[1].strip().split("  ")[0]


def test_the_doctors_text_holds_no_escape_sequences() -> None:
    text = render([checkup.Check("name\x1b[31m", "limited", "found\x1b[0m\n", "next\x07")])
    assert all(ch.isprintable() or ch == "\n" for ch in text)
