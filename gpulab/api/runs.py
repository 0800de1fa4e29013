"""`gpulab.runs`: the runs of the store and of this process as one sequence, which ends with the latest run here."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Self, overload

from msgspec import Struct
from msgspec.structs import replace

from gpulab.analysis.steps import select as select_steps
from gpulab.analysis.steps import spread_of_steps, steps_per_round
from gpulab.errors import StoreError, UsageError
from gpulab.formatting import duration, plural, settings_words
from gpulab.run import Run
from gpulab.store import exports
from gpulab.store.exports import Cell
from gpulab.store.files import size_bytes
from gpulab.store.folders import DOCUMENT, Store, entry_in, read, run_folder
from gpulab.store.lookup import Entry, Filter, brief, make_filter, select, why_none
from gpulab.store.summaries import rename_summary
from gpulab.views.view import Listing
from gpulab.views.wording import cut, plain, rank_words, shortened

MOST_IN_MEMORY = 20
MOST_ROWS = 20  # in a list, unless all rows are requested
TITLES = ("", "name", "id", "started", "step", "steps", "took", "device", "outcome")
_NUMBERS = ("", "step", "steps", "took")
_WIDEST_NAME = 32
_WIDEST_CONDITIONS = 200


class Deletion(Struct, frozen=True):
    """One run that is deleted, or would be."""

    id: str
    name: str
    size_bytes: int  # on disk; 0 for an unsaved run
    path: Path | None


class Exported(Struct, frozen=True):
    """The result of an export: `count` runs in `path`; `skipped`: omitted runs with reasons; `notes`: other remarks."""

    path: Path
    count: int
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Runs(Sequence[Run]):
    """The runs of the store, oldest first, then the runs of this process in the order they were made.

    So `runs[-1]` is this process's latest run, whatever another notebook saves meanwhile. Folders that cannot be read
    are not in the sequence; `rows` names them.
    """

    def __init__(self, store: Store | None = None) -> None:
        self._store = store
        self._own: dict[str, Entry] = {}  # `run` is None: too old to stay in memory
        self._filters: tuple[Filter, ...] = ()

    @property
    def store(self) -> Store:
        """The store of the runs: the constructor's argument, else the current default."""
        return self._store or Store()

    @property
    def conditions(self) -> str:
        """The conditions of `where` in words; empty without conditions."""
        return ", ".join(map(str, self._filters))

    def add(self, run: Run, path: Path | None = None) -> None:
        """Add a run of this process, with its folder if it was saved.

        The last 20 stay in memory. Older ones are read from their folder; older unsaved ones are forgotten.
        """
        self._own.pop(run.id, None)
        self._own[run.id] = _entry_of(run, path)
        for old in list(self._own)[:-MOST_IN_MEMORY]:
            if self._own[old].path is None:
                del self._own[old]
            else:
                self._own[old] = replace(self._own[old], run=None)

    @property
    def own(self) -> list[Run]:
        """The runs of this process that are in memory, in the order they were made."""
        return [own.run for own in self._own.values() if own.run is not None]

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
        """The runs that fulfil all conditions, as a sequence of the same kind that follows the store.

        `name` is a pattern ("resnet*"), `device` "cpu" or "cuda", `since` a date ("2026-11-20") or an age ("30m", "2h",
        "3d", "1w"), `outcome` one of "completed", "stopped", "interrupted", "failed"; all `words` must occur in the
        name, id, code, device, dataset, error or knobs. Raises UsageError for impossible values.
        """
        condition = make_filter(name, device, since, outcome, words)
        part = copy.copy(self)  # shares this process's runs
        if condition != Filter():
            part._filters = (*self._filters, condition)
        return part

    def __len__(self) -> int:
        return len(self._entries())

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
            return read_entry(self.find(key))
        entries = self._entries()
        if isinstance(key, slice):
            return [read_entry(entry) for entry in entries[key]]
        try:
            return read_entry(entries[key])
        except IndexError:
            raise IndexError(f"there is no run {key}: {len(entries)} here") from None

    def rows(self, count: int | None = None) -> list[Entry]:
        """The last `count` runs of the sequence (None: all), newest first, then every folder that cannot be read.

        A job with several ranks is one row. Positions refer to the whole sequence, also after `where`. After `where`,
        folders that cannot be read are omitted, because nothing is known about them.
        """
        groups = _grouped(self._entries()[::-1])[:count]
        newest_first = sorted(groups, key=lambda group: group[0].created, reverse=True)
        return [*map(_row, newest_first), *self._unreadable()]

    # -- changing ------------------------------------------------------------------------------------------------

    def name(self, key: str | Run, new: str) -> str:
        """Rename a run, with a rank its whole job; an empty name removes the name. Returns the id.

        Raises StoreError if the run is unknown, if several have that name, or if it cannot be written, and UsageError
        for a name that already denotes another run.
        """
        entries = self._with_job(key)
        for entry in entries:
            is_position = new == "latest" or (new[:1] == "-" and new[1:].isdecimal())
            if is_position or any(other.id == new and other.id != entry.id for other in self._all()):
                raise UsageError(f"{brief(new)!r} is already taken by a run; choose another name.")
        for entry in entries:
            if entry.path is not None:
                self.store.rename(entry.path, new)
                rename_summary(entry.path, new)
            own = self._own.get(entry.id)
            if own is not None and own.run is not None:
                self._own[entry.id] = _entry_of(_with_name(own.run, new), own.path)
        return entries[0].id

    def deletions(self, *keys: str | Run) -> list[Deletion]:
        """What `delete` would delete, with sizes. Raises as `delete`; nothing is changed."""
        return [_deletion(entry) for entry in self._doomed(keys)]

    def delete(self, *keys: str | Run) -> list[Deletion]:
        """Delete runs permanently: the runs that the keys name, or without keys all runs that `where` selected.

        A rank's name deletes its whole job, a rank's id or folder only that rank; conditions select whole jobs. All
        keys are looked up before the first deletion. Raises StoreError for a key that names no run or several,
        UsageError without keys and conditions.
        """
        doomed = self._doomed(keys)
        deletions = [_deletion(entry) for entry in doomed]
        for count, entry in enumerate(doomed):
            try:
                if entry.path is not None:
                    store = Store(entry.path.parent) if entry.id in self._own else self.store
                    store.delete(entry.path)
                self._own.pop(entry.id, None)
            except StoreError as e:
                raise StoreError(f"{e} {count} of {len(doomed)} are deleted.") from e
        return deletions

    # -- exporting -----------------------------------------------------------------------------------------------

    def export(self, path: str | Path) -> Exported:
        """One row of figures per run, oldest first, as .csv, .json or .parquet (which needs pyarrow).

        Raises UsageError for another ending, StoreError if there is no run or the file cannot be written.
        """
        file = Path(path)
        exports.check_path(file)
        from gpulab.analysis.run_row import COLUMNS, run_row

        rows: list[Mapping[str, Cell]] = []
        count, skipped = self._export_each(lambda run: rows.append(run_row(run)))
        exports.write_table(file, rows, COLUMNS)
        return Exported(file, count, skipped)

    def export_tensorboard(self, folder: str | Path) -> Exported:
        """Curves per step and per reading as TensorBoard scalars, one folder per run; needs tensorboard.

        Raises UsageError without it, StoreError if there is no run or nothing can be written.
        """
        if not exports.installed("tensorboard"):
            raise UsageError("TensorBoard scalars need TensorBoard: pip install tensorboard.")
        notes: dict[str, str] = {}

        def write(run: Run) -> None:
            every = max((curve.every for curve in exports.write_scalars(run, Path(folder))), default=1)
            if every > 1:
                notes[run.id] = f"{run.id}: long curves are thinned, down to one point in {every}"

        count, skipped = self._export_each(write)
        return Exported(Path(folder), count, skipped, tuple(notes.values()))

    def _export_each(self, write: Callable[[Run], object]) -> tuple[int, tuple[str, ...]]:
        """Write all readable runs, oldest first; returns their number, and why others were skipped.

        Raises StoreError if there is no run, or none could be read.
        """
        entries = {entry.id: entry for entry in (*self._entries(), *self._unreadable())}
        if not entries:
            none = (
                f"no run matches {brief(self.conditions)!r}"
                if self.conditions
                else f"no run is in {str(self.store.root)!r} yet, profile something first"
            )
            raise StoreError(f"Nothing to export: {none}.")
        skipped: list[str] = []
        for entry in entries.values():
            try:
                run = read_entry(entry)
            except StoreError as e:
                skipped.append(f"{entry.id}: {e}")
            else:
                write(run)
        if len(skipped) == len(entries):
            raise StoreError(f"Nothing to export: {skipped[0]}")
        return len(entries) - len(skipped), tuple(skipped)

    # -- finding -------------------------------------------------------------------------------------------------

    def _entries(self) -> list[Entry]:
        return [entry for entry in self._all() if all(_fits(entry, condition) for condition in self._filters)]

    def _unreadable(self) -> list[Entry]:
        """Folders of the store that cannot be read; empty after `where`."""
        return [] if self._filters else [entry for entry in self.store.list() if entry.problem is not None]

    def _all(self) -> list[Entry]:
        try:
            stored = {entry.id: entry for entry in self.store.list()}
        except StoreError:
            if not self._own:
                raise
            stored = {}  # this process's runs are available without the store
        entries = [entry for entry in stored.values() if entry.problem is None and entry.id not in self._own]
        entries += filter(None, [self._own_entry(run_id, stored) for run_id in list(self._own)])
        return [replace(entry, position=place - len(entries)) for place, entry in enumerate(entries)]

    def _own_entry(self, run_id: str, stored: Mapping[str, Entry]) -> Entry | None:
        """A run of this process in its present form on disk: another notebook may have renamed or deleted it."""
        own = self._own[run_id]
        if own.path is None or not (own.path / DOCUMENT).exists():
            return replace(own, path=None) if own.run is not None else None
        on_disk = stored.get(run_id)
        if on_disk is None or on_disk.path != own.path:
            on_disk = entry_in(own.path)
        if own.run is None:
            return on_disk
        if on_disk.problem is None and on_disk.name != own.name:
            own = _entry_of(_with_name(own.run, "" if on_disk.name == on_disk.id else on_disk.name), own.path)
            self._own[run_id] = own
        return own

    def find(self, key: str) -> Entry:
        """The run that a key denotes, see `runs[key]`. Raises StoreError if there is none."""
        entries = self._entries()
        folder = run_folder(key)
        if folder is not None:
            return next((entry for entry in entries if entry.path == folder), None) or entry_in(folder)
        match = select(entries, key) or next(iter(_of_job(entries, key)), None)
        if match is None and not self._filters:
            match = next((entry for entry in self.store.list() if entry.id == key), None)  # it cannot be read
        if match is None:
            raise StoreError(why_none(entries, key, self.store.root))
        return match

    def _only(self, key: str | Run) -> Entry:
        """The only run that a key denotes. Raises StoreError if there is none or several."""
        word = key.id if isinstance(key, Run) else key
        match = self.find(word)
        same = [group[0].id for group in _grouped([entry for entry in self._entries() if entry.name == word])]
        if len(same) > 1 and match.name == word and match.id != word:
            raise StoreError(f"{len(same)} runs are named {brief(word)!r}: {', '.join(same[-4:])}. Use an id.")
        return match

    def _doomed(self, keys: Sequence[str | Run]) -> list[Entry]:
        if keys:
            return list({entry.id: entry for key in keys for entry in self._with_job(key)}.values())
        if not self._filters:
            raise UsageError("Name the runs to delete: by id, by name or with a filter.")
        matches = self._entries()
        jobs = {entry.job.id for entry in matches if entry.job is not None}
        ids = {entry.id for entry in matches}
        return [e for e in self._all() if e.id in ids or (e.job is not None and e.job.id in jobs)]

    def _with_job(self, key: str | Run) -> list[Entry]:
        """The run that a key denotes; for a rank, all ranks of its job, unless the key is the rank's id."""
        match = self._only(key)
        if match.job is None or isinstance(key, Run) or match.id.startswith(key) or run_folder(key) is not None:
            return [match]
        return _of_job(self._all(), match.job.id) or [match]

    # -- showing -------------------------------------------------------------------------------------------------

    def listing(self, count: int | None = MOST_ROWS) -> Listing:
        """The newest `count` runs (None: all) as a table, and every folder that cannot be read with its reason."""
        rows = self.rows(count)
        cells = [_cells(row, row.run) for row in rows if row.run is not None]
        hidden = len(self) - sum(row.runs for row in rows if row.position is not None)
        lines = [] if cells else [self._none()]
        lines += [f"… and {plural(hidden, 'older run')}"] if hidden > 0 else []
        if any(row.path for row in rows):
            lines.append(f"Saved in {cut(plain(str(self.store.root)), _WIDEST_CONDITIONS)}.")
        lines += [f"{plain(row.id)}: unreadable, {plain(row.problem)}" for row in rows if row.problem is not None]
        return Listing([(TITLES, cells)] if cells else [], lines, _NUMBERS)

    def _none(self) -> str:
        if self.conditions:
            return f"No run matches: {cut(plain(self.conditions), _WIDEST_CONDITIONS)}."
        return f"No run yet in {plain(str(self.store.root))}."

    def __repr__(self) -> str:
        return repr(self.listing())

    def _repr_html_(self) -> str:
        return self.listing()._repr_html_()


