"""Benches on disk: one file per text of a cell, next to the runs, so that rows survive a restart and an edit."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpulab.errors import StoreError
from gpulab.store.files import reason, write_whole
from gpulab.store.folders import default_root
from gpulab.tuning.bench import Bench, plain_text

FOLDER = "benches"
SCHEMA = 1
LARGEST_BYTES = 64 * 2**20
NOTEBOOK = "JPY_SESSION_NAME"  # Jupyter's server names the notebook to its kernel; other front ends do not


class _Document(Struct, frozen=True):
    schema: int
    bench: Bench
    notebook: str = ""  # name of its notebook; empty: unknown


def path_of(code: str) -> Path:
    """The file of this cell's bench, in `$GPULAB_DIR/benches`, next to the runs."""
    key = hashlib.sha256(code.strip().encode()).hexdigest()[:16]
    return default_root().parent / FOLDER / f"{key}.json"


def load(code: str) -> tuple[Bench, str]:
    """The bench of this cell (a new one if none is stored), and why a stored one could not be read."""
    code = plain_text(code)
    path, empty = path_of(code), Bench(code)
    try:
        document = _read(path)
    except FileNotFoundError:
        return empty, ""
    except StoreError as e:
        return empty, f"The rows in {path.name} were skipped: {e}."
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as e:
        return empty, f"The earlier rows could not be read from {path.name}: {reason(e)}."
    if document.schema != SCHEMA or code not in (document.bench.code, *document.bench.texts):
        return empty, f"The earlier rows in {path.name} come from another version of gpulab and were skipped."
    return document.bench.at(code), ""


def latest() -> Bench | None:
    """The bench that was saved last, by this notebook if its name is known; None without one."""
    here = os.environ.get(NOTEBOOK, "")
    files = (default_root().parent / FOLDER).glob("*.json")
    for path in sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError, StoreError):
            document = _read(path)
            if document.schema == SCHEMA and document.notebook in ("", here or document.notebook):
                return document.bench
    return None


def save(bench: Bench) -> str:
    """Save the bench under each text of its cell. Returns the reason of a failure, or an empty text."""
    document = msgspec.json.encode(_Document(SCHEMA, bench, os.environ.get(NOTEBOOK, "")))
    try:
        for path in map(path_of, (*bench.texts, bench.code)):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, document)
    except (OSError, StoreError) as e:
        return f"The rows could not be saved: {reason(e)}."
    return ""


def _read(path: Path) -> _Document:
    if path.stat().st_size > LARGEST_BYTES:
        raise StoreError("the file is too large")
    document = msgspec.json.decode(path.read_bytes(), type=_Document)
    return replace(document, bench=replace(document.bench, code=plain_text(document.bench.code)))
