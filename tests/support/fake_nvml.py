"""A scripted stand-in for the module `pynvml`, so that every GPU and every refusal can be played without one.

A script is plain JSON (`FakeScript`). Values are lists that are read in turn, the last one again and again.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import NotRequired, TypedDict, TypeVar

from msgspec import Struct, field

ERROR_CODES = {
    "InvalidArgument": 2,
    "NotSupported": 3,
    "NoPermission": 4,
    "NotFound": 6,
    "DriverNotLoaded": 9,
    "Timeout": 10,
    "LibraryNotFound": 12,
    "FunctionNotFound": 13,
    "GpuIsLost": 15,
    "LibRmVersionMismatch": 18,
    "Unknown": 999,
}

READINGS = (  # numbers of a whole GPU, which are read from the script
    "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
)


class FakeDevice(TypedDict):
    """One GPU, or one MIG part of a GPU, as NVML lists it."""

    name: str
    uuid: str  # with "GPU-" or "MIG-"
    memory_bytes: NotRequired[int]
    cores: NotRequired[int]
    capability: NotRequired[tuple[int, int]]
    sm_count: NotRequired[int]  # NVML tells it of MIG parts only
    parts: NotRequired[list[FakeDevice]]
    instance: NotRequired[int]  # of a MIG part: the number of its GPU instance


Given = TypeVar("Given")
Handle = int | tuple[int, int]  # a GPU's index; of a MIG part also its number


class FakeScript(TypedDict, total=False):
    """What the fake answers. Functions are named as in pynvml, errors as in `ERROR_CODES`."""

    devices: list[FakeDevice]
    driver: str
    cuda: int  # as the driver counts: 12040 is CUDA 12.4
    gpm: bool
    values: dict[str, list[float]]  # function name, or "gpm:<metric id>" → answers in NVML's own units
    errors: dict[str, str]  # function name, or "gpm:<metric id>" → error of every call
    fails_after: dict[str, tuple[int, str]]  # function name → good calls, then this error
    exits_after: int  # utilization queries, then the whole process dies
    processes: list[int]  # pids on the GPU


def h100(uuid: str = "GPU-00000000-0000-0000-0000-0000000000a0") -> FakeScript:
    """An H100 half busy, with hardware counters."""
    return {
        "devices": [{"name": "NVIDIA H100 80GB HBM3", "uuid": uuid, "cores": 16896, "capability": (9, 0)}],
        "driver": "550.54.15",
        "cuda": 12040,
        "gpm": True,
        "values": {
            "nvmlDeviceGetUtilizationRates": [10, 30, 50, 60, 50],
            "nvmlDeviceGetMemoryInfo": [4 * 2**30, 6 * 2**30],
            "nvmlDeviceGetPowerUsage": [120_000, 310_000],
            "nvmlDeviceGetTotalEnergyConsumption": [1_000_000, 1_012_000, 1_043_000],
            "nvmlDeviceGetClockInfo": [1980],
            "nvmlDeviceGetTemperature": [41, 44],
            "nvmlDeviceGetCurrentClocksEventReasons": [1, 4],
            "gpm:2": [42.0],
            "gpm:3": [18.0],
            "gpm:5": [12.5],
            "gpm:10": [33.0],
            "gpm:20": [1000.0],
            "gpm:21": [2000.0],
        },
    }


def t4(uuid: str = "GPU-00000000-0000-0000-0000-0000000000b0") -> FakeScript:
    """A T4 with an older driver: no hardware counters, and the old name of the throttle reasons."""
    script = h100(uuid)
    script["devices"] = [{"name": "Tesla T4", "uuid": uuid}]
    script["driver"] = "450.80.02"
    script["gpm"] = False
    script["values"]["nvmlDeviceGetCurrentClocksThrottleReasons"] = [4]
    script["errors"] = {"nvmlDeviceGetCurrentClocksEventReasons": "FunctionNotFound"}
    return script


def no_driver() -> FakeScript:
    """A machine without an NVIDIA driver."""
    return {"errors": {"nvmlInit": "LibraryNotFound"}}


def fake_nvml(script: FakeScript) -> ModuleType:
    """A module with the part of pynvml that gpulab uses, playing `script`."""
    module = ModuleType("pynvml")
    fake = _Fake(script)
    module.__dict__.update(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        NVML_GPM_METRICS_GET_VERSION=1,
        nvmlMemory_v2=0x02000028,
        c_nvmlGpmMetricsGet_t=GpmRequest,
        state=fake,
    )
    for name in {*dir(fake), *READINGS}:
        if name.startswith("nvml"):
            setattr(module, name, fake.scripted(name))
    return module


class NVMLError(Exception):
    """As pynvml's: carries NVML's error code as `value`."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return next((name for name, code in ERROR_CODES.items() if code == self.value), f"code {self.value}")


