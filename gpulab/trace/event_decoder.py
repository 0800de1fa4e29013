"""The events of a trace as typed objects: decoded in bulk, and one by one if the text is damaged."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import TypeAlias, Union

import msgspec
from msgspec.structs import replace

from gpulab.run import Damage
from gpulab.trace.text_pieces import TraceText

Value: TypeAlias = int | float | str | bool | None


class Args(msgspec.Struct, gc=False):
    """The arguments of a span that gpulab uses, in every spelling PyTorch has had."""

    correlation: Value = None
    device: Value = None
    stream: Value = None
    stream_id: Value = msgspec.field(name="Stream Id", default=None)  # spelling of Ascend's profiler
    bytes: Value = None
    blocks_per_sm: Value = msgspec.field(name="blocks per SM", default=None)
    occupancy: Value = msgspec.field(name="est. achieved occupancy %", default=None)
    collective: Value = msgspec.field(name="Collective name", default=None)
    elements_in: Value = msgspec.field(name="In msg nelems", default=None)
    elements_out: Value = msgspec.field(name="Out msg nelems", default=None)
    element_type: Value = msgspec.field(name="dtype", default=None)
    group_size: Value = msgspec.field(name="Group size", default=None)
    process_group: Value = msgspec.field(name="Process Group Name", default=None)
    sequence: Value = msgspec.field(name="Seq", default=None)
    input_dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw())  # decoded only on request


class MemoryArgs(msgspec.Struct, gc=False):
    """The arguments of a `[memory]` event."""

    bytes: Value = msgspec.field(name="Bytes", default=None)
    address: Value = msgspec.field(name="Addr", default=None)
    allocated: Value = msgspec.field(name="Total Allocated", default=None)
    reserved: Value = msgspec.field(name="Total Reserved", default=None)
    device_type: Value = msgspec.field(name="Device Type", default=None)
    device_id: Value = msgspec.field(name="Device Id", default=None)


class LabelArgs(msgspec.Struct, gc=False):
    """The arguments of a label; only the thread's name is used."""

    name: Value = None


