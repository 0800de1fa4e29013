"""The machine: versions, what gpulab's doctor says, and every NVML query with its raw code and its duration."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks.conductor import NEEDED
from benchmarks.gpu_first.answer import Answer
from benchmarks.gpu_first.stage import Stage
from gpulab.api.doctor import Examination
from gpulab.devices import doctor, nvml
from gpulab.devices.machine import detect_device
from tests.support.fake_nvml import fake_nvml, h100

REPEATS = 20
SLOW_REPEATS = 3
WINDOWS_S = (0.02, 0.05, 0.1, 0.2, 0.5)  # between two GPM samples; NVML asks for 100 ms or more
GPM_METRICS = (*range(1, 14), 20, 21)  # nvml.h, nvmlGpmMetricId_t: utilizations, then PCIe
GUARANTEED = ("utilization", "memory", "power", "SM clock", "temperature")
_CUPTI = re.compile(r"\S*/libcupti\.so\S*")


def measure(answer: Answer, stage: Stage) -> None:
    """Versions first, for nothing else can be read without them."""
    answer.figure("versions", versions(stage))
    answer.figure("environment", {k: v for k, v in os.environ.items() if k.startswith(("CUDA", "NVIDIA", "KINETO"))})
    answer.figure("pid namespace", _text_of("/proc/self/ns/pid", os.readlink))
    answer.figure("sees the host's processes", nvml.sees_host_pids())
    answer.figure("driver parameters", _text_of("/proc/driver/nvidia/params", _profiling_parameters))
    _queries(answer, stage)
    began = time.perf_counter()
    checks = doctor.examine()
    answer.figure("doctor_s", time.perf_counter() - began)
    answer.figure("doctor", repr(Examination(checks)).splitlines())
    refused = [f"{check.name}: {check.evidence}" for check in checks if check.state in ("refused", "absent")]
    answer.check("gpulab doctor", "nothing refused or absent", "; ".join(refused) or "nothing", agrees=not refused)


def versions(stage: Stage) -> dict[str, str | None]:
    """Of everything whose version decides what CUPTI and NVML do."""
    distributions = {name: _installed(name) for name in (*NEEDED.values(), "triton", "nvidia-cuda-cupti", "IPython")}
    return {
        "device": stage.name,
        **distributions,
        "CUDA of torch": torch.version.cuda,
        "cuDNN": str(torch.backends.cudnn.version()) if torch.backends.cudnn.is_available() else None,
        "CUPTI": cupti_version(),
        "driver": _driver(stage),
        "GPUs": str(0 if stage.simulated else torch.cuda.device_count()),
    }


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def cupti_version() -> str | None:
    """Of the library that torch has loaded; None where it has loaded none."""
    try:
        loaded = _CUPTI.search(Path("/proc/self/maps").read_text())
        if loaded is None:
            return None
        number = ctypes.c_uint32()
        ctypes.CDLL(loaded[0]).cuptiGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return str(number.value)


def _driver(stage: Stage) -> str | None:
    try:
        with nvml.session(_module(stage)) as nv:
            return str(nv.nvmlSystemGetDriverVersion())
    except Exception as e:
        return nvml.reason_of(e)


def _module(stage: Stage) -> ModuleType | None:
    return fake_nvml(h100()) if stage.simulated else None


def _text_of(file: str, read: Callable[[str], str]) -> str:
    try:
        return read(file)
    except OSError as e:
        return str(e)


def _profiling_parameters(file: str) -> str:
    lines = Path(file).read_text().splitlines()
    return "; ".join(line for line in lines if "Profiling" in line)


def _queries(answer: Answer, stage: Stage) -> None:
    """Every query of NVML on its own."""
    try:
        with nvml.session(_module(stage)) as nv:
            handle = nv.nvmlDeviceGetHandleByIndex(_index(stage, nv))
            rows = {name: timed(nv, ask, repeats) for name, ask, repeats in queries(nv, handle)}
            answer.figure("queries", rows)
            for name in GUARANTEED:
                answer.check(f"NVML: {name}", "code 0", f"code {rows[name]['code']}", agrees=rows[name]["code"] == 0)
            _gpm(answer, nv, handle)
    except Exception as e:
        answer.unmeasured("NVML", "answers", nvml.reason_of(e))


def _index(stage: Stage, nv: ModuleType) -> int:
    """NVML's number of torch's first GPU."""
    if stage.simulated:
        return 0
    index = nvml.nvml_index_for(detect_device("cuda").uuid)
    if index is None:
        raise RuntimeError("NVML has no GPU with the UUID that torch names")
    return index


def queries(nv: ModuleType, handle: object) -> Iterator[tuple[str, Callable[[], object], int]]:
    """Name, call and how often. A function that this pynvml lacks fails when it is called, as on an old driver."""
    yield "utilization", lambda: nv.nvmlDeviceGetUtilizationRates(handle).gpu, REPEATS
    yield "memory", lambda: nv.nvmlDeviceGetMemoryInfo(handle).used, REPEATS
    yield "memory, version 2", lambda: nv.nvmlDeviceGetMemoryInfo(handle, nv.nvmlMemory_v2).used, REPEATS
    yield "power", lambda: nv.nvmlDeviceGetPowerUsage(handle), REPEATS
    yield "energy", lambda: nv.nvmlDeviceGetTotalEnergyConsumption(handle), REPEATS
    yield "SM clock", lambda: nv.nvmlDeviceGetClockInfo(handle, nv.NVML_CLOCK_SM), REPEATS
    yield "temperature", lambda: nv.nvmlDeviceGetTemperature(handle, nv.NVML_TEMPERATURE_GPU), REPEATS
    yield "throttle reasons, new name", lambda: nv.nvmlDeviceGetCurrentClocksEventReasons(handle), REPEATS
    yield "throttle reasons, old name", lambda: nv.nvmlDeviceGetCurrentClocksThrottleReasons(handle), REPEATS
    yield "processes", lambda: [p.pid for p in nv.nvmlDeviceGetComputeRunningProcesses(handle)], REPEATS
    yield "power limit", lambda: nv.nvmlDeviceGetPowerManagementLimit(handle), SLOW_REPEATS
    yield "enforced power limit", lambda: nv.nvmlDeviceGetEnforcedPowerLimit(handle), SLOW_REPEATS
    yield "MIG mode", lambda: nv.nvmlDeviceGetMigMode(handle), SLOW_REPEATS
    yield "MIG parts", lambda: nv.nvmlDeviceGetMaxMigDeviceCount(handle), SLOW_REPEATS
    yield "PCIe generation", lambda: nv.nvmlDeviceGetCurrPcieLinkGeneration(handle), SLOW_REPEATS
    yield "PCIe width", lambda: nv.nvmlDeviceGetCurrPcieLinkWidth(handle), SLOW_REPEATS
    yield "PCIe throughput", lambda: nv.nvmlDeviceGetPcieThroughput(handle, nv.NVML_PCIE_UTIL_RX_BYTES), SLOW_REPEATS
    yield "use by process", lambda: len(nv.nvmlDeviceGetProcessUtilization(handle, 0)), SLOW_REPEATS
    yield "utilization samples", lambda: _samples(nv, handle, nv.NVML_GPU_UTILIZATION_SAMPLES), SLOW_REPEATS
    yield "power samples", lambda: _samples(nv, handle, nv.NVML_TOTAL_POWER_SAMPLES), SLOW_REPEATS
    yield "fields", lambda: _fields(nv, handle), SLOW_REPEATS
    yield "GPM support", lambda: nv.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice, SLOW_REPEATS


def _samples(nv: ModuleType, handle: object, kind: int) -> str:
    """How many the driver keeps, and how far apart they lie."""
    _, results = nv.nvmlDeviceGetSamples(handle, kind, 0)
    times = [sample.timeStamp for sample in results if sample.timeStamp]
    gaps_ms = [(later - earlier) / 1e3 for earlier, later in pairwise(times)]
    apart = f", {statistics.median(gaps_ms):.0f} ms apart" if gaps_ms else ""
    return f"{len(results)} samples{apart}"


def _fields(nv: ModuleType, handle: object) -> dict[str, list[int]]:
    """Fields that no other function has, each as (its own code, its value as an unsigned number)."""
    names = ("POWER_INSTANT", "POWER_AVERAGE", "PCIE_COUNT_TX_BYTES", "PCIE_COUNT_RX_BYTES")
    values = nv.nvmlDeviceGetFieldValues(handle, [getattr(nv, f"NVML_FI_DEV_{name}") for name in names])
    return {name: [int(v.nvmlReturn), int(v.value.ullVal)] for name, v in zip(names, values, strict=True)}


def timed(nv: ModuleType, ask: Callable[[], object], repeats: int) -> dict[str, Any]:
    """The raw code (0: success, None: this pynvml has no such function), the last value and the durations."""
    took_ms: list[float] = []
    value: object = None
    code: int | None = 0
    reason = ""
    for _ in range(repeats):
        began = time.perf_counter()
        try:
            value = ask()
        except nv.NVMLError as e:
            code, reason = int(e.value), nvml.reason_of(e)
        except Exception as e:
            code, reason = None, f"{type(e).__name__}: {e}"
        took_ms.append(1e3 * (time.perf_counter() - began))
        if code != 0:
            break
    row = {"code": code, "value": value, "median_ms": statistics.median(took_ms), "longest_ms": max(took_ms)}
    return row | ({"reason": reason} if reason else {})


def _gpm(answer: Answer, nv: ModuleType, handle: object) -> None:
    """All hardware counters, with the time between the two samples made longer and longer."""
    why = nvml.gpm_refusal(nv, handle)
    expected = "all six metrics that gpulab reads have code 0"
    if why is not None:
        answer.unmeasured("NVML GPM", expected, why)
        return
    rows = {f"{window_s:g} s": gpm(nv, handle, window_s) for window_s in WINDOWS_S}
    answer.figure("gpm", rows)
    codes = {label: rows["0.2 s"][str(metric)][0] for _, _, label, metric, _ in nvml.GPM_SERIES}
    refused = [f"{label}: code {code}" for label, code in codes.items() if code]
    answer.check("NVML GPM", expected, "; ".join(refused) or "all 0", agrees=not refused)


def gpm(nv: ModuleType, handle: object, window_s: float) -> dict[str, list[float]]:
    """Each metric as (its own code, its value) between two samples so far apart."""
    samples = [nv.nvmlGpmSampleAlloc() for _ in range(2)]
    try:
        nv.nvmlGpmSampleGet(handle, samples[0])
        time.sleep(window_s)
        nv.nvmlGpmSampleGet(handle, samples[1])
        request = nv.c_nvmlGpmMetricsGet_t()
        request.version, request.numMetrics = nv.NVML_GPM_METRICS_GET_VERSION, len(GPM_METRICS)
        request.sample1, request.sample2 = samples
        for slot, metric in enumerate(GPM_METRICS):
            request.metrics[slot].metricId = metric
        nv.nvmlGpmMetricsGet(request)
        return {
            str(metric): [int(request.metrics[slot].nvmlReturn), float(request.metrics[slot].value)]
            for slot, metric in enumerate(GPM_METRICS)
        }
    finally:
        for sample in samples:
            nv.nvmlGpmSampleFree(sample)
