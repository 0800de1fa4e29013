"""The GPUs that CUDA offers to this process, and those it uses, without initializing CUDA in the user's process.

Forked children cannot use CUDA once their parent has initialized it: asking CUDA for the name of a GPU would keep a
notebook from training in forked processes. So NVML is asked. If NVML cannot answer, a separate process asks CUDA. The
last line of its output is one JSON object, `{"gpus": [...]}` or `{"kernels": n}`; messages of CUDA and CUPTI go to
standard error.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from msgspec import Struct

from gpulab.devices.nvml import bare_uuid, mig_parts, session
from gpulab.devices.own_processes import run_python
from gpulab.errors import DeviceLost
from gpulab.formatting import plain_values

if TYPE_CHECKING:
    import subprocess

Value = TypeVar("Value")

# 32-bit floating-point results per clock and SM, by compute capability (CUDA C++ Programming Guide, "Arithmetic
# Instructions"): NVML's "cores". For a capability that is not listed, the number of SMs is unknown.
CORES_PER_SM = {
    (6, 0): 64, (6, 1): 128, (6, 2): 128, (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64, (8, 6): 128, (8, 7): 128,
    (8, 9): 128, (9, 0): 128, (10, 0): 128, (10, 3): 128, (11, 0): 128, (12, 0): 128, (12, 1): 128,
}  # fmt: skip


class Gpu(Struct, frozen=True):
    """A GPU, or a MIG part of one; None: unknown."""

    name: str
    uuid: str | None = None
    memory_total_bytes: int | None = None
    sm_count: int | None = None
    compute_capability: str | None = None


def visible_gpus(environ: Mapping[str, str] = os.environ, nvml: ModuleType | None = None) -> list[Gpu] | None:
    """The GPUs in CUDA's numbering from 0; None if NVML does not work, or cannot determine the numbering.

    It cannot if the GPUs differ (CUDA puts the fastest first, unless CUDA_DEVICE_ORDER is PCI_BUS_ID), or if a GPU
    split by MIG is meant as a whole.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    try:
        with session(nvml) as nv:
            if visible is not None and visible.startswith(("GPU-", "MIG-")):
                gpu_handles = _by_uuid(nv, visible.split(","))
            else:
                by_bus = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
                gpu_handles = _by_number(nv, visible, by_bus=by_bus)
            return None if gpu_handles is None else [_described(nv, handle) for handle in gpu_handles]
    except Exception:  # no driver, or a GPU that does not answer
        return None


def driver_cuda(nvml: ModuleType | None = None) -> tuple[int, int] | None:
    """The newest CUDA that the driver can run, as (major, minor); None if NVML does not report it."""
    try:
        with session(nvml) as nv:
            version: int = nv.nvmlSystemGetCudaDriverVersion_v2()
    except Exception:
        return None
    return version // 1000, version % 1000 // 10


def _wholes(nv: ModuleType) -> list[object]:
    return [nv.nvmlDeviceGetHandleByIndex(index) for index in range(nv.nvmlDeviceGetCount())]


def _by_uuid(nv: ModuleType, words: Sequence[str]) -> list[object] | None:
    """The GPUs of a list of UUIDs, read as CUDA does: prefixes are enough, and an unknown UUID ends the list."""
    handles = {nv.nvmlDeviceGetUUID(h): h for whole in _wholes(nv) for h in (whole, *mig_parts(nv, whole))}
    uuids: list[str] = []
    for word in words:
        fitting = [uuid for uuid in handles if uuid.lower().startswith(word.strip().lower())]
        if len(fitting) != 1:
            break
        uuids += fitting
    if any(uuid.startswith("GPU-") and _is_split(nv, handles[uuid]) for uuid in uuids):
        return None
    return [handles[uuid] for uuid in uuids] if len(set(uuids)) == len(uuids) else []


def _by_number(nv: ModuleType, visible: str | None, *, by_bus: bool) -> list[object] | None:
    """The GPUs of a list of numbers, read as CUDA does; without a list, every GPU."""
    wholes = _wholes(nv)
    numbers = list(range(len(wholes))) if visible is None else _numbers(visible, len(wholes))
    if not numbers:
        return []
    alike = len({nv.nvmlDeviceGetName(handle) for handle in wholes}) == 1
    if not (alike or by_bus) or any(_is_split(nv, handle) for handle in wholes):
        return None
    return [wholes[number] for number in numbers]


