"""Opens a trace file, a stored run, or a folder with one trace per rank; files that were read before open at once.

The ranks of a folder are read in parallel processes. The columns of a large file are cached in `$GPULAB_CACHE_DIR`,
else in `gpulab` in the user's cache folder, which may be deleted at any time. A trace file and its folder are never
written to. The cache identifies a file by its place on the disk, its size and its times, so a changed file is read
again; so is every file after an update of gpulab.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import zlib
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from gpulab.devices.machine import usable_cores
from gpulab.devices.own_processes import run_python
from gpulab.errors import StoreError, TraceError
from gpulab.run import Missing, Ranks, Run
from gpulab.store import run_format
from gpulab.store.folders import COLUMNS, DOCUMENT, read
from gpulab.trace.load import READERS, Tell, load_run

if TYPE_CHECKING:
    from gpulab.run import Run

# A process needs about 0.3 s to start and to return its columns: below this total size, one process is faster.
PARALLEL_FROM_BYTES = 8 << 20
_RANK_IN_NAME = re.compile(r"rank[-_.]?(\d+)|^(\d+)\D*\.(?:pt\.trace\.)?json", re.IGNORECASE)


def load(path: str | Path, tell: Tell = lambda _: None) -> Run | Ranks:
    """A trace file or a stored run's folder as a `Run`, a folder of the traces of one job's ranks as `Ranks`.

    `tell` is called with the fraction of a trace file that has been read.

    Raises TraceError or StoreError, in one sentence with the next step, if nothing can be read.
    """
    path = Path(path)
    if (path / DOCUMENT).is_file():
        return read(path)
    if not path.is_dir():
        return _opened(path, tell)
    ranks = load_ranks(path)
    return next(iter(ranks.runs.values())) if len(ranks.runs) == 1 and not ranks.problems else ranks


def _opened(path: Path, tell: Tell = lambda _: None) -> Run:
    """A trace file's run: from the cache, else read now and cached."""
    run = cached(path)
    if run is None:
        run = load_run(path, tell)
        cache(path, run)
    return run


def load_ranks(folder: Path) -> Ranks:
    """Every trace in a folder, by rank. Raises TraceError if the folder has no readable trace."""
    files = sorted(f for f in folder.iterdir() if f.name.endswith(tuple(READERS)) and f.is_file())
    if not files:
        raise TraceError(
            f"{folder} holds no trace: none of its files ends in {' or '.join(READERS)}. Name the file, or its folder."
        )
    read = _read_all(files)
    problems = [
        Missing(f.name, r, key="unreadable_file") for f, r in zip(files, read, strict=True) if isinstance(r, str)
    ]
    by_file = {f: r for f, r in zip(files, read, strict=True) if isinstance(r, Run)}
    if not by_file:
        raise TraceError(f"None of the {len(files)} files in {folder} can be read as a trace. {problems[0].reason}")
    runs, doubled = _by_rank(by_file)
    world_size = max((r.origin.world_size or 0 for r in runs.values() if r.origin), default=0) or None
    problems += [*doubled, *_absent(runs, world_size), *_cut_short(runs), *_strangers(runs)]
    return Ranks(str(folder), dict(sorted(runs.items())), world_size, tuple(problems))


def _read_all(files: Sequence[Path]) -> list[Run | str]:
    """Each file's run, or a sentence why it cannot be read."""
    workers = min(len(files), max(1, int(usable_cores() or 1)))
    if workers < 2 or sum(f.stat().st_size for f in files) < PARALLEL_FROM_BYTES:
        return [_read_here(f) for f in files]
    import tempfile
    from concurrent.futures import ThreadPoolExecutor

    with tempfile.TemporaryDirectory(prefix="gpulab-") as scratch, ThreadPoolExecutor(workers) as pool:
        folders = [Path(scratch, str(i)) for i in range(len(files))]
        return list(pool.map(_read_apart, files, folders))


def _read_here(file: Path) -> Run | str:
    try:
        return _opened(file)
    except TraceError as e:
        return str(e)


