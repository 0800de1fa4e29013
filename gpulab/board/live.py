"""The board in the instructor's notebook: it reads the folder again every few seconds until it is stopped."""

from __future__ import annotations

import contextvars
import shlex
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec import Struct

from gpulab.board import page
from gpulab.board.folder import read_folder, warning
from gpulab.board.standing import Standing, standing
from gpulab.errors import UsageError
from gpulab.lessons.catalogue import lesson_named
from gpulab.views.live_view import in_notebook

RENEWED_S = 5.0


class LiveBoard(Struct):
    """A board in an output of the notebook, and the thread that renews it."""

    folder: Path
    only: tuple[str, ...]
    handle: Any = None
    over: threading.Event | None = None

    def read(self) -> Standing:
        """Raises UsageError where the folder cannot be read."""
        return standing(read_folder(self.folder), self.only)

    def bundle(self) -> dict[str, str]:
        """The page; a folder that has gone away says so, and the board goes on."""
        now = datetime.now(UTC)
        try:
            current, note = self.read(), warning(self.folder)
        except UsageError as e:
            current, note = standing({}), str(e)
        return {"text/plain": page.text(current, now), "text/html": page.html(current, now, note)}

    def start(self) -> None:
        """Show it, and renew it from a thread."""
        from IPython.display import display

        self.handle = display(self.bundle(), raw=True, display_id=True)  # type: ignore[no-untyped-call]
        over = self.over = threading.Event()

        def renew() -> None:
            while not over.wait(RENEWED_S):
                with suppress(Exception):
                    self.handle.update(self.bundle(), raw=True)

        context = contextvars.copy_context()  # says to which cell the output belongs
        threading.Thread(target=context.run, args=(renew,), name="gpulab-board", daemon=True).start()

    def stop(self) -> None:
        """What was shown last stays."""
        if self.over is not None:
            self.over.set()


_boards: list[LiveBoard] = []


def stop_boards() -> None:
    """No board is read any longer."""
    while _boards:
        _boards.pop().stop()


def magic(rest: str) -> None:
    """`%gpulab board …`. Raises UsageError in one line."""
    words = _words(rest)
    if words == ["--stop"]:
        stop_boards()
        return
    if "--html" in words:
        at = words.index("--html")
        if at + 1 >= len(words):
            raise UsageError("--html needs the name of a file: %gpulab board FOLDER --html board.html.")
        target = Path(words[at + 1])
        board = _board([*words[:at], *words[at + 2 :]])
        _write(target, board)
        print(f"The board is in {str(target)!r}.")
        return
    board = _board(words)
    stop_boards()
    if in_notebook():
        _boards.append(board)
        board.start()
    else:
        print(page.text(board.read(), datetime.now(UTC)))


def _board(words: Sequence[str]) -> LiveBoard:
    if not words or words[0].startswith("-"):
        raise UsageError("%gpulab board needs the class folder: %gpulab board FOLDER.")
    board = LiveBoard(Path(words[0]).expanduser(), tuple(lesson_named(word).name for word in words[1:]))
    board.read()
    return board


def _write(target: Path, board: LiveBoard) -> None:
    content = f'<!doctype html><meta charset="utf-8"><title>gpulab: the class</title>{board.bundle()["text/html"]}'
    try:
        target.write_text(content, encoding="utf-8")
    except OSError as e:
        raise UsageError(f"{str(target)!r} cannot be written: {e.strerror or e}.") from e


def _words(rest: str) -> list[str]:
    try:
        return shlex.split(rest)
    except ValueError as e:
        raise UsageError(f"%gpulab board {rest}: {str(e).lower()}.") from None
