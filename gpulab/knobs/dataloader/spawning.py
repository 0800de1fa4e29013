"""What a worker process that is started, not forked, cannot get: code of a notebook, which it cannot import by name."""

from __future__ import annotations

import functools
import multiprocessing
import sys
import types
from collections import deque
from typing import Any

_OBJECTS_LOOKED_AT = 200
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)  # pickled by their name
_PICKLING = ("__getstate__", "__reduce__", "__reduce_ex__")


def start_method(loader: Any = None) -> str:
    """How workers would start; without a loader, those of one that says nothing of it.

    Leaves a default that is not yet fixed as it is.
    """
    context = getattr(loader, "multiprocessing_context", None)
    method: str | None = (context or multiprocessing).get_start_method(allow_none=True)
    return method or multiprocessing.get_all_start_methods()[0]


def main_can_be_imported() -> bool:
    """What `multiprocessing.spawn` asks before it lets a worker import the main module: no notebook can be."""
    main = sys.modules["__main__"]
    return (
        getattr(getattr(main, "__spec__", None), "name", None) is not None
        or getattr(main, "__file__", None) is not None
    )


def defined_in_main(loader: Any) -> list[str]:
    """Classes and functions of `__main__` among what a loader's workers are given, as far as pickle would follow."""
    waiting: deque[object] = deque((loader.dataset, loader.collate_fn, loader.worker_init_fn))
    found: dict[str, None] = {}
    for _ in range(_OBJECTS_LOOKED_AT):
        if not waiting:
            break
        thing = waiting.popleft()
        named = thing if isinstance(thing, _NAMED) else type(thing)
        if named.__module__ == "__main__":
            found[named.__qualname__] = None
        waiting += _held_by(thing)
    return list(found)


def _held_by(thing: object) -> list[object]:
    if isinstance(thing, _NAMED):
        return []
    if isinstance(thing, types.MethodType):
        return [thing.__self__]
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args]
    if isinstance(thing, list | tuple):
        return list(thing[:_OBJECTS_LOOKED_AT])
    if any(getattr(type(thing), way) is not getattr(object, way) for way in _PICKLING):
        return []  # what it gives to pickle is its own affair
    return list(getattr(thing, "__dict__", {}).values())
