"""How much memory is still free, so that a copy of the training's state does not take what the training needs."""

from __future__ import annotations

from pathlib import Path

from gpulab.devices import machine


def free_host_bytes(root: Path = machine.ROOT) -> int | None:
    """Memory that this process may still take: what the system has, cut by the limits of its cgroups (v1 and v2).

    What a cgroup counts as used and can drop at any time (file cache) is free. None where nothing can be read. `root`
    stands for "/" (tests give a folder).
    """
    rooms = [*_rooms(root, "", "memory.max", "memory.current"), *_rooms(root, "memory", *_V1)]
    if root == machine.ROOT:
        rooms += _of_system()
    return max(0, min(rooms)) if rooms else None


def free_gpu_bytes(index: int) -> int:
    """Free memory of that GPU, as CUDA tells it. CUDA must have been started."""
    import torch

    return int(torch.cuda.mem_get_info(index)[0])


_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _rooms(root: Path, controller: str, limit_file: str, used_file: str) -> list[int]:
    found = []
    for folder in machine._groups(root, controller):
        limit, used = machine._text(folder / limit_file), machine._text(folder / used_file)
        if limit is None or used is None or not (limit.isdigit() and used.isdigit()):
            continue
        if 0 < int(limit) < machine.UNLIMITED_BYTES:
            found.append(int(limit) - int(used) + _droppable(machine._text(folder / "memory.stat") or ""))
    return found


def _droppable(stat: str) -> int:
    counts = dict(line.split(maxsplit=1) for line in stat.splitlines() if " " in line)
    return int(counts.get("total_inactive_file", counts.get("inactive_file", "0")))


def _of_system() -> list[int]:
    try:
        import psutil

        return [int(psutil.virtual_memory().available)]
    except Exception:  # no psutil, or a system it does not know
        return []
