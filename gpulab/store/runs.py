"""`gpulab.runs`: this process's runs and the store's as one sequence, so that the last run is always `runs[-1]`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Self, overload

from msgspec import Struct
from msgspec.structs import replace

from gpulab.errors import StoreError, UsageError
from gpulab.run import Job, Run
from gpulab.store import filter, tables, tensorboard
from gpulab.store.atomic_write import size_bytes
from gpulab.store.filter import Filter
from gpulab.store.folders import DOCUMENT, Entry, Store, entry, read, run_folder
from gpulab.store.lookup import not_found, select, shown
from gpulab.store.summaries import rename_summary
from gpulab.store.tables import Cell

KEPT_IN_MEMORY = 20


class Row(Struct, frozen=True):
    """One line of a table of runs: a run (its timeline may be left out), or a folder with the reason it has none.

    Of a job with several ranks the run is that of the lowest rank, `id` the job's, `position` that of its newest run,
    and `outcomes` are those of all that are here.
    """

    id: str
    position: int | None = None  # counted from the end, of all runs: runs[position]
    run: Run | None = None
    path: Path | None = None  # None: not saved
    problem: str | None = None
    outcomes: tuple[str, ...] = ()
    runs: int = 1  # that this line stands for


class Deletion(Struct, frozen=True):
    """One run that is deleted, or would be."""

    id: str
    name: str
    size_bytes: int  # on disk; 0 of a run that was not saved
    path: Path | None


class _Own(Struct, frozen=True):
    run: Run | None  # None: too old to stay in memory
    path: Path | None


class _Item(Struct, frozen=True):
    """One run of the sequence, as far as a header tells; `position` counts from the end of all runs."""

    id: str
    name: str
    created: str
    device_kind: str
    outcome: str | None
    run: Run | None
    path: Path | None
    position: int = 0
    job: Job | None = None


class Runs(Sequence[Run]):
    """Runs found in the store, oldest first, then the runs of this process in the order they were made.

    So `runs[-1]` is what this process measured last, whatever another notebook saves meanwhile. Folders that cannot
    be read are not in the sequence; `rows` names them. `show_with` hands in the two functions that draw a table,
    `export_with` what makes a row of figures of a run.
    """

    def __init__(self, store: Store | None = None) -> None:
        self._store = store
        self._own: dict[str, _Own] = {}
        self._filters: tuple[Filter, ...] = ()
        self._text: Callable[[Runs], str] | None = None
        self._html: Callable[[Runs], str] | None = None
        self._figures: Figures | None = None

    @property
    def store(self) -> Store:
        """Where runs are looked for: the store given, else the default one as it is now."""
        return self._store or Store()

    @property
    def asked(self) -> str:
        """The conditions of `where` in words; empty where all runs are here."""
        return ", ".join(map(str, self._filters))

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

    @property
    def own(self) -> list[Run]:
        """What this process measured and still has in memory, in the order it was made."""
        return [own.run for own in self._own.values() if own.run is not None]

    def show_with(self, text: Callable[[Runs], str], html: Callable[[Runs], str]) -> None:
        """Use these functions for `repr` and in a notebook."""
        self._text, self._html = text, html

    def export_with(self, figures: Figures) -> None:
        """Use these columns for exported tables."""
        self._figures = figures

    # -- choosing ------------------------------------------------------------------------------------------------

    def where(
        self,
        *,
        name: str = "",
        device: str = "",
        since: str | datetime | timedelta | None = None,
        outcome: str = "",
        words: Sequence[str] | str = (),
    ) -> Self:
        """The runs for which all of this holds, as a sequence of the same kind that follows the store.

        `name` is a pattern ("resnet*"), `device` "cpu" or "cuda", `since` a date ("2026-11-20") or an age ("30m", "2h",
        "3d", "1w"), `outcome` one of "completed", "stopped", "interrupted", "failed"; all `words` must occur in the
        name, id, code, device, dataset, error or knobs. Raises UsageError for values that cannot be.
        """
        wanted = filter.make(name, device, since, outcome, words)
        chosen = copy.copy(self)  # what is remembered stays shared
        if wanted != Filter():
            chosen._filters = (*self._filters, wanted)
        return chosen

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
            return _load(self._find(key))
        items = self._items()
        if isinstance(key, slice):
            return [_load(item) for item in items[key]]
        try:
            return _load(items[key])
        except IndexError:
            raise IndexError(f"there is no run {key}: {len(items)} here") from None

    def rows(self, count: int | None = None) -> list[Row]:
        """The last `count` runs of the sequence (None: all), newest first, then every folder that cannot be read.

        A job with several ranks is one of them. Positions are those in the whole sequence, also of a part that `where`
        chose. Of such a part folders that cannot be read are left out: nobody knows what they are.
        """
        groups = _grouped(self._items()[::-1])[:count]
        rows = [_row_of(items) for items in sorted(groups, key=lambda items: items[0].created, reverse=True)]
        return rows + [Row(e.id, path=e.path, problem=e.problem) for e in self._unreadable()]

    # -- changing ------------------------------------------------------------------------------------------------

    def name(self, key: str | Run, new: str) -> str:
        """Give a run another name; an empty one takes the name away. Returns its id. A rank stands for its whole job.

        Raises StoreError where the run is unknown, where several have that name, or where it cannot be written, and
        UsageError for a name that means another run already.
        """
        items = self._with_job(key)
        for item in items:
            taken = new == "latest" or (new[:1] == "-" and new[1:].isdecimal())
            if taken or any(other.id == new and other.id != item.id for other in self._all()):
                raise UsageError(f"{shown(new)!r} is already taken by a run; choose another name.")
        for item in items:
            if item.path is not None:
                self.store.rename(item.path, new)
                rename_summary(item.path, new)
            own = self._own.get(item.id)
            if own is not None and own.run is not None:
                self._own[item.id] = replace(own, run=_with_name(own.run, new))
        return items[0].id

    def deletions(self, *keys: str | Run) -> list[Deletion]:
        """What `delete` would delete, with its size. Raises as `delete`; nothing is changed."""
        return [_deletion(item) for item in self._doomed(keys)]

    def delete(self, *keys: str | Run) -> list[Deletion]:
        """Delete runs for good: those that the keys name, or without keys all that `where` chose.

        A rank goes with its job unless its id or folder is given; conditions choose jobs as a whole. All keys are
        looked up before the first run goes. Raises StoreError for a key that names no run or several, UsageError
        without keys and conditions.
        """
        items = self._doomed(keys)
        deletions = [_deletion(item) for item in items]
        for count, item in enumerate(items):
            try:
                if item.path is not None:
                    store = Store(item.path.parent) if item.id in self._own else self.store
                    store.delete(item.path)
                self._own.pop(item.id, None)
            except StoreError as e:
                raise StoreError(f"{e} {count} of {len(items)} are deleted.") from e
        return deletions

    # -- exporting -----------------------------------------------------------------------------------------------

    def export(self, path: str | Path) -> Exported:
        """One row of figures per run, oldest first, as .csv, .json or .parquet (which needs pyarrow).

        Raises UsageError for another ending, StoreError where there is no run or the file cannot be written.
        """
        assert self._figures is not None, "export_with says what a row is"
        return to_table(self._to_export, Path(path), self._figures)

    def export_tensorboard(self, folder: str | Path) -> Exported:
        """Curves per step and per reading as TensorBoard scalars, one folder per run; needs tensorboard.

        Raises UsageError without it, StoreError where there is no run or nothing can be written.
        """
        return to_tensorboard(self._to_export, Path(folder))

    def _to_export(self) -> Loaders:
        """Oldest first, then what cannot be read. Raises StoreError where there is none."""
        items, unreadable = self._items(), self._unreadable()
        if not items and not unreadable:
            none = (
                f"no run matches {shown(self.asked)!r}"
                if self.asked
                else f"no run is in {str(self.store.root)!r} yet, profile something first"
            )
            raise StoreError(f"Nothing to export: {none}.")
        loaders: dict[str, Callable[[], Run]] = {item.id: partial(_load, item) for item in items}
        return loaders | {e.id: partial(read, e.path) for e in unreadable}

    # -- finding -------------------------------------------------------------------------------------------------

    def _items(self) -> list[_Item]:
        return [item for item in self._all() if all(_fits(item, wanted) for wanted in self._filters)]

    def _unreadable(self) -> list[Entry]:
        """Folders of the store that cannot be read; none in a part that `where` chose."""
        return [] if self._filters else [entry for entry in self.store.list() if entry.problem is not None]

    def _all(self) -> list[_Item]:
        try:
            entries = {e.id: e for e in self.store.list()}
        except StoreError:
            if not self._own:
                raise
            entries = {}  # what this process measured is there without the store
        stored = [_of_entry(e) for e in entries.values() if e.problem is None and e.id not in self._own]
        own = [item for id_ in list(self._own) if (item := self._own_item(id_, entries)) is not None]
        items = stored + own
        return [replace(item, position=place - len(items)) for place, item in enumerate(items)]

    def _own_item(self, id_: str, entries: Mapping[str, Entry]) -> _Item | None:
        """A run of this process, as it is on disk by now: another notebook may have named or deleted it."""
        own = self._own[id_]
        if own.path is None:
            return _of_run(own.run, None) if own.run is not None else None
        on_disk = entries.get(id_)
        if on_disk is None or on_disk.path != own.path:
            on_disk = entry(own.path)
        if not (own.path / DOCUMENT).exists():
            return _of_run(own.run, None) if own.run is not None else None
        if own.run is None:
            return _of_entry(on_disk)
        if on_disk.problem is None and on_disk.name != own.run.name:
            own = replace(own, run=_with_name(own.run, "" if on_disk.name == on_disk.id else on_disk.name))
            self._own[id_] = own
        assert own.run is not None
        return _of_run(own.run, own.path)

    def _find(self, key: str) -> _Item:
        items = self._items()
        folder = run_folder(key)
        if folder is not None:
            return next((i for i in items if i.path == folder), None) or _of_entry(entry(folder))
        match = select(items, key) or next(iter(_of_job(items, key)), None)
        if match is not None:
            return match
        if not self._filters:
            broken = next((e for e in self.store.list() if e.id == key), None)
            if broken is not None:
                return _of_entry(broken)
        raise StoreError(not_found(items, key, self.store.root))

    def _only(self, key: str | Run) -> _Item:
        """The run that a key means, and no other could be meant. Raises StoreError."""
        word = key.id if isinstance(key, Run) else key
        item = self._find(word)
        same = [group[0].id for group in _grouped([i for i in self._items() if i.name == word])]
        if len(same) > 1 and item.name == word and item.id != word:
            raise StoreError(f"{len(same)} runs are named {shown(word)!r}: {', '.join(same[-4:])}. Use an id.")
        return item

    def _doomed(self, keys: Sequence[str | Run]) -> list[_Item]:
        if keys:
            meant = [one for key in keys for one in self._with_job(key)]
            return list({item.id: item for item in meant}.values())
        if not self._filters:
            raise UsageError("Name the runs to delete: by id, by name or with a filter.")
        chosen = self._items()
        jobs = {item.job.id for item in chosen if item.job is not None}
        ids = {item.id for item in chosen}
        return [i for i in self._all() if i.id in ids or (i.job is not None and i.job.id in jobs)]

    def _with_job(self, key: str | Run) -> list[_Item]:
        """The run that a key means; of one that is a rank, all ranks of its job, unless it is meant by its id."""
        item = self._only(key)
        if item.job is None or isinstance(key, Run) or item.id.startswith(key) or run_folder(key) is not None:
            return [item]
        return _of_job(self._all(), item.job.id) or [item]

    def __repr__(self) -> str:
        return self._text(self) if self._text else f"<{len(self)} runs in {str(self.store.root)!r}>"

    def _repr_html_(self) -> str | None:
        return self._html(self) if self._html else None


def _of_run(run: Run, path: Path | None) -> _Item:
    return _Item(run.id, run.name, run.created, run.device.kind, run.outcome, run, path, 0, run.job)


def _of_entry(header: Entry) -> _Item:
    return _Item(
        header.id, header.name, header.created, header.device_kind, header.outcome, None, header.path, 0, header.job
    )


def _fits(item: _Item, wanted: Filter) -> bool:
    if not wanted.fits(item):
        return False
    if not wanted.words:
        return True
    run = _row(item).run
    return run is not None and wanted.fits_words(run)


def _with_name(run: Run, name: str) -> Run:
    return replace(run, settings=replace(run.settings, name=name))


def _deletion(item: _Item) -> Deletion:
    return Deletion(item.id, item.name, size_bytes(item.path) if item.path is not None else 0, item.path)


def _load(item: _Item) -> Run:
    if item.run is not None:
        return item.run
    assert item.path is not None, "a run is in memory or on disk"
    return read(item.path)


def _grouped(items: Sequence[_Item]) -> list[list[_Item]]:
    """Runs, and jobs with their lowest rank first, in the order of their first item."""
    groups: dict[str, list[_Item]] = {}
    for item in items:
        several = item.job is not None and item.job.world_size != 1
        groups.setdefault(f"job {item.job.id}" if several and item.job else f"run {item.id}", []).append(item)
    ordered = [sorted(of_one, key=_rank_of) for of_one in groups.values()]
    return [part for of_one in ordered for part in ([of_one] if _ranks(of_one) else [[item] for item in of_one])]


def _ranks(items: Sequence[_Item]) -> dict[int, _Item]:
    """By rank, of which the last run counts; empty where they are not several ranks."""
    ranks = {item.job.rank: item for item in items if item.job is not None}
    return ranks if len(ranks) > 1 else {}


def _of_job(items: Sequence[_Item], job_id: str) -> list[_Item]:
    """Its ranks, the lowest first."""
    return sorted((item for item in items if item.job is not None and item.job.id == job_id), key=_rank_of)


def _rank_of(item: _Item) -> int:
    return item.job.rank if item.job is not None else 0


def _row_of(items: Sequence[_Item]) -> Row:
    row, job = _row(items[0]), items[0].job
    ranks = _ranks(items)
    if job is None or not ranks:
        return row
    outcomes = tuple(item.outcome or "" for item in ranks.values())
    return replace(row, id=job.id, position=max(item.position for item in items), outcomes=outcomes, runs=len(items))


def _row(item: _Item) -> Row:
    if item.run is not None:
        return Row(item.run.id, item.position, item.run, item.path)
    assert item.path is not None, "a run is in memory or on disk"
    try:
        return Row(item.id, item.position, read(item.path, timeline=False), item.path)
    except StoreError as e:
        return Row(item.id, item.position, path=item.path, problem=str(e))


__all__ = ["Deletion", "Exported", "Figures", "Row", "Runs"]


class Exported(Struct, frozen=True):
    """What an export wrote: `count` runs into `path`; `skipped` says which it left out and why, `notes` the rest."""

    path: Path
    count: int
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Figures(Struct, frozen=True):
    """How a run becomes one row of a table: the columns with their types, and the function that fills them."""

    columns: Mapping[str, type]
    row: Callable[[Run], Mapping[str, Cell]]


Loaders = Mapping[str, Callable[[], Run]]  # by id; one raises StoreError where its run cannot be read
FindLoaders = Callable[[], Loaders]  # called when all else was checked; raises StoreError where there is no run


def to_table(find_runs: FindLoaders, file: Path, figures: Figures) -> Exported:
    """As one table. Raises UsageError and StoreError; then no file is written."""
    tables.check_path(file)
    cells: list[Mapping[str, Cell]] = []
    skipped = _each(find_runs(), lambda run: cells.append(figures.row(run)))
    tables.write_table(file, cells, figures.columns)
    return Exported(file, len(cells), skipped)


def to_tensorboard(find_runs: FindLoaders, folder: Path) -> Exported:
    """As TensorBoard scalars. Raises UsageError and StoreError."""
    tensorboard.require()
    notes: dict[str, str] = {}

    def write(run: Run) -> None:
        every = max((curve.thinned for curve in tensorboard.export(run, folder)), default=1)
        if every > 1:
            notes[run.id] = f"{run.id}: long curves are thinned, down to one point in {every}"

    chosen = find_runs()
    skipped = _each(chosen, write)
    return Exported(folder, len(chosen) - len(skipped), skipped, tuple(notes.values()))


def _each(loaders: Loaders, write: Callable[[Run], object]) -> tuple[str, ...]:
    """Write all runs that can be read; returns why others were not. Raises StoreError where none could."""
    skipped: list[str] = []
    for id_, load in loaders.items():
        try:
            run = load()
        except StoreError as e:
            skipped.append(f"{id_}: {e}")
        else:
            write(run)
    if len(skipped) == len(loaders):
        raise StoreError(f"Nothing to export: {skipped[0]}")
    return tuple(skipped)
