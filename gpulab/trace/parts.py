"""One trace file read in parts: each process decodes every so-many-th piece, then all is put together in order.

What comes out is what one process alone would have read, to the last bit. A part travels as a header in MessagePack and
the bytes of its columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from gpulab.run import MemoryEvents
from gpulab.trace.columns import Columns, SpanColumns
from gpulab.trace.damage import Noted
from gpulab.trace.events import EventDecoder, Label, Value
from gpulab.trace.json_text import TraceText

T = TypeVar("T")
Column = npt.NDArray[np.generic]


class Part(Struct, frozen=True):
    """What some pieces of a file hold. Pieces come as (number of the piece, its columns), in the order of the file."""

    spans: list[tuple[int, SpanColumns]]
    memory: list[tuple[int, MemoryEvents]]
    labels: list[tuple[int, Label]]
    names: list[str]  # by name_id
    names_from: list[int]  # the piece in which each came first
    lane_keys: list[tuple[Value, ...]]
    lane_keys_from: list[int]
    events_read: int
    flow_events: int
    fractional: bool
    damage: dict[str, Noted]


def decode(text: TraceText, part: int = 0, parts: int = 1) -> Part:
    """Read the whole text and decode the pieces of one part. Raises TraceError for a file that is no trace."""
    decoder, columns = EventDecoder(text), Columns()
    for number, offset, piece in text.pieces(part, parts):
        where = f"first in the events from byte {offset:,} of the text"
        for decoded, events in decoder.decode(offset, piece):
            columns.add(number, decoded, events, decoder.damage, where)
    return Part(
        spans=columns.spans,
        memory=columns.memory,
        labels=columns.labels,
        names=list(columns.names),
        names_from=columns.names_from,
        lane_keys=list(columns.lane_keys),
        lane_keys_from=columns.lane_keys_from,
        events_read=columns.events_read,
        flow_events=columns.flow_events,
        fractional=columns.fractional,
        damage=decoder.damage.noted,
    )


def together(parts: Sequence[Part]) -> Part:
    """The parts of one file as one, numbered as if one process had read it. The parts have no spans afterwards."""
    if len(parts) == 1:
        return parts[0]
    names, names_from, name_ids = _renumbered([(p.names, p.names_from) for p in parts])
    keys, keys_from, key_ids = _renumbered([(p.lane_keys, p.lane_keys_from) for p in parts])
    spans = [
        (number, replace(columns, name_id=name_id[columns.name_id], lane_key=lane_key[columns.lane_key]))
        for part, name_id, lane_key in zip(parts, name_ids, key_ids, strict=True)
        for number, columns in part.spans
    ]
    for part in parts:
        part.spans.clear()
    return Part(
        spans=sorted(spans, key=_number),
        memory=sorted((m for p in parts for m in p.memory), key=_number),
        labels=sorted((label for p in parts for label in p.labels), key=_number),
        names=names,
        names_from=names_from,
        lane_keys=keys,
        lane_keys_from=keys_from,
        events_read=sum(p.events_read for p in parts),
        flow_events=sum(p.flow_events for p in parts),
        fractional=any(p.fractional for p in parts),
        damage=_summed(parts),
    )


def _number(piece: tuple[int, object]) -> int:
    return piece[0]


def _renumbered(
    parts: Sequence[tuple[Sequence[T], Sequence[int]]],
) -> tuple[list[T], list[int], list[npt.NDArray[np.int32]]]:
    """The things of all parts in the order in which one reader meets them, where each came first, the new number of
    each part's. Those that came first in one piece belong to one part, which has them in order.
    """
    first: dict[T, tuple[int, int]] = {}
    for things, come_from in parts:
        for place, (thing, piece) in enumerate(zip(things, come_from, strict=True)):
            if thing not in first or piece < first[thing][0]:
                first[thing] = (piece, place)
    ordered = sorted(first, key=first.__getitem__)
    number = {thing: i for i, thing in enumerate(ordered)}
    numbers = [np.array([number[thing] for thing in things], np.int32) for things, _ in parts]
    return ordered, [first[thing][0] for thing in ordered], numbers


def _summed(parts: Sequence[Part]) -> dict[str, Noted]:
    kinds = dict.fromkeys(what for p in parts for what in p.damage)
    damages = {}
    for what in kinds:
        each = [p.damage[what] for p in parts if what in p.damage]
        damages[what] = replace(min(each, key=lambda d: d.offset), count=sum(d.count for d in each))
    return dict(sorted(damages.items(), key=lambda item: item[1].offset))


def write(part: Part, file: IO[bytes]) -> None:
    """The part as bytes."""
    arrays: list[Column] = []

    def refer(array: object) -> tuple[str, int]:
        assert isinstance(array, np.ndarray)
        arrays.append(array)
        return str(array.dtype), len(array)

    header = msgspec.msgpack.encode(part, enc_hook=refer)
    file.write(len(header).to_bytes(8, "little") + header)
    for array in arrays:
        file.write(np.ascontiguousarray(array).data)


def read(file: IO[bytes]) -> Part:
    """What `write` wrote. Raises EOFError or msgspec.MsgspecError where it ends too early or is something else."""

    def column(_: type, reference: object) -> Column:
        dtype, length = msgspec.convert(reference, tuple[str, int])
        array: npt.NDArray[Any] = np.empty(length, dtype)
        _fill(file, array.data.cast("B") if length else memoryview(b""))
        return array

    size, header = bytearray(8), bytearray()
    _fill(file, memoryview(size))
    header.extend(bytes(int.from_bytes(size, "little")))
    _fill(file, memoryview(header))
    return msgspec.msgpack.decode(header, type=Part, dec_hook=column)


def _fill(file: IO[bytes], room: memoryview) -> None:
    while room:
        count = file.readinto(room)  # type: ignore[attr-defined]  # of a buffered reader
        if not count:
            raise EOFError("the part ends too early")
        room = room[count:]
