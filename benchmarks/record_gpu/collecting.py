"""Puts finished recordings where gpulab ships them, as long as all of them together stay small enough."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.record_gpu.outlet import DOCUMENT, SIMULATED, Outlet, document_of, shortcoming, size_of
from benchmarks.record_gpu.packing import unpack
from gpulab.recordings import DATA
from gpulab.run import Missing
from gpulab.store import folders

LIMIT_BYTES = 20_000_000
LARGEST = 5


class CannotCollect(Exception):
    """Why nothing was copied, with the next step."""


class Collected(Struct, frozen=True):
    """What was copied, what was left out and why, and the size of all that is shipped now."""

    names: tuple[str, ...]
    omissions: tuple[str, ...]
    total_bytes: int


def collect(out: Path, data: Path | None = None, *, traces: bool = True, limit_bytes: int = LIMIT_BYTES) -> Collected:
    """Copy every whole recording of a folder, also one that only has packed files, into gpulab or `data`.

    Older ones of that name go.

    Without `traces` the runs are copied without the profiler's trace files: reports stay as they are. Raises
    CannotCollect where there is nothing to copy or all of it would be too large; then nothing is changed.
    """
    data = DATA if data is None else data
    if not out.is_dir():
        raise CannotCollect(f"There is no folder {str(out)!r}: name the one that --out has filled.")
    with tempfile.TemporaryDirectory(prefix="collect-") as temporary:
        prepared = Path(temporary, "prepared")
        names, omissions = _prepare(out, Path(temporary, "unpacked"), prepared, traces=traces)
        if not names:
            why = f" {'; '.join(omissions)}." if omissions else ""
            raise CannotCollect(f"There is no whole recording in {str(out)!r}.{why}")
        kept = [f for f in data.glob("*/*") if f.is_dir() and f"{f.parent.name}/{f.name}" not in names]
        total = sum(map(size_of, kept)) + sum(size_of(prepared / name) for name in names)
        if total > limit_bytes:
            raise CannotCollect(_too_large(total, limit_bytes, [*kept, *(prepared / n for n in names)], traces=traces))
        for name in names:
            _install(prepared / name, data / name)
    return Collected(tuple(names), tuple(omissions), total)


def _prepare(out: Path, unpacked: Path, prepared: Path, *, traces: bool) -> tuple[list[str], list[str]]:
    omissions = unpack(out, unpacked)
    sources = {f"{f.parent.name}/{f.name}": f for root in (unpacked, out) for f in Outlet(root, root).folders()}
    names = []
    for name, folder in sorted(sources.items()):
        document = document_of(folder)
        why = shortcoming(folder)
        if document is not None and (document.get("simulated") or document.get("machine") == SIMULATED):
            why = "the CPU stood in for a GPU"
        if why is not None:
            omissions.append(f"{name}: {why}")
            continue
        shutil.copytree(folder, prepared / name)
        if not traces:
            _drop_trace(prepared / name)
        names.append(name)
    return names, omissions


def _drop_trace(folder: Path) -> None:
    """Take the trace file away; the run says so."""
    trace = folders.trace_path(folder)
    if trace is None:
        return
    trace.unlink()
    run = folders.read(folder)
    lacking = Missing("trace file", "left out of what gpulab ships, to keep it small", key="trace_file")
    smaller = folders.Store(folder / "again").save(replace(run, missing=(*run.missing, lacking)))
    for name in (folders.DOCUMENT, folders.COLUMNS):
        os.replace(smaller / name, folder / name)
    shutil.rmtree(folder / "again")
    document = folder / DOCUMENT
    fields = json.loads(document.read_text(encoding="utf-8"))
    fields["files"] = sorted(set(fields["files"]) - {trace.name})
    document.write_text(json.dumps(fields, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _too_large(total: int, limit_bytes: int, recordings: Iterable[Path], *, traces: bool) -> str:
    largest = sorted(recordings, key=size_of, reverse=True)[:LARGEST]
    words = ", ".join(f"{folder.parent.name}/{folder.name} {size_of(folder) / 1e6:.1f} MB" for folder in largest)
    advice = "Add --without-traces, or" if traces else "Give the largest fewer traced steps, and record them again, or"
    return (
        f"All recordings together take {total / 1e6:.1f} MB, more than the {limit_bytes / 1e6:.0f} MB that gpulab "
        f"ships; nothing was copied. The largest: {words}. {advice} delete a folder of another machine."
    )


def _install(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    stage = target.parent / f".collecting-{target.name}-{secrets.token_hex(3)}"
    shutil.copytree(source, stage)
    if target.exists():
        shutil.rmtree(target)
    stage.rename(target)