class Span(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """A complete event: something with a start and a duration."""

    name: str = ""
    cat: str = ""
    pid: Value = None
    tid: Value = None
    ts: Value = None
    dur: Value = None
    args: Args | None = None


class Instant(msgspec.Struct, gc=False, tag_field="ph", tag="i"):
    """A point in time; only `[memory]` and the profiler's own marks are used."""

    name: str = ""
    ts: Value = None
    args: MemoryArgs | None = None


class Label(msgspec.Struct, gc=False, tag_field="ph", tag="M"):
    """The name of a process or a thread."""

    name: str = ""
    pid: Value = None
    tid: Value = None
    args: LabelArgs | None = None


class FlowStart(msgspec.Struct, gc=False, tag_field="ph", tag="s"):
    """The tail of an arrow."""


class FlowEnd(msgspec.Struct, gc=False, tag_field="ph", tag="f"):
    """The head of an arrow."""


class FlowStep(msgspec.Struct, gc=False, tag_field="ph", tag="t"):
    """An intermediate point of an arrow."""


Event: TypeAlias = Span | Instant | Label | FlowStart | FlowEnd | FlowStep
FLOWS = (FlowStart, FlowEnd, FlowStep)
_OTHER_PHASES = "BEIbneCPNODSTpFRcVv(),a"
_OTHERS = tuple(msgspec.defstruct(f"Other{i}", [], tag_field="ph", tag=p) for i, p in enumerate(_OTHER_PHASES))


class ExactSpan(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """A span's time stamp as written in the file."""

    ts: msgspec.Raw = msgspec.Raw(b"null")


class ExactInstant(msgspec.Struct, gc=False, tag_field="ph", tag="i"):
    """A point's time stamp as written in the file."""

    ts: msgspec.Raw = msgspec.Raw(b"null")


class ExactLabel(msgspec.Struct, gc=False, tag_field="ph", tag="M"):
    """A label, whose time does not matter."""


ExactEvent: TypeAlias = ExactSpan | ExactInstant | ExactLabel | FlowStart | FlowEnd | FlowStep

_decoder: msgspec.json.Decoder[list[Event]] = msgspec.json.Decoder(list[Union[(Event, *_OTHERS)]])  # type: ignore[valid-type]
_exact_decoder: msgspec.json.Decoder[list[ExactEvent]] = msgspec.json.Decoder(
    list[Union[(ExactEvent, *_OTHERS)]]  # type: ignore[valid-type]
)
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_CONTROL = bytes(c for c in range(32) if c not in b"\t\r\n")
_SPACES = bytes(32 if c < 32 else c for c in range(256))
_NOT_NUMBERS = (b"nan", b"NaN", b"NAN", b"inf", b"Inf", b"INF")
_NOT_A_NUMBER = re.compile(rb"([:,\[]\s*)[-+]?(?:nan(?:\([a-z]*\))?|inf(?:inity)?)(?=\s*[,}\]])", re.IGNORECASE)
_ESCAPE = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')
_LIMIT = 1 << 62
_PHASES = {"X", "i", "M", "s", "f", "t", *_OTHER_PHASES}


class EventDecoder:
    """Decodes pieces of whole events; events that cannot be read as written are counted, with their first position."""

    def __init__(self, text: TraceText) -> None:
        self._text = text
        self.damage = DamageCount()

    def decode(self, offset: int, piece: bytes) -> Iterator[tuple[bytes, list[Event]]]:
        """The events of a piece (a JSON list), each list with its text, which may have been mended."""
        try:
            yield piece, _decoder.decode(piece)
        except _MALFORMED:
            yield from self._mend(offset, piece[1:-1])

    def _mend(self, offset: int, piece: bytes) -> Iterator[tuple[bytes, list[Event]]]:
        mended, faults = _mended(piece)
        text = b"[" + mended + b"]"
        try:
            events = _decoder.decode(text)
        except _MALFORMED:
            yield from self._halve(offset, piece)
        else:
            self._note_all(faults, f"first in the events from byte {offset:,} of the text")
            yield text, events

    def _note_all(self, faults: dict[str, int], where: str) -> None:
        for what, count in faults.items():
            self.damage.note(what, where, count)

    def _halve(self, offset: int, piece: bytes) -> Iterator[tuple[bytes, list[Event]]]:
        """Narrow down to the unreadable events, each of which is then tried alone."""
        inner = [match.end() for match in self._text.boundary.finditer(piece)]
        starts = [0, *inner]
        ends = [*(piece.rindex(b",", 0, start) for start in inner), len(piece)]
        waiting = [(0, len(starts))]
        while waiting:
            first, last = waiting.pop()
            text = b"[" + piece[starts[first] : ends[last - 1]] + b"]"
            try:
                yield text, _decoder.decode(text)
            except _MALFORMED:
                if last - first == 1:
                    yield from self._alone(offset + starts[first], text[1:-1])
                else:
                    middle = (first + last) // 2
                    waiting += [(middle, last), (first, middle)]

    def _alone(self, offset: int, piece: bytes) -> Iterator[tuple[bytes, list[Event]]]:
        where = f"first at byte {offset:,} of the text"
        mended, faults = _mended(piece)
        text = b"[" + mended + b"]"
        try:
            events = _decoder.decode(text)
        except _MALFORMED:
            event = _plain(mended)
            if event is None:
                self.damage.note("unreadable events", where)
                return
            faults["odd values"] = 1
            text = b"[" + msgspec.json.encode(event) + b"]"
            events = _decoder.decode(text)
        self._note_all(faults, where)
        yield text, events


def exact_times(text: bytes, kind: type[ExactSpan | ExactInstant]) -> list[msgspec.Raw]:
    """The time stamps of all spans (or instants) of a decoded piece, as written in the file."""
    return [e.ts for e in _exact_decoder.decode(text) if type(e) is kind]


def _mended(piece: bytes) -> tuple[bytes, dict[str, int]]:
    """Control characters to spaces, invalid UTF-8 and NaN replaced, stray backslashes doubled; how many of each."""
    faults: dict[str, int] = {}
    control = len(piece) - len(piece.translate(None, _CONTROL))
    piece = piece.translate(_SPACES)
    if control:
        faults["control characters"] = control
    try:
        piece.decode()
    except UnicodeDecodeError:
        decoded = piece.decode("utf-8", "replace")
        faults["invalid UTF-8"] = decoded.count("\ufffd")
        piece = decoded.encode()
    if any(word in piece for word in _NOT_NUMBERS):
        piece, numbers = _NOT_A_NUMBER.subn(rb"\1null", piece)
        if numbers:
            faults["not a number"] = numbers
    return piece, faults


def _plain(piece: bytes) -> dict[str, object] | None:
    """One event read by the lenient JSON reader of the standard library, its values converted to the expected types."""
    for text in (piece, _ESCAPE.sub(lambda m: m[0] if len(m[0]) > 1 else b"\\\\", piece)):
        try:
            event, _ = json.JSONDecoder(strict=False).raw_decode(text.decode("utf-8", "replace").lstrip(", "))
        except (ValueError, RecursionError):
            continue
        return _typed(event) if isinstance(event, dict) else None
    return None


def _typed(event: dict[str, object]) -> dict[str, object] | None:
    phase = event.get("ph")
    if not isinstance(phase, str) or phase not in _PHASES:
        return None
    args = event.get("args")
    return {
        "ph": phase,
        "name": _text(event.get("name")),
        "cat": _text(event.get("cat")),
        **{key: _value(event.get(key)) for key in ("pid", "tid", "ts", "dur")},
        "args": {_text(k): _value(v) for k, v in args.items()} if isinstance(args, dict) else None,
    }


def _text(value: object) -> str:
    if value is None:
        return ""
    return str(value).encode("utf-8", "replace").decode()


def _value(value: object) -> Value:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value if -_LIMIT < value < _LIMIT else None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return None


class DamageCount:
    """The faults of a trace file, by kind, in order of first occurrence."""

    def __init__(self) -> None:
        self.kinds: dict[str, Damage] = {}

    def note(self, what: str, where: str, count: int = 1) -> None:
        """Count a fault; does nothing if `count` is 0."""
        if count:
            before = self.kinds.get(what) or Damage(what, 0, where)
            self.kinds[what] = replace(before, count=before.count + count)
