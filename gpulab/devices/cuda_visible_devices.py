"""Which GPUs CUDA would offer to this process, and as which number, told by NVML so that CUDA is not started for it.

CUDA that was started in a process cannot be used in what is forked from it: a notebook in which gpulab had only asked
for the GPU's name could not start a training in processes of its own any more.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TypeVar

from msgspec import Struct

from gpulab.devices.nvml import bare_uuid, mig_parts, session

Value = TypeVar("Value")

# 32-bit floating-point results per clock and SM, by compute capability (CUDA C++ Programming Guide, "Arithmetic
# Instructions"): what NVML calls a core. A capability that is not here leaves the number of SMs unknown.
CORES_PER_SM = {
    (6, 0): 64, (6, 1): 128, (6, 2): 128, (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64, (8, 6): 128, (8, 7): 128,
    (8, 9): 128, (9, 0): 128, (10, 0): 128, (10, 3): 128, (11, 0): 128, (12, 0): 128, (12, 1): 128,
}  # fmt: skip


class Gpu(Struct, frozen=True):
    """A GPU, or a MIG part of one, as a process may use it; None is what is not known."""

    name: str
    uuid: str | None = None
    memory_total_bytes: int | None = None
    sm_count: int | None = None
    compute_capability: str | None = None


def visible_gpus(environ: Mapping[str, str] = os.environ, nvml: ModuleType | None = None) -> list[Gpu] | None:
    """The GPUs that CUDA would number from 0; None where NVML does not work, or cannot tell the numbers.

    It cannot where different GPUs are counted (CUDA puts the fastest first, unless CUDA_DEVICE_ORDER is PCI_BUS_ID),
    and where a GPU split by MIG is meant as a whole.
    """
    asked = environ.get("CUDA_VISIBLE_DEVICES")
    try:
        with session(nvml) as nv:
            if asked is not None and asked.startswith(("GPU-", "MIG-")):
                chosen = _by_uuid(nv, asked.split(","))
            else:
                by_bus = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
                chosen = _by_number(nv, asked, by_bus=by_bus)
            return None if chosen is None else [_described(nv, handle) for handle in chosen]
    except Exception:  # no driver, or a GPU that does not answer
        return None


def driver_cuda(nvml: ModuleType | None = None) -> tuple[int, int] | None:
    """The newest CUDA the driver can run, as (major, minor); None where NVML does not say."""
    try:
        with session(nvml) as nv:
            version: int = nv.nvmlSystemGetCudaDriverVersion_v2()
    except Exception:
        return None
    return version // 1000, version % 1000 // 10


def _wholes(nv: ModuleType) -> list[object]:
    return [nv.nvmlDeviceGetHandleByIndex(index) for index in range(nv.nvmlDeviceGetCount())]


def _by_uuid(nv: ModuleType, words: Sequence[str]) -> list[object] | None:
    """As CUDA reads a list of UUIDs: beginnings are enough, what follows an unknown one is not seen."""
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


def _by_number(nv: ModuleType, asked: str | None, *, by_bus: bool) -> list[object] | None:
    """As CUDA reads a list of numbers; without one, every GPU."""
    wholes = _wholes(nv)
    numbers = list(range(len(wholes))) if asked is None else _numbers(asked, len(wholes))
    if not numbers:
        return []
    alike = len({nv.nvmlDeviceGetName(handle) for handle in wholes}) == 1
    if not (alike or by_bus) or any(_is_split(nv, handle) for handle in wholes):
        return None
    return [wholes[number] for number in numbers]


def _numbers(text: str, count: int) -> list[int]:
    """What follows an entry that is no GPU's number is not seen; a number given twice makes the list void."""
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
    """NVML gives the SMs of a MIG part, and the cores of a whole GPU."""
    parts = _or_none(lambda: int(nv.nvmlDeviceGetAttributes_v2(handle).multiprocessorCount))
    if parts:
        return parts
    cores = _or_none(lambda: int(nv.nvmlDeviceGetNumGpuCores(handle)))
    per_sm = CORES_PER_SM.get((capability[0], capability[1])) if capability else None
    return cores // per_sm if cores and per_sm else None


def _or_none(ask: Callable[[], Value]) -> Value | None:
    with contextlib.suppress(Exception):  # each question on its own: one refusal must not hide the rest
        return ask()
    return None
