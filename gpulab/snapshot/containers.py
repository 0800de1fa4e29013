"""What names, containers and iterators hold, remembered by reference and put back in place, so that all keep identity.

Each class here remembers one holder. `put_back` makes it hold the same objects again, in the same order, and says
whether it held others; it goes by the built-in types' own methods, so that no code of a subclass runs. What a cell has
taken from an iterator cannot be put back, but its position tells that something was taken.
"""

from __future__ import annotations

import gc
import io
import operator
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from types import CellType, GeneratorType
from typing import Any

from msgspec import Struct

SCALARS = frozenset((int, float, bool, str, bytes, complex, type(None)))
ABSENT = object()


class KeptItems:
    """The elements of a dict, list, deque or set."""

    def __init__(self, target: Any, place: ObjectPath) -> None:
        self.target, self.place = target, place
        self._base: Any = next(base for base in (OrderedDict, dict, list, deque, set) if isinstance(target, base))
        self._items = self._present()

    def _present(self) -> list[Any]:
        """What it holds now: of a dict keys and values in turn."""
        if issubclass(self._base, dict):
            return [part for pair in self._base.items(self.target) for part in pair]
        return list(self._base.__iter__(self.target))

    def put_back(self) -> bool:
        base, target, items, present = self._base, self.target, self._items, self._present()
        if base is set:
            same = set(map(id, present)) == set(map(id, items))
        else:
            same = len(present) == len(items) and all(map(operator.is_, present, items))
        if same:
            return False
        base.clear(target)
        if issubclass(base, dict):
            for key, value in zip(items[::2], items[1::2], strict=True):
                base.__setitem__(target, key, value)
        elif base is set:
            set.update(target, items)
        else:
            base.extend(target, items)
        return base is set or len(present) != len(items) or not all(map(_equal, present, items))


class KeptVariable(ABC):
    """What one variable holds, ABSENT where nothing."""

    def __init__(self, place: ObjectPath) -> None:
        self.place = place
        self.value = self.read()

    @abstractmethod
    def read(self) -> Any: ...

    @abstractmethod
    def write(self, value: Any) -> None: ...

    @abstractmethod
    def delete(self) -> None: ...

    def put_back(self) -> bool:
        if self.read() is self.value:
            return False
        if self.value is ABSENT:
            self.delete()
        else:
            self.write(self.value)
        return True


class KeptName(KeptVariable):
    """What a name means: in a namespace, or among the globals of a function."""

    def __init__(self, namespace: dict[str, Any], name: str, place: ObjectPath) -> None:
        self._namespace, self._name = namespace, name
        super().__init__(place)

    @property
    def is_new(self) -> bool:
        return self.value is ABSENT

    def read(self) -> Any:
        return self._namespace.get(self._name, ABSENT)

    def write(self, value: Any) -> None:
        self._namespace[self._name] = value

    def delete(self) -> None:
        self._namespace.pop(self._name, None)


class KeptCell(KeptVariable):
    """A variable that a function shares with the one around it."""

    def __init__(self, cell: CellType, place: ObjectPath) -> None:
        self._cell = cell
        super().__init__(place)

    def read(self) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:
            return ABSENT

    def write(self, value: Any) -> None:
        self._cell.cell_contents = value

    def delete(self) -> None:
        del self._cell.cell_contents


class KeptSlot(KeptVariable):
    """A slot of an instance, by its descriptor."""

    def __init__(self, slot: Any, owner: Any, place: ObjectPath) -> None:
        self._slot, self._owner = slot, owner
        super().__init__(place)

    def read(self) -> Any:
        try:
            return self._slot.__get__(self._owner)
        except AttributeError:
            return ABSENT

    def write(self, value: Any) -> None:
        self._slot.__set__(self._owner, value)

    def delete(self) -> None:
        self._slot.__delete__(self._owner)


class KeptAttributes:
    """The attributes of an instance, in its `__dict__` and its slots, and its class: torch changes that of modules."""

    def __init__(self, owner: Any, place: ObjectPath) -> None:
        self.owner, self.place = owner, place
        self._kind = type(owner)
        held = attributes(owner)
        self.slots = [KeptSlot(slot, owner, place.attribute(slot.__name__)) for slot in slots(self._kind)]
        self._parts: list[KeptItems | KeptSlot] = [*self.slots]
        if held is not None:
            self._parts.append(KeptItems(held, place))

    def put_back(self) -> bool:
        if type(self.owner) is not self._kind:
            object.__setattr__(self.owner, "__class__", self._kind)
        changed = [part.put_back() for part in self._parts]
        return any(changed)


Kept = KeptItems | KeptVariable | KeptAttributes


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
