"""Read at which lines a thread of another process stands, from that process's memory.

The thread runs on meanwhile: what has changed between two reads is seen by its not fitting, and then there is no
answer. Nothing is written, no process is stopped, and no lock is asked for.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from gpulab.capture.stacks.layout import LENGTH_AT, STATE_AT, TAG, WORD, Layout, Unreadable, bytes_at, words_at

Spot = tuple[str, int, str]  # file as Python has it, line, function

DEEPEST = 400  # frames
_LONGEST_TEXT = 4_096  # characters
_MOST_LINES = 1 << 20  # bytes of a code object's table of lines
_BLOCK = 4_096  # bytes below the current frame: most of its callers' frames
_FRAME_WORDS = 8
_FRAME = struct.Struct(f"{_FRAME_WORDS}Q")
_TEMPLATE = compile("", "", "exec")


class _Code(NamedTuple):
    file: str
    function: str
    size: int  # bytes of instructions
    starts: tuple[int, ...]
    lines: tuple[int, ...]  # from each start on

    def line(self, instruction: int) -> int | None:
        at = bisect_right(self.starts, instruction) - 1
        return self.lines[at] if at >= 0 and instruction < self.size else None


class StackReader:
    """Reads the stack of one thread, whose state lies at `thread` in the memory `file` of its process."""

    def __init__(self, file: int, layout: Layout, thread: int) -> None:
        self._file, self._layout, self.thread = file, layout, thread
        self._codes: dict[int, _Code | None] = {}
        at = layout.frame_code, layout.frame_previous, layout.frame_instruction
        self._words = at[0] // WORD, at[1] // WORD, at[2] // WORD, layout.code_start

    def frames(self) -> Iterator[Spot]:
        """The lines from the innermost frame outwards. Raises Unreadable where they do not fit together."""
        address = self._current()
        block_at = max(address - _BLOCK, 0)
        try:
            block = bytes_at(self._file, block_at, _BLOCK + _FRAME.size)
        except Unreadable:
            block = b""
        code_word, previous_word, instruction_word, start = self._words
        codes, whole = self._codes, len(block) - _FRAME.size
        for _ in range(DEEPEST):
            if not address:
                return
            at = address - block_at
            near = 0 <= at <= whole
            frame = _FRAME.unpack_from(block, at) if near else words_at(self._file, address, _FRAME_WORDS)
            code_at = frame[code_word] & ~TAG
            code = codes[code_at] if code_at in codes else self._code(code_at)
            line = code.line(frame[instruction_word] - code_at - start) if code is not None else None
            if code is not None and line is not None:
                yield code.file, line, code.function
            address = frame[previous_word]
        raise Unreadable("no end")

    def _current(self) -> int:
        address = self.thread
        for offset in self._layout.thread_frame:
            (address,) = words_at(self._file, address + offset, 1)
        return address

    def _code(self, address: int) -> _Code | None:
        """None for what stands between frames where C calls Python: it has no code."""
        try:
            code = self._read_code(address)
        except Unreadable:
            code = None
        self._codes[address] = code
        return code

    def _read_code(self, address: int) -> _Code:
        layout = self._layout
        head = bytes_at(self._file, address, layout.code_start)

        def pointer(offset: int) -> int:
            target: int = struct.unpack_from("Q", head, offset)[0]
            return target

        file, function = self._text(pointer(layout.code_file)), self._text(pointer(layout.code_name))
        (first,) = struct.unpack_from("i", head, layout.code_line)
        table = self._bytes(pointer(layout.code_lines))
        try:
            ranges = list(_TEMPLATE.replace(co_firstlineno=first, co_linetable=table).co_lines())
        except (ValueError, OverflowError) as e:
            raise Unreadable(str(e)) from None
        size = ranges[-1][1] if ranges else 0
        starts, lines = tuple(start for start, _, _ in ranges), tuple(line or first for *_, line in ranges)
        return _Code(file, function, size, starts, lines)

    def _text(self, address: int) -> str:
        (length,) = words_at(self._file, address + LENGTH_AT, 1)
        (state,) = struct.unpack("I", bytes_at(self._file, address + STATE_AT, 4))
        kinds = {masked: (start, size) for masked, start, size in self._layout.text_kinds}
        start, size = kinds.get(state & self._layout.text_mask, (0, 0))
        if not size or length > _LONGEST_TEXT:
            raise Unreadable("no text")
        codec = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}[size]
        return bytes_at(self._file, address + start, length * size).decode(codec, "replace")

    def _bytes(self, address: int) -> bytes:
        (length,) = words_at(self._file, address + LENGTH_AT, 1)
        if length > _MOST_LINES:
            raise Unreadable("no table of lines")
        return bytes_at(self._file, address + self._layout.bytes_start, length)
