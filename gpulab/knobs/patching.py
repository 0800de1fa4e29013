"""Replacing an attribute of torch for the length of a run: the one way in which knobs touch what is not theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace `owner.name` by `make(original)`; put the original back unless somebody replaced ours meanwhile."""
    inherited = name not in vars(owner)
    original = getattr(owner, name)
    ours = make(original)
    setattr(owner, name, ours)
    try:
        yield
    finally:
        if vars(owner).get(name) is ours:
            if inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


__all__ = ["replaced"]
