"""Keeps what the cell writes while a button's click runs it: a front end has no place for what a click prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

from msgspec import Struct

from gpulab.tuning import cell_code

KEPT_CHARACTERS = 20_000  # of what the code wrote: the last


class KeptPrints(Struct):
    """The end of what some code wrote."""

    text: str = ""
    cut: bool = False  # its beginning was dropped

    def write(self, text: str) -> int:
        whole = self.text + text
        self.cut = self.cut or len(whole) > KEPT_CHARACTERS
        self.text = whole[-KEPT_CHARACTERS:]
        return len(text)


class _Stream:
    """Stands in for a standard stream: what this thread of this process writes is kept."""

    def __init__(self, stream: Any, prints: KeptPrints) -> None:
        self._stream = stream
        self._prints = prints
        self._thread = get_ident()
        self._process = os.getpid()
        self.over = False

    def write(self, text: str) -> int:
        ours = not self.over and get_ident() == self._thread and os.getpid() == self._process
        return self._prints.write(text) if ours else int(self._stream.write(text) or 0)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def prints_kept(prints: KeptPrints) -> Iterator[None]:
    """What this thread prints or displays inside is kept; all other threads print as before."""
    with ExitStack() as undo:
        for name in ("stdout", "stderr"):
            undo.enter_context(_stream_replaced(name, prints))
        undo.enter_context(_displays_kept(prints))
        yield


@contextmanager
def _stream_replaced(name: str, prints: KeptPrints) -> Iterator[None]:
    stream = getattr(sys, name)
    if stream is None:
        yield
        return
    ours = _Stream(stream, prints)
    setattr(sys, name, ours)
    try:
        yield
    finally:
        ours.over = True  # the cell may have put something over it, which goes on writing to it
        if getattr(sys, name) is ours:
            setattr(sys, name, stream)


@contextmanager
def _displays_kept(prints: KeptPrints) -> Iterator[None]:
    """By a hook of ipykernel's display publisher, which is this thread's own."""
    publisher: Any = getattr(cell_code.shell(), "display_pub", None)
    if not hasattr(publisher, "register_hook"):
        yield
        return

    def keep(message: dict[str, Any]) -> None:
        text = message.get("content", {}).get("data", {}).get("text/plain")
        if text:
            prints.write(f"{text}\n")

    publisher.register_hook(keep)
    try:
        yield
    finally:
        publisher.unregister_hook(keep)
