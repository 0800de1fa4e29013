"""How much memory an item of a dataset takes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

_DEPTH = 8


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


__all__ = ["item_bytes"]
