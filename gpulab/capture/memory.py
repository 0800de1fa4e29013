"""The peaks of memory over a run, as far as the device and the sampling process tell them."""

from __future__ import annotations

import sys

from gpulab.run import Device, Memory, Missing


def gpu_peak_bytes(device: Device) -> int:
    """Most memory that tensors held on the GPU so far in this process, without waking CUDA up."""
    torch = sys.modules.get("torch")
    if device.kind != "cuda" or torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.max_memory_allocated(device.index))


def peaks(device: Device, before_bytes: int, extremes: dict[str, float]) -> tuple[Memory, tuple[Missing, ...]]:
    """The peaks, and what of them is hidden. `before_bytes`: `gpu_peak_bytes` at the start of the run.

    torch keeps one peak for the life of the process, which we do not reset: it may be the user's.
    """
    missing: tuple[Missing, ...] = ()
    allocated = reserved = None
    torch = sys.modules.get("torch")
    if device.kind == "cuda" and (torch is None or not torch.cuda.is_initialized()):
        reason = "CUDA was never used in this process"
        missing = (Missing("peak of the GPU memory allocated by tensors", reason, key="memory"),)
    elif device.kind == "cuda" and torch is not None:
        peak = torch.cuda.max_memory_allocated(device.index)
        if before_bytes and peak <= before_bytes:
            reason = f"this process had reached {peak / 2**30:.2f} GiB before the run, and the run stayed below"
            missing = (Missing("peak of the GPU memory allocated by tensors", reason, key="memory"),)
        else:
            allocated = peak
            reserved = torch.cuda.max_memory_reserved(device.index)
    rss = extremes.get("peak_rss_bytes")
    memory = Memory(
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        peak_rss_bytes=int(rss) if rss is not None else None,
        total_bytes=device.memory_total_bytes,
    )
    return memory, missing
