"""Where an object was found, written as the user would write it: `model.head.weight`, `history['loss']`."""

from __future__ import annotations

from msgspec import Struct


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
