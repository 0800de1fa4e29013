"""A learner's own progress: `%gpulab progress`."""

from __future__ import annotations

from collections.abc import Iterator

from gpulab.board.standing import LearnerStanding, State, standing
from gpulab.errors import UsageError
from gpulab.lessons.catalogue import LESSONS
from gpulab.lessons.progress import CLASS_VARIABLE, Line, Progress, class_outlets, learner

_WORDS: dict[State, str] = {
    "right": "solved",
    "undecided": "undecided so far",
    "wrong": "not yet",
    "unanswered": "not begun",
    "none": "not begun",
}


def show() -> None:
    """Print it. Raises UsageError where nothing was done yet."""
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
