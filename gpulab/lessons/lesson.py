"""A lesson while it is worked on: asks for guesses, reveals what was measured, checks answers, keeps the progress.

A lesson's module has its questions (`QUESTIONS`) and exercises (`EXERCISES`) by name. The parameters of an exercise's
check are names of the notebook, so that a check that is run too early can say which cell comes first.
"""

from __future__ import annotations

import difflib
import html
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping, MutableMapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from gpulab import recordings
from gpulab.api.reading import compare
from gpulab.errors import UsageError
from gpulab.formatting import plural
from gpulab.lessons.catalogue import Entry, lesson_named
from gpulab.lessons.check import Checked, Exercise, Note, unanswered, wrong
from gpulab.lessons.figures import png
from gpulab.lessons.guess_input import GuessInput
from gpulab.lessons.guesses import Question, Revealed, reveal
from gpulab.lessons.hints import Hints, what_failed
from gpulab.lessons.measured import left_open
from gpulab.lessons.progress import Line, Progress, class_outlets, learner, now
from gpulab.lessons.time_limit import TimeLimit, time_limit
from gpulab.options import QUICK_NOTE, is_quick
from gpulab.tuning import cell_code
from gpulab.views.comparison.comparison import Compared
from gpulab.views.running.waiting import waiting

SHIPPED = Path(__file__).with_name("shipped.json")
LIMIT_S = 180.0  # of a check, which may train for some steps: many times what one takes


@cache
def shipped_figures() -> dict[str, dict[str, str]]:
    """What each question of each lesson was answered with on the quiet machine that made the notebooks."""
    return msgspec.json.decode(SHIPPED.read_bytes(), type=dict[str, dict[str, str]])


class Lesson:
    """What `open_lesson` gives. `names` are those of the notebook."""

    def __init__(self, entry: Entry, names: Mapping[str, Any], progress: Progress | None = None) -> None:
        parts = importlib.import_module(f"gpulab.lessons.{entry.module}")
        self.entry = entry
        self.questions: Mapping[str, Question] = getattr(parts, "QUESTIONS", {})
        self.exercises: Mapping[str, Exercise] = getattr(parts, "EXERCISES", {})
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
        """The name that the class sees; assign another."""
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
        """What was measured, beside the guess. What the experiment left open is measured again, where that decides."""
        asked = self._question(question)
        guess = self._names.get(f"guess_{_identifier(question)}")
        again = left_open(asked.experiment, *asked.setting)
        if again is not None:
            _show(Note("Undecided so far.", again.words))
            again.run()
        revealed = reveal(guess, asked, shipped_figures().get(self.entry.name, {}).get(question, ""))
        self._note(question, "guess", revealed.closeness, revealed.guess, revealed.measured, asked.unit)
        return revealed

    def check(self, exercise: str, *, limit_s: float = LIMIT_S) -> Checked:
        """Check an answer: unanswered, wrong with what is wrong, undecided with why, or right. Never raises for one."""
        judge = _named(self.exercises, exercise, "exercise")
        checked = self._checked(judge, limit_s)
        self._note(exercise, "check", checked.state, checked.guess, checked.measured)
        return self._with_what_is_left(exercise, checked) if checked.state == "right" else checked

    def has(self, package: str) -> bool:
        """Whether an optional package is installed; where it is not, says how to install it."""
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
        """Two runs that were recorded on a GPU side by side; where none are shipped, a sentence that says so."""
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
        """Take back what waits in the kernel: fields for guesses, and hints."""
        while self._inputs:
            self._inputs.pop().close()
        Hints.stop()

    def _with_what_is_left(self, exercise: str, checked: Checked) -> Checked:
        """With the exercises that are still to be solved, or that the lesson is passed."""
        left = [name for name in self.exercises if name not in self.solved | {exercise}]
        if left:
            return replace(checked, hint=f"{checked.hint} Still to solve in this lesson: {', '.join(left)}.")
        return replace(checked, hint=f"{checked.hint} With that lesson {self.entry.number} is passed.")

    def _question(self, name: str) -> Question:
        question: Question = _named(self.questions, name, "question")
        return question

    def _checked(self, judge: Exercise, limit_s: float) -> Checked:
        parameters = inspect.signature(judge).parameters.values()
        wanted = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
        missing = [name for name in wanted if name not in self._names]
        if missing:
            return unanswered(
                f"`{missing[0]}` is not there yet. Run the cell that makes it (where it showed an error, correct that "
                "first), then this one again. If several are missing: menu Run, Run All Above Selected Cell."
            )
        try:
            with waiting("checking your answer"), time_limit(limit_s):
                return judge(*(self._names[name] for name in wanted))
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
    """Open a lesson by its number or name; one that was open before is closed. `names`: None for the notebook's own.

    Raises UsageError for a lesson that does not exist.
    """
    entry = lesson_named(lesson)
    while _open:
        _open.pop().close()
    with waiting("opening the lesson"):  # which imports PyTorch
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
    """As `%matplotlib inline` does, which would also replace what a learner has chosen."""
    formatter: Any = getattr(cell_code.shell(), "display_formatter", None)
    if formatter is not None:
        formatter.formatters["image/png"].for_type_by_name("matplotlib.figure", "Figure", png)


def _identifier(name: str) -> str:
    return name.replace("-", "_")


def _named(parts: Mapping[str, Any], name: str, kind: str) -> Any:
    if name in parts:
        return parts[name]
    near = difflib.get_close_matches(name, parts, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else f" There are: {', '.join(parts)}."
    raise UsageError(f"This lesson has no {kind} {name!r}.{hint}")


def _machine() -> str:
    """The device that computes, and what it runs on."""
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
