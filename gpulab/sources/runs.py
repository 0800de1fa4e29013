"""`gpulab.runs`: this process's runs and the store's as one sequence, so that the last run is always `runs[-1]`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import overload

from gpulab.errors import StoreError
from gpulab.run import Run
from gpulab.sources.store import Store, read, read_outline

KEPT_IN_MEMORY = 20


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table of runs: a run (its timeline may be left out), or a folder with the reason it has none."""

    id: str
    position: int | None = None  # counted from the end: runs[position]
    run: Run | None = None
    path: Path | None = None  # None: not saved
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class _Own:
    run: Run | None  # None: too old to stay in memory
    path: Path | None


class Runs(Sequence[Run]):
    """Runs found in the store, oldest first, then the runs of this process in the order they were made.

    So `runs[-1]` is what this process measured last, whatever another notebook saves meanwhile. Folders that cannot
    be read are not in the sequence; `rows` names them. `show_with` hands in the two functions that draw a table.
    """

    def __init__(self, store: Store | None = None) -> None:
        self._store = store
        self._own: dict[str, _Own] = {}
        self._text: Callable[[Runs], str] | None = None
        self._html: Callable[[Runs], str] | None = None

    @property
    def store(self) -> Store:
        """Where runs are looked for: the store given, else the default one as it is now."""
        return self._store or Store()

    def add(self, run: Run, path: Path | None = None) -> None:
        """Remember a run of this process, with its folder where it was saved.

        The last 20 stay in memory. Older ones are read from their folder; older unsaved ones are forgotten.
        """
        self._own.pop(run.id, None)
        self._own[run.id] = _Own(run, path)
        for old in list(self._own)[:-KEPT_IN_MEMORY]:
            if self._own[old].path is None:
                del self._own[old]
            else:
                self._own[old] = replace(self._own[old], run=None)

    def show_with(self, text: Callable[[Runs], str], html: Callable[[Runs], str]) -> None:
        """Use these functions for `repr` and in a notebook."""
        self._text, self._html = text, html

    def __len__(self) -> int:
        return len(self._items())

    @overload
    def __getitem__(self, key: int) -> Run: ...
    @overload
    def __getitem__(self, key: slice) -> list[Run]: ...
    @overload
    def __getitem__(self, key: str) -> Run: ...
    def __getitem__(self, key: int | slice | str) -> Run | list[Run]:
        """A run by position, name, id or beginning of an id; a list for a slice.

        Raises IndexError beyond the ends, StoreError for an unknown name or a run that cannot be read.
        """
        if isinstance(key, str):
            return self._named(key)
        items = self._items()
        if isinstance(key, slice):
            return [_load(item) for item in items[key]]
        try:
            return _load(items[key])
        except IndexError:
            raise IndexError(f"there is no run {key}: {len(items)} here") from None

    def rows(self, count: int | None = None) -> list[Row]:
        """The newest `count` runs (None: all), newest first, then every folder that cannot be read."""
        items = self._items()
        newest = list(enumerate(reversed(items), start=1))[:count]
        rows = [_row(item, -place) for place, item in newest]
        broken = [Row(e.id, path=e.path, problem=e.problem) for e in self.store.list() if e.problem is not None]
        return rows + broken

    def _items(self) -> list[_Own]:
        try:
            entries = self.store.list()
        except StoreError:
            if not self._own:
                raise
            entries = []  # what this process measured is there without the store
        stored = [_Own(None, e.path) for e in entries if e.problem is None and e.id not in self._own]
        return stored + list(self._own.values())

    def _named(self, key: str) -> Run:
        if key == "latest":
            return self[-1]
        own = list(reversed(self._own.items()))
        exact = [o for id_, o in own if id_ == key] or [o for _, o in own if o.run is not None and o.run.name == key]
        return _load(exact[0]) if exact else self.store.load(key)

    def __repr__(self) -> str:
        return self._text(self) if self._text else f"<{len(self)} runs in {str(self.store.root)!r}>"

    def _repr_html_(self) -> str | None:
        return self._html(self) if self._html else None


def _load(item: _Own) -> Run:
    if item.run is not None:
        return item.run
    assert item.path is not None, "a run is in memory or on disk"
    return read(item.path)


def _row(item: _Own, position: int) -> Row:
    if item.run is not None:
        return Row(item.run.id, position, item.run, item.path)
    assert item.path is not None, "a run is in memory or on disk"
    try:
        return Row(item.path.name, position, read_outline(item.path), item.path)
    except StoreError as e:
        return Row(item.path.name, position, path=item.path, problem=str(e))
