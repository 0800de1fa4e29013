"""A `Run` as plain bytes and back, so that a stored run opens with any JSON and NumPy reader and never runs code.

`encode` gives two documents: JSON with every field of the record, and a file of tables with its columns. In the JSON
a column is `{"column": name, "rows": n}`. `decode` trusts neither: wrong types, indices or sizes raise StoreError.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import IO, TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from gpulab.errors import StoreError
from gpulab.run import SCHEMA, Category, Missing, Phase, Run, StepFlag, Timeline
from gpulab.store import npz, run_tables, table_file

T = TypeVar("T")
Column = npt.NDArray[np.generic]

MAX_DOCUMENT_BYTES = 64 << 20
MAX_COLUMNS_BYTES = 1 << 30

_KEYS_BEFORE = {  # of what is missing in runs that were saved before it had keys
    "steps": "steps",
    "step breakdown, operators and kernels": "breakdown",
    "step breakdown and kernels": "breakdown",
    "device curves": "curves",
    "GPU curves": "curves",
}


class _Reference(msgspec.Struct, forbid_unknown_fields=True):
    column: str
    rows: int


class _Version(msgspec.Struct):
    schema: int


def encode(run: Run) -> tuple[bytes, bytes]:
    """The JSON document and the columns of a run.

    A number in `Device.details` that is not finite is written as null. Text that is no valid Unicode (lone surrogates)
    is written with its code points spelled out. Raises StoreError where the run breaks its own rules.
    """
    packed = io.BytesIO()
    document = encode_into(run, packed)
    decode(document, packed)
    return document, packed.getvalue()


def encode_into(run: Run, packed: IO[bytes]) -> bytes:
    """Write the columns into a file; returns the JSON document. Nothing is checked."""
    columns: dict[int, tuple[_Reference, Column]] = {}
    for name, array in _named_columns(run):
        columns.setdefault(id(array), (_Reference(name, array.size), array))  # one array may serve two fields
    table_file.write(packed, {reference.column: array for reference, array in columns.values()})
    return _document(run, lambda array: columns[id(array)][0])


def encode_header(run: Run) -> bytes:
    """The JSON document alone, whose columns are empty: `decode_header` reads it."""
    return _document(run, lambda array: _Reference("", 0))


def _document(run: Run, refer: Callable[[object], _Reference]) -> bytes:
    try:
        return msgspec.json.encode(run, enc_hook=refer)
    except UnicodeEncodeError:
        return msgspec.json.encode(_valid_unicode(msgspec.to_builtins(run, enc_hook=refer)))


def decode(document: bytes, columns: IO[bytes], *, timeline: bool = True) -> Run:
    """The run that `encode` wrote; without its timeline where `timeline` is false, which reads far less.

    The arrays are read-only. Raises StoreError naming the first thing that is not as it must be.
    """
    check_version(document)
    skip = () if timeline else ("timeline.", "memory_events.")
    tables = _tables(columns, skip)
    try:
        if run_tables.ORIGIN in tables.about:
            run = run_tables.run_of(decode_header(document), tables)
        else:
            run = _decode(document, Run, partial(_column, tables.tables, skip))
        missing = tuple(map(_with_key, run.missing))
        run = msgspec.structs.replace(run, missing=missing, schema=SCHEMA)
        if not timeline:
            run = msgspec.structs.replace(run, timeline=None, memory_events=None)
        run.check()
    except (AssertionError, ValueError, TypeError, LookupError) as e:
        raise StoreError(f"the record contradicts itself: {e}") from e
    _within(run.steps.phase, max(Phase), "a step's phase")
    _within(run.steps.flags, sum(StepFlag), "a step's flags")
    if run.timeline is not None:
        _check_timeline(run.timeline)
    return run


def _with_key(missing: Missing) -> Missing:
    return msgspec.structs.replace(missing, key=missing.key or _KEYS_BEFORE.get(missing.what, ""))


def decode_header(document: bytes) -> Run:
    """The run with empty columns. Raises StoreError for anything that is not a run of this version."""
    check_version(document)
    return _decode(document, Run, partial(_column, {}, ("",)))


def check_container(columns: IO[bytes]) -> None:
    """Raises StoreError where the end of the columns is missing: they were torn."""
    _tables(columns, skip=("",))


def check_version(document: bytes) -> None:
    """Raises StoreError for a document of another program or of a newer gpulab."""
    version = _decode(document, _Version).schema
    if version > SCHEMA:
        raise StoreError(f"written by a newer gpulab (format {version}; this one reads up to {SCHEMA})")
    if version < 1:
        raise StoreError(f"unknown format version: {version}")


def _decode(document: bytes, kind: type[T], hook: Callable[[type, object], object] | None = None) -> T:
    try:
        return msgspec.json.decode(document, type=kind, dec_hook=hook)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise StoreError(f"run.json is corrupt or not a gpulab run: {e}") from e


def _tables(columns: IO[bytes], skip: tuple[str, ...]) -> table_file.Tables:
    """All but the columns that begin with `skip`."""
    try:
        tables = npz.read_npz(columns, skip) if npz.is_npz(columns) else table_file.read(columns, skip)
        if not tables.whole and run_tables.ORIGIN not in tables.about:
            raise ValueError("rows are missing or have changed")
    except (ValueError, OSError) as e:
        raise StoreError(f"its columns are damaged: {e}") from e
    return tables


def _column(tables: Mapping[str, Column], skip: tuple[str, ...], hint: type, raw: object) -> Column:
    """The decode hook: `hint` is the array type a field of the record declares, `raw` the reference in the JSON."""
    reference = msgspec.convert(raw, _Reference)
    dtype = _dtype(hint)
    if reference.column.startswith(skip):
        return np.empty(0, dtype)
    if reference.column not in tables:
        raise StoreError(f"column {reference.column!r} is missing")
    rows = tables[reference.column]
    if rows.dtype != dtype:
        raise StoreError(f"column {reference.column!r} holds {rows.dtype} instead of {dtype}")
    if len(rows) != reference.rows:
        raise StoreError(f"column {reference.column!r} does not have the {reference.rows} rows it should have")
    return rows


def _dtype(hint: type) -> np.dtype[np.generic]:
    scalar: type[np.generic] = get_args(get_args(hint)[1])[0]
    return np.dtype(scalar)


def _named_columns(run: Run) -> Iterator[tuple[str, Column]]:
    yield from _arrays_of(run.steps, "steps")
    for index, series in enumerate(run.samples.series):
        yield from _arrays_of(series, f"samples.{index}")
    if run.timeline is not None:
        yield from _arrays_of(run.timeline, "timeline")
        for index, array in enumerate(run.timeline.extra.values()):
            yield f"timeline.extra.{index}", array
    for name in ("memory_events", "batches", "stack", "core_times", "core_use", "loading_looks", "call_looks"):
        record = getattr(run, name)
        if record is not None:
            yield from _arrays_of(record, name)


def _arrays_of(record: msgspec.Struct, prefix: str) -> Iterator[tuple[str, Column]]:
    for name, value in msgspec.structs.asdict(record).items():
        if isinstance(value, np.ndarray):
            yield f"{prefix}.{name}", value


def _valid_unicode(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_valid_unicode(key): _valid_unicode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_valid_unicode(item) for item in value]
    return value


def _check_timeline(timeline: Timeline) -> None:
    columns = [array for _, array in _arrays_of(timeline, "")] + list(timeline.extra.values())
    if {len(array) for array in columns} != {len(timeline)}:
        raise StoreError("the record contradicts itself: timeline columns differ in length")
    _within(timeline.name_id, len(timeline.names) - 1, "a span's name")
    _within(timeline.lane_id, len(timeline.lanes) - 1, "a span's lane")
    _within(timeline.category, max(Category), "a span's category")
    if timeline.training_lane is not None:
        _within(np.array([timeline.training_lane]), len(timeline.lanes) - 1, "the training lane")


def _within(ids: npt.NDArray[np.integer], last: int, what: str) -> None:
    if len(ids) and (ids.min() < 0 or ids.max() > last):
        raise StoreError(f"the record contradicts itself: {what} is out of range")