def _read_apart(file: Path, folder: Path) -> Run | str:
    """Read a file in its own process, which returns the record in the store's format; cached files are read here."""
    run = cached(file)
    if run is not None:
        return run
    folder.mkdir()
    done = run_python("gpulab.trace.files:write_run", str(file), str(folder))
    if done.returncode:
        return (done.stdout or done.stderr).strip().splitlines()[-1] if done.stdout or done.stderr else "it was killed"
    try:
        with (folder / COLUMNS).open("rb") as columns:
            run = run_format.decode((folder / DOCUMENT).read_bytes(), columns)
    except (OSError, StoreError) as e:
        return f"{file} was read and could not be handed over: {e}"
    cache(file, run)
    return run


def write_run(file: str, folder: str) -> int:
    """Read one trace and write its record into a folder; returns the exit status. Runs in a reading process."""
    try:
        document, columns = run_format.encode(load_run(file))
    except TraceError as e:
        sys.stdout.write(f"{e}\n")
        return 1
    Path(folder, DOCUMENT).write_bytes(document)
    Path(folder, COLUMNS).write_bytes(columns)
    return 0


def _by_rank(by_file: dict[Path, Run]) -> tuple[dict[int, Run], list[Missing]]:
    """Runs by rank: the rank in the trace, else in the file's name, else the order of the names."""
    runs: dict[int, Run] = {}
    doubled = []
    nameless = [file.name for file, run in by_file.items() if _rank(file, run) is None]
    if len(nameless) > 1:
        reason = "neither the files nor their names give a rank: they are numbered by name"
        doubled.append(Missing(", ".join(sorted(nameless)[:4]), reason, key="unnumbered_rank"))
    for file, run in sorted(by_file.items(), key=lambda item: (_rank(*item) is None, item[0].name)):
        rank = _rank(file, run)
        if rank is None:
            rank = next(n for n in count() if n not in runs)
        if rank in runs:
            origin = runs[rank].origin
            place = Path(origin.path).name if origin else "another file"
            doubled.append(Missing(file.name, f"rank {rank} again: {place} has it already", key="duplicate_rank"))
        else:
            runs[rank] = run
    return runs, doubled


def _rank(file: Path, run: Run) -> int | None:
    if run.origin is not None and run.origin.rank is not None:
        return run.origin.rank
    match = _RANK_IN_NAME.search(file.name)
    return int(next(g for g in match.groups() if g)) if match else None


def _absent(runs: dict[int, Run], world_size: int | None) -> Iterator[Missing]:
    absent = sorted(set(range(world_size or 0)) - set(runs))
    if absent:
        some = ", ".join(map(str, absent[:12])) + (" …" if len(absent) > 12 else "")
        plural = "s" if len(absent) > 1 else ""
        yield Missing(
            f"rank{plural} {some}", f"the job has {world_size} ranks; no trace of it is here", key="absent_rank"
        )


def _cut_short(runs: dict[int, Run]) -> Iterator[Missing]:
    for rank, run in sorted(runs.items()):
        if run.origin is not None and run.origin.is_cut_short:
            reason = f"its file is cut short, so it is not compared: copy {Path(run.origin.path).name} again, whole"
            yield Missing(f"rank {rank}", reason, key="cut_short")


def _strangers(runs: dict[int, Run]) -> Iterator[Missing]:
    """Traces that do not belong to the job of the majority: another number of ranks, or no common step."""
    if len(runs) < 2:
        return
    most = max(runs, key=lambda rank: sum(_apart(runs[rank], other) is None for other in runs.values()))
    for rank, run in sorted(runs.items()):
        why = _apart(runs[most], run)
        if why is not None:
            what = f"rank {rank} beside rank {most}"
            yield Missing(what, f"they are not of the same job: {why}", key="stranger")


