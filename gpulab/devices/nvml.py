"""NVIDIA's management library as a meter. Queries are separate, so that one refusal never hides the rest.

NVML is reached through the module `pynvml` of the distribution nvidia-ml-py. A missing driver is reported, not raised.
A handle is used only by the process that opened it: after a fork every reading is None.

Hardware counters (SM, occupancy, tensor, DRAM, PCIe) come from NVML GPM on Hopper and newer: the average between two
samples, which must lie at least 100 ms apart. `nvmlDeviceGetPcieThroughput` is never called: it blocks for 20 ms.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType

from msgspec import Struct

from gpulab.devices.meters import Answer, Failure, Meter, Query, Unavailable
from gpulab.live_feed import SeriesInfo

GPM_INTERVAL_S = 0.18  # 200 ms at a 10 Hz reading, with room for jitter; NVML asks for 100 ms or more
MIB_IN_MB = 1.048576
READINGS_PER_PROCESS_LIST = 10
HOST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO in Linux's include/linux/proc_ns.h

# Error codes are part of NVML's ABI (nvml.h, nvmlReturn_t).
REASONS = {
    1: "NVML is not initialised",
    2: "NVML refused the arguments",
    3: "not supported by this GPU or its driver",
    4: "no permission: the driver or the container refuses it",
    6: "not found on this machine",
    9: "the NVIDIA driver is not loaded",
    10: "NVML did not answer in time",
    12: "no NVIDIA driver on this machine (libnvidia-ml is not found)",
    13: "the NVIDIA driver is too old for it",
    15: "the GPU fell off the bus or is not reachable",
    16: "the GPU must be reset",
    17: "the operating system or the container blocks it",
    18: "the driver and its library differ in version: reboot, or reload the driver",
    21: "NVML has no data for it yet",
    25: "the NVIDIA driver is too old for it",
    27: "the GPU is not ready",
    999: "NVML failed without a reason",
}


def reason_of(error: Exception) -> str:
    """Why NVML refused, in words a user can act on."""
    if isinstance(error, ImportError):
        return "the package nvidia-ml-py is not installed"
    if isinstance(error, AttributeError):
        return "the installed nvidia-ml-py is too old for it"
    code = getattr(error, "value", None)
    return REASONS.get(code, f"NVML error {code}: {error}") if isinstance(code, int) else f"{error}"


def load_nvml() -> ModuleType:
    """The module `pynvml`. Raises ImportError where nvidia-ml-py is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # from the deprecated distribution; the doctor reports it
        import pynvml
    module: ModuleType = pynvml
    return module


@contextlib.contextmanager
def session(nvml: ModuleType | None = None) -> Iterator[ModuleType]:
    """NVML for a few queries. Raises the errors of its import and of nvmlInit; `reason_of` explains them."""
    nv = nvml or load_nvml()
    nv.nvmlInit()
    try:
        yield nv
    finally:
        nv.nvmlShutdown()


def nvml_index_for(uuid: str | None, nvml: ModuleType | None = None) -> int | None:
    """NVML's index of the GPU with torch's `uuid` (with or without "GPU-" in front), which may also name a MIG part.

    None if NVML has no such GPU or does not work. Without a UUID (old torch) it is the only GPU of the machine; None if
    there are several.
    """
    try:
        with session(nvml) as nv:
            place = _find(nv, uuid)
    except Exception:
        return None
    return None if place is None else place.index


def nvml_meter(uuid: str | None, pid: int, nvml: ModuleType | None = None) -> Meter:
    """A meter for one GPU and the profiled process `pid`. Never raises: without NVML it is empty and says why."""
    try:
        nv = nvml or load_nvml()
        nv.nvmlInit()
    except Exception as e:
        return Meter([], [Unavailable("GPU curves", reason_of(e))])
    place = _find(nv, uuid)
    if place is None:
        nv.nvmlShutdown()
        return Meter([], [Unavailable("GPU curves", f"NVML knows no GPU with the UUID {uuid}")])
    gpu = _Gpu(nv, place, pid)
    return Meter(gpu.queries(), gpu.unavailable, gpu.close)


def bare_uuid(uuid: str) -> str:
    """A GPU's UUID without NVML's prefix, in lower case: torch and NVML spell it differently."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def mig_parts(nv: ModuleType, handle: object) -> Iterator[object]:
    """Handles of the parts into which MIG splits a GPU; none if it is not split."""
    try:
        most: int = nv.nvmlDeviceGetMaxMigDeviceCount(handle)
    except Exception:  # a GPU without MIG, or a driver that does not know it
        return
    for number in range(most):
        with contextlib.suppress(nv.NVMLError):  # the numbers have gaps
            yield nv.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)


class _Place(Struct, frozen=True):
    """A GPU by its NVML index; for a MIG part also the part's handle. `handle` is the owner of memory and processes."""

    index: int
    whole: object
    handle: object

    @property
    def is_part(self) -> bool:
        return self.handle is not self.whole


