"""Where this Python keeps the frames of a thread: learned from a stack whose frames are known.

The offsets differ from one Python to the next. Each is searched for in memory that belongs to an object whose value is
known, at several depths of the stack, and counts only where exactly one place fits. Memory is read through a file of
the system's, which answers an impossible address with an error.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

WORD = 8  # bytes
TAG = 7  # low bits of a pointer, which newer Pythons use as a mark
OWN_MEMORY = "/proc/self/mem"

_FRAME_WORDS, _CODE_WORDS, _THREAD_WORDS = 12, 22, 40
_FRAME_OBJECT_WORDS = 6
LENGTH_AT = 2 * WORD  # of a str, and of bytes: after the count of references and the type
STATE_AT = 4 * WORD  # of a str: after its length and hash
_KINDS = (("a", 1), ("\xe9", 1), ("\u0101", 2), ("\U0001f600", 4))  # of each kind of str, and bytes per character


Words = tuple[int, ...]
T = TypeVar("T")


class Unreadable(Exception):
    """Memory that is not there, or holds something else than it should."""


class Layout(NamedTuple):
    """Offsets in bytes. `thread_frame`: from the thread's state to its current frame, in one step or two.

    `text_kinds`: of a str, by its masked state, where its characters begin and how many bytes each has.
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

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Layout:
        """From what `_asdict` gave, after JSON."""
        kinds = tuple((state, start, size) for state, start, size in fields["text_kinds"])
        return cls(**{**fields, "thread_frame": tuple(fields["thread_frame"]), "text_kinds": kinds})


def words_at(file: int, address: int, count: int) -> Words:
    """So many words of a process's memory. Raises Unreadable."""
    return struct.unpack(f"{count}Q", bytes_at(file, address, WORD * count))


def bytes_at(file: int, address: int, size: int) -> bytes:
    """So many bytes of a process's memory. Raises Unreadable."""
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
    """Of the running Python, whose memory `file` is; None where it cannot be told."""
    if struct.calcsize("P") != WORD or sys.implementation.name != "cpython":
        return None
    try:
        answers = [_deeper(file, levels) for levels in (0, 2, 5)]
        if any(answer != answers[0] for answer in answers):
            raise Unreadable("different answers")
        return answers[0]
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


def _of_code(file: int, kind: str, value: Callable[[CodeType], int]) -> int:
    """Where code objects keep that value: the place that fits all that are looked at."""
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
    """The way from the thread's state to its current frame, which is this function's while it reads by itself."""
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
    """The mask of a str's state that tells its kind, and for each kind where its characters begin, and their size."""
    unique = str(os.getpid())  # no constant: another state
    texts = [(kind, size, text) for kind, size in _KINDS for text in (kind, kind + unique, sys.intern(kind + unique))]
    states = [(kind, size, _state(file, text)) for kind, size, text in texts]
    shift = next(n for n in range(24) if all(state >> n & 7 == size for _, size, state in states))
    ascii_bit = next(n for n in range(shift + 3, 32) if all((state >> n & 1) == (k == "a") for k, _, state in states))
    mask = 7 << shift | 1 << ascii_bit
    fresh = [(kind + unique, size) for kind, size in _KINDS]  # without a copy in UTF-8, which would count
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
