"""Whether two loadings of an item gave the same, value by value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DEPTH = 8


def same(a: Any, b: Any, depth: int = 0) -> bool:
    """Equal in type, shape and every value, NaN with NaN. Of objects that can only be told apart by identity, yes."""
    import numpy as np
    import torch

    if a is b or depth > _DEPTH:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(torch.all((a == b) | ((a != a) & (b != b))))
    if isinstance(a, np.ndarray):
        return _same_arrays(a, b, depth)
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same(a[k], b[k], depth + 1) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y, depth + 1) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return a == b or (a != a and b != b)
    try:
        if bool(a == b):
            return True
    except Exception:  # an __eq__ that gives an array
        return same(getattr(a, "__dict__", None), getattr(b, "__dict__", None), depth + 1)
    by_identity = getattr(type(a), "__eq__", None) is getattr(object, "__eq__", None)
    return by_identity and same(getattr(a, "__dict__", None), getattr(b, "__dict__", None), depth + 1)


def _same_arrays(a: Any, b: Any, depth: int) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return same(a.tolist(), b.tolist(), depth + 1) if a.dtype.hasobject else bool(a.tobytes() == b.tobytes())


__all__ = ["same"]