def _find(nv: ModuleType, uuid: str | None) -> _Place | None:
    count: int = nv.nvmlDeviceGetCount()
    if uuid is None:
        only = nv.nvmlDeviceGetHandleByIndex(0) if count == 1 else None
        return _Place(0, only, only) if count == 1 else None
    for index in range(count):
        with contextlib.suppress(nv.NVMLError):  # a GPU that answers nothing must not hide its neighbours
            whole = nv.nvmlDeviceGetHandleByIndex(index)
            for handle in (whole, *mig_parts(nv, whole)):
                if bare_uuid(nv.nvmlDeviceGetUUID(handle)) == bare_uuid(uuid):
                    return _Place(index, whole, handle)
    return None


class _Gpu:
    """The queries of one GPU and their resources."""

    def __init__(self, nv: ModuleType, place: _Place, pid: int) -> None:
        self._nv, self._pid, self._place = nv, pid, place
        self._handle, self._whole = place.handle, place.whole
        self._of_whole = " (whole GPU)" if place.is_part else ""
        self._owner = os.getpid()
        self._first_energy_mj: int | None = None
        self._turn = 0
        self._own_pids: set[int] = set()
        self._gpm: _Gpm | None = None
        self.unavailable: list[Unavailable] = []

    def queries(self) -> list[Query]:
        """Every query this GPU might answer. A MIG part has only memory, processes and counters."""
        nv, h, whole = self._nv, self._whole, self._of_whole
        simple: list[tuple[str, str, str, Callable[[], float | None]]] = [
            ("gpu_utilization_pct", "%", f"GPU utilization{whole}", lambda: nv.nvmlDeviceGetUtilizationRates(h).gpu),
            ("gpu_memory_used_bytes", "bytes", "GPU memory used (all processes)", self._memory_reader()),
            ("power_w", "W", f"power{whole}", lambda: nv.nvmlDeviceGetPowerUsage(h) / 1e3),
            ("energy_j", "J", f"energy since the start{whole}", self._energy),
            ("sm_clock_mhz", "MHz", f"SM clock{whole}", lambda: nv.nvmlDeviceGetClockInfo(h, nv.NVML_CLOCK_SM)),
            (
                "temperature_c",
                "°C",
                f"temperature{whole}",
                lambda: nv.nvmlDeviceGetTemperature(h, nv.NVML_TEMPERATURE_GPU),
            ),
            ("throttle_reasons", "bits", f"throttle reasons{whole}", self._throttle),
        ]
        if sees_host_pids():
            simple.append(("other_gpu_processes", "processes", "other processes on the GPU", self._other_processes))
        else:
            why = "NVML names processes by the host's ids, which this container does not see"
            self.unavailable.append(Unavailable("other processes on the GPU", why))
        queries = [
            Query([SeriesInfo(name, unit, label, "NVML")], self._guarded(ask), reason_of)
            for name, unit, label, ask in simple
        ]
        return queries + self._gpm_query()

    def close(self) -> None:
        """Free the GPM samples, then end NVML. Does nothing after a fork: the handles belong to the parent."""
        if os.getpid() != self._owner:
            return
        if self._gpm is not None:
            self._gpm.free()
        with contextlib.suppress(self._nv.NVMLError):
            self._nv.nvmlShutdown()

    def _guarded(self, ask: Callable[[], float | None]) -> Callable[[], list[Answer]]:
        def one() -> list[Answer]:
            if os.getpid() != self._owner:
                return [None]
            value = ask()
            return [None if value is None else float(value)]

        return one

    def _memory_reader(self) -> Callable[[], float]:
        """A reader of used memory. Version 2 excludes the driver's reserve, as nvidia-smi does; older drivers have only
        version 1.
        """
        nv, h = self._nv, self._handle
        try:
            version = nv.nvmlMemory_v2
            nv.nvmlDeviceGetMemoryInfo(h, version)
        except Exception:
            return lambda: nv.nvmlDeviceGetMemoryInfo(h).used
        return lambda: nv.nvmlDeviceGetMemoryInfo(h, version).used

    def _energy(self) -> float:
        now: int = self._nv.nvmlDeviceGetTotalEnergyConsumption(self._whole)
        if self._first_energy_mj is None:
            self._first_energy_mj = now
        return (now - self._first_energy_mj) / 1e3

    def _throttle(self) -> float:
        ask = getattr(self._nv, "nvmlDeviceGetCurrentClocksEventReasons", None)
        if ask is not None:
            with contextlib.suppress(self._nv.NVMLError):  # drivers before 535 only know the old name
                return float(ask(self._whole))
        return float(self._nv.nvmlDeviceGetCurrentClocksThrottleReasons(self._whole))

    def _other_processes(self) -> float | None:
        self._turn += 1
        if (self._turn - 1) % READINGS_PER_PROCESS_LIST:
            return None
        running = {p.pid for p in self._nv.nvmlDeviceGetComputeRunningProcesses(self._handle)}
        self._own_pids |= {pid for pid in running - self._own_pids if belongs_to(pid, self._pid)}
        return float(len(running - self._own_pids))

    def _gpm_query(self) -> list[Query]:
        why = gpm_refusal(self._nv, self._whole)
        if why is not None:
            self.unavailable.append(Unavailable(", ".join(GPM_LABELS), why))
            return []
        self._gpm = _Gpm(self._nv, self._place)
        series = [SeriesInfo(name, unit, label, "NVML GPM") for name, unit, label, _, _ in GPM_SERIES]
        return [Query(series, self._gpm.ask, reason_of)]


