"""Encodes a `Run` as JSON and plain columns, which any JSON and NumPy reader opens; reading executes no code.

`encode` returns two documents: JSON with every field of the record, and a file of tables with its columns. In the JSON
a column is `{"column": name, "rows": n}`. `decode` validates both: wrong types, indices or sizes raise StoreError.

A run in progress writes the tables of `TABLES` instead, from which `decode` makes the run up to its last second.
`decode` also reads the columns of gpulab 0.1.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import IO, TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import asdict, replace

from gpulab.errors import StoreError
from gpulab.run import SCHEMA, Category, Columns, Phase, Run, Samples, Series, StepFlag, Timeline
from gpulab.store import table_file
from gpulab.store.table_file import Table, Tables
from gpulab.tape.marks import MARK
from gpulab.tape.step_finder import steps_of

T = TypeVar("T")
Column = npt.NDArray[np.generic]

MAX_DOCUMENT_BYTES = 64 << 20
MAX_COLUMNS_BYTES = 1 << 30

MARKS, READINGS, ARRIVALS = "marks", "readings", "arrivals"
ORIGIN = "origin_ns"  # in the metadata of a run in progress: when it began
READING = np.dtype([("series", np.int64), ("t_ns", np.int64), ("value", np.float64)])  # the mean of about a second
# arrival at a collective: its group, its number in the group, and the time by the system's clock
ARRIVAL = np.dtype([("group", np.int64), ("sequence", np.int64), ("time_ns", np.int64)])
TABLES: dict[str, np.dtype[np.void]] = {
    MARKS: MARK,
    READINGS: READING,
    ARRIVALS: ARRIVAL,  # for the live view of a job
}
Arrivals = npt.NDArray[np.void]

_KEYS_BY_NAME = {  # for runs of gpulab 0.1, whose `missing` has no keys
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

    A number in `Device.details` that is not finite is written as null. Invalid Unicode (lone surrogates) is written as
    code points. Raises StoreError if the run violates the rules of its type.
    """
    packed = io.BytesIO()
    document = encode_into(run, packed)
    decode(document, packed)
    return document, packed.getvalue()


def encode_into(run: Run, packed: IO[bytes]) -> bytes:
    """Write the columns into a file; returns the JSON document. Does not validate."""
    columns: dict[int, tuple[_Reference, Column]] = {}
    for name, array in _columns_of(run):
        columns.setdefault(id(array), (_Reference(name, array.size), array))  # one array may serve two fields
    table_file.write(packed, {reference.column: array for reference, array in columns.values()})
    return _document(run, lambda array: columns[id(array)][0])


def encode_header(run: Run) -> bytes:
    """The JSON document alone, with empty columns: `decode_header` reads it."""
    return _document(run, lambda array: _Reference("", 0))


def _document(run: Run, refer: Callable[[object], _Reference]) -> bytes:
    try:
        return msgspec.json.encode(run, enc_hook=refer)
    except UnicodeEncodeError:
        return msgspec.json.encode(_valid_unicode(msgspec.to_builtins(run, enc_hook=refer)))


def decode(document: bytes, columns: IO[bytes], *, timeline: bool = True) -> Run:
    """The run that `encode` wrote; without its timeline if `timeline` is false, which reads far less.

    The arrays are read-only. Raises StoreError naming the first fault.
    """
    _check_version(document)
    skip = () if timeline else ("timeline.", "memory_events.")
    tables = _tables(columns, skip)
    try:
        if ORIGIN in tables.about:
            run = _run_so_far(decode_header(document), tables)
        else:
            run = _decode(document, Run, partial(_column, tables.tables, skip))
        missing = tuple(replace(m, key=m.key or _KEYS_BY_NAME.get(m.what, "")) for m in run.missing)
        run = replace(run, missing=missing, schema=SCHEMA)
        if not timeline:
            run = replace(run, timeline=None, memory_events=None)
        run.check()
    except (AssertionError, ValueError, TypeError, LookupError) as e:
        raise StoreError(f"the record contradicts itself: {e}") from e
    _within(run.steps.phase, max(Phase), "a step's phase")
    _within(run.steps.flags, sum(StepFlag), "a step's flags")
    if run.timeline is not None:
        _check_timeline(run.timeline)
    return run


def _run_so_far(header: Run, tables: Tables) -> Run:
    """The run up to its last second, from the tables of a run in progress."""
    marks, readings = tables.tables[MARKS], tables.tables[READINGS]
    steps = steps_of(marks, int(tables.about[ORIGIN]), int(marks["t_ns"].max(initial=0)))
    series = list[Series]()
    for number, empty in enumerate(header.samples.series):
        own = readings[readings["series"] == number]
        series.append(replace(empty, t_ns=own["t_ns"].copy(), value=own["value"].copy()))
    ends_ns = [header.wall_ns, *steps.end_ns[-1:].tolist(), *readings["t_ns"][-1:].tolist()]
    source = header.step_source if len(steps) else "whole cell"
    return replace(header, steps=steps, samples=Samples(tuple(series)), wall_ns=max(ends_ns), step_source=source)


