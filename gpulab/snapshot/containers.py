"""What names, containers and iterators hold, remembered by reference and put back in place, so that all keep identity.

Each class here remembers one holder. `put_back` makes it hold the same objects again, in the same order, and says
whether it held others; it goes by the built-in types' own methods, so that no code of a subclass runs. What a cell has
taken from an iterator cannot be put back, but its position tells that something was taken.
"""

from __future__ import annotations

import gc
import io
import operator
from collections import OrderedDict, deque
from types import CellType, GeneratorType
from typing import Any

from msgspec import Struct

SCALARS = frozenset((int, float, bool, str, bytes, complex, type(None)))
ABSENT = object()


class KeptDict:
    def __init__(self, target: dict[Any, Any], place: ObjectPath) -> None:
        self.target, self.place = target, place
        self._base: Any = OrderedDict if isinstance(target, OrderedDict) else dict
        self._items: list[tuple[Any, Any]] = list(self._base.items(target))

    def put_back(self) -> bool:
        target, base = self.target, self._base
        present = list(base.items(target))
        if _all_same(present, self._items):
            return False
        base.clear(target)
        for key, value in self._items:
            base.__setitem__(target, key, value)
        return not _all_equal(present, self._items)


class KeptAttributes:
    """The attributes of an instance, in its `__dict__` and its slots, and its class: torch changes that of modules."""

    def __init__(self, owner: Any, place: ObjectPath) -> None:
        self.owner, self.place = owner, place
        self._kind = type(owner)
        held = attributes(owner)
        self._dict = KeptDict(held, place) if held is not None else None
        self._slots = [(slot, slot_value(slot, owner)) for slot in slots(type(owner))]

    def put_back(self) -> bool:
        if type(self.owner) is not self._kind:
            object.__setattr__(self.owner, "__class__", self._kind)
        changed = self._dict is not None and self._dict.put_back()
        for slot, value in self._slots:
            if slot_value(slot, self.owner) is value:
                continue
            changed = True
            if value is ABSENT:
                slot.__delete__(self.owner)
            else:
                slot.__set__(self.owner, value)
        return changed


class KeptList:
    """A list or a deque."""

    def __init__(self, target: list[Any] | deque[Any], place: ObjectPath) -> None:
        self.target, self.place = target, place
        self._items = list(target)

    def put_back(self) -> bool:
        target = self.target
        if len(target) == len(self._items) and all(map(operator.is_, target, self._items)):
            return False
        base: Any = list if isinstance(target, list) else deque
        present = list(base.__iter__(target))
        base.clear(target)
        base.extend(target, self._items)
        return len(present) != len(self._items) or not all(map(_equal, present, self._items))


class KeptSet:
    def __init__(self, target: set[Any], place: ObjectPath) -> None:
        self.target, self.place = target, place
        self._items = list(target)

    def put_back(self) -> bool:
        present = {id(x) for x in self.target}
        if present == {id(x) for x in self._items}:
            return False
        set.clear(self.target)
        set.update(self.target, self._items)
        return True


class KeptName:
    """What a name means: in a namespace, or among the globals of a function."""

    def __init__(self, namespace: dict[str, Any], name: str, place: ObjectPath) -> None:
        self.place = place
        self._namespace, self._name = namespace, name
        self._value = namespace.get(name, ABSENT)

    @property
    def is_new(self) -> bool:
        return self._value is ABSENT

    def put_back(self) -> bool:
        if self._namespace.get(self._name, ABSENT) is self._value:
            return False
        if self._value is ABSENT:
            self._namespace.pop(self._name, None)
        else:
            self._namespace[self._name] = self._value
        return True


class KeptCell:
    """A variable that a function shares with the one around it."""

    def __init__(self, cell: CellType, place: ObjectPath) -> None:
        self.place = place
        self._cell, self._value = cell, cell_value(cell)

    def put_back(self) -> bool:
        if cell_value(self._cell) is self._value:
            return False
        if self._value is ABSENT:
            del self._cell.cell_contents
        else:
            self._cell.cell_contents = self._value
        return True


Kept = KeptDict | KeptAttributes | KeptList | KeptSet | KeptName | KeptCell


class Length:
    """The length of a container that is too large to be remembered."""

    def __init__(self, target: Any, place: ObjectPath) -> None:
        self.place = place
        self._target, self._seen = target, len(target)

    def changed(self) -> bool:
        """Whether it differs from the last time."""
        before, self._seen = self._seen, len(self._target)
        return before != self._seen


def attributes(owner: Any) -> dict[str, Any] | None:
    """The instance's `__dict__`; None where it has none. Runs no code of the instance's class."""
    try:
        held = object.__getattribute__(owner, "__dict__")
    except (AttributeError, TypeError):
        return None
    return held if isinstance(held, dict) else None


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


def slot_value(slot: Any, owner: Any) -> Any:
    """What the slot holds; ABSENT where nothing."""
    try:
        return slot.__get__(owner)
    except AttributeError:
        return ABSENT


def cell_value(cell: CellType) -> Any:
    """What the cell holds; ABSENT where nothing."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def _all_same(a: list[tuple[Any, Any]], b: list[tuple[Any, Any]]) -> bool:
    return len(a) == len(b) and all(x[1] is y[1] and x[0] is y[0] for x, y in zip(a, b, strict=True))


def _all_equal(a: list[tuple[Any, Any]], b: list[tuple[Any, Any]]) -> bool:
    pairs = zip(a, b, strict=False)
    return len(a) == len(b) and all(_equal(x[0], y[0]) and _equal(x[1], y[1]) for x, y in pairs)


def _equal(a: Any, b: Any) -> bool:
    """As far as that can be said without running code of the user's."""
    return a is b or (type(a) is type(b) and type(a) in SCALARS and bool(a == b))


class ObjectPath(Struct, frozen=True):
    """`users`: the user made what is there, by name; else it lies inside a module or an object of a library."""

    piece: str
    parent: ObjectPath | None = None
    users: bool = True

    def attribute(self, name: str, *, users: bool = True) -> ObjectPath:
        return ObjectPath(f"[{name}]" if name.isdigit() else f".{name}", self, self.users and users)

    def item(self, key: object) -> ObjectPath:
        """What lies there under this key or index."""
        return ObjectPath(f"[{key!r}]" if isinstance(key, str | int) else "[…]", self, self.users)

    def __str__(self) -> str:
        pieces, place = [], self
        while place.parent is not None:
            pieces.append(place.piece)
            place = place.parent
        return place.piece + "".join(reversed(pieces))


DEPTH = 8  # of iterators around iterators


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
        names = {name: value if type(value) in SCALARS else id(value) for name, value in variables.items()}
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
        elif type(part) in SCALARS:
            positions.append(part)
    return tuple(positions) or None


def _of_file(file: Any) -> object:
    if file.closed:
        return "closed"
    try:
        return int(file.tell())
    except (OSError, ValueError):  # not seekable, or in the middle of `for line in file`
        return None
