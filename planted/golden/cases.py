"""The inputs of the golden answers: stored runs of planted cells, GPU recordings, shared traces, simulated loops."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from msgspec import Struct

FOLDER = Path(__file__).parent
RUNS = FOLDER / "runs.tar.xz"
TRACES = Path(__file__).parents[3] / "shared" / "traces"


class Case(Struct, frozen=True):
    """One input: a stored run's folder, a trace file or folder of ranks, or the name of a simulated loop."""

    name: str
    kind: Literal["run", "trace", "loop"]
    path: str = ""


def cases(runs: Path) -> Iterator[Case]:
    """Every case, the traces where they are there; `runs` is the folder into which `unpack` has put the stored runs."""
    from gpulab import recordings
    from planted.simulated.loops import LOOPS

    for folder in sorted(runs.iterdir()):
        yield Case(f"run {folder.name}", "run", str(folder))
    for name in recordings.names():
        yield Case(f"recording {name}", "run", str(recordings.DATA / name))
    if TRACES.is_dir():
        traces = (
            path for path in sorted(TRACES.iterdir()) if path.name.endswith(".json.gz") or path.name.endswith("ranks")
        )
        for path in traces:
            yield Case(f"trace {path.name.partition('.')[0]}", "trace", str(path))
    for loop in LOOPS:
        yield Case(f"loop {loop.name}", "loop")


def unpack(into: Path) -> None:
    """The stored runs, each in a folder named after its planted cell."""
    with tarfile.open(RUNS) as archive:
        archive.extractall(into, filter="data")


def pack(store: Path, cells: set[str]) -> list[str]:
    """Keep the newest stored run of each of these cells from a store of `benchmarks.planted --store`; their names."""
    from gpulab.store import folders

    newest = {entry.name: entry.path for entry in folders.Store(store).list() if entry.path and entry.problem is None}
    names = sorted(cells & set(newest))
    with tarfile.open(RUNS, "w:xz", preset=9) as archive:
        for name in names:
            for file in (folders.DOCUMENT, folders.COLUMNS):
                archive.add(newest[name] / file, f"{name}/{file}", filter=_anonymous)
    return names


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """The same bytes whoever packs, and whenever."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member
