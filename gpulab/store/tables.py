"""A table of runs as a file that other programs read: CSV, JSON or Parquet, by the ending of its name."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from gpulab.errors import StoreError, UsageError
from gpulab.store.atomic_write import reason, require_no_folder, write_whole

Cell = str | int | float | bool | None
Row = Mapping[str, Cell]
Columns = Mapping[str, type]


def check_path(path: Path) -> None:
    """Refuse a file that could not be written, before any work. Raises UsageError and StoreError."""
    require_no_folder(path)
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"{str(path)!r} is not a table file: its name must end in {_endings()}.")
    if path.suffix.lower() == ".parquet" and not installed("pyarrow"):
        raise UsageError("A Parquet file needs pyarrow: pip install pyarrow. CSV and JSON need no package.")
    if not path.absolute().parent.is_dir():
        raise StoreError(f"{str(path)!r} cannot be written: there is no folder {str(path.parent)!r}.")


def write_table(path: Path, rows: Sequence[Row], columns: Columns) -> None:
    """Write rows, whole or not at all. A missing figure is an empty cell (CSV) or null, never 0.

    Raises UsageError for an ending that is none of `FORMATS` or without a package that writes it, StoreError where the
    file cannot be written.
    """
    check_path(path)
    try:
        content = FORMATS[path.suffix.lower()](rows, columns)
    except (ValueError, TypeError, OverflowError) as e:
        raise StoreError(f"{str(path)!r} is not written: {reason(e)}.") from e
    write_whole(path, content)


def _csv(rows: Sequence[Row], columns: Columns) -> bytes:
    import csv

    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(columns))  # RFC 4180
    writer.writeheader()
    writer.writerows(map(_clean, rows))
    return text.getvalue().encode()


def _json(rows: Sequence[Row], columns: Columns) -> bytes:
    ordered = [{name: row[name] for name in columns} for row in map(_clean, rows)]
    return (json.dumps(ordered, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _parquet(rows: Sequence[Row], columns: Columns) -> bytes:
    pa, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    types = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    schema = pa.schema([(name, types[kind]) for name, kind in columns.items()])
    clean = [_clean(row) for row in rows]
    content = io.BytesIO()
    parquet.write_table(pa.table({name: [row[name] for row in clean] for name in columns}, schema=schema), content)
    return content.getvalue()


def _clean(row: Row) -> dict[str, Cell]:
    return {name: _clean_cell(cell) for name, cell in row.items()}


def _clean_cell(cell: Cell) -> Cell:
    """What is not finite is missing; text that is no valid Unicode has its code points spelled out."""
    if isinstance(cell, float) and not math.isfinite(cell):
        return None
    return cell.encode("utf-8", "backslashreplace").decode() if isinstance(cell, str) else cell


def _endings() -> str:
    *most, last = FORMATS
    return f"{', '.join(most)} or {last}"


FORMATS: Mapping[str, Callable[[Sequence[Row], Columns], bytes]] = {
    ".csv": _csv,
    ".json": _json,
    ".parquet": _parquet,
}


def installed(name: str) -> bool:
    """Whether a package can be imported, without importing it. A folder that merely has its name does not count."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None
