"""Saves the contents of names, containers and instances by reference, and restores them in place: identity is kept.

Each function `undo_…` saves one holder and returns a function that makes it hold the same objects in the same order.
They use the built-in types' own methods, so that no code of a subclass runs. Items taken from an iterator cannot be put
back, but the iterator's position shows that something was taken.
"""

from __future__ import annotations

import gc
import io
import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from functools import partial
from types import CellType, GeneratorType
from typing import Any

from msgspec import Struct

from gpulab.patching.randomness import Undo

SCALARS = frozenset((int, float, bool, str, bytes, complex, type(None)))
ABSENT = object()


def undo_items(target: Any) -> Undo:
    """The elements of a dict, list, deque or set."""
    base: Any = next(base for base in (OrderedDict, dict, list, deque, set) if isinstance(target, base))

    def items() -> list[Any]:
        """The present contents; for a dict, keys and values alternate."""
        if issubclass(base, dict):
            return [part for pair in base.items(target) for part in pair]
        return list(base.__iter__(target))

    before = items()

    def undo() -> None:
        present = items()
        if len(present) == len(before) and all(map(operator.is_, present, before)):
            return
        base.clear(target)
        if issubclass(base, dict):
            for key, value in zip(before[::2], before[1::2], strict=True):
                base.__setitem__(target, key, value)
        elif base is set:
            set.update(target, before)
        else:
            base.extend(target, before)

    return undo


class Variable(Struct, frozen=True):
    """A variable by its three operations. Reading and deleting raise an error if it is unbound."""

    read: Callable[[], Any]
    write: Callable[[Any], object]
    delete: Callable[[], object]

    @property
    def value(self) -> Any:
        """The present value; ABSENT if the variable is unbound."""
        try:
            return self.read()
        except (KeyError, ValueError, AttributeError):
            return ABSENT


def name_in(namespace: dict[str, Any], name: str) -> Variable:
    get, put, delete = namespace.__getitem__, namespace.__setitem__, namespace.__delitem__
    return Variable(partial(get, name), partial(put, name), partial(delete, name))


def cell_variable(cell: CellType) -> Variable:
    """A variable that a function shares with its enclosing function."""
    contents = (cell, "cell_contents")
    return Variable(partial(getattr, *contents), partial(setattr, *contents), partial(delattr, *contents))


def slot_variable(slot: Any, owner: Any) -> Variable:
    """A slot of an instance, by its descriptor."""
    return Variable(partial(slot.__get__, owner), partial(slot.__set__, owner), partial(slot.__delete__, owner))


def undo_variable(variable: Variable) -> Undo:
    before = variable.value

    def undo() -> None:
        if variable.value is before:
            return
        if before is ABSENT:
            variable.delete()
        else:
            variable.write(before)

    return undo


def undo_attributes(owner: Any) -> Undo:
    """The attributes of an instance, in `__dict__` and slots, and its class, which torch changes for some modules."""
    kind, fields = type(owner), attributes(owner)
    undos = [undo_variable(slot_variable(slot, owner)) for slot in slots(kind)]
    if fields is not None:
        undos.append(undo_items(fields))

    def undo() -> None:
        if type(owner) is not kind:
            object.__setattr__(owner, "__class__", kind)
        for one in undos:
            one()

    return undo


def undo_all(undos: Iterable[tuple[ObjectPath, Undo]]) -> list[str]:
    """Run all undos. Returns the places that could not be restored, with the reason."""
    failures = []
    for place, undo in undos:
        try:
            undo()
        except Exception as e:  # a user's object may refuse anything
            failures.append(f"`{place}`: {str(e).partition(chr(10))[0]}")
    return failures


class ChangeDetector:
    """Detects changes of an object that is not copied, by its position, length or version."""

    def __init__(self, place: ObjectPath, read: Callable[[], object]) -> None:
        self.place = place
        self._read, self._last = read, read()

    def changed(self) -> bool:
        """Whether it has changed since the last call."""
        before, self._last = self._last, self._read()
        return before != self._last


def attributes(owner: Any) -> dict[str, Any] | None:
    """The instance's `__dict__`; None if it has none. Runs no code of the instance's class."""
    try:
        fields = object.__getattribute__(owner, "__dict__")
    except (AttributeError, TypeError):
        return None
    return fields if isinstance(fields, dict) else None


def slots(kind: type) -> list[Any]:
    """The descriptors of the slots that Python classes among its bases define."""
    descriptors = []
    for base in kind.__mro__:
        names = base.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            private = name.startswith("__") and not name.endswith("__")
            slot = base.__dict__.get(f"_{base.__name__.lstrip('_')}{name}" if private else name)
            if name not in ("__dict__", "__weakref__") and hasattr(slot, "__set__"):
                descriptors.append(slot)
    return descriptors


class ObjectPath(Struct, frozen=True):
    """The path to an object, as the user would write it.

    `users`: the user created the object under this name; else it is inside a module or an object of a library.
    """

    piece: str
    parent: ObjectPath | None = None
    users: bool = True

    def attribute(self, name: str, *, users: bool = True) -> ObjectPath:
        return ObjectPath(f"[{name}]" if name.isdigit() else f".{name}", self, self.users and users)

    def item(self, key: object) -> ObjectPath:
        """The path to the element with this key or index."""
        return ObjectPath(f"[{key!r}]" if isinstance(key, str | int) else "[…]", self, self.users)

    def __str__(self) -> str:
        pieces, place = [self.piece], self.parent
        while place is not None:  # no recursion: it may be deeper than Python's stack
            pieces.append(place.piece)
            place = place.parent
        return "".join(reversed(pieces))


DEPTH = 8  # of iterators around iterators


def is_iterator(kind: type) -> bool:
    """Whether objects of this type are consumed by reading: iterators, generators, open files."""
    return hasattr(kind, "__next__") or issubclass(kind, io.IOBase)


def position(iterator: Any, depth: int = DEPTH) -> object:
    """A value that changes when something is taken from the iterator; None if there is none. Takes nothing itself."""
    try:
        return _position(iterator, type(iterator), depth) if depth else None
    except Exception:  # a dead weak proxy, or an unusual iterator of a library
        return None


def _position(iterator: Any, kind: type, depth: int) -> object:
    if kind is GeneratorType:
        frame = iterator.gi_frame
        if frame is None:
            return "ended"
        variables = frame.f_locals
        names = {name: value if type(value) in SCALARS else id(value) for name, value in variables.items()}
        if type(variables) is dict:  # before Python 3.13: a copy that would keep the batch alive in the frame
            variables.clear()
        return frame.f_lasti, tuple(names.items()), position(iterator.gi_yieldfrom, depth - 1)
    if issubclass(kind, io.IOBase):
        return "closed" if iterator.closed else int(iterator.tell())
    yielded = getattr(iterator, "__dict__", {}).get("_num_yielded")
    if yielded is not None:  # a DataLoader's
        return int(yielded)
    hint = getattr(kind, "__length_hint__", None)
    if hint is not None:
        return int(hint(iterator))
    if kind.__module__ == "itertools" and kind.__name__ in ("count", "repeat"):
        return repr(iterator)
    # positions of the iterators inside `zip`, `map`, `enumerate` and the like
    positions: list[object] = []
    for part in gc.get_referents(iterator):
        if is_iterator(type(part)):
            positions.append(position(part, depth - 1))
        elif type(part) in (list, tuple):
            positions.append(len(part))
            positions += [position(x, depth - 1) for x in part[:DEPTH] if is_iterator(type(x))]
        elif type(part) in SCALARS:
            positions.append(part)
    return tuple(positions) or None
