"""Where an iterator stands: what a cell has taken from one cannot be put back, but it can be told.

A cell that takes from an iterator made by an earlier cell does not behave the same twice.
"""

from __future__ import annotations

import gc
import io
from types import GeneratorType
from typing import Any

DEPTH = 8  # of iterators around iterators
PLAIN = (int, float, bool, str, bytes, type(None))


def is_iterator(kind: type) -> bool:
    """Whether things are taken from objects of this type: iterators, generators, open files."""
    return hasattr(kind, "__next__") or issubclass(kind, io.IOBase)


def position(iterator: Any, depth: int = DEPTH) -> object:
    """Something that differs once more has been taken; None where that cannot be told. Takes nothing."""
    try:
        return _position(iterator, type(iterator), depth) if depth else None
    except Exception:  # a weak proxy of what is gone, an iterator of a library with a mind of its own
        return None


def _position(iterator: Any, kind: type, depth: int) -> object:
    if kind is GeneratorType:
        frame = iterator.gi_frame
        if frame is None:
            return "ended"
        variables = frame.f_locals
        names = {name: value if type(value) in PLAIN else id(value) for name, value in variables.items()}
        if type(variables) is dict:  # before Python 3.13 a copy that the frame would keep, with the batch in it
            variables.clear()
        inner = iterator.gi_yieldfrom
        within = position(inner, depth - 1) if inner is not None and is_iterator(type(inner)) else None
        return frame.f_lasti, tuple(names.items()), within
    if issubclass(kind, io.IOBase):
        return _of_file(iterator)
    yielded = getattr(iterator, "__dict__", {}).get("_num_yielded")
    if yielded is not None:  # a DataLoader's
        return int(yielded)
    hint = getattr(kind, "__length_hint__", None)
    if hint is not None:
        return int(hint(iterator))
    if kind.__module__ == "itertools" and kind.__name__ in ("count", "repeat"):
        return repr(iterator)
    # of what `zip`, `map`, `enumerate` and the like hold
    positions: list[object] = []
    for part in gc.get_referents(iterator):
        if is_iterator(type(part)):
            positions.append(position(part, depth - 1))
        elif type(part) in (list, tuple):
            positions.append(len(part))
            positions += [position(x, depth - 1) for x in part[:DEPTH] if is_iterator(type(x))]
        elif type(part) in PLAIN:
            positions.append(part)
    return tuple(positions) or None


def _of_file(file: Any) -> object:
    if file.closed:
        return "closed"
    try:
        return int(file.tell())
    except (OSError, ValueError):  # not seekable, or in the middle of `for line in file`
        return None
