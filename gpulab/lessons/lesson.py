"""An open lesson: it asks for guesses, reveals measurements, checks answers, and records the progress.

A lesson's module has its questions by name (`QUESTIONS`), and for each exercise a function `check_…`. Its parameters
are names in the notebook, so that a check that is run too early can say which cell comes first.
"""

from __future__ import annotations

import difflib
import html
import importlib
import importlib.util
import inspect
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from msgspec.structs import replace

from gpulab import recordings
from gpulab.api.reading import compare
from gpulab.errors import UsageError
from gpulab.formatting import plural
from gpulab.lessons.catalogue import Entry, find_lesson
from gpulab.lessons.check import Checked, Exercise, Note, unanswered, wrong
from gpulab.lessons.figures import png
from gpulab.lessons.guesses import GuessInput, Question, Revealed, reveal
from gpulab.lessons.measured import remeasurement
from gpulab.lessons.progress import Line, Progress, class_outlets, learner, now
from gpulab.options import QUICK_NOTE, is_quick
from gpulab.tuning import cell_code
from gpulab.user_code import is_users_file
from gpulab.views.comparison import Compared
from gpulab.views.waiting import waiting

SHIPPED = Path(__file__).with_name("shipped.json")
LIMIT_S = 180.0  # of a check, which may train for some steps: many times its usual time


@cache
def shipped_figures() -> dict[str, dict[str, str]]:
    """The answer to each question of each lesson on the quiet machine that made the notebooks."""
    return msgspec.json.decode(SHIPPED.read_bytes(), type=dict[str, dict[str, str]])


def exercises_of(entry: Entry) -> dict[str, Exercise]:
    """The check of each exercise of a lesson: the module's `check_one_step` checks "one-step"."""
    parts = importlib.import_module(f"gpulab.lessons.{entry.module}")
    return {name: getattr(parts, f"check_{_identifier(name)}") for name in entry.exercises}


