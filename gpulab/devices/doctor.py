"""What this machine can and cannot measure, and the next step: the checks behind `gpulab doctor`."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Literal

from msgspec import Struct

from gpulab.devices import gpus, machine, nvml
from gpulab.devices.cgroups import memory_limit_bytes
from gpulab.devices.gpus import ProbeResult
from gpulab.formatting import number, plural, size

State = Literal["ok", "limited", "refused", "absent"]

SMALL_SHARED_MEMORY_BYTES = 2**30  # PyTorch's own advice for containers: more than Docker's 64 MB; --ipc=host
SMALL_MEMORY_BYTES = 2 * 2**30


class Check(Struct, frozen=True):
    """The result of one check: its state, the evidence, and what to do, if anything."""

    name: str
    state: State
    evidence: str
    next_step: str = ""


def examine(
    store: Path | None = None,
    nvml_module: ModuleType | None = None,
    try_tracing: Callable[[], ProbeResult] = gpus.try_tracing,
) -> tuple[Check, ...]:
    """Check everything that decides what can be measured here. Never raises; imports torch if it is installed.

    `store` is the folder of the runs (None: the default store). `nvml_module` replaces `pynvml` (scripted fake).
    `try_tracing` profiles a small kernel if there is a GPU, in a separate process: CUDA is not started in this one.
    """
    checks: list[Check] = [Check("Python", "ok", f"{platform.python_version()} on {platform.system()}")]
    checks += _guarded("PyTorch", lambda: [_torch()])
    checks += _guarded("NVIDIA driver", lambda: list(_gpu_checks(nvml_module)))
    checks += _guarded("GPU work in the trace", lambda: [_kernels_in_trace(try_tracing)])
    checks += _guarded("CPU cores", lambda: [_cores()])
    checks += _guarded("memory", lambda: [_memory()])
    checks += _guarded("shared memory", lambda: [_shared_memory()])
    checks += _guarded("DataLoader workers", lambda: [_workers()])
    checks += _guarded("nvidia-ml-py", lambda: [_deprecated_pynvml()])
    checks += _guarded("run store", lambda: [_store(store)])
    return tuple(checks)


def _guarded(name: str, check: Callable[[], list[Check]]) -> list[Check]:
    try:
        return check()
    except Exception as e:  # a check that fails must not cost the others
        return [Check(name, "limited", f"check failed: {type(e).__name__}: {e}")]


def _torch() -> Check:
    try:
        import torch
    except ImportError:
        return Check("PyTorch", "absent", "not installed", "pip install torch")
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"
    built_for = f"ROCm {torch.version.hip}" if torch.version.hip else built_for
    evidence = f"{torch.__version__}, built for {built_for}"
    device = machine.detect_device()
    if device.kind == "cuda":
        return Check("PyTorch", "ok", f"{evidence}; uses {device.name}")
    if torch.version.cuda or torch.version.hip:
        return Check("PyTorch", "limited", f"{evidence}; it finds no usable GPU", "Check the driver below.")
    if machine.nvml_sees_a_gpu():
        next_step = "Install a CUDA build of PyTorch (pytorch.org/get-started): this build cannot use the GPU."
        return Check("PyTorch", "limited", f"{evidence}, although this machine has an NVIDIA GPU", next_step)
    return Check("PyTorch", "ok", f"{evidence}: the CPU is the device")


def _gpu_checks(module: ModuleType | None) -> Iterator[Check]:
    try:
        with nvml.session(module) as nv:
            count = nv.nvmlDeviceGetCount()
            yield Check("NVIDIA driver", "ok", f"{nv.nvmlSystemGetDriverVersion()}, {plural(count, 'GPU')}")
            for index in range(count):
                yield from _one_gpu(nv, index)
    except Exception as e:
        step = "Nothing to do on a machine without an NVIDIA GPU: gpulab profiles the CPU as the device."
        if isinstance(e, ImportError):
            step = "pip install nvidia-ml-py"
        yield Check("NVIDIA driver", "absent", nvml.reason_of(e), step)
        yield Check("GPU curves", "absent", "utilization, memory, power and clocks need the driver")
        yield Check("hardware counters", "absent", "SM, tensor and memory activity need the driver")


def _one_gpu(nv: ModuleType, index: int) -> Iterator[Check]:
    handle = nv.nvmlDeviceGetHandleByIndex(index)
    name = f"GPU {index}"
    meter = nvml.nvml_meter(nv.nvmlDeviceGetUUID(handle), os.getpid(), nv)
    try:
        labels = [s.label for s in meter.series() if s.source.startswith("NVML") and "GPM" not in s.source]
        counters = [s.label for s in meter.series() if "GPM" in s.source]
        unavailable = [m for m in meter.missing() if not set(m.what.split(", ")) & set(nvml.GPM_LABELS)]
        evidence = f"{nv.nvmlDeviceGetName(handle)}: {', '.join(labels) or 'nothing'}"
        if unavailable:
            evidence += "; not " + "; ".join(f"{m.what} ({m.reason})" for m in unavailable)
        yield Check(f"{name} curves", "limited" if unavailable else "ok", evidence)
        yield _counters(name, counters, nvml.gpm_refusal(nv, handle))
        yield _neighbours(nv, handle, name)
    finally:
        meter.close()


def _counters(name: str, labels: list[str], refusal: str | None) -> Check:
    if labels:
        return Check(f"{name} hardware counters", "ok", ", ".join(labels))
    step = "Nothing to do: reports show them as not measurable."
    return Check(f"{name} hardware counters", "absent", refusal or "the driver refused the first sample", step)


def _neighbours(nv: ModuleType, handle: object, name: str) -> Check:
    what = f"{name} other processes"
    try:
        pids = {p.pid for p in nv.nvmlDeviceGetComputeRunningProcesses(handle)}
    except Exception as e:
        return Check(what, "limited", f"cannot be listed: {nvml.reason_of(e)}")
    if not nvml.sees_host_pids():
        used = size(nv.nvmlDeviceGetMemoryInfo(handle).used)
        evidence = f"cannot be distinguished from ours inside this container; {used} of GPU memory is in use"
        return Check(what, "limited", evidence, "Run nvidia-smi on the host before you compare runs.")
    others = {pid for pid in pids if not nvml.belongs_to(pid, os.getpid())}
    if not others:
        return Check(what, "ok", "none: you have the GPU to yourself")
    listed = ", ".join(str(pid) for pid in sorted(others)[:5])
    step = "All GPU figures include them. Stop them, or use another GPU, before you compare runs."
    processes = "1 other process" if len(others) == 1 else f"{len(others)} other processes"
    return Check(what, "limited", f"{processes} (pid {listed})", step)


def _kernels_in_trace(try_tracing: Callable[[], ProbeResult]) -> Check:
    what = "GPU work in the trace"
    if machine.detect_device().kind == "cpu":
        unused = machine.nvml_sees_a_gpu()
        return Check(what, "absent", "not tried: PyTorch does not use the GPU" if unused else "not tried: no GPU")
    trial = try_tracing()
    if trial.kernels:
        return Check(what, "ok", f"{trial.kernels} of {gpus.LAUNCHED} test kernels were traced (CUPTI)")
    return Check(what, "refused", f"refused: {trial.reason}", _against(trial.reason))


def _against(reason: str) -> str:
    """What may help if no kernel is traced."""
    if "PRIVILEGE" in reason.upper() or _profiling_is_admin_only():
        return (
            "The driver restricts CUPTI to administrators: load it with NVreg_RestrictProfilingToAdminUsers=0, or "
            "start the container with --cap-add=SYS_ADMIN."
        )
    return (
        "Reports will have step times and GPU curves, but no kernels. Stop other profilers of this GPU (DCGM, Nsight)."
    )


def _profiling_is_admin_only() -> bool:
    try:
        return "RmProfilingAdminOnly: 1" in Path("/proc/driver/nvidia/params").read_text()
    except OSError:
        return False


def _cores() -> Check:
    logical, usable = os.cpu_count() or 1, machine.usable_cores()
    if usable >= logical:
        return Check("CPU cores", "ok", f"all {logical} are usable")
    cores = number(usable)
    step = f"Choose num_workers for {cores} cores, not for the {logical} that os.cpu_count() reports."
    return Check("CPU cores", "limited", f"{cores} of {logical} are usable (affinity or container quota)", step)


def _memory() -> Check:
    total, limit = machine.memory_total_bytes(), memory_limit_bytes()
    if total is None:
        return Check("memory", "limited", "its size cannot be read")
    evidence = size(total) + (" (container limit)" if limit == total else "")
    if total < SMALL_MEMORY_BYTES:
        return Check("memory", "limited", evidence, "Each DataLoader worker needs a few hundred MiB: use few workers.")
    return Check("memory", "ok", evidence)


def _shared_memory() -> Check:
    what = "shared memory"
    shared_bytes = machine.shared_memory_bytes()
    if shared_bytes is None:
        return Check(what, "ok", "this system has no /dev/shm; DataLoader workers pass batches another way")
    evidence = f"/dev/shm has {size(shared_bytes)}"
    if shared_bytes < SMALL_SHARED_MEMORY_BYTES:
        step = 'DataLoader workers may die with "Bus error". Start the container with --ipc=host or --shm-size=8g.'
        return Check(what, "limited", evidence, step)
    return Check(what, "ok", evidence)


def _workers() -> Check:
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    gil = "with the GIL" if getattr(sys, "_is_gil_enabled", lambda: True)() else "without the GIL"
    evidence = f"started by {method}, Python {gil}"
    if method == "fork":
        return Check("DataLoader workers", "ok", evidence)
    step = "Workers cannot import a Dataset defined in a notebook cell: move it to a module, or use num_workers=0."
    return Check("DataLoader workers", "limited", evidence, step)


def _deprecated_pynvml() -> Check:
    try:
        version = importlib.metadata.version("pynvml")
    except importlib.metadata.PackageNotFoundError:
        return Check("nvidia-ml-py", "ok", "the deprecated pynvml is absent")
    step = "pip uninstall pynvml && pip install --force-reinstall nvidia-ml-py"
    return Check("nvidia-ml-py", "limited", f"the deprecated pynvml {version} is installed and may shadow it", step)


def _store(folder: Path | None) -> Check:
    from gpulab.store.folders import default_root

    folder = (folder or default_root()).absolute()
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return Check("run store", "ok", f"runs are kept in {folder}")
    step = "Start from a writable folder, or set GPULAB_DIR."
    return Check("run store", "limited", f"{existing} is not writable: reports are shown, but runs are not saved", step)
