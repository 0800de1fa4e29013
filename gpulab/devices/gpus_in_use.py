"""The GPUs that this process uses. Nothing here starts CUDA or opens a context on a GPU that nobody uses."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType

from gpulab.errors import DeviceLost


def in_use() -> list[int]:
    """GPUs on which torch's allocator holds memory; the current one where the allocator is not torch's own."""
    torch = torch_with_cuda()
    if torch is None:
        return []
    try:
        return [index for index in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(index)]
    except RuntimeError:  # a CUDAPluggableAllocator counts nothing
        return [torch.cuda.current_device()]


def in_graph_capture() -> bool:
    """Whether this thread captures a CUDA graph: what is launched becomes part of it, and waiting makes it invalid."""
    torch = torch_with_cuda()
    try:
        return torch is not None and bool(torch.cuda.is_current_stream_capturing())
    except RuntimeError:  # a GPU whose error stays captures nothing
        return False


def synchronize(more: Iterable[int] = ()) -> None:
    """Wait for the GPUs in use, and for `more`. Raises DeviceLost where an error of the GPU stays."""
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
    """The error of a GPU that stays, if there is one. Waits for the GPUs in use."""
    try:
        synchronize()
    except DeviceLost as e:
        return e
    return None


def free_bytes(index: int) -> int:
    """Free memory of that GPU, as CUDA tells it. CUDA must have been started."""
    import torch

    return int(torch.cuda.mem_get_info(index)[0])


def torch_with_cuda() -> ModuleType | None:
    """torch, where it has started CUDA."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def _stays(torch: ModuleType, index: int) -> bool:
    """An error that stays is raised by every call; any other is raised once."""
    try:
        torch.cuda.synchronize(index)
    except RuntimeError:
        return True
    return False
