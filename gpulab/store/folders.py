"""The run store: one folder per run, so that a run outlives its kernel and opens in other tools.

A folder holds `run.json`, `columns.tables` and, if the profiler ran, `<host>_<pid>.<ns>.pt.trace.json.gz`, the name
that TensorBoard's PyTorch plugin looks for. A folder appears under its final name only when it is complete; until then
it is hidden. Several processes may save and read at once without a lock.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
import tomllib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from gpulab.errors import StoreError, UsageError
from gpulab.run import TRACE_DROPPED, Missing, Run
from gpulab.store import run_format
from gpulab.store.files import orphaned, reason, replace_whole, sync_folder, write_new
from gpulab.store.lookup import Entry, moment, select, why_none

DOCUMENT = "run.json"
COLUMNS = "columns.tables"
NPZ = "columns.npz"  # of gpulab 0.1
TRACE_SUFFIX = ".pt.trace.json.gz"

UNFINISHED_TRACE = "unfinished.json.gz"

_STAGE_PREFIX = ".saving-"
_GONE_PREFIX = ".deleting-"
RUNNING_PREFIX = ".running-"  # a run in progress: updated every second
KILLED = "its process was killed"
_STALE_AFTER_S = 3600.0
_SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

WriteTrace = Callable[[Path], None]


def new_id(now: datetime | None = None) -> str:
    """A unique id: the UTC second and 40 random bits, drawn without the global random state."""
    return f"{(now or datetime.now(UTC)).astimezone(UTC):%Y%m%d-%H%M%S}-{os.urandom(5).hex()}"


def default_root() -> Path:
    """`$GPULAB_DIR/runs`, or `.gpulab/runs` under the current directory."""
    return Path(os.environ.get("GPULAB_DIR") or ".gpulab").absolute() / "runs"


class Store:
    """The runs under one folder, which is created by the first `save`."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = default_root() if root is None else Path(root).absolute()

    def save(self, run: Run, write_trace: WriteTrace | None = None) -> Path:
        """Write a run, and its trace if `write_trace(path)` makes one (gzip, Chrome trace JSON). Returns the run's
        folder.

        A trace that cannot be written does not lose the run: the stored record says so in `missing`, and `trace_path`
        is None. Raises StoreError if the run itself cannot be written; then no files are left.
        """
        if not _SAFE_ID.fullmatch(run.id):
            raise StoreError(f"Run not saved: {run.id!r} cannot be the name of a folder.")
        final = self.root / run.id
        stage = self.root / f"{_STAGE_PREFIX}{run.id}-{os.urandom(3).hex()}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._remove_stale()
            stage.mkdir()
            run = run if write_trace is None else _put_trace(stage, run, write_trace)
            document, columns = run_format.encode(run)
            if len(document) > run_format.MAX_DOCUMENT_BYTES or len(columns) > run_format.MAX_COLUMNS_BYTES:
                raise StoreError("it exceeds the size limit of a stored run; profile fewer steps")
            write_new(stage / DOCUMENT, document)
            write_new(stage / COLUMNS, columns)
            sync_folder(stage)
            os.rename(stage, final)
        except (OSError, StoreError) as e:
            raise StoreError(f"Run not saved in {str(self.root)!r}: {reason(e)}") from e
        finally:
            shutil.rmtree(stage, ignore_errors=True)
        sync_folder(self.root)
        return final

    def add_trace(self, folder: Path, run: Run, write_trace: WriteTrace) -> Run:
        """Add the trace to a stored run. Returns the run; if the trace cannot be written, its `missing` says why.

        Raises StoreError if the stored record cannot be updated.
        """
        stored = _put_trace(folder, run, write_trace)
        if stored is run:
            sync_folder(folder)
            return run
        try:
            replace_whole(folder / DOCUMENT, run_format.encode(stored)[0])
        except OSError as e:
            raise StoreError(f"Run {folder.name!r} cannot be written: {reason(e)}.") from e
        return stored

    def drop_trace(self, key: str | Path, why: str) -> None:
        """Remove the profiler's data from a stored run, which keeps its steps and curves; `missing` says `why`.

        Raises StoreError if the run cannot be read or written.
        """
        folder = self.find(key)
        run = read(folder)
        lacking = Missing("trace", why, key=TRACE_DROPPED)
        run = replace(
            run, timeline=None, memory_events=None, stack=None, traced_numbers=(), missing=(*run.missing, lacking)
        )
        try:
            _rewrite(folder, run)
        except OSError as e:
            raise StoreError(f"Run {folder.name!r} cannot be written: {reason(e)}.") from e
        _remove_traces(folder)

    def settle_trace(self, folder: Path) -> None:
        """Remove a trace that was written while another process ran `drop_trace`."""
        with contextlib.suppress(OSError, StoreError):
            header = run_format.decode_header(_document(folder))
            if any(m.key == TRACE_DROPPED for m in header.missing):
                _remove_traces(folder)

    def load(self, key: str | Path) -> Run:
        """The run that `key` names, see `find`. Raises StoreError if there is none or it cannot be read."""
        return read(self.find(key))

    def find(self, key: str | Path) -> Path:
        """The folder of a run.

        `key` is the path of a run's folder, an id, "latest", a position from the end ("-1" is the newest), a name (the
        newest run with that name) or the beginning of an id. Raises StoreError naming the nearest match.
        """
        folder = run_folder(key)
        if folder is not None:
            return folder
        if isinstance(key, Path):
            raise StoreError(f"{str(key)!r} is not the folder of a run: it has no {DOCUMENT}.")
        entries = [e for e in self.list() if e.problem is None or e.id == key]
        match = select(entries, key)
        if match is None or match.path is None:
            raise StoreError(why_none(entries, key, self.root))
        return match.path

    def rename(self, key: str | Path, name: str) -> None:
        """Rename a run; an empty name removes the name.

        The record is replaced atomically, its trace and columns are unchanged; of two simultaneous changes the last
        wins. Raises StoreError if there is no such run, or it cannot be written.
        """
        folder = self.find(key)

        def with_name(settings: bytes) -> object:
            valid = name.encode("utf-8", "backslashreplace").decode()
            return {**msgspec.json.decode(settings, type=dict[str, Raw]), "name": valid}

        try:
            document = _document(folder)
            run_format.decode_header(document)
            renamed = _with_field(document, "settings", b"{}", with_name)
            if len(renamed) > run_format.MAX_DOCUMENT_BYTES:
                raise StoreError(f"the new name is too long for {DOCUMENT}; choose a shorter one")
            replace_whole(folder / DOCUMENT, renamed)
        except (OSError, StoreError) as e:
            raise StoreError(f"Run {folder.name!r} not renamed: {reason(e)}") from e

    def delete(self, key: str | Path) -> bool:
        """Delete the folder of a run; False if another process has just done so.

        For readers it disappears at once; then its files are deleted. Raises StoreError if there is no such run, if it
        lies outside this store, or if the folder cannot be moved.
        """
        folder = self.find(key)
        if folder.parent.resolve() != self.root.resolve():
            raise StoreError(f"{str(folder)!r} is not in the run store {str(self.root)!r}: delete that folder by hand.")
        doomed = self.root / f"{_GONE_PREFIX}{folder.name}-{os.urandom(3).hex()}"
        try:
            os.rename(folder, doomed)
        except FileNotFoundError:
            return False
        except OSError as e:
            raise StoreError(f"Run {folder.name!r} not deleted: {reason(e)}.") from e
        self._remove_stale()
        sync_folder(self.root)
        return True

    def list(self) -> Sequence[Entry]:
        """Every folder of the store, the newest last; unreadable ones come first, with their problem.

        Only headers are read. Runs of killed processes are finished first. Raises StoreError if the store itself cannot
        be read.
        """
        unfinished = self.finish_killed()
        try:
            folders = [f for f in self.root.iterdir() if not f.name.startswith(".") and f.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as e:
            raise StoreError(f"The run store {str(self.root)!r} cannot be read: {reason(e)}") from e
        entries = [entry for f in folders if (entry := entry_in(f)).problem is None or f.is_dir()]
        return sorted([*entries, *unfinished], key=_age)

    def finish_killed(self) -> Sequence[Entry]:
        """Move the runs of killed processes to their final folders; returns the runs for which that fails."""
        unfinished = []
        for folder in self.root.glob(f"{RUNNING_PREFIX}*"):
            with orphaned(folder / COLUMNS, _STALE_AFTER_S) as ours:
                problem = self._finish(folder) if ours else None
            if problem is not None:
                id_ = folder.name.removeprefix(RUNNING_PREFIX)
                unfinished.append(Entry(id_, folder, problem=f"{KILLED}: {problem}"))
            if not (folder / COLUMNS).exists():  # killed while the folder was created or removed
                with contextlib.suppress(OSError):
                    folder.rmdir()
        return unfinished

    def _finish(self, folder: Path) -> str | None:
        """Move a run to its final folder. Returns why that fails; None if it succeeds or the run is useless."""
        final = self.root / folder.name.removeprefix(RUNNING_PREFIX)
        try:
            if final.exists():
                _say_no_trace(final)
                shutil.rmtree(folder)
            elif entry_in(folder).problem is None:
                with contextlib.suppress(OSError, StoreError):  # it is readable as is, but more slowly
                    _rewrite(folder, read(folder))
                for file in folder.glob(".*"):
                    file.unlink()
                os.rename(folder, final)
                sync_folder(self.root)
            elif time.time() - (folder / COLUMNS).stat().st_mtime > _STALE_AFTER_S:
                shutil.rmtree(folder, ignore_errors=True)
        except (OSError, StoreError) as e:
            return reason(e)
        return None

    def _remove_stale(self) -> None:
        for folder in self.root.glob(f"{_GONE_PREFIX}*"):
            with contextlib.suppress(OSError):
                folder.unlink() if folder.is_symlink() else shutil.rmtree(folder, ignore_errors=True)
        for folder in self.root.glob(f"{_STAGE_PREFIX}*"):
            with contextlib.suppress(OSError):
                if time.time() - max(f.lstat().st_mtime for f in (folder, *folder.iterdir())) > _STALE_AFTER_S:
                    shutil.rmtree(folder, ignore_errors=True)


def read(folder: Path, *, timeline: bool = True) -> Run:
    """The run in a folder. Reading without the timeline is fast and enough for lists of runs.

    Raises StoreError with the reason if it cannot be read.
    """
    try:
        document = _document(folder)
        with _open_columns(folder) as file:
            return run_format.decode(document, file, timeline=timeline)
    except (OSError, StoreError) as e:
        raise StoreError(f"Run {folder.name!r} cannot be read: {reason(e)}") from e


def trace_path(folder: Path) -> Path | None:
    """The profiler's trace in a run's folder, for Perfetto, HTA or TensorBoard; None if it has no trace."""
    return next((f for f in sorted(folder.glob(f"*{TRACE_SUFFIX}")) if f.is_file()), None)


def _rewrite(folder: Path, run: Run) -> None:
    """Replace the files of a stored run. Raises OSError."""
    document, columns = run_format.encode(run)
    replace_whole(folder / DOCUMENT, document)
    replace_whole(folder / COLUMNS, columns)
    (folder / NPZ).unlink(missing_ok=True)


def _remove_traces(folder: Path) -> None:
    for file in folder.glob(f"*{TRACE_SUFFIX}"):
        file.unlink(missing_ok=True)


def _document(folder: Path) -> bytes:
    path = folder / DOCUMENT
    _require_file(path, run_format.MAX_DOCUMENT_BYTES)
    return path.read_bytes()


def _open_columns(folder: Path) -> IO[bytes]:
    path = folder / COLUMNS
    if not path.exists() and (folder / NPZ).exists():
        path = folder / NPZ
    _require_file(path, run_format.MAX_COLUMNS_BYTES)
    return path.open("rb")


def _require_file(path: Path, limit_bytes: int) -> None:
    if not path.exists():
        raise StoreError(f"it has no {path.name}")
    if not path.is_file():  # a pipe or a device would block or never end
        raise StoreError(f"{path.name} is not a file")
    if path.stat().st_size > limit_bytes:
        raise StoreError(f"{path.name} is larger than {limit_bytes >> 20} MiB")


def entry_in(folder: Path) -> Entry:
    """The entry of a folder, from its header; with a `problem` if it cannot be read."""
    try:
        header, rows = run_format.header_and_rows(_document(folder))
        with _open_columns(folder) as file:
            run_format.check_container(file, rows)
        moment(header.created)
    except (OSError, StoreError) as e:
        return Entry(folder.name, folder, problem=reason(e))
    name = header.settings.name or folder.name
    return Entry(folder.name, folder, name, header.created, header.outcome, header.device.kind, header.job)


def _age(entry: Entry) -> tuple[bool, float, int, str]:
    if entry.problem is not None or entry.path is None:
        return (False, 0.0, 0, entry.id)
    try:
        saved_ns = (entry.path / DOCUMENT).stat().st_mtime_ns
    except OSError:
        saved_ns = 0
    return (True, moment(entry.created).timestamp(), saved_ns, entry.id)


def run_folder(key: str | Path) -> Path | None:
    """The folder of the run at `key`, the path of that folder or of the document in it; None if there is no run."""
    folder, name = os.path.split(key)
    if name == DOCUMENT and os.path.isfile(key):
        return Path(folder).absolute()
    return Path(key).absolute() if os.path.isfile(os.path.join(key, DOCUMENT)) else None


def _say_no_trace(folder: Path) -> None:
    """Note in a stored run that its process was killed before the trace was added, if so. Raises OSError."""
    try:
        traced = read(folder).timeline is not None
    except StoreError:  # its entry in the list says so
        return
    if traced and trace_path(folder) is None:
        lacking = Missing("trace file", KILLED, key="trace_file")
        document = _with_field(
            _document(folder), "missing", b"[]", lambda raw: [*msgspec.json.decode(raw, type=list[Raw]), lacking]
        )
        replace_whole(folder / DOCUMENT, document)
        (folder / UNFINISHED_TRACE).unlink(missing_ok=True)


def _with_field(document: bytes, name: str, default: bytes, change: Callable[[bytes], object]) -> bytes:
    """The document with one field changed; all other fields keep their bytes, also fields of a newer gpulab."""
    fields = msgspec.json.decode(document, type=dict[str, Raw])
    fields[name] = Raw(msgspec.json.encode(change(fields.get(name, Raw(default)))))
    return msgspec.json.encode(fields)


def _put_trace(folder: Path, run: Run, write_trace: WriteTrace) -> Run:
    """Write a run's trace into its folder. Returns the run; if writing fails, its `missing` says why.

    The trace gets its final name last, because TensorBoard also reads hidden folders and would load half a trace.
    """
    unfinished = folder / UNFINISHED_TRACE
    try:
        write_trace(unfinished)
        if unfinished.exists():
            import socket

            host = re.sub(r"[^A-Za-z0-9.-]", "-", run.environment.hostname or socket.gethostname())[:100] or "host"
            unfinished.rename(folder / f"{host}_{os.getpid()}.{time.time_ns()}{TRACE_SUFFIX}")
    except Exception as e:  # whatever the profiler raises: the run is worth more than its trace
        lacking = Missing("trace file", f"it could not be written: {reason(e)}", key="trace_file")
        return replace(run, missing=(*run.missing, lacking))
    finally:  # also after an interrupt
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
    return run


CONFIGURATION_FILE = "gpulab.toml"


def configured(table: str) -> dict[str, object]:
    """A table of the user's configuration file; empty if the file or the table is missing.

    The file in the current folder is used, else the file in `$GPULAB_DIR`. Raises UsageError in one line for a file
    that cannot be read, or a value that is not a table.
    """
    places = [Path(folder, CONFIGURATION_FILE) for folder in ("", os.environ.get("GPULAB_DIR") or "")]
    try:
        path = next((place for place in places if place.is_file()), None)
    except OSError as e:
        raise UsageError(f"gpulab cannot read {CONFIGURATION_FILE}: {e.strerror or e}.") from e
    if path is None:
        return {}
    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"{str(path)!r} cannot be read: {getattr(e, 'strerror', None) or 'it is not UTF-8'}.") from e
    except tomllib.TOMLDecodeError as e:
        raise UsageError(f"{str(path)!r} is not TOML: {e}. Example: [{table}] with name = 0.1 below it.") from e
    values = document.get(table, {})
    if not isinstance(values, dict):
        raise UsageError(f"{str(path)!r}: {table} is not a table: write [{table}] on a line of its own.")
    return values