def _entry_of(run: Run, path: Path | None) -> Entry:
    return Entry(run.id, path, run.name, run.created, run.outcome, run.device.kind, run.job, run=run)


def _with_name(run: Run, name: str) -> Run:
    return replace(run, settings=replace(run.settings, name=name))


def _deletion(entry: Entry) -> Deletion:
    return Deletion(entry.id, entry.name, size_bytes(entry.path) if entry.path is not None else 0, entry.path)


def read_entry(entry: Entry, *, timeline: bool = True) -> Run:
    """The run of an entry. Raises StoreError if it cannot be read."""
    if entry.run is not None:
        return entry.run
    assert entry.path is not None, "a run is in memory or on disk"
    return read(entry.path, timeline=timeline)


def _fits(entry: Entry, condition: Filter) -> bool:
    if not condition.fits(entry):
        return False
    if not condition.words:
        return True
    run = _outlined(entry).run
    return run is not None and condition.fits_words(run)


def _outlined(entry: Entry) -> Entry:
    """The entry with its run, possibly without the timeline, or with the problem of reading it."""
    try:
        return replace(entry, run=read_entry(entry, timeline=False), problem=None)
    except StoreError as e:
        return replace(entry, problem=str(e))


def _row(group: Sequence[Entry]) -> Entry:
    row, ranks = _outlined(group[0]), _ranks(group)
    if row.job is None or not ranks:
        return row
    outcomes = tuple(entry.outcome or "" for entry in ranks.values())
    newest = max(entry.position or 0 for entry in group)
    return replace(row, id=row.job.id, position=newest, outcomes=outcomes, runs=len(group))