def _numbers(text: str, count: int) -> list[int]:
    """The numbers in a list: an entry that is not a GPU's number ends the list, a repeated number makes it void."""
    numbers: list[int] = []
    for word in text.split(","):
        number = re.match(r"\s*\+?(\d+)", word)
        if number is None or int(number[1]) >= count:
            break
        numbers.append(int(number[1]))
    return numbers if len(set(numbers)) == len(numbers) else []


def _is_split(nv: ModuleType, handle: object) -> bool:
    return next(mig_parts(nv, handle), None) is not None


def _described(nv: ModuleType, handle: object) -> Gpu:
    capability = _or_none(lambda: tuple(nv.nvmlDeviceGetCudaComputeCapability(handle)))
    uuid: str = nv.nvmlDeviceGetUUID(handle)
    return Gpu(
        name=nv.nvmlDeviceGetName(handle),
        uuid=uuid if uuid.startswith("MIG-") else bare_uuid(uuid),
        memory_total_bytes=_or_none(lambda: int(nv.nvmlDeviceGetMemoryInfo(handle).total)),
        sm_count=_sm_count(nv, handle, capability),
        compute_capability=".".join(map(str, capability)) if capability else None,
    )


def _sm_count(nv: ModuleType, handle: object, capability: tuple[int, ...] | None) -> int | None:
    """The number of SMs: NVML has the SMs of a MIG part, but only the cores of a whole GPU."""
    parts = _or_none(lambda: int(nv.nvmlDeviceGetAttributes_v2(handle).multiprocessorCount))
    if parts:
        return parts
    cores = _or_none(lambda: int(nv.nvmlDeviceGetNumGpuCores(handle)))
    per_sm = CORES_PER_SM.get((capability[0], capability[1])) if capability else None
    return cores // per_sm if cores and per_sm else None


def _or_none(ask: Callable[[], Value]) -> Value | None:
    with contextlib.suppress(Exception):  # separate queries: one refusal must not hide the rest
        return ask()
    return None


TIMEOUT_S = 60.0  # mostly for importing PyTorch from a slow disk
DEVICE_FILES = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/kfd", "/dev/dxg")  # NVIDIA, Jetson, AMD, WSL
DECIDING = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
LAUNCHED = 64  # in a test: CUPTI of CUDA 12.6 to 13.0 loses a few at a session's start (pytorch#192021)

Question = Literal["gpus", "kernels"]
_CUPTI_LINE = re.compile(r"^.*(?:CUPTI|[Ii]nsufficient [Pp]rivilege).*$", re.MULTILINE)
_LOG_PREFIX = re.compile(r"^(?:\[[^\]]*\]|\w+:\S+ \S+ \S+ \S+\]|\s)+")


class ProbeResult(Struct, frozen=True):
    """How many of the `LAUNCHED` small profiled kernels the trace has, or why it has none."""

    kernels: int
    reason: str = ""


def gpus_by_cuda() -> list[Gpu]:
    """The GPUs in PyTorch's order; empty if there is no device file of a GPU. Takes seconds, once."""
    if not any(map(os.path.exists, DEVICE_FILES)):
        return []
    return list(_gpus(tuple(os.environ.get(name) for name in DECIDING)))


@functools.cache
def _gpus(deciding: tuple[str | None, ...]) -> tuple[Gpu, ...]:
    done = ask("gpus")
    rows = _last_object(done.stdout).get("gpus") if done is not None else None
    return tuple(Gpu(**row) for row in rows) if isinstance(rows, list) else ()


def try_tracing() -> ProbeResult:
    """Profile small kernels and count those in the trace. Takes seconds."""
    return probe_result(ask("kernels"))