# name, unit, label, metric id (nvml.h, nvmlGpmMetricId_t), factor to our unit
GPM_SERIES = (
    ("sm_active_fraction", "fraction", "SM active", 2, 0.01),
    ("sm_occupancy_fraction", "fraction", "SM occupancy", 3, 0.01),
    ("tensor_active_fraction", "fraction", "tensor active", 5, 0.01),
    ("dram_active_fraction", "fraction", "DRAM active", 10, 0.01),
    ("pcie_tx_mb_per_s", "MB/s", "PCIe from the GPU", 20, MIB_IN_MB),
    ("pcie_rx_mb_per_s", "MB/s", "PCIe to the GPU", 21, MIB_IN_MB),
)
GPM_LABELS = tuple(label for _, _, label, _, _ in GPM_SERIES)


def gpm_refusal(nv: ModuleType, handle: object) -> str | None:
    """Why this GPU has no hardware counters through NVML GPM; None if it has."""
    try:
        supported = bool(nv.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)
    except Exception as e:
        return f"{reason_of(e)} (NVML GPM needs Hopper or newer)"
    return None if supported else "this GPU has no NVML GPM (Hopper or newer has it)"


class _Gpm:
    """Two alternating GPM samples; each pair yields the averages over the time between them."""

    def __init__(self, nv: ModuleType, place: _Place) -> None:
        self._nv, self._place = nv, place
        self._owner = os.getpid()
        self._samples: list[object] = []
        self._sampled_s: float | None = None
        self._request = nv.c_nvmlGpmMetricsGet_t()
        self._request.version = nv.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(GPM_SERIES)
        for slot, (_, _, _, metric, _) in enumerate(GPM_SERIES):
            self._request.metrics[slot].metricId = metric

    def ask(self) -> list[Answer]:
        """The averages since the last sample; all None until the two are far enough apart."""
        nothing: list[Answer] = [None] * len(GPM_SERIES)
        now_s = time.perf_counter()
        too_early = self._sampled_s is not None and now_s - self._sampled_s < GPM_INTERVAL_S
        if os.getpid() != self._owner or too_early:
            return nothing
        while len(self._samples) < 2:
            self._samples.append(self._nv.nvmlGpmSampleAlloc())
        older, newer = self._samples
        try:
            # a MIG part has no sample by its own handle: it is an instance of its GPU
            nv, place = self._nv, self._place
            if place.is_part:
                nv.nvmlGpmMigSampleGet(place.whole, nv.nvmlDeviceGetGpuInstanceId(place.handle), newer)
            else:
                nv.nvmlGpmSampleGet(place.whole, newer)
        except Exception:
            self._sampled_s = None  # the pair is broken: start with a new first sample
            raise
        first, self._sampled_s, self._samples = self._sampled_s is None, now_s, [newer, older]
        if first:
            return nothing
        self._request.sample1, self._request.sample2 = older, newer
        self._nv.nvmlGpmMetricsGet(self._request)
        return [self._answer(slot, factor) for slot, (_, _, _, _, factor) in enumerate(GPM_SERIES)]

    def free(self) -> None:
        """Free both samples; call before nvmlShutdown."""
        while self._samples:
            sample = self._samples.pop()
            with contextlib.suppress(self._nv.NVMLError):
                self._nv.nvmlGpmSampleFree(sample)

    def _answer(self, slot: int, factor: float) -> Answer:
        metric = self._request.metrics[slot]
        if metric.nvmlReturn != 0:
            return Failure(REASONS.get(metric.nvmlReturn, f"NVML GPM error {metric.nvmlReturn}"))
        value = float(metric.value)
        return value * factor if math.isfinite(value) else Failure("NVML GPM gave no number")


def sees_host_pids() -> bool:
    """Whether process ids here are those of the host, which NVML uses; false in most containers."""
    try:
        return os.readlink("/proc/self/ns/pid") == HOST_PID_NAMESPACE
    except OSError:
        return not os.path.isdir("/proc/self")  # no such file: not Linux, so no such namespaces


def belongs_to(pid: int, root: int) -> bool:
    """Whether process `pid` is `root` or descends from it."""
    import psutil

    try:
        return pid == root or any(parent.pid == root for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False
