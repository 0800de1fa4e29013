"""The board in the instructor's notebook, which reads the class folder again every few seconds until it is stopped.

The folder has one file per learner, which may be written while it is read. A learner's own progress is shown as text.
"""

from __future__ import annotations

import argparse
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct, field

from gpulab.board import page
from gpulab.board.standing import LearnerStanding, Standing, State, standing
from gpulab.errors import UsageError
from gpulab.lessons.catalogue import LESSONS, find_lesson
from gpulab.lessons.progress import CLASS_VARIABLE, Line, Progress, class_outlets, learner, read_lines
from gpulab.store.files import reason, write_whole
from gpulab.views.view import Answer
from gpulab.views.widgets import Output, Repeater, in_notebook

RENEWED_S = 5.0


class LiveBoard(Struct):
    """A board in an output of the notebook, and the thread that renews it."""

    folder: Path
    only: tuple[str, ...]
    output: Output = field(default_factory=Output)
    repeater: Repeater | None = None

    def read(self) -> Standing:
        """The standing of the class. Raises UsageError if the folder cannot be read."""
        return standing(read_folder(self.folder), self.only)

    def bundle(self) -> dict[str, str]:
        """The page; if the folder has gone away, it says so and the board goes on."""
        now = datetime.now(UTC)
        try:
            current, note = self.read(), warning(self.folder)
        except UsageError as e:
            current, note = standing({}), str(e)
        return {"text/plain": page.text(current, now), "text/html": page.html(current, now, note)}

    def start(self) -> None:
        """Show the board, and renew it from a thread."""
        self.output.show(self.bundle())

        def renew() -> None:
            with suppress(Exception):
                self.output.show(self.bundle())

        self.repeater = Repeater("board", renew, RENEWED_S)

    def stop(self) -> None:
        """Stop refreshing; the last state stays on display."""
        if self.repeater is not None:
            self.repeater.stop()


_boards: list[LiveBoard] = []


def stop_boards() -> None:
    """Stop refreshing all boards."""
    while _boards:
        _boards.pop().stop()


def show_board(options: argparse.Namespace) -> Answer | None:
    """Run `%gpulab board`. Raises UsageError in one line."""
    if options.stop:
        stop_boards()
        return None
    if options.folder is None:
        raise UsageError("%gpulab board needs the class folder: %gpulab board FOLDER.")
    board = LiveBoard(options.folder.expanduser(), tuple(find_lesson(word).name for word in options.lessons))
    current = board.read()
    if options.html is not None:
        content = board.bundle()["text/html"]
        content = f'<!doctype html><meta charset="utf-8"><title>gpulab: the class</title>{content}'
        write_whole(options.html, content.encode())
        return Answer(f"The board is in {str(options.html)!r}.")
    stop_boards()
    if not in_notebook():
        return Answer(page.text(current, datetime.now(UTC)))
    _boards.append(board)
    board.start()
    return None


MOST_FILES = 1_000


def read_folder(folder: Path) -> Mapping[str, list[Line]]:
    """The lines of every learner by the name of their file. Raises UsageError if the folder cannot be read."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".jsonl")
    except OSError as e:
        raise UsageError(f"The class folder {str(folder)!r} cannot be read: {reason(e)}.") from e
    return {
        path.stem: list(read_lines(path)) for path in paths[:MOST_FILES] if path.is_file() and not path.is_symlink()
    }


def warning(folder: Path) -> str:
    """What is unsafe about the folder: a learner may delete another learner's file. Empty if it is safe."""
    try:
        mode = folder.stat().st_mode
    except OSError:
        return ""
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        return f"Every learner can delete the others' files here: chmod +t {folder} ends that."
    return ""


_WORDS: dict[State, str] = {
    "right": "solved",
    "undecided": "undecided so far",
    "wrong": "not yet",
    "unanswered": "not begun",
    "none": "not begun",
}


def show() -> None:
    """Print a learner's own progress. Raises UsageError if there is none yet."""
    progress = Progress()
    lines = progress.lines()
    if not lines:
        raise UsageError(f"There is no progress in {str(progress.folder)!r} yet: open a lesson, guess, and check.")
    print("\n".join(report(lines)))
    for outlet in class_outlets(learner()):
        print(
            f'\nThe class sees these lines, too, as "{learner().name}": {CLASS_VARIABLE} sends them to {outlet.words}.'
        )


def report(lines: list[Line]) -> Iterator[str]:
    """One line per exercise and guess of every lesson that was opened; the latest guess of a question counts."""
    everything = standing({"own": lines})
    one = everything.learners[0] if everything.learners else LearnerStanding("own", "")
    count = sum(len(entry.exercises) for entry in LESSONS)
    yield f"{one.solved_count} of {count} exercises of all lessons are solved."
    for entry in everything.lessons:
        yield f"\n{entry.number} {entry.title}"
        for exercise in entry.exercises:
            state = one.states.get((entry.name, exercise), "none")
            tries = one.attempts.get((entry.name, exercise), 0)
            yield f"  exercise {exercise}: {_WORDS[state]}" + (f" (checked {tries} times)" if tries > 1 else "")
        for (lesson, question), guesses in sorted(everything.guesses.items()):
            if lesson == entry.name:
                yield f"  guess {question}: you guessed {guesses[0].guess:.3g}, measured was {guesses[0].measured:.3g}"
