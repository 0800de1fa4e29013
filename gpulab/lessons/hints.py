"""A sentence after a cell that failed as cells do in every class: run too early, misspelt, a package missing."""

from __future__ import annotations

import traceback
from typing import Any

from gpulab.lessons.check import Note
from gpulab.tuning import cell_code
from gpulab.user_code import is_users_file

PACKAGES = {"PIL": "pillow", "cv2": "opencv-python", "skimage": "scikit-image", "sklearn": "scikit-learn"}  # by module


class Hints:
    """Listens to the notebook while a lesson is open."""

    _events: Any = None

    @classmethod
    def start(cls) -> None:
        """In a notebook; elsewhere nothing happens."""
        shell: Any = cell_code.shell()
        if cls._events is None and shell is not None:
            cls._events = shell.events
            cls._events.register("post_run_cell", _after_cell)

    @classmethod
    def stop(cls) -> None:
        """Listen no more."""
        events, cls._events = cls._events, None
        if events is not None:
            events.unregister("post_run_cell", _after_cell)


def _after_cell(result: Any = None) -> None:
    error = getattr(result, "error_before_exec", None) or getattr(result, "error_in_exec", None)
    sentence = hint(error) if isinstance(error, BaseException) else None
    if sentence:
        from IPython.display import display

        display(Note("A hint.", sentence))  # type: ignore[no-untyped-call]


def hint(error: BaseException) -> str | None:
    """What to do about an error; None where its own words say it all."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        module = error.name.partition(".")[0]
        package = PACKAGES.get(module, module)
        return f"{package} is not installed here: run %pip install {package} in a cell, then this one again."
    if isinstance(error, NameError) and error.name:
        return (
            f"`{error.name}` is not there yet: was a cell above left out? Run them from the top (menu Run, Run All "
            "Above Selected Cell), then this one again. Or is it a typing "
            "error, or a text that needs quotes?"
        )
    if isinstance(error, SyntaxError):
        line = f" near line {error.lineno}" if error.lineno else ""
        return f"Python could not read this cell{line}, so nothing of it ran: what was there before still is."
    return None


def what_failed(error: Exception) -> str:
    """The error in its own words, and the last line of the learner's own code on its way."""
    words = f"{type(error).__name__}: {error}".rstrip(": ")
    own = [entry for entry in traceback.extract_tb(error.__traceback__) if is_users_file(entry.filename)]
    line = own[-1].line if own else ""
    return f"{words} (in the line {line!r})" if line else words
