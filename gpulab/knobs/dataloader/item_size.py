"""How much memory an item of a dataset takes, and how much is free."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_DEPTH = 8
_CGROUP = Path("/sys/fs/cgroup")  # in a container its own; limits of groups inside are seen by the machine's figures


def item_bytes(item: Any, depth: int = 0) -> int:
    """An estimate: tensors, arrays, images, strings and what containers hold; other objects by their attributes."""
    if depth > _DEPTH:
        return 0
    own = sys.getsizeof(item, 0)
    nbytes = getattr(item, "nbytes", None)
    if isinstance(nbytes, int):  # tensors and arrays
        return own + nbytes
    if isinstance(item, str | bytes | bytearray | int | float | bool | None):
        return own
    if isinstance(item, Mapping):
        return own + sum(item_bytes(k, depth + 1) + item_bytes(v, depth + 1) for k, v in item.items())
    if isinstance(item, list | tuple | set | frozenset):
        return own + sum(item_bytes(part, depth + 1) for part in item)
    if hasattr(item, "getbands"):  # an image of Pillow's: one byte a pixel and band, or four
        width, height = item.size
        return own + int(width * height * max(len(item.getbands()), 4 if item.mode in ("I", "F") else 1))
    return own + item_bytes(getattr(item, "__dict__", None), depth + 1)


def free_bytes() -> int:
    """Memory that can still be had: of the machine, or below the container's limit where that is less."""
    import psutil

    free = int(psutil.virtual_memory().available)
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is None or used is None:
        return free
    return max(0, min(free, limit - used + _reclaimable_bytes()))


def _reclaimable_bytes() -> int:
    """File pages that the container's usage counts and that are given up when memory is short."""
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such limit, or "max"
        return None


__all__ = ["free_bytes", "item_bytes"]