def probe_result(done: subprocess.CompletedProcess[str] | None) -> ProbeResult:
    """The result from the output of the process; None: it did not end in time."""
    if done is None:
        return ProbeResult(0, f"the trial did not end within {TIMEOUT_S:g} s")
    kernels = _last_object(done.stdout).get("kernels")
    if isinstance(kernels, int) and kernels > 0:
        return ProbeResult(kernels)
    complaint = _CUPTI_LINE.search(done.stderr)
    if complaint is not None:
        return ProbeResult(0, _LOG_PREFIX.sub("", complaint[0]).strip())
    if kernels == 0:
        return ProbeResult(0, "a kernel ran and did not come back")
    if done.returncode < 0:
        return ProbeResult(0, f"the trial was ended by signal {-done.returncode}")
    lines = done.stderr.strip().splitlines()
    return ProbeResult(0, lines[-1].strip() if lines else f"the trial ended with exit code {done.returncode}")


def ask(question: Question) -> subprocess.CompletedProcess[str] | None:
    """The answer of a separate process; None if it does not end in time."""
    import subprocess

    try:
        return run_python("gpulab.devices.gpus:answer", question, timeout_s=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None


def answer(question: Question) -> None:
    """Runs in the separate process: print the answer."""
    print(json.dumps({"gpus": plain_values(_own_gpus())} if question == "gpus" else {"kernels": _kernels()}))


def _own_gpus() -> list[Gpu]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [described(torch.cuda.get_device_properties(index)) for index in range(torch.cuda.device_count())]


def described(properties: Any) -> Gpu:
    """A GPU from `torch.cuda.get_device_properties`; PyTorch before 2.5 has no UUID."""
    uuid = getattr(properties, "uuid", None)
    return Gpu(
        name=properties.name,
        uuid=None if uuid is None else str(uuid),
        memory_total_bytes=properties.total_memory,
        sm_count=properties.multi_processor_count,
        compute_capability=f"{properties.major}.{properties.minor}",
    )


def _kernels() -> int:
    """Profile small kernels and count the kernels that the device reports."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    ones = torch.ones(256, 256, device="cuda")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(LAUNCHED):
            ones = ones + 1
        torch.cuda.synchronize()
    return kernels_among(profiler.events() or ())


def kernels_among(events: Iterable[Any]) -> int:
    """How many of torch's profiler events are GPU kernels, without copies and the waits that some versions record."""
    on_device = (event.name for event in events if event.device_type.name == "CUDA")
    return sum(not name.startswith("Mem") and "Sync" not in name for name in on_device)


def _last_object(text: str) -> dict[str, object]:
    lines = text.strip().splitlines()
    try:
        value = json.loads(lines[-1]) if lines else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def in_use() -> list[int]:
    """GPUs on which torch's allocator holds memory; the current GPU if the allocator is not torch's own."""
    torch = torch_with_cuda()
    if torch is None:
        return []
    try:
        return [index for index in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(index)]
    except RuntimeError:  # a CUDAPluggableAllocator counts nothing
        return [torch.cuda.current_device()]


def in_graph_capture() -> bool:
    """Whether this thread captures a CUDA graph: launches become part of the graph, and waiting would invalidate it."""
    torch = torch_with_cuda()
    try:
        return torch is not None and bool(torch.cuda.is_current_stream_capturing())
    except RuntimeError:  # a GPU with a permanent error captures nothing
        return False


def synchronize(more: Iterable[int] = ()) -> None:
    """Wait for the GPUs in use, and for `more`. Raises DeviceLost after a permanent GPU error."""
    torch = torch_with_cuda()
    if torch is None:
        return
    for index in sorted({*in_use(), *more}):
        try:
            torch.cuda.synchronize(index)
        except RuntimeError as e:
            if _stays(torch, index):
                raise DeviceLost(str(e)) from e


def lost() -> DeviceLost | None:
    """The permanent error of a GPU, if any. Waits for the GPUs in use."""
    try:
        synchronize()
    except DeviceLost as e:
        return e
    return None


def free_bytes(index: int) -> int:
    """Free memory of that GPU, from CUDA, which must have been initialized."""
    import torch

    return int(torch.cuda.mem_get_info(index)[0])


def torch_with_cuda() -> ModuleType | None:
    """torch, if it has initialized CUDA; else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def _stays(torch: ModuleType, index: int) -> bool:
    """Whether the error is permanent, so that every call raises it."""
    try:
        torch.cuda.synchronize(index)
    except RuntimeError:
        return True
    return False
