"""A trace file as text in pieces of whole events, so that a file of any size is read in bounded memory.

The file may be gzipped or not, whatever its name says, and may be cut short. The text before and after the events
(device properties and the like) is kept for the reader of metadata.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Protocol

from gpulab.errors import TraceError
from gpulab.run import Damage

BLOCK_BYTES = 1 << 20
COMPRESSED_BLOCK_BYTES = 1 << 16
INFLATED_BYTES = 4 << 20  # the most decompressed bytes per block
LEARNED_BYTES = 1 << 16
HEADER_LIMIT_BYTES = 64 << 20
EVENT_LIMIT_BYTES = 64 << 20

_GZIP = b"\x1f\x8b"
_KEYS = ("ph", "name", "cat", "args", "pid", "tid", "ts", "dur", "id", "bp", "s")
_FIRST_KEY = re.compile(rb'[\[,]\s*\{\s*"(' + "|".join(_KEYS).encode() + rb')"\s*:')
_OPENING = re.compile(rb'"traceEvents"\s*:\s*\[')
_CLOSING = re.compile(rb'\}\s*(\])\s*(?:,\s*"[^"\\]*"\s*:|\}?\s*\Z)')
_BOUNDARY_BYTES = 512  # the longest white space between two events
_RECORD = "Record one with torch.profiler and export_chrome_trace."
_OWN_PAGE = b"gpulab</title>"
_SIGNATURES = (
    (
        b"<",
        "is a web page or XML, not a trace",
        "Download the file itself; a link or a login page was saved in its place.",
    ),
    (b"PK\x03\x04", "is a zip archive", "Unpack it and load the trace inside."),
    (b"\x28\xb5\x2f\xfd", "is compressed with zstd", "Unpack it with `zstd -d` and load the result."),
    (b"BZh", "is compressed with bzip2", "Unpack it with `bunzip2` and load the result."),
    (b"\xfd7zXZ", "is compressed with xz", "Unpack it with `unxz` and load the result."),
    (b"SQLite format 3", "is an SQLite database, as Nsight Systems exports it", _RECORD),
    (b"\x80", "is a Python pickle, which gpulab never opens", _RECORD),
    (b"\xff\xfe", "is text in UTF-16", "Save it as UTF-8."),
    (b"\xfe\xff", "is text in UTF-16", "Save it as UTF-8."),
)


class _Inflater(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    @property
    def unconsumed_tail(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class TraceText:
    """The text of one trace file. `pieces` is read once; afterwards the other attributes are complete."""

    def __init__(self, path: Path, tell: Callable[[float], None] = lambda _: None) -> None:
        self.path = path
        self.tell = tell  # called with the fraction of the file that has been read
        self.file_bytes = 0
        self.text_bytes = 0
        self.head = b""  # from the start to the opening bracket of the events
        self.tail = b""  # from their closing bracket to the end
        self.damage: list[Damage] = []
        self.boundary = re.compile(rb'\}\s*,\s*(?=\{\s*"ph"\s*:)')
        self._needle = b'"ph"'
        self._before = re.compile(rb"\}\s*(,)\s*\{\s*$")

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """(offset in the text, whole events as a JSON list), in the order of the file.

        Raises TraceError if the file is not a trace.
        """
        try:
            with self.path.open("rb") as file:
                self.file_bytes = file.seek(0, 2)
                file.seek(0)
                for offset, *fragments in self._cut(self._blocks(file)):
                    yield offset, b"".join(fragments)
                    self.tell(min(1.0, file.tell() / self.file_bytes))
        except IsADirectoryError as e:
            raise TraceError(f"{self.path} is a folder: name one trace file inside it.") from e
        except OSError as e:
            raise TraceError(
                f"{self.path} cannot be read ({e.strerror or e}): check the name and its permissions."
            ) from e

    def _blocks(self, file: IO[bytes]) -> Iterator[bytes]:
        if self.file_bytes == 0:
            raise TraceError(f"{self.path} is empty (0 bytes): the profiler has not written it to its end. {_RECORD}")
        zipped = file.read(2) == _GZIP
        file.seek(0)
        for block in self._inflated(file) if zipped else iter(lambda: file.read(BLOCK_BYTES), b""):
            self.text_bytes += len(block)
            yield block

    def _inflated(self, file: IO[bytes]) -> Iterator[bytes]:
        """The decompressed text; after an error, the rest of a broken file is read again in small steps."""
        new, errors = _inflaters()
        produced = 0
        try:
            for out in _inflate(file, new, COMPRESSED_BLOCK_BYTES, self._trailing):
                produced += len(out)
                yield out
        except errors as e:
            rest = b"".join(_salvage(self.path, produced))
            yield rest
            self._trailing(str(e))

    def _trailing(self, what: str) -> None:
        self.damage.append(Damage("broken gzip", 1, f"after {self.text_bytes:,} bytes of text: {what}"))

    def _cut(self, blocks: Iterator[bytes]) -> Iterator[tuple[int, *tuple[bytes, ...]]]:
        block, rest = self._opened(blocks), b""
        offset = len(self.head)
        while block and len(rest) < EVENT_LIMIT_BYTES:
            end = self._last_boundary(block)
            if end < 0 and self._learn_boundary(block):
                end = self._last_boundary(block)
            if end < 0:
                rest += block
            else:
                yield offset, b"[", rest, block[:end], b"]"
                offset += len(rest) + end + 1
                rest = block[end + 1 :]
            block = next(blocks, b"")
        yield from self._last(offset, rest)

    def _opened(self, blocks: Iterator[bytes]) -> bytes:
        """Read up to the opening bracket of the events; returns the text after it."""
        text = b""
        for block in blocks:
            text += block
            start = text[:BLOCK_BYTES].removeprefix(b"\xef\xbb\xbf").lstrip()
            if start[:1] not in (b"{", b"[", b""):
                raise TraceError(self._not_json(text))
            match = re.match(rb"(?:\xef\xbb\xbf)?\s*\[", text) or _OPENING.search(text)
            if match:
                self.head = text[: match.end()]
                rest = text[match.end() :]
                while len(rest) < LEARNED_BYTES and (block := next(blocks, b"")):
                    rest += block
                self._learn_boundary(rest)
                return rest
            if len(text) > HEADER_LIMIT_BYTES:
                break
        raise TraceError(self._no_events(text))

    def _learn_boundary(self, text: bytes) -> bool:
        """Learn the key with which events begin. In a string its quotes would be escaped, so cutting there is safe."""
        keys = Counter(_FIRST_KEY.findall(b"," + text[:BLOCK_BYTES]))
        if not keys:
            return False
        key = b"ph" if b"ph" in keys else keys.most_common(1)[0][0]
        self.boundary = re.compile(rb'\}\s*,\s*(?=\{\s*"' + key + rb'"\s*:)')
        self._needle = b'"' + key + b'"'
        return True

    def _last_boundary(self, text: bytes) -> int:
        """Index of the comma before the last event that begins in the text; -1 without one."""
        at = len(text)
        while (at := text.rfind(self._needle, 0, at)) >= 0:
            match = self._before.search(text, max(0, at - _BOUNDARY_BYTES), at)
            if match:
                return match.start(1)
        return -1

    def _last(self, offset: int, text: bytes) -> Iterator[tuple[int, *tuple[bytes, ...]]]:
        """The last events, one by one; also keeps the text after the closing bracket."""
        readable = text.decode("latin-1")  # one character per byte: positions stay the same
        decoder = json.JSONDecoder(strict=False)
        at = 0
        while True:
            at += len(text[at:]) - len(text[at:].lstrip(b", \t\r\n"))
            if text[at : at + 1] == b"]":
                self.tail = text[at + 1 :]
                return
            try:
                _, end = decoder.raw_decode(readable, at)
            except (ValueError, RecursionError):
                break
            yield offset + at, b"[", text[at:end], b"]"
            at = end
        closing = _CLOSING.search(text, at)
        if closing:
            yield offset + at, b"[", text[at : closing.start() + 1], b"]"
            self.tail = text[closing.start(1) + 1 :]
        else:
            self.damage.append(Damage("truncated tail", 1, f"at byte {offset + at:,} of the text"))

    def _not_json(self, text: bytes) -> str:
        start = text.lstrip()
        if start.startswith(b"<") and _OWN_PAGE in start:
            return f"{self.path} is a report that gpulab wrote, not a trace. Open it in a browser, or name its run."
        for signature, what, cure in _SIGNATURES:
            if text.startswith(signature) or start.startswith(signature):
                return f"{self.path} {what}. {cure}"
        if text[:1] == b"\x0a" and re.search(rb"[\x00-\x08\x0e-\x1f]", text[:64]):
            return f"{self.path} looks like a Perfetto protobuf trace, which gpulab does not read. Export it as JSON."
        beginning = ascii(start[:20].decode("latin-1"))
        return f"{self.path} is not JSON (it begins with {beginning} at byte {len(text) - len(start):,}). {_RECORD}"

    def _no_events(self, text: bytes) -> str:
        if self.damage:
            where = self.damage[-1].detail
            return (
                f"{self.path} is a broken gzip file, its events cannot be reached ({where}). Copy or export it again."
            )
        if not text.strip():
            return (
                f"{self.path} holds no text ({self.text_bytes:,} bytes after decompression). Copy or export it again."
            )
        if b'"nodes"' in text[:4096] and b'"schema"' in text[:4096]:
            return f"{self.path} is a PyTorch execution trace, without times. {_RECORD}"
        try:
            keys = list(json.loads(text))[:6]
            has = f"its keys are {', '.join(ascii(k[:30]) for k in keys)}" if keys else "it is empty"
        except (ValueError, RecursionError, TypeError):
            has = f"the text ends or breaks before them, {self.text_bytes:,} bytes in"
        return f"{self.path} has no list of traceEvents ({has}): it is no profiler trace, or only its start. {_RECORD}"


def _inflate(
    file: IO[bytes], new: Callable[[], _Inflater], step: int, trailing: Callable[[str], None]
) -> Iterator[bytes]:
    """Decompress every member of a gzip file; `trailing` is called if its end is damaged."""
    inflater = new()
    begun = False
    while block := file.read(step):
        while block:
            begun = True
            out = inflater.decompress(block, INFLATED_BYTES)
            if out:
                yield out
            if inflater.eof:
                block = inflater.unused_data or file.read(step)
                if not block.strip(b"\0"):
                    return
                if not block.startswith(_GZIP[: len(block)]):
                    trailing(f"{len(block):,} or more bytes that are no gzip follow its end")
                    return
                inflater = new()
            else:
                block = inflater.unconsumed_tail
    if begun and not inflater.eof:
        trailing("the file ends too early")


def _salvage(path: Path, skip: int) -> Iterator[bytes]:
    """The text that the standard library can still read from a broken gzip file beyond `skip` bytes of text."""
    done = 0
    with path.open("rb") as file:
        try:
            for out in _inflate(file, lambda: zlib.decompressobj(31), 64, lambda _: None):
                done += len(out)
                if done > skip:
                    yield out[max(0, len(out) - (done - skip)) :]
        except zlib.error:
            return


def _inflaters() -> tuple[Callable[[], _Inflater], tuple[type[Exception], ...]]:
    try:
        from isal import isal_zlib
    except ImportError:
        return (lambda: zlib.decompressobj(31)), (zlib.error,)
    return (lambda: isal_zlib.decompressobj(31)), (zlib.error, isal_zlib.IsalError)  # type: ignore[return-value]  # its stub says instance
