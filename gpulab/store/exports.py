"""Runs as files that other programs read: a table as CSV, JSON or Parquet, or curves as TensorBoard scalars.

Scalars have a folder per run, written by torch's own writer and replaced when they are exported again. `step/…` has
one point per step, numbered as the steps are; `curve/…` has one point per reading of a meter, in the unit that its name
ends with, numbered in milliseconds since the start of the run. Long curves are thinned to every n-th point with
unchanged values.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from msgspec import Struct

from gpulab.errors import StoreError, UsageError
from gpulab.run import Float64, Int64, Run
from gpulab.store.files import check_target, make_folder, reason, write_whole
from gpulab.store.lookup import moment

Cell = str | int | float | bool | None
Row = Mapping[str, Cell]
Columns = Mapping[str, type]

MOST_POINTS = 10_000  # trackers draw fewer, and writing takes about 20 µs per point
_EVENTS_SUFFIX = ".gpulab"  # of event files that gpulab may replace


def check_path(path: Path) -> None:
    """Check that a table can be written, before any work. Raises UsageError and StoreError."""
    check_target(path)
    *most, last = _FORMATS
    if path.suffix.lower() not in _FORMATS:
        raise UsageError(f"{str(path)!r} is not a table file: its name must end in {', '.join(most)} or {last}.")
    if path.suffix.lower() == ".parquet" and not installed("pyarrow"):
        raise UsageError("A Parquet file needs pyarrow: pip install pyarrow. CSV and JSON need no package.")


def write_table(path: Path, rows: Sequence[Row], columns: Columns) -> None:
    """Write rows, whole or not at all. A missing figure is an empty cell (CSV) or null, never 0.

    Values that are not finite count as missing; invalid Unicode is written as code points. Raises UsageError for an
    unknown file ending or a missing package, StoreError if the file cannot be written.
    """
    check_path(path)
    try:
        cells = [{name: _valid(row[name]) for name in columns} for row in rows]
        content = _FORMATS[path.suffix.lower()](cells, columns)
    except (ValueError, TypeError, OverflowError) as e:
        raise StoreError(f"{str(path)!r} is not written: {reason(e)}.") from e
    write_whole(path, content)


def _valid(cell: Cell) -> Cell:
    if isinstance(cell, float) and not math.isfinite(cell):
        return None
    return cell.encode("utf-8", "backslashreplace").decode() if isinstance(cell, str) else cell


def _csv(rows: Sequence[Row], columns: Columns) -> bytes:
    import csv

    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(columns))  # RFC 4180
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _json(rows: Sequence[Row], columns: Columns) -> bytes:
    return (json.dumps(rows, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _parquet(rows: Sequence[Row], columns: Columns) -> bytes:
    pa, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    types = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    schema = pa.schema([(name, types[kind]) for name, kind in columns.items()])
    content = io.BytesIO()
    parquet.write_table(pa.table({name: [row[name] for row in rows] for name in columns}, schema=schema), content)
    return content.getvalue()


_FORMATS: Mapping[str, Callable[[Sequence[Row], Columns], bytes]] = {
    ".csv": _csv,
    ".json": _json,
    ".parquet": _parquet,
}


def installed(name: str) -> bool:
    """Whether a package can be imported, without importing it. A folder of that name is no package."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


class Scalar(Struct, frozen=True):
    """One curve. `t_ns` counts from the start of the run; `every`: only each `every`-th point is included."""

    name: str
    number: Int64
    t_ns: Int64
    value: Float64
    every: int = 1


def scalars(run: Run) -> list[Scalar]:
    """All curves of a run that have points, under unique names."""
    by_name: dict[str, Scalar] = {}
    for curve in _curves(run):
        name, count = curve.name, 1
        while name in by_name:  # two meters may share a name, e.g. one per GPU
            count += 1
            name = f"{curve.name}_{count}"
        every = -(-len(curve.number) // MOST_POINTS)
        if every:
            value = np.asarray(curve.value[::every], float)
            by_name[name] = Scalar(name, curve.number[::every], curve.t_ns[::every], value, every)
    return list(by_name.values())


def _curves(run: Run) -> Iterator[Scalar]:
    steps = run.steps
    columns = {"wall_ms": steps.time_ns / 1e6, "data_wait_ms": steps.data_wait_ns / 1e6}
    if steps.optimizer_ns.any():
        columns["optimizer_ms"] = steps.optimizer_ns / 1e6
    for name, value in columns.items():
        yield Scalar(f"step/{name}", steps.number, steps.end_ns, value)
    countable = (steps.sample_count >= 0) & (steps.time_ns > 0)
    rate = steps.sample_count[countable] / (steps.time_ns[countable] / 1e9)
    yield Scalar("step/samples_per_s", steps.number[countable], steps.end_ns[countable], rate)
    for series in run.samples.series:
        yield Scalar(f"curve/{plain_name(series.name)}", series.t_ns // 1_000_000, series.t_ns, series.value)


def plain_name(name: str) -> str:
    """A name that every tracker accepts: letters, digits, `_ . - / space`, at most 100 of them."""
    return re.sub(r"[^A-Za-z0-9_./ -]", "_", name)[:100].strip(" /.") or "unnamed"


def write_scalars(run: Run, folder: Path) -> list[Scalar]:
    """Write one run's curves under the folder; returns them. Raises UsageError and StoreError.

    A point's step is the step's number or, for a meter's reading, milliseconds since the start of the run; its wall
    time is the time of the measurement.
    """
    import tempfile

    make_folder(folder)
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as e:
        raise UsageError(f"TensorBoard scalars cannot be written: {reason(e)}.") from e
    curves, start_s = scalars(run), 0.0
    with contextlib.suppress(StoreError, OverflowError):  # if its date cannot be read
        start_s = moment(run.created).timestamp()
    with tempfile.TemporaryDirectory(prefix="gpulab-") as stage:
        with contextlib.closing(SummaryWriter(stage, filename_suffix=_EVENTS_SUFFIX)) as writer:
            for curve in curves:
                for number, t_ns, value in zip(curve.number, curve.t_ns, curve.value, strict=True):
                    writer.add_scalar(curve.name, float(value), int(number), start_s + t_ns / 1e9)
        _put_in_place(run, Path(stage), folder)
    return curves


def _put_in_place(run: Run, stage: Path, folder: Path) -> None:
    for old in folder.iterdir():
        if old.is_dir() and (old.name == run.id or old.name.endswith(f" {run.id}")):
            with contextlib.suppress(OSError):
                for file in old.glob(f"events.out.tfevents.*{_EVENTS_SUFFIX}"):
                    file.unlink()
                old.rmdir()  # of a renamed run; fails if other files are in it
    # what TensorBoard lists: the user's name, and the id because names may repeat
    name = plain_name(run.settings.name).replace("/", "_")[:60] if run.settings.name else ""
    home = folder / f"{name} {run.id}".strip()
    make_folder(home)
    for file in stage.iterdir():
        write_whole(home / file.name, file.read_bytes())
