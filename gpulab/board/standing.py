"""The progress of a class, computed from the learners' lines without side effects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Literal

from msgspec import Struct, field

from gpulab.lessons.catalogue import LESSONS, Entry
from gpulab.lessons.progress import Line

STUCK_AFTER = timedelta(minutes=10)
LONGEST_GONE = timedelta(hours=3)  # inactive for longer: not stuck but gone
MOST_LEARNERS = 500

State = Literal["right", "undecided", "wrong", "unanswered", "none"]

_STATES: Mapping[str, State] = {s: s for s in ("right", "undecided", "wrong", "unanswered")}
_SAFE_QUESTION = re.compile(r"[a-z0-9-]{1,40}")
_BY_NAME = {entry.name: entry for entry in LESSONS}


class LearnerStanding(Struct):
    """One learner. `states`: the latest state by lesson and exercise; a solved exercise stays solved."""

    key: str  # name of the file: learners with the same name stay apart
    name: str
    states: dict[tuple[str, str], State] = field(default_factory=dict)
    attempts: dict[tuple[str, str], int] = field(default_factory=dict)
    lesson: str = ""  # the latest
    last: datetime | None = None  # time of the last line of any kind
    advanced: datetime | None = None  # time of the last newly solved exercise, revealed guess or opened lesson

    @property
    def solved_count(self) -> int:
        return sum(state == "right" for state in self.states.values())

    def stuck_for(self, now: datetime) -> timedelta | None:
        """How long without progress; None: not stuck, done with the lesson, or gone."""
        if self.advanced is None or self.last is None or now - self.last > LONGEST_GONE or self._is_through():
            return None
        waiting = now - self.advanced
        return waiting if waiting >= STUCK_AFTER else None

    def _is_through(self) -> bool:
        entry = _BY_NAME.get(self.lesson)
        return entry is not None and all(self.states.get((entry.name, e)) == "right" for e in entry.exercises)


class Guess(Struct, frozen=True):
    """One learner's latest guess and measurement, both in per cent or both factors."""

    learner: str
    guess: float
    measured: float
    unit: str = "times"  # or "%"


class Standing(Struct, frozen=True):
    """The class: learners by name, the columns, and the guesses by lesson and question."""

    learners: tuple[LearnerStanding, ...]
    lessons: tuple[Entry, ...]  # opened by anybody, in their order
    guesses: Mapping[tuple[str, str], tuple[Guess, ...]]
    excess: int = 0  # learners beyond those that fit


def standing(files: Mapping[str, Iterable[Line]], only: Sequence[str] = ()) -> Standing:
    """The standing from the lines of each file. `only` these lessons (names); none: all lessons."""
    learners: list[LearnerStanding] = []
    guesses: dict[tuple[str, str], dict[str, Guess]] = {}
    opened: set[str] = set()
    for key in sorted(files)[:MOST_LEARNERS]:
        learner = LearnerStanding(key, "")
        for line in files[key]:
            entry = _BY_NAME.get(line.lesson)
            if entry is None or (only and entry.name not in only):
                continue
            opened.add(entry.name)
            _add(learner, entry, line)
            guess = _guess(key, line)
            if guess is not None:
                guesses.setdefault((entry.name, line.exercise), {})[key] = guess
        if learner.last is not None or learner.states:
            learner.name = learner.name or key
            learners.append(learner)
    return Standing(
        tuple(sorted(learners, key=lambda one: (one.name.casefold(), one.key))),
        tuple(entry for entry in LESSONS if entry.name in opened),
        {question: tuple(by_learner.values()) for question, by_learner in guesses.items()},
        max(0, len(files) - MOST_LEARNERS),
    )


def _guess(key: str, line: Line) -> Guess | None:
    if (
        line.kind != "guess"
        or line.guess is None
        or line.measured is None
        or not _SAFE_QUESTION.fullmatch(line.exercise)
    ):
        return None
    return Guess(line.learner or key, line.guess, line.measured, line.unit)


def _add(learner: LearnerStanding, entry: Entry, line: Line) -> None:
    learner.name = line.learner or learner.name
    learner.lesson = entry.name
    moment = line.moment
    advances = line.kind in ("opened", "guess")
    if line.kind == "check" and line.exercise in entry.exercises and line.state in _STATES:
        place = entry.name, line.exercise
        if line.state != "unanswered":
            learner.attempts[place] = learner.attempts.get(place, 0) + 1
        if learner.states.get(place) != "right":
            learner.states[place] = _STATES[line.state]
            advances = line.state == "right"
    if moment is not None:
        learner.last = max(learner.last or moment, moment)
        if advances:
            learner.advanced = max(learner.advanced or moment, moment)
