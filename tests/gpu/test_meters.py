"""The meters on a real NVIDIA GPU, against nvidia-smi and beside CUPTI."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pynvml = pytest.importorskip("pynvml")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from benchmarks.gpu_first.answer import Answer  # noqa: E402
from benchmarks.gpu_first.metering import Load, idle, judge, metered, products  # noqa: E402
from benchmarks.gpu_first.stage import Stage  # noqa: E402
from gpulab.capture.sampler import Sampler  # noqa: E402
from gpulab.devices.machine import detect_device  # noqa: E402
from gpulab.devices.nvml import GPM_SERIES, nvml_index_for, session  # noqa: E402

pytestmark = pytest.mark.gpu


def asked_of_nvidia_smi(*fields: str) -> list[float]:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("no nvidia-smi here")
    uuid = f"GPU-{detect_device('cuda').uuid}"
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "-i", uuid]
    line = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [float(word) for word in line.split(",")]


def test_torch_maps_to_nvml_by_uuid() -> None:
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found = nvml_index_for(str(properties.uuid))
        assert found is not None
        with session() as nv:
            handle = nv.nvmlDeviceGetHandleByIndex(found)
            assert nv.nvmlDeviceGetUUID(handle) == f"GPU-{properties.uuid}"
            assert nv.nvmlDeviceGetName(handle) == properties.name


def test_curves_agree_with_nvidia_smi() -> None:
    load, done = products(Stage(simulated=False)), threading.Event()

    def work() -> None:
        while not done.is_set():
            load.run()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        time.sleep(2)
        sampler = Sampler(os.getpid(), detect_device("cuda"), time.perf_counter_ns())
        sampler.start()
        time.sleep(3)
        samples, missing, _ = sampler.stop()
        used_mib, clock_mhz, power_w = asked_of_nvidia_smi("memory.used", "clocks.sm", "power.draw")
    finally:
        done.set()
        thread.join()
    assert not [m for m in missing if m.what in ("device curves", "GPU curves")], missing
    value = {series.name: float(np.median(series.value)) for series in samples.series}
    assert value["gpu_utilization_pct"] > 90
    assert value["gpu_memory_used_bytes"] / 2**20 == pytest.approx(used_mib, rel=0.05)
    assert value["sm_clock_mhz"] == pytest.approx(clock_mhz, rel=0.2)
    assert value["power_w"] == pytest.approx(power_w, rel=0.3)


@pytest.mark.skipif(torch.cuda.get_device_capability() < (9, 0), reason="NVML GPM needs Hopper or newer")
@pytest.mark.parametrize("make", [idle, products])
def test_hardware_counters_say_what_a_load_does(tmp_path: Path, make: Callable[[Stage], Load]) -> None:
    """Alone and beside CUPTI."""
    stage, answer = Stage(simulated=False), Answer(tmp_path / "answer.json", simulated=False)
    load = make(stage)
    for around in (nullcontext(), torch.profiler.profile(activities=stage.activities)):
        measured = metered(stage, load, 2.0, around)
        judge(answer, stage, load, measured)
        assert all(measured.mean(name) is not None for name, *_ in GPM_SERIES)
    checks = answer.contents["checks"]
    assert checks and [check for check in checks if check["verdict"] == "disagrees"] == []