def decode_header(document: bytes) -> Run:
    """The run with empty columns. Raises StoreError for anything that is not a run of this version."""
    return header_and_rows(document)[0]


def header_and_rows(document: bytes) -> tuple[Run, dict[str, int]]:
    """The run with empty columns, and the number of rows of each column. Raises as `decode_header`."""
    _check_version(document)
    rows: dict[str, int] = {}

    def column(hint: type, raw: object) -> Column:
        reference = msgspec.convert(raw, _Reference)
        rows[reference.column] = reference.rows
        return _column({}, ("",), hint, raw)

    return _decode(document, Run, column), rows


def check_container(columns: IO[bytes], rows: Mapping[str, int]) -> None:
    """Raises StoreError if the columns are torn: if their end or some of these rows are missing."""
    tables = _tables(columns, skip=("",))
    if tables.row_counts is None or ORIGIN in tables.about:  # of gpulab 0.1, or of a run in progress
        return
    torn = next((name for name, count in rows.items() if tables.row_counts.get(name) != count), None)
    if torn is not None:
        raise StoreError(f"its columns are damaged: {torn!r} does not have the {rows[torn]} rows it should have")


def _check_version(document: bytes) -> None:
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


def _tables(columns: IO[bytes], skip: tuple[str, ...]) -> Tables:
    """All columns except those whose names begin with `skip`."""
    try:
        columns.seek(0)
        is_npz = columns.read(2) == b"PK"
        tables = _read_npz(columns, skip) if is_npz else table_file.read(columns, skip)
        if not tables.whole and ORIGIN not in tables.about:
            raise ValueError("rows are missing or have changed")
    except (ValueError, OSError) as e:
        raise StoreError(f"its columns are damaged: {e}") from e
    return tables


def _read_npz(file: IO[bytes], skip: tuple[str, ...]) -> Tables:
    """The columns of an npz file, which must be uncompressed, so that reading needs no more memory than the file.
    Raises OSError, ValueError.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > file.seek(0, io.SEEK_END):
                raise ValueError("its members are larger than the file")
            names = {member.filename.removesuffix(".npy"): member for member in members}
            tables = {name: _array_of_npz(archive.read(m), m) for name, m in names.items() if not name.startswith(skip)}
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError) as e:
        raise ValueError(e) from e
    return Tables({}, tables, whole=True)


def _array_of_npz(data: bytes, member: zipfile.ZipInfo) -> Table:
    stream = io.BytesIO(data)
    try:
        if member.compress_type != zipfile.ZIP_STORED or np.lib.format.read_magic(stream) != (1, 0):
            raise ValueError("not as gpulab writes it")
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        rows = np.frombuffer(data, dtype, offset=stream.tell())
        if shape != rows.shape:
            raise ValueError(f"{len(rows)} rows instead of {shape}")
        return rows
    except Exception as e:  # the header is a Python literal: Python's own tokenizer and parser raise here
        raise ValueError(f"{member.filename} is no plain column: {e}") from e


def _column(tables: Mapping[str, Column], skip: tuple[str, ...], hint: type, raw: object) -> Column:
    """The decode hook: `hint` is the array type a field of the record declares, `raw` the reference in the JSON."""
    reference = msgspec.convert(raw, _Reference)
    scalar: type[np.generic] = get_args(get_args(hint)[1])[0]
    dtype = np.dtype(scalar)
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


def _columns_of(run: Run) -> Iterator[tuple[str, Column]]:
    for name, value in asdict(run).items():
        if isinstance(value, Columns):
            yield from ((f"{name}.{column}", array) for column, array in value.columns().items())
    extra = run.timeline.extra if run.timeline is not None else {}
    yield from ((f"timeline.extra.{index}", array) for index, array in enumerate(extra.values()))
    for index, series in enumerate(run.samples.series):
        yield from (
            (f"samples.{index}.{name}", array) for name, array in (("t_ns", series.t_ns), ("value", series.value))
        )


def _valid_unicode(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_valid_unicode(key): _valid_unicode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_valid_unicode(item) for item in value]
    return value


def _check_timeline(timeline: Timeline) -> None:
    _within(timeline.name_id, len(timeline.names) - 1, "a span's name")
    _within(timeline.lane_id, len(timeline.lanes) - 1, "a span's lane")
    _within(timeline.category, max(Category), "a span's category")
    if timeline.training_lane is not None:
        _within(np.array([timeline.training_lane]), len(timeline.lanes) - 1, "the training lane")


def _within(ids: npt.NDArray[np.integer], last: int, what: str) -> None:
    if len(ids) and (ids.min() < 0 or ids.max() > last):
        raise StoreError(f"the record contradicts itself: {what} is out of range")
