"""Reads the stack of a thread in another process from that process's memory, while the thread runs on.

If the stack changes between two reads, the reads do not fit together, and there is no result. Nothing is written, no
process is stopped, and no lock is taken. The memory is read through a file of the system, which reports an invalid
address as an error.

Python versions store frames at different offsets, so these are found in a stack whose frames are known: each offset is
searched for in the memory of an object whose value is known, at several depths of the stack, and counts only if
exactly one place fits.
"""

from __future__ import annotations

import os
import struct
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

WORD = 8  # bytes
TAG = 7  # low bits of a pointer, which newer Pythons use as tags
OWN_MEMORY = "/proc/self/mem"

_FRAME_WORDS, _CODE_WORDS, _THREAD_WORDS = 12, 22, 40
_FRAME_OBJECT_WORDS = 6
LENGTH_AT = 2 * WORD  # of a str, and of bytes: after the count of references and the type
STATE_AT = 4 * WORD  # of a str: after its length and hash
_KINDS = (("a", 1), ("\xe9", 1), ("\u0101", 2), ("\U0001f600", 4))  # one character of each kind of str, and its bytes


Spot = tuple[str, int, str]  # file as Python names it, line, function
Stack = tuple[Spot, ...]  # from the innermost line outwards
Words = tuple[int, ...]
T = TypeVar("T")

DEEPEST = 400  # frames
_LONGEST_TEXT = 4_096  # characters
_MOST_LINES = 1 << 20  # bytes of a code object's line table
_BLOCK = 4_096  # bytes below the current frame: most of its callers' frames
_FRAME = struct.Struct("8Q")
_TEMPLATE = compile("", "", "exec")
_RUNTIME, _RUNTIME_BLOCK = 1 << 20, 1 << 12  # bytes of the interpreter's own state to search, and per read
_LOCKED, _LOCK_TRIES = struct.pack("i", 1), 20  # tries, as another thread may take the lock in between


class Unreadable(Exception):
    """Memory that does not exist, or that holds something unexpected."""


class Layout(NamedTuple):
    """Offsets in bytes, except `lock`. `thread_frame` leads from a thread's state to its frame, in one or two steps.

    `text_kinds`: for each masked state of a str, the offset of its characters and the bytes of each.
    """

    thread_frame: tuple[int, ...]
    frame_code: int
    frame_previous: int
    frame_instruction: int
    code_start: int  # of a code object: its first instruction
    code_file: int
    code_name: int
    code_line: int
    code_lines: int
    bytes_start: int
    text_mask: int
    text_kinds: tuple[tuple[int, int, int], ...]
    lock: int = 0  # address of the state of the thread that last held the interpreter's lock; 0: unknown

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Layout:
        """From the result of `_asdict` after JSON."""
        kinds = tuple((state, start, size) for state, start, size in fields["text_kinds"])
        return cls(**{**fields, "thread_frame": tuple(fields["thread_frame"]), "text_kinds": kinds})


def words_at(file: int, address: int, count: int) -> Words:
    """`count` words of a process's memory. Raises Unreadable."""
    return struct.unpack(f"{count}Q", bytes_at(file, address, WORD * count))


def bytes_at(file: int, address: int, size: int) -> bytes:
    """`size` bytes of a process's memory. Raises Unreadable."""
    try:
        data = os.pread(file, size, address)
    except (OSError, OverflowError) as e:
        raise Unreadable(str(e)) from None
    if len(data) != size:
        raise Unreadable(f"{len(data)} of {size} bytes")
    return data


def thread_state() -> int:
    """The address of the calling thread's state."""
    import ctypes

    state = ctypes.pythonapi.PyThreadState_Get
    state.restype, state.argtypes = ctypes.c_void_p, ()
    return int(state())


def find_layout(file: int) -> Layout | None:
    """The layout of the running Python, whose memory is `file`; None if it cannot be found."""
    if struct.calcsize("P") != WORD or sys.implementation.name != "cpython":
        return None
    try:
        answers = [_deeper(file, levels) for levels in (0, 2, 5)]
        if any(answer != answers[0] for answer in answers):
            raise Unreadable("different answers")
        return answers[0]._replace(lock=_lock(file))
    except (Unreadable, ImportError, AttributeError, StopIteration):
        return None


