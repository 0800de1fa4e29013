"""The meters on a real NVIDIA GPU, against nvidia-smi and beside CUPTI."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pynvml = pytest.importorskip("pynvml")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from gpulab.capture.meters.sampler import Sampler  # noqa: E402
from gpulab.devices.machine import detect_device  # noqa: E402
from gpulab.devices.nvml import GPM_SERIES, nvml_index_for, session  # noqa: E402
from gpulab.run import Samples  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture
def load() -> Iterator[None]:
    """The GPU multiplies matrices all the time."""
    done = threading.Event()

    def work() -> None:
        a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        while not done.is_set():
            for _ in range(20):
                a @ a
            torch.cuda.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(2)
    yield
    done.set()
    thread.join()


def sampled(seconds: float) -> Samples:
    sampler = Sampler(os.getpid(), detect_device("cuda"), time.perf_counter_ns())
    sampler.start()
    time.sleep(seconds)
    samples, missing, _ = sampler.stop()
    assert not [m for m in missing if m.what in ("device curves", "GPU curves")], missing
    return samples


def value_of(samples: Samples, name: str) -> float:
    series = samples.get(name)
    assert series is not None, f"{name} was not measured"
    return float(np.median(series.value))


def asked_of_nvidia_smi(*fields: str) -> list[float]:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("no nvidia-smi here")
    uuid = f"GPU-{detect_device('cuda').uuid}"
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "-i", uuid]
    line = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [float(word) for word in line.split(",")]


def is_hopper_or_newer() -> bool:
    return bool(torch.cuda.get_device_capability() >= (9, 0))


def test_torch_maps_to_nvml_by_uuid() -> None:
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found = nvml_index_for(str(properties.uuid))
        assert found is not None
        with session() as nv:
            handle = nv.nvmlDeviceGetHandleByIndex(found)
            assert nv.nvmlDeviceGetUUID(handle) == f"GPU-{properties.uuid}"
            assert nv.nvmlDeviceGetName(handle) == properties.name


@pytest.mark.usefixtures("load")
def test_curves_agree_with_nvidia_smi() -> None:
    samples = sampled(3)
    used_mib, clock_mhz, power_w = asked_of_nvidia_smi("memory.used", "clocks.sm", "power.draw")
    assert value_of(samples, "gpu_utilization_pct") > 90
    assert value_of(samples, "gpu_memory_used_bytes") / 2**20 == pytest.approx(used_mib, rel=0.05)
    assert value_of(samples, "sm_clock_mhz") == pytest.approx(clock_mhz, rel=0.2)
    assert value_of(samples, "power_w") == pytest.approx(power_w, rel=0.3)


@pytest.mark.usefixtures("load")
@pytest.mark.skipif(not is_hopper_or_newer(), reason="NVML GPM needs Hopper or newer")
def test_hopper_gives_hardware_counters() -> None:
    samples = sampled(3)
    for name, unit, *_ in GPM_SERIES:
        value = value_of(samples, name)
        assert value >= 0
        assert unit != "fraction" or value <= 1
    assert value_of(samples, "sm_active_fraction") > 0.5, "large matrix products keep the SMs busy"
    assert value_of(samples, "tensor_active_fraction") > 0.2


@pytest.mark.usefixtures("load")
@pytest.mark.skipif(not is_hopper_or_newer(), reason="NVML GPM needs Hopper or newer")
def test_hardware_counters_work_beside_cupti() -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities):
        samples = sampled(2)
    assert value_of(samples, "sm_active_fraction") > 0.5


@pytest.mark.skipif(not is_hopper_or_newer(), reason="NVML GPM needs Hopper or newer")
def test_an_idle_gpu_shows_no_activity() -> None:
    torch.cuda.synchronize()
    time.sleep(1)
    assert value_of(sampled(2), "sm_active_fraction") < 0.2
