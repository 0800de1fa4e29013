"""Which run a word means: its id, its place from the end, its name or the beginning of its id."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

_LONGEST_SHOWN = 100


class Named(Protocol):
    """What a key can select; `name` is what the user calls it, or its id."""

    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=Named)


def select(entries: Sequence[N], key: str) -> N | None:
    """By id, by position from the end, by name, by a unique beginning of an id, in this order; of equals the last."""
    exact = [e for e in entries if e.id == key]
    if exact:
        return exact[-1]
    position = 1 if key == "latest" else int(key[1:]) if re.fullmatch(r"-[0-9]{1,9}", key) else 0
    if position:
        return entries[-position] if position <= len(entries) else None
    named = [e for e in entries if e.name == key]
    if named:
        return named[-1]
    starting = [e for e in entries if key and e.id.startswith(key)]
    return starting[0] if len(starting) == 1 else None


def not_found(entries: Sequence[Named], key: str, root: Path) -> str:
    """Why `select` found none, with the nearest: a sentence for the user."""
    starting = [e.id for e in entries if key and e.id.startswith(key)]
    if starting:
        return f"{key!r} matches {len(starting)} runs: {', '.join(starting[:4])}. Give more characters."
    if not entries:
        return f"There is no run in {str(root)!r} yet: profile something first."
    if re.fullmatch(r"-\d+", key):
        return f"There is no run {key}: {str(root)!r} holds {len(entries)}."
    names = [shown(e.name) for e in entries] + [e.id for e in entries]
    nearest = difflib.get_close_matches(shown(key), names, n=1, cutoff=0.5)
    hint = f"Did you mean {nearest[0]!r}?" if nearest else "`gpulab runs` lists them."
    return f"There is no run {shown(key)!r} in {str(root)!r}. {hint}"


def shown(name: str) -> str:
    """A name as it stands in a sentence: comparing and printing very long ones takes minutes and pages."""
    return name if len(name) <= _LONGEST_SHOWN else name[: _LONGEST_SHOWN - 1] + "…"