def _apart(one: Run, other: Run) -> str | None:
    """Why two runs cannot be ranks of one job; None if they can."""
    sizes = {r.origin.world_size for r in (one, other) if r.origin and r.origin.world_size}
    if len(sizes) > 1:
        return "their numbers of ranks differ"
    if {one.device.kind, other.device.kind} == {"cpu", "cuda"}:
        return "one holds a GPU's work and the other does not"
    steps = [set(r.steps.number.tolist()) for r in (one, other)]
    return "they have no step in common" if all(steps) and steps[0].isdisjoint(steps[1]) else None


CACHED_FROM_BYTES = 1 << 20  # size of a file: smaller files are read again as fast
MOST_BYTES = 2 << 30  # size of the cache: the least recently opened entries are deleted first
_PACKAGE = Path(__file__).parent.parent
_READERS = ("run.py", "trace", "timeline", "store/run_format.py", "store/table_file.py")  # what makes a run from a file


def cache_folder() -> Path:
    """The folder of the cache."""
    setting = os.environ.get("GPULAB_CACHE_DIR")
    if setting:
        return Path(setting) / "traces"
    home = Path.home()
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "gpulab" / "traces"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "gpulab" / "traces"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "gpulab" / "traces"


def cached(path: Path) -> Run | None:
    """The run of this file from the cache; None if it is not cached or the entry is damaged."""
    from msgspec.structs import replace

    from gpulab.errors import StoreError
    from gpulab.store import run_format
    from gpulab.store.folders import COLUMNS, DOCUMENT

    key = _key(path)
    if key is None:
        return None
    place = cache_folder() / key
    try:
        with (place / COLUMNS).open("rb") as columns:
            run = run_format.decode((place / DOCUMENT).read_bytes(), columns)
        os.utime(place)
    except FileNotFoundError:
        return None
    except (OSError, StoreError):
        shutil.rmtree(place, ignore_errors=True)
        return None
    return run if run.origin is None else replace(run, origin=replace(run.origin, path=str(path)))


def cache(path: Path, run: Run) -> None:
    """Cache the columns of a large file. After a failure, the file will be read again."""
    from gpulab.store import run_format
    from gpulab.store.folders import COLUMNS, DOCUMENT

    key = _key(path)
    if key is None:
        return
    root = cache_folder()
    unfinished = root / f".saving-{os.urandom(6).hex()}"
    with contextlib.suppress(OSError):
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            unfinished.mkdir(mode=0o700)
            with (unfinished / COLUMNS).open("xb") as columns:
                document = run_format.encode_into(run, columns)
            (unfinished / DOCUMENT).write_bytes(document)
            os.rename(unfinished, root / key)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        _make_room(root)


def _key(path: str | Path) -> str | None:
    """The cache key of a file; None for a small file, or if it is not a file."""
    try:
        state = os.stat(path)
    except OSError:
        return None
    if state.st_size < CACHED_FROM_BYTES or not os.path.isfile(path):
        return None
    name = zlib.crc32(os.path.basename(path).encode("utf-8", "surrogateescape"))  # which names the run
    times = f"{state.st_size:x}-{state.st_mtime_ns:x}-{state.st_ctime_ns:x}"
    return f"{state.st_dev:x}-{state.st_ino:x}-{times}-{name:x}-{_readers():x}"


def _readers() -> int:
    """A checksum of the code that turns a file into a run."""
    files = [file for name in _READERS for file in _files(_PACKAGE / name)]
    states = [(os.path.basename(file), *os.stat(file)[6:9:2]) for file in files]
    return zlib.crc32(repr(sorted(states)).encode())


def _files(path: Path) -> list[str]:
    return [entry.path for entry in os.scandir(path) if entry.name.endswith(".py")] if path.is_dir() else [str(path)]


def _make_room(root: Path) -> None:
    from gpulab.store.files import size_bytes

    entries = sorted((e for e in root.iterdir() if e.is_dir()), key=lambda e: e.stat().st_mtime)
    sizes = {entry: size_bytes(entry) for entry in entries}
    for entry in entries:
        if sum(sizes.values()) <= MOST_BYTES:
            return
        shutil.rmtree(entry, ignore_errors=True)
        del sizes[entry]