def _given(value: Given | None) -> Given:
    if value is None:
        raise NVMLError(ERROR_CODES["NotSupported"])
    return value


class GpmMetric(Struct):
    """One slot of a GPM request."""

    metricId: int = 0
    nvmlReturn: int = 0
    value: float = 0.0


class GpmRequest(Struct):
    """As pynvml's c_nvmlGpmMetricsGet_t."""

    version: int = 0
    numMetrics: int = 0
    sample1: object = None
    sample2: object = None
    metrics: list[GpmMetric] = field(default_factory=lambda: [GpmMetric() for _ in range(32)])


class GpmSample:
    """A sample buffer that knows whether it was filled and freed."""

    def __init__(self) -> None:
        self.filled = False
        self.freed = False


class _Fake:
    """The functions of pynvml that gpulab calls, each answering from the script."""

    def __init__(self, script: FakeScript) -> None:
        self.script = script
        self.calls: dict[str, int] = {}
        self.open_sessions = 0
        self.samples: list[GpmSample] = []

    def scripted(self, name: str) -> Callable[..., object]:
        """The function, failing and dying where the script says so."""
        answer: Callable[..., object] = getattr(self, name, functools.partial(self._reading, name))

        def call(*args: object) -> object:
            self.calls[name] = self.calls.get(name, 0) + 1
            self._fail(name)
            return answer(*args)

        return call

    def _fail(self, name: str) -> None:
        error = self.script.get("errors", {}).get(name)
        good_calls, later_error = self.script.get("fails_after", {}).get(name, (0, None))
        if later_error is not None and self.calls[name] > good_calls:
            error = later_error
        if error is not None:
            raise NVMLError(ERROR_CODES[error])

    def _value(self, name: str) -> float:
        values = self.script.get("values", {}).get(name)
        if not values:
            raise NVMLError(ERROR_CODES["NotSupported"])
        return values[min(self.calls.get(name, 1), len(values)) - 1]

    def _reading(self, name: str, handle: Handle, _which: int = 0) -> int:
        self._whole(handle)
        return int(self._value(name))

    def _whole(self, handle: Handle) -> FakeDevice:
        """A GPU that is asked for what no MIG part tells of itself."""
        if isinstance(handle, tuple):
            raise NVMLError(ERROR_CODES["NotSupported"])
        return self.script["devices"][handle]

    def _device(self, handle: Handle) -> FakeDevice:
        if isinstance(handle, tuple):
            return self.script["devices"][handle[0]]["parts"][handle[1]]
        return self.script["devices"][handle]

    # NVML's own names, from here to the end.

    def nvmlInit(self) -> None:
        self.open_sessions += 1

    def nvmlShutdown(self) -> None:
        assert all(s.freed for s in self.samples), "a GPM sample outlives NVML"
        self.open_sessions -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.script.get("driver", "0")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.script.get("devices", []))

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return _given(self.script.get("cuda"))

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle:
        return index

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Handle) -> int:
        return 7 if "parts" in self._device(handle) else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, number: int) -> Handle:
        if number >= len(self._device(handle).get("parts", [])):
            raise NVMLError(ERROR_CODES["NotFound"])
        return handle, number

    def nvmlDeviceGetName(self, handle: Handle) -> str:
        return self._device(handle)["name"]

    def nvmlDeviceGetUUID(self, handle: Handle) -> str:
        return self._device(handle)["uuid"]

    def nvmlDeviceGetNumGpuCores(self, handle: Handle) -> int:
        return _given(self._device(handle).get("cores"))

    def nvmlDeviceGetCudaComputeCapability(self, handle: Handle) -> tuple[int, int]:
        return _given(self._device(handle).get("capability"))

    def nvmlDeviceGetAttributes_v2(self, handle: Handle) -> SimpleNamespace:
        return SimpleNamespace(multiprocessorCount=_given(self._device(handle).get("sm_count")))

    def nvmlDeviceGetUtilizationRates(self, handle: Handle) -> SimpleNamespace:
        if "parts" in self._whole(handle):
            raise NVMLError(ERROR_CODES["NotSupported"])  # NVML: not on a GPU that MIG splits
        last = self.script.get("exits_after")
        if last is not None and self.calls["nvmlDeviceGetUtilizationRates"] > last:
            os._exit(3)
        return SimpleNamespace(gpu=int(self._value("nvmlDeviceGetUtilizationRates")), memory=0)

    def nvmlDeviceGetMemoryInfo(self, handle: Handle, _version: int = 1) -> SimpleNamespace:
        used, total = int(self._value("nvmlDeviceGetMemoryInfo")), self._device(handle).get("memory_bytes", 80 * 2**30)
        return SimpleNamespace(used=used, total=total, free=total - used)

    def nvmlDeviceGetPowerUsage(self, handle: Handle) -> int:
        return self._reading("nvmlDeviceGetPowerUsage", handle)

    def nvmlDeviceGetPowerManagementLimit(self, _handle: Handle) -> int:
        return 700_000

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: Handle) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=2**30) for pid in self.script.get("processes", [])]

    def nvmlGpmQueryDeviceSupport(self, handle: Handle) -> SimpleNamespace:
        self._whole(handle)
        return SimpleNamespace(isSupportedDevice=int(self.script.get("gpm", False)))

    def nvmlGpmSampleAlloc(self) -> GpmSample:
        self.samples.append(GpmSample())
        return self.samples[-1]

    def nvmlDeviceGetGpuInstanceId(self, handle: Handle) -> int:
        return _given(self._device(handle).get("instance"))

    def nvmlGpmMigSampleGet(self, handle: Handle, instance: int, sample: GpmSample) -> GpmSample:
        if instance not in [part.get("instance") for part in self._whole(handle).get("parts", [])]:
            raise NVMLError(ERROR_CODES["InvalidArgument"])
        return self.nvmlGpmSampleGet(handle, sample)

    def nvmlGpmSampleGet(self, handle: Handle, sample: GpmSample) -> GpmSample:
        self._whole(handle)
        assert not sample.freed, "a freed GPM sample is filled"
        sample.filled = True
        return sample

    def nvmlGpmSampleFree(self, sample: GpmSample) -> None:
        assert not sample.freed, "a GPM sample is freed twice"
        sample.freed = True

    def nvmlGpmMetricsGet(self, request: GpmRequest) -> GpmRequest:
        first, second = request.sample1, request.sample2
        assert isinstance(first, GpmSample) and isinstance(second, GpmSample) and first is not second
        assert first.filled and second.filled, "GPM metrics of a sample that was never taken"
        for metric in request.metrics[: request.numMetrics]:
            key = f"gpm:{metric.metricId}"
            self.calls[key] = self.calls.get(key, 0) + 1
            try:
                self._fail(key)
                metric.value, metric.nvmlReturn = self._value(key), 0
            except NVMLError as e:
                metric.nvmlReturn = e.value
        return request