def _deeper(file: int, levels: int) -> Layout:
    return _deeper(file, levels - 1) if levels else _layout(file)


def _layout(file: int) -> Layout:
    frame = sys._getframe()
    caller = frame.f_back
    assert caller is not None
    inner = _word_of_inner_frame(file, frame)
    mine_at = words_at(file, id(frame), _FRAME_OBJECT_WORDS)[inner]
    callers_at = words_at(file, id(caller), _FRAME_OBJECT_WORDS)[inner]
    mine, callers = words_at(file, mine_at, _FRAME_WORDS), words_at(file, callers_at, _FRAME_WORDS)
    code, start = caller.f_code, type(caller.f_code).__basicsize__
    mask, kinds = _text(file)
    return Layout(
        thread_frame=_thread_frame(file, inner),
        frame_code=WORD * _where(callers, lambda word: word & ~TAG == id(code)),
        frame_previous=WORD * _where(mine, lambda word: word == callers_at),
        frame_instruction=WORD * _where(callers, lambda word: word - id(code) - start == caller.f_lasti),
        code_start=start,
        code_file=_of_code(file, "Q", lambda code: id(code.co_filename)),
        code_name=_of_code(file, "Q", lambda code: id(code.co_qualname)),
        code_line=_of_code(file, "i", lambda code: code.co_firstlineno),
        code_lines=_of_code(file, "Q", lambda code: id(code.co_linetable)),
        bytes_start=bytes.__basicsize__ - 1,
        text_mask=mask,
        text_kinds=kinds,
    )


