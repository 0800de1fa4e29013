"""What was not as it should be in a trace file, counted while it is read."""

from __future__ import annotations

from msgspec import Struct


class Noted(Struct, frozen=True):
    """How often, and where first."""

    count: int
    where: str


class DamageCount:
    """Counts by kind, in the order in which each kind came first."""

    def __init__(self) -> None:
        self.noted: dict[str, Noted] = {}

    def note(self, what: str, where: str, count: int = 1) -> None:
        """Count a damage; nothing where `count` is 0."""
        if count:
            before = self.noted.get(what) or Noted(0, where)
            self.noted[what] = Noted(before.count + count, before.where)
