"""What an object of the user's leads to: what it holds, what that holds, and so on, as far as is worth a look."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType

LOOKED_AT = 500
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})  # but no class of the user's among them


def walk(*things: object, follow: Callable[[object], Iterable[object]] | None = None) -> Iterator[object]:
    """The objects themselves first, then the nearest; `follow` says what an object leads to, else all that it holds."""
    waiting, seen = deque(things), dict[int, object]()
    while waiting and len(seen) < LOOKED_AT:
        thing = waiting.popleft()
        if type(thing) in _PLAIN or isinstance(thing, ModuleType | BuiltinFunctionType) or id(thing) in seen:
            continue
        seen[id(thing)] = thing  # kept, so that its id stays its own
        yield thing
        with suppress(Exception):  # a user's object may raise anything, or change meanwhile
            waiting += (follow or _held_by)(thing)


def _held_by(thing: object) -> list[object]:
    if isinstance(thing, type):
        return []
    if isinstance(thing, FunctionType):
        return [c.cell_contents for c in thing.__closure__ or () if _is_filled(c)]
    if isinstance(thing, MethodType):
        return [thing.__func__, thing.__self__]
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, list | tuple):
        return list(thing[:LOOKED_AT])
    held = thing if isinstance(thing, dict) else getattr(thing, "__dict__", {})
    return list(islice(held.values(), LOOKED_AT))


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # its variable is not assigned yet
        return False
