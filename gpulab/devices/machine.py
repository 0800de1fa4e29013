"""The machine's limits, such as usable cores and memory, its software versions, and the device that is profiled."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gpulab.devices import gpus
from gpulab.devices.cgroups import ROOT, core_quotas, memory_limit_bytes
from gpulab.devices.gpus import Gpu, driver_cuda, visible_gpus
from gpulab.devices.nvml import nvml_index_for, session
from gpulab.devices.packages import package_versions
from gpulab.errors import UsageError
from gpulab.formatting import plural
from gpulab.run import Device, Environment

if TYPE_CHECKING:
    from types import ModuleType


def usable_cores(root: Path = ROOT) -> float:
    """Cores this process may use: its affinity, limited by the CPU quota of its cgroups (v1 and v2).

    `root` replaces "/" (tests use a folder).
    """
    return min([float(affinity_cores()), *core_quotas(root)])


def affinity_cores() -> int:
    """Logical cores the scheduler may put this process on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_total_bytes() -> int | None:
    """Memory this process may use: that of the machine, or the cgroup's limit if smaller."""
    total = _physical_bytes()
    return min((x for x in (total, memory_limit_bytes()) if x is not None), default=None)


def _physical_bytes() -> int | None:
    """The machine's memory, without psutil if possible: its import takes as long as everything else in this module."""
    with contextlib.suppress(ValueError, OSError, AttributeError):
        pages = os.sysconf("SC_PHYS_PAGES")
        if pages > 0:
            return pages * os.sysconf("SC_PAGE_SIZE")
    try:
        import psutil

        return int(psutil.virtual_memory().total)
    except Exception:  # no psutil, or a system it does not know
        return None


def shared_memory_bytes(path: str = "/dev/shm") -> int | None:
    """Size of the shared memory through which loader workers hand over batches; None if there is none."""
    try:
        stat = os.statvfs(path)
    except (OSError, AttributeError):
        return None
    return stat.f_blocks * stat.f_frsize


def environment(packages: Mapping[str, str] | None = None) -> Environment:
    """The machine and the software, as far as they affect the figures. Imports no heavy packages.

    `packages`: versions, if the caller has them; reading them takes the longest.
    """
    count = getattr(sys.modules.get("torch"), "get_num_threads", None)  # None, too, while another thread imports it
    return Environment(
        python=platform.python_version(),
        platform=platform.platform(),
        cpu=cpu_name(),
        logical_cores=os.cpu_count(),
        usable_cores=usable_cores(),
        memory_total_bytes=memory_total_bytes(),
        packages=dict(package_versions() if packages is None else packages),
        hostname=platform.node(),
        compute_threads=int(count()) if count is not None else None,
        affinity_cores=affinity_cores(),
        core_quota=min(core_quotas(), default=None),
    )


def cpu_name() -> str:
    """The processor's model name."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except (OSError, UnicodeDecodeError):
        text = ""
    names = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def detect_device(requested: str = "auto") -> Device:
    """The device whose time is accounted: "auto", "cpu", "cuda" (the current GPU) or "cuda:<index>".

    torch is imported only if needed: for a requested GPU, or for "auto" on a machine that may have one. CUDA is never
    initialized here: until the user's code does, NVML lists the GPUs (or else a separate process). Raises UsageError if
    the request cannot be met.
    """
    kind, _, number = requested.partition(":")
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", requested):
        raise UsageError(f'device "{requested}" is unknown: use "auto", "cpu", "cuda" or "cuda:<index>".')
    if kind == "cpu":
        return _cpu()
    needs_torch = kind == "cuda" or "torch" in sys.modules or nvml_sees_a_gpu()
    torch = _torch() if needs_torch else None
    gpus = _gpus(torch) if torch is not None else []
    if kind == "auto" and not gpus:
        return _cpu()
    if torch is None:
        raise UsageError(f'device "{requested}" needs PyTorch: pip install torch.')
    if not gpus:
        raise UsageError(f'device "{requested}" is not available: {_why_no_cuda(torch)}. Use "cpu" or "auto".')
    index = int(number) if number else _current(torch)
    if index >= len(gpus):
        raise UsageError(
            f'device "{requested}" does not exist: PyTorch sees {plural(len(gpus), "GPU")}, numbered from 0.'
        )
    return _gpu(torch, index, gpus[index])


def nvml_sees_a_gpu() -> bool:
    """Whether the driver's library lists any GPU. Does not initialize CUDA."""
    try:
        with session() as nv:
            return bool(nv.nvmlDeviceGetCount())
    except Exception:
        return False


def _cpu() -> Device:
    return Device("cpu", cpu_name(), memory_total_bytes=memory_total_bytes())


def _gpus(torch: ModuleType) -> list[Gpu]:
    """The GPUs that this PyTorch can use, in its order: from PyTorch once CUDA is initialized here, else from NVML."""
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # after a permanent GPU error, NVML still lists the GPUs
            return [gpus.described(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]
    if torch.version.cuda is None and torch.version.hip is None:
        return []
    if torch.version.cuda is not None and _driver_is_too_old(torch):
        return []
    visible = visible_gpus() if torch.version.cuda is not None else None
    return gpus.gpus_by_cuda() if visible is None else visible


def _driver_is_too_old(torch: ModuleType) -> bool:
    """Whether the driver is too old; within a major CUDA version, all drivers run (NVIDIA's minor version
    compatibility).
    """
    newest = driver_cuda()
    return newest is not None and newest[0] < int(torch.version.cuda.partition(".")[0])


def _current(torch: ModuleType) -> int:
    """The current GPU; before CUDA is initialized in this process, the first one."""
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):
            return int(torch.cuda.current_device())
    return 0


def _gpu(torch: ModuleType, index: int, gpu: Gpu) -> Device:
    nvml_index = nvml_index_for(gpu.uuid)
    details: dict[str, str | int | float | None] = {
        "sm_count": gpu.sm_count,
        "compute_capability": gpu.compute_capability,
        "cuda": torch.version.cuda or torch.version.hip,
        "nvml_index": nvml_index,
        **_nvml_details(nvml_index),
    }
    return Device("cuda", gpu.name, index, gpu.uuid, gpu.memory_total_bytes, details)


def _nvml_details(index: int | None) -> dict[str, str | int | float | None]:
    details: dict[str, str | int | float | None] = {"driver": None, "power_limit_w": None}
    if index is None:
        return details
    with contextlib.suppress(Exception), session() as nv:
        handle = nv.nvmlDeviceGetHandleByIndex(index)
        details["driver"] = nv.nvmlSystemGetDriverVersion()
        details["power_limit_w"] = nv.nvmlDeviceGetPowerManagementLimit(handle) / 1e3
    return details


def _torch() -> ModuleType | None:
    try:
        import torch
    except ImportError:
        return None
    module: ModuleType = torch
    return module


def _why_no_cuda(torch: ModuleType) -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return f"this PyTorch ({torch.__version__}) is built for the CPU only"
    newest = driver_cuda()
    if torch.version.cuda is not None and newest is not None and _driver_is_too_old(torch):
        return (
            f"this PyTorch needs CUDA {torch.version.cuda}, the NVIDIA driver runs CUDA {newest[0]}.{newest[1]} at most"
        )
    return "PyTorch finds no GPU it can use"
