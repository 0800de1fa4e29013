"""The board in the instructor's notebook: it reads the folder again every few seconds until it is stopped."""

from __future__ import annotations

import argparse
import contextvars
import threading
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
from gpulab.views.view import Answer

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


def show_board(options: argparse.Namespace) -> Answer | None:
    """Do `%gpulab board`. Raises UsageError in one line."""
    if options.stop:
        stop_boards()
        return None
    if options.folder is None:
        raise UsageError("%gpulab board needs the class folder: %gpulab board FOLDER.")
    board = LiveBoard(options.folder.expanduser(), tuple(lesson_named(word).name for word in options.lessons))
    current = board.read()
    if options.html is not None:
        _write(options.html, board)
        return Answer(f"The board is in {str(options.html)!r}.")
    stop_boards()
    if not in_notebook():
        return Answer(page.text(current, datetime.now(UTC)))
    _boards.append(board)
    board.start()
    return None


def _write(target: Path, board: LiveBoard) -> None:
    content = f'<!doctype html><meta charset="utf-8"><title>gpulab: the class</title>{board.bundle()["text/html"]}'
    try:
        target.write_text(content, encoding="utf-8")
    except OSError as e:
        raise UsageError(f"{str(target)!r} cannot be written: {e.strerror or e}.") from e
