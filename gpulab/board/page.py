"""The board as HTML without scripts, large enough for a projector, and as text. What learners wrote is escaped."""

from __future__ import annotations

import math
from datetime import datetime
from functools import partial

from gpulab.board.standing import Guess, LearnerStanding, Standing
from gpulab.formatting import plural
from gpulab.views.page import render
from gpulab.views.wording import plain

_SIGNS = {"right": "✓", "undecided": "?", "wrong": "✗", "unanswered": "·"}


def html(standing: Standing, now: datetime, note: str = "") -> str:
    """The table of learners and exercises, who is stuck, and the guesses as dots."""
    page = render(
        "board.html",
        title=_title(standing, now),
        learners=standing.learners,
        exercised=[entry for entry in standing.lessons if entry.exercises],
        since=partial(_since, now=now),
        plots=[_plot(question, standing.guesses[question]) for question in sorted(standing.guesses)],
        when=now.astimezone().strftime("%H:%M:%S"),
        excess=standing.excess,
        note=note,
    )
    return str(page)


def text(standing: Standing, now: datetime) -> str:
    """The board for a terminal: one line per learner."""
    if not standing.learners:
        return "Nobody has opened a lesson yet."
    lines = [_title(standing, now)]
    width = max(len(plain(learner.name)) for learner in standing.learners)
    for learner in standing.learners:
        states = []
        for entry in standing.lessons:
            signs = [_SIGNS.get(learner.states.get((entry.name, exercise), ""), "–") for exercise in entry.exercises]
            states += [f"{entry.number} {''.join(signs)}"] if signs else []
        lines.append(f"  {plain(learner.name):{width}}  {'  '.join(states)}  {_since(learner, now)}".rstrip())
    return "\n".join(lines)


def _since(learner: LearnerStanding, now: datetime) -> str:
    waiting = learner.stuck_for(now)
    return "" if waiting is None else f"no progress for {int(waiting.total_seconds() // 60)} min"


def _title(standing: Standing, now: datetime) -> str:
    stuck = sum(learner.stuck_for(now) is not None for learner in standing.learners)
    words = f"{stuck} without progress for ten minutes" if stuck else "all of them get on"
    return f"{plural(len(standing.learners), 'learner')}, {words}"


def _plot(question: tuple[str, str], guesses: tuple[Guess, ...]) -> dict[str, object]:
    """Each guess and its measurement as shares of one axis; `low` and `high` are its ends in words."""
    lesson, name = question
    low, high = _range(guesses)
    unit = " %" if guesses[0].unit == "%" else " ×"
    return {
        "title": f"{lesson.partition('_')[0]} {name}: {len(guesses)} {'guess' if len(guesses) == 1 else 'guesses'}",
        "low": f"{low:.2g}{unit}",
        "high": f"{high:.3g}{unit}",
        "dots": [
            (
                _place(one.guess, low, high),
                _place(one.measured, low, high),
                f"{one.learner}: guess {one.guess:.3g}, measured {one.measured:.3g}",
            )
            for one in guesses
        ],
    }


def _range(guesses: tuple[Guess, ...]) -> tuple[float, float]:
    if guesses[0].unit == "%":
        return 0.0, 100.0
    values = [value for one in guesses for value in (one.guess, one.measured) if value > 0] or [1.0]
    low, high = min(values), max(values)
    return (low / 1.5, high * 1.5) if low == high else (low / 1.15, high * 1.15)


def _place(value: float, low: float, high: float) -> float:
    """The position of a value as a share of a logarithmic axis, or of an axis from 0; values outside go to the edge."""
    if value <= low:
        return 0.0
    return min(1.0, value / high if low == 0.0 else math.log(value / low) / math.log(high / low))
