"""One line at a terminal that is renewed and taken away again; a stream that fails is left alone."""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from typing import TextIO


class TerminalLine:
    """On standard error; nothing is written where that is no terminal."""

    def __init__(self) -> None:
        self._stream = _terminal()
        self._width = 0

    def __bool__(self) -> bool:
        """Whether somebody can see it."""
        return self._stream is not None

    def write(self, text: str) -> None:
        """In place of what stands there."""
        text = text[: shutil.get_terminal_size().columns - 1]  # a longer one would stay, line by line
        self._put("\r" + text.ljust(self._width))
        self._width = len(text)

    def clear(self) -> None:
        """Take the line away."""
        if self._width:
            self._put("\r" + " " * self._width + "\r")
            self._width = 0

    def _put(self, text: str) -> None:
        if self._stream is not None:
            with suppress(OSError, ValueError):
                self._stream.write(text)
                self._stream.flush()


def _terminal() -> TextIO | None:
    try:
        return sys.stderr if sys.stderr.isatty() else None
    except (AttributeError, ValueError):  # no standard error, or a closed one
        return None