def _grouped(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Groups of one run or one job (lowest rank first), ordered by the first run of each group."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        several = entry.job is not None and entry.job.world_size != 1
        groups.setdefault(f"job {entry.job.id}" if several and entry.job else f"run {entry.id}", []).append(entry)
    ordered = [sorted(of_one, key=_rank) for of_one in groups.values()]
    return [part for of_one in ordered for part in ([of_one] if _ranks(of_one) else [[entry] for entry in of_one])]


def _ranks(entries: Iterable[Entry]) -> dict[int, Entry]:
    """The last run of each rank; empty if there is only one rank."""
    ranks = {entry.job.rank: entry for entry in entries if entry.job is not None}
    return ranks if len(ranks) > 1 else {}


def _of_job(entries: Iterable[Entry], job_id: str) -> list[Entry]:
    """The ranks of a job, the lowest first."""
    return sorted((entry for entry in entries if entry.job is not None and entry.job.id == job_id), key=_rank)


def _rank(entry: Entry) -> int:
    return entry.job.rank if entry.job is not None else 0


def _cells(row: Entry, run: Run) -> tuple[str, ...]:
    rows = select_steps(run).rows
    step = spread_of_steps(run, run.steps.time_ns[rows], rows, steps_per_round(run, rows))
    return (
        str(row.position),
        shortened(plain(_called(row, run)), _WIDEST_NAME) or "–",
        plain(row.id) + ("" if row.path else " (not saved)"),
        _local_time(run.created),
        duration(step.median if step else None),
        f"{len(run.steps):,}",
        duration(run.code_wall_ns / 1e3),
        cut(plain(run.device.name), _WIDEST_NAME),
        _outcome(row, run),
    )


def _called(row: Entry, run: Run) -> str:
    """The run's name, its settings if the name lacks them, and its ranks."""
    changed = settings_words(run.settings.knobs)
    name = run.settings.name
    return " · ".join(filter(None, (name, "" if changed in name else changed, rank_words(run.job, len(row.outcomes)))))


def _outcome(row: Entry, run: Run) -> str:
    """The outcome; for several ranks the most frequent one among incomplete ranks, with the number of ranks."""
    if run.reached_step_limit and set(row.outcomes) <= {"stopped"}:
        return "step limit"
    others = Counter(outcome for outcome in row.outcomes if outcome != "completed")
    if not others:
        return run.outcome
    outcome, count = others.most_common(1)[0]
    return f"{outcome} ({count} of {len(row.outcomes)})" if count < len(row.outcomes) else outcome


def _local_time(created: str) -> str:
    """The start in local time; the id has it in UTC."""
    try:
        return f"{datetime.fromisoformat(created).astimezone():%d %b %H:%M:%S}"
    except ValueError:  # a file from another tool
        return "–"


runs = Runs()  # the default store's runs and this process's runs