class Lesson:
    """The lesson that `open_lesson` returns. `names` are the notebook's variables."""

    def __init__(self, entry: Entry, names: Mapping[str, Any], progress: Progress | None = None) -> None:
        parts = importlib.import_module(f"gpulab.lessons.{entry.module}")
        self.entry = entry
        self.questions: Mapping[str, Question] = getattr(parts, "QUESTIONS", {})
        self.exercises: Mapping[str, Exercise] = exercises_of(entry)
        self._names = names
        who = learner()
        self.progress = progress if progress is not None else Progress(outlets=class_outlets(who))
        self._learner = who
        self._inputs: list[GuessInput] = []
        self._said_none_recorded = False

    def __repr__(self) -> str:
        return " ".join(self._opening())

    def _repr_html_(self) -> str:
        title, *rest = self._opening()
        return f"<div><b>{html.escape(title)}</b> {html.escape(' '.join(rest))}</div>"

    def _opening(self) -> list[str]:
        entry, solved = self.entry, len(self.solved)
        done = f"{solved} of {plural(len(self.exercises), 'exercise')} solved here." if self.exercises else ""
        title = f"Lesson {entry.number}: {entry.title.rstrip('.?')}."
        sentences = [title, f"About {entry.minutes} minutes.", _machine()]
        sentences += [done] if done else []
        sentences += [QUICK_NOTE] if is_quick() else []
        for outlet in self.progress.outlets:
            sentences.append(
                f"This is a class: each guess and check, without your code, also goes to {outlet.words}, under the "
                f'name "{self.name}". To choose another: lesson.name = "…".'
            )
        return sentences

    @property
    def name(self) -> str:
        """The name that the class sees; can be assigned."""
        return self._learner.name

    @name.setter
    def name(self, name: str) -> None:
        before, self._learner = self._learner, learner(name=str(name))
        for outlet in class_outlets(before):
            outlet.rename(self._learner)
        self.progress.outlets = class_outlets(self._learner)

    @property
    def solved(self) -> set[str]:
        """The exercises whose check was right at least once, in this folder."""
        mine = (line for line in self.progress.lines() if line.lesson == self.entry.name)
        return {line.exercise for line in mine if line.kind == "check" and line.state == "right"}

    def guess(self, question: str) -> GuessInput:
        """A field for a guess. Assign it to `guess_QUESTION`, or assign a number in its place."""
        field = GuessInput(f"guess_{_identifier(question)}", self._question(question))
        self._inputs.append(field)
        return field

    def reveal(self, question: str) -> Revealed:
        """The measurement next to the guess. An undecided setting is measured again if that can decide it."""
        question_ = self._question(question)
        guess = self._names.get(f"guess_{_identifier(question)}")
        again = remeasurement(question_.experiment, *question_.setting)
        if again is not None:
            _show(Note("Undecided so far.", again.words))
            again.run()
        revealed = reveal(guess, question_, shipped_figures().get(self.entry.name, {}).get(question, ""))
        self._note(question, "guess", revealed.closeness, revealed.guess, revealed.measured, question_.unit)
        return revealed

    def check(self, exercise: str, *, limit_s: float = LIMIT_S) -> Checked:
        """Check an answer: unanswered, wrong (with a hint), undecided (with the reason), or right. Never raises."""
        judge = _part(self.exercises, exercise, "exercise")
        checked = self._checked(judge, limit_s)
        self._note(exercise, "check", checked.state)
        return self._with_rest(exercise, checked) if checked.state == "right" else checked

    def has(self, package: str) -> bool:
        """Whether an optional package is installed; if not, says how to install it."""
        if importlib.util.find_spec(package) is not None:
            return True
        _show(
            Note(
                "Not installed.",
                f"This cell needs {package}, and all others do without: run %pip install {package} in a cell, then "
                "this one again.",
            )
        )
        return False

    def compare_recorded(self, before: str, after: str) -> Compared | Note:
        """Two runs recorded on a GPU, compared side by side; if they are not shipped, a sentence that says so."""
        machine = recordings.machine_with(before, after)
        if machine is None and self._said_none_recorded:
            return Note("No recording", "of this one either.")
        if machine is None:
            self._said_none_recorded = True
            return Note(
                "No recording.",
                "This gpulab comes without these two runs recorded on a GPU, so this part stays empty. "
                "(To record them, run make record-gpu in a clone of gpulab, on a machine with an NVIDIA GPU.)",
            )
        return compare(recordings.open(f"{machine}/{before}"), recordings.open(f"{machine}/{after}"))

    def close(self) -> None:
        """Remove the lesson's objects in the kernel: fields for guesses, and hints."""
        while self._inputs:
            self._inputs.pop().close()
        Hints.stop()

    def _with_rest(self, exercise: str, checked: Checked) -> Checked:
        """The result with the exercises that remain, or that the lesson is passed."""
        unsolved = [name for name in self.exercises if name not in self.solved | {exercise}]
        if unsolved:
            return replace(checked, hint=f"{checked.hint} Still to solve in this lesson: {', '.join(unsolved)}.")
        return replace(checked, hint=f"{checked.hint} With that lesson {self.entry.number} is passed.")

    def _question(self, name: str) -> Question:
        question: Question = _part(self.questions, name, "question")
        return question

    def _checked(self, judge: Exercise, limit_s: float) -> Checked:
        parameters = inspect.signature(judge).parameters.values()
        expected = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
        missing = [name for name in expected if name not in self._names]
        if missing:
            return unanswered(
                f"`{missing[0]}` is not there yet. Run the cell that makes it (where it showed an error, correct that "
                "first), then this one again. If several are missing: menu Run, Run All Above Selected Cell."
            )
        try:
            with waiting("checking your answer"), time_limit(limit_s):
                return judge(*(self._names[name] for name in expected))
        except TimeLimit:
            return wrong(
                f"It ran for {limit_s:g} seconds without coming to an end, and was stopped. Is there a loop that never "
                "ends, or far more work than was asked for?"
            )
        except Exception as e:
            return wrong(f"It does not run. {what_failed(e)}")

    def _note(
        self,
        exercise: str,
        kind: str,
        state: str,
        guess: float | None = None,
        measured: float | None = None,
        unit: str = "",
    ) -> None:
        line = Line(self.entry.name, exercise, kind, state, now(), guess, measured, unit)
        for sentence in self.progress.note(line):
            _show(Note("Note.", sentence))