def _lock(file: int) -> int:
    """The address of the last holder of the interpreter's lock (the GIL); the next word says whether it is locked.

    Source: CPython, `struct _gil_runtime_state`, in `_PyRuntime`. Reading memory as a file releases the lock, reading
    it by `ctypes` does not: only the right word shows both.
    """
    import ctypes

    try:
        runtime = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
    except ValueError:
        return 0
    state, places = thread_state(), list[int]()
    for block in range(runtime, runtime + _RUNTIME, _RUNTIME_BLOCK):
        try:
            words = words_at(file, block, _RUNTIME_BLOCK // WORD)
        except Unreadable:
            break
        places += [block + WORD * i for i, word in enumerate(words) if word == state]
    locked = [place for place in places if ctypes.string_at(place + WORD, 4) == _LOCKED]
    fitting = [
        place for place in locked if any(bytes_at(file, place + WORD, 4) == bytes(4) for _ in range(_LOCK_TRIES))
    ]
    return fitting[0] if len(fitting) == 1 else 0


def _of_code(file: int, kind: str, value: Callable[[CodeType], int]) -> int:
    """The offset of that value in code objects: the only offset that fits several code objects."""
    from textwrap import TextWrapper, dedent

    functions = (os.walk, os.makedirs, TextWrapper.wrap, TextWrapper._split, dedent)
    codes = [function.__code__ for function in functions]
    size = struct.calcsize(kind)
    places = set(range(0, WORD * _CODE_WORDS, size))
    for code in codes:
        values = struct.unpack(f"{WORD * _CODE_WORDS // size}{kind}", bytes_at(file, id(code), WORD * _CODE_WORDS))
        places &= {size * i for i, at in enumerate(values) if at == value(code)}
    return _sole(sorted(places))


def _word_of_inner_frame(file: int, frame: FrameType) -> int:
    """Which word of a frame object points to the interpreter's own frame."""

    def holds_code(word: int) -> bool:
        try:
            return id(frame.f_code) in [w & ~TAG for w in words_at(file, word, _FRAME_WORDS)]
        except Unreadable:
            return False

    return _where(words_at(file, id(frame), _FRAME_OBJECT_WORDS), holds_code)


def _thread_frame(file: int, inner: int) -> tuple[int, ...]:
    """The offsets from the thread's state to its current frame, which is this function's frame."""
    own = words_at(file, id(sys._getframe()), _FRAME_OBJECT_WORDS)[inner]
    state = thread_state()
    words = struct.unpack(f"{_THREAD_WORDS}Q", os.pread(file, WORD * _THREAD_WORDS, state))
    if own in words:
        return (WORD * _where(words, lambda word: word == own),)
    ways: list[tuple[int, ...]] = []
    for i, word in enumerate(words):
        try:
            within = struct.unpack("2Q", os.pread(file, 2 * WORD, word))
        except (OSError, OverflowError, struct.error):
            continue
        ways += [(WORD * i, WORD * j) for j, step in enumerate(within) if step == own]
    return _sole(ways)


def _text(file: int) -> tuple[int, tuple[tuple[int, int, int], ...]]:
    """The mask for a str's kind in its state, and for each kind the offset of its characters and their size."""
    unique = str(os.getpid())  # not a constant, whose state would differ
    texts = [(kind, size, text) for kind, size in _KINDS for text in (kind, kind + unique, sys.intern(kind + unique))]
    states = [(kind, size, _state(file, text)) for kind, size, text in texts]
    shift = next(n for n in range(24) if all(state >> n & 7 == size for _, size, state in states))
    ascii_bit = next(n for n in range(shift + 3, 32) if all((state >> n & 1) == (k == "a") for k, _, state in states))
    mask = 7 << shift | 1 << ascii_bit
    fresh = [(kind + unique, size) for kind, size in _KINDS]  # without a cached UTF-8 copy, which would be found
    return mask, tuple((_state(file, t) & mask, sys.getsizeof(t) - size * (len(t) + 1), size) for t, size in fresh)


def _state(file: int, text: str) -> int:
    state: int = struct.unpack("I", bytes_at(file, id(text) + STATE_AT, 4))[0]
    return state


def _where(words: Sequence[int], fits: Callable[[int], bool]) -> int:
    return _sole([i for i, word in enumerate(words) if fits(word)])


def _sole(places: list[T]) -> T:
    if len(places) != 1:
        raise Unreadable(f"{len(places)} places fit")
    return places[0]


class _Code(NamedTuple):
    file: str
    function: str
    size: int  # bytes of instructions
    starts: tuple[int, ...]
    lines: tuple[int, ...]  # the line from each start on

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
        self._snapshot: tuple[int, int, bytes] | None = None

    def take(self) -> None:
        """Copy the innermost frames quickly, for `frames` to read; else it copies them itself."""
        with suppress(Unreadable):
            self._snapshot = self._copy()

    def _copy(self) -> tuple[int, int, bytes]:
        """The current frame's address, and the memory that ends with it: address and bytes."""
        address = self._current()
        block_at = max(address - _BLOCK, 0)
        try:
            return address, block_at, bytes_at(self._file, block_at, _BLOCK + _FRAME.size)
        except Unreadable:
            return address, block_at, b""

    def frames(self) -> Iterator[Spot]:
        """The lines from the innermost frame outwards. Raises Unreadable if reads do not fit together."""
        snapshot, self._snapshot = self._snapshot, None
        address, block_at, block = snapshot or self._copy()
        code_word, previous_word, instruction_word, start = self._words
        codes, whole = self._codes, len(block) - _FRAME.size
        for _ in range(DEEPEST):
            if not address:
                return
            at = address - block_at
            near = 0 <= at <= whole
            frame = _FRAME.unpack_from(block, at) if near else words_at(self._file, address, _FRAME.size // WORD)
            code_at = frame[code_word] & ~TAG
            code = codes[code_at] if code_at in codes else self._code(code_at)
            line = code.line(frame[instruction_word] - code_at - start) if code is not None else None
            if code is not None and line is not None:
                yield code.file, line, code.function
            address = frame[previous_word]
        raise Unreadable("no end")

    def holds_lock(self) -> bool | None:
        """Whether the thread runs Python now; None if unknown. Raises Unreadable."""
        if not self._layout.lock:
            return None
        holder, is_locked = struct.unpack("Qi", bytes_at(self._file, self._layout.lock, WORD + 4))
        return bool(holder == self.thread and is_locked)

    def _current(self) -> int:
        address = self.thread
        for offset in self._layout.thread_frame:
            (address,) = words_at(self._file, address + offset, 1)
        return address

    def _code(self, address: int) -> _Code | None:
        """The code at an address; None for the entry of a call from C to Python, which has no code."""
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
