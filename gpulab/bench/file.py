"""Benches on disk: a file per cell beside the runs, so that the rows outlive the kernel."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
from msgspec import Struct

from gpulab.errors import StoreError
from gpulab.store.atomic_write import reason, write_whole
from gpulab.store.folders import default_root
from gpulab.tuning.bench import Bench

FOLDER = "benches"
SCHEMA = 1
LARGEST_BYTES = 64 * 2**20


class _Document(Struct, frozen=True):
    schema: int
    bench: Bench


def path_of(code: str) -> Path:
    """Of the bench of this cell; `$GPULAB_DIR/benches`, beside the runs."""
    key = hashlib.sha256(code.strip().encode()).hexdigest()[:16]
    return default_root().parent / FOLDER / f"{key}.json"


def load(code: str) -> tuple[Bench, str]:
    """The bench of this cell and why a stored one could not be read; a new one where there is none."""
    path = path_of(code)
    try:
        if path.stat().st_size > LARGEST_BYTES:
            return Bench(code), f"The rows in {path.name} were skipped: the file is too large."
        document = msgspec.json.decode(path.read_bytes(), type=_Document)
    except FileNotFoundError:
        return Bench(code), ""
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as e:
        return Bench(code), f"The earlier rows could not be read from {path.name}: {reason(e)}."
    if document.schema != SCHEMA or document.bench.code.strip() != code.strip():
        return Bench(code), f"The earlier rows in {path.name} come from another version of gpulab and were skipped."
    return document.bench, ""


def save(bench: Bench) -> str:
    """Keep it. Returns why that failed; empty: it did not."""
    path = path_of(bench.code)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, msgspec.json.encode(_Document(SCHEMA, bench)))
    except (OSError, StoreError) as e:
        return f"The rows could not be saved: {reason(e)}."
    return ""