_open: list[Lesson] = []


def open_lesson(lesson: str | int, names: MutableMapping[str, Any] | None = None) -> Lesson:
    """Open a lesson by its number or name, and close the previously open one. `names`: None for the notebook's
    variables.

    Raises UsageError if the lesson does not exist.
    """
    entry = find_lesson(lesson)
    while _open:
        _open.pop().close()
    with waiting("opening the lesson"):  # imports PyTorch
        opened = Lesson(entry, _notebook_names() if names is None else names)
    _open.append(opened)
    Hints.start()
    _show_figures_as_images()
    opened._note("", "opened", "")
    return opened


def _notebook_names() -> Mapping[str, Any]:
    shell: Any = cell_code.shell()
    return vars(sys.modules["__main__"]) if shell is None else shell.user_ns


def _show_figures_as_images() -> None:
    """As `%matplotlib inline` does, but without replacing the learner's own backend."""
    formatter: Any = getattr(cell_code.shell(), "display_formatter", None)
    if formatter is not None:
        formatter.formatters["image/png"].for_type_by_name("matplotlib.figure", "Figure", png)


def _identifier(name: str) -> str:
    return name.replace("-", "_")


def _part(parts: Mapping[str, Any], name: str, kind: str) -> Any:
    if name in parts:
        return parts[name]
    near = difflib.get_close_matches(name, parts, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else f" There are: {', '.join(parts)}."
    raise UsageError(f"This lesson has no {kind} {name!r}.{hint}")


def _machine() -> str:
    """The device that computes, and its machine."""
    import torch

    from gpulab.devices.machine import usable_cores

    cores = plural(usable_cores(), "usable core")
    if torch.cuda.is_available():
        return f"The device is a {torch.cuda.get_device_name()}, beside {cores}; torch {torch.__version__}."
    return f"There is no GPU here, so the CPU ({cores}) is the device that computes; torch {torch.__version__}."


def _show(note: Note) -> None:
    if cell_code.shell() is None:
        print(note)
        return
    from IPython.display import display

    display(note)  # type: ignore[no-untyped-call]


PACKAGES = {"PIL": "pillow", "cv2": "opencv-python", "skimage": "scikit-image", "sklearn": "scikit-learn"}  # by module


class Hints:
    """Shows a hint below each cell that failed, while a lesson is open."""

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
        """Stop listening."""
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
    """What to do about an error; None if its message is enough."""
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
    """The error's message, and the last line of the learner's own code in its traceback."""
    words = f"{type(error).__name__}: {error}".rstrip(": ")
    own = [entry for entry in traceback.extract_tb(error.__traceback__) if is_users_file(entry.filename)]
    line = own[-1].line if own else ""
    return f"{words} (in the line {line!r})" if line else words


class TimeLimit(BaseException):
    """Raised in code that runs for too long; not an Exception, so that an answer's own `except` does not catch it."""


@contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """Raises TimeLimit in the block after `limit_s` seconds, on the main thread of Linux or macOS; elsewhere: no limit.

    A timer set by other code continues afterwards; if it expires sooner, this limit is not set.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    others_s, began_s = signal.getitimer(signal.ITIMER_REAL)[0], time.monotonic()
    if 0 < others_s <= limit_s:
        yield
        return

    def over(_signal: int, _frame: FrameType | None) -> None:
        raise TimeLimit

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if others_s:
            signal.setitimer(signal.ITIMER_REAL, max(others_s - (time.monotonic() - began_s), 1e-3))
