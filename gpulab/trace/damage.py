"""What was not as it should be in a trace file, counted while it is read."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


class Noted(Struct, frozen=True):
    """How often, and where first: the offset in the text of what was being read, and the place in words."""

    count: int
    offset: int
    where: str


class DamageCount:
    """Counts by kind, in the order in which each kind came first. `offset`: of what is being read."""

    def __init__(self, noted: Mapping[str, Noted] | None = None) -> None:
        self.noted: dict[str, Noted] = dict(noted or {})
        self.offset = 0

    def note(self, what: str, where: str, count: int = 1) -> None:
        """Count a damage; nothing where `count` is 0."""
        if count:
            before = self.noted.get(what) or Noted(0, self.offset, where)
            self.noted[what] = Noted(before.count + count, before.offset, before.where)
