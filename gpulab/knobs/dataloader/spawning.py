"""What a worker process that is started, not forked, cannot get: code of a notebook, which it cannot import by name."""

from __future__ import annotations

import functools
import multiprocessing
import sys
import types
from collections.abc import Iterable
from typing import Any

from gpulab.knobs.variables import LOOKED_AT, walk

_NAMED = (type, types.FunctionType)  # pickled by their name
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
    given = walk(loader.dataset, loader.collate_fn, loader.worker_init_fn, follow=_pickled_with)
    named = (thing if isinstance(thing, _NAMED) else type(thing) for thing in given)
    return list(dict.fromkeys(one.__qualname__ for one in named if one.__module__ == "__main__"))


def _pickled_with(thing: object) -> Iterable[object]:
    if isinstance(thing, _NAMED):
        return ()
    if isinstance(thing, types.MethodType):
        return (thing.__self__,)
    if isinstance(thing, functools.partial):
        return (thing.func, *thing.args)
    if isinstance(thing, list | tuple):
        return thing[:LOOKED_AT]
    if any(getattr(type(thing), way) is not getattr(object, way) for way in _PICKLING):
        return ()  # what it gives to pickle is its own affair
    return getattr(thing, "__dict__", {}).values()
