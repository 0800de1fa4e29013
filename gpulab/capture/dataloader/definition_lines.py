"""Where the user's code that makes a batch is written: the dataset's items, its transforms, what puts them together.

Workers run it in processes of their own, where no stack is sampled: then these lines are the nearest to the cause.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

from gpulab.capture.dataloader.fetch_clock import TRANSFORMS
from gpulab.capture.stacks.stack import Spot
from gpulab.user_code import is_users_file

_ITEMS = ("__getitems__", "__getitem__", "__iter__")
_WITHIN = ("dataset", "datasets", "data_collator", "collate_fn", "transforms", "__wrapped__")
_CALL = "__call__"
_DEPTH = 4


def items_spot(dataset: Any) -> Spot | None:
    """The user's method that gives an item, of the dataset or of one that it holds (Subset, ConcatDataset)."""
    for held in _held(dataset):
        for name in _ITEMS:
            spot = _spot(getattr(type(held), name, None))
            if spot is not None:
                return spot
    return None


def transform_spot(dataset: Any) -> Spot | None:
    """The user's transform, where the dataset holds it as such."""
    for held in _held(dataset):
        for name in TRANSFORMS:
            spot = callable_spot(_attributes(held).get(name))
            if spot is not None:
                return spot
    return None


def callable_spot(call: Any) -> Spot | None:
    """A function of the user's, a method, an object that is called, or one of them within it."""
    for held in _held(call):
        spot = _spot(held) or _spot(getattr(type(held), _CALL, None))
        if spot is not None:
            return spot
    return None


def _held(thing: Any, depth: int = 0) -> Iterator[Any]:
    if thing is None or depth > _DEPTH:
        return
    yield thing
    if isinstance(thing, functools.partial):
        yield from _held(thing.func, depth + 1)
    for name in _WITHIN:
        inner = _attributes(thing).get(name)
        for one in inner[:_DEPTH] if isinstance(inner, list | tuple) else (inner,):
            yield from _held(one, depth + 1)


def _attributes(thing: Any) -> dict[str, Any]:
    """What it holds by itself: a property would run code of the user's."""
    held: dict[str, Any] = getattr(thing, "__dict__", {})
    return held


def _spot(function: Any) -> Spot | None:
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    if code is None or not is_users_file(code.co_filename):
        return None
    return code.co_filename, code.co_firstlineno, code.co_qualname
