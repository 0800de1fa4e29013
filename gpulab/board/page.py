"""The board as HTML without scripts, large enough for a projector, and as text. What learners wrote is escaped."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import datetime
from html import escape

from gpulab.board.standing import Guess, LearnerStanding, Standing, State
from gpulab.formatting import plural

_SIGNS: dict[State, tuple[str, str, str]] = {  # sign, colour, words
    "right": ("✓", "#1E7B45", "right"),
    "undecided": ("?", "#8A6A00", "undecided"),
    "wrong": ("✗", "#B3541E", "not yet"),
    "unanswered": ("·", "#5B6B7F", "looked at"),
    "none": ("", "#5B6B7F", "not begun"),
}
_CELL = "padding:4px 10px;border-bottom:1px solid rgba(128,128,128,0.3)"
_PLOT = 200  # px
_MARGIN = 30
_DOT = "#0072B2"


def html(standing: Standing, now: datetime, note: str = "") -> str:
    """The table of learners and exercises, who is stuck, and the guesses as dots."""
    if not standing.learners:
        return (
            '<div style="font-size:16px"><b>Nobody has opened a lesson yet.</b> The learners appear here with their '
            "first check or guess."
            f"{_note(note)}</div>"
        )
    title = f'<div style="font-size:18px;margin:6px 0"><b>{_title(standing, now)}</b></div>'
    parts = [title, _table(standing, now), _plots(standing)]
    legend = " &nbsp; ".join(
        f'<b style="color:{colour}">{sign}</b> {words}' for sign, colour, words in _SIGNS.values() if sign
    )
    when = now.astimezone().strftime("%H:%M:%S")
    left = f" {standing.left_out} more learners are not shown." if standing.left_out else ""
    parts.append(f'<div style="font-size:13px;opacity:0.8;margin-top:6px">{legend} &nbsp; as of {when}.{left}</div>')
    parts.append(_note(note))
    return f'<div style="font-family:sans-serif">{"".join(parts)}</div>'


def text(standing: Standing, now: datetime) -> str:
    """The same for a terminal: one line per learner."""
    if not standing.learners:
        return "Nobody has opened a lesson yet."
    lines = [_title(standing, now)]
    width = max(len(_plain(learner.name)) for learner in standing.learners)
    for learner in standing.learners:
        states = [
            f"{entry.number} " + "".join(_sign(learner, entry.name, exercise) or "–" for exercise in entry.exercises)
            for entry in standing.lessons
            if entry.exercises
        ]
        lines.append(f"  {_plain(learner.name):{width}}  {'  '.join(states)}  {_since(learner, now)}".rstrip())
    return "\n".join(lines)


def _table(standing: Standing, now: datetime) -> str:
    with_exercises = [entry for entry in standing.lessons if entry.exercises]
    top = "".join(
        f'<th colspan="{len(entry.exercises)}" style="{_CELL};text-align:left">{escape(entry.number)} '
        f"{escape(entry.title.partition(':')[0])}</th>"
        for entry in with_exercises
    )
    names = "".join(
        f'<th style="{_CELL};font-weight:normal;text-align:center">{escape(exercise)}</th>'
        for entry in with_exercises
        for exercise in entry.exercises
    )
    rows = "".join(_row(standing, learner, now) for learner in standing.learners)
    return (
        '<div style="overflow-x:auto"><table style="border-collapse:collapse;font-size:16px">'
        f'<tr><th style="{_CELL}"></th>{top}<th style="{_CELL}"></th></tr>'
        f'<tr><th style="{_CELL};text-align:left">learner</th>{names}<th style="{_CELL}"></th></tr>{rows}</table></div>'
    )


def _row(standing: Standing, learner: LearnerStanding, now: datetime) -> str:
    cells = "".join(_cell(learner, entry.name, exercise) for entry in standing.lessons for exercise in entry.exercises)
    since = _since(learner, now)
    colour = "#B3541E" if since else "inherit"
    return (
        f'<tr><td style="{_CELL};text-align:left">{escape(_plain(learner.name))}</td>{cells}'
        f'<td style="{_CELL};text-align:left;color:{colour}">{escape(since)}</td></tr>'
    )


def _cell(learner: LearnerStanding, lesson: str, exercise: str) -> str:
    sign, colour, words = _SIGNS[learner.states.get((lesson, exercise), "none")]
    count = learner.attempts.get((lesson, exercise), 0)
    tries = f", {plural(count, 'attempt')}" if count else ""
    return (
        f'<td title="{escape(words + tries)}" style="{_CELL};text-align:center;color:{colour};font-weight:bold">'
        f"{sign}</td>"
    )


def _sign(learner: LearnerStanding, lesson: str, exercise: str) -> str:
    return _SIGNS[learner.states.get((lesson, exercise), "none")][0]


def _since(learner: LearnerStanding, now: datetime) -> str:
    waiting = learner.stuck_for(now)
    return "" if waiting is None else f"no progress for {int(waiting.total_seconds() // 60)} min"


def _title(standing: Standing, now: datetime) -> str:
    stuck = sum(learner.stuck_for(now) is not None for learner in standing.learners)
    words = f"{stuck} without progress for ten minutes" if stuck else "all of them get on"
    return f"{plural(len(standing.learners), 'learner')}, {words}"


def _note(note: str) -> str:
    return f'<div style="font-size:13px;color:#B3541E">{escape(note)}</div>' if note else ""


def _plain(name: str) -> str:
    return "".join(c for c in name if c.isprintable())


# -- guesses as dots ---------------------------------------------------------------------------------------------------


def _plots(standing: Standing) -> str:
    plots = "".join(_plot(standing, question) for question in sorted(standing.guesses))
    return f'<div style="display:flex;flex-wrap:wrap;gap:24px;margin-top:12px">{plots}</div>' if plots else ""


def _plot(standing: Standing, question: tuple[str, str]) -> str:
    guesses = standing.guesses[question]
    lesson, name = question
    count = "1 guess" if len(guesses) == 1 else f"{len(guesses)} guesses"
    title = f"{escape(lesson.partition('_')[0])} {escape(name)}: {count}"
    low, high = _range(guesses)
    unit = " %" if guesses[0].unit == "%" else " ×"
    side = _PLOT + 2 * _MARGIN
    axis = "stroke:currentColor;stroke-width:1;opacity:0.5"
    ends = _PLOT + _MARGIN
    dots = "".join(_dots(guesses, low, high))
    return (
        f'<div><div style="font-size:15px"><b>{title}</b></div>'
        f'<svg width="{side}" height="{side}" role="img" aria-label="guess against measurement">'
        f'<line x1="{_MARGIN}" y1="{ends}" x2="{ends}" y2="{ends}" style="{axis}"/>'
        f'<line x1="{_MARGIN}" y1="{ends}" x2="{_MARGIN}" y2="{_MARGIN}" style="{axis}"/>'
        f'<line x1="{_MARGIN}" y1="{ends}" x2="{ends}" y2="{_MARGIN}" style="{axis};stroke-dasharray:4 4"/>{dots}'
        f'<g font-size="12" fill="currentColor"><text x="{_MARGIN}" y="{side - 8}">{low:.2g}{unit}</text>'
        f'<text x="{ends}" y="{side - 8}" text-anchor="end">guess {high:.3g}{unit}</text>'
        f'<text x="{_MARGIN}" y="{_MARGIN - 10}">measured {high:.3g}{unit}</text></g></svg></div>'
    )


def _range(guesses: tuple[Guess, ...]) -> tuple[float, float]:
    if guesses[0].unit == "%":
        return 0.0, 100.0
    values = [value for one in guesses for value in (one.guess, one.measured) if value > 0] or [1.0]
    low, high = min(values), max(values)
    return (low / 1.5, high * 1.5) if low == high else (low / 1.15, high * 1.15)


def _dots(guesses: tuple[Guess, ...], low: float, high: float) -> Iterator[str]:
    """On two axes that are the same, so that the dashed line is where a guess was right."""
    for one in guesses:
        x, y = _at(one.guess, low, high), _at(one.measured, low, high)
        words = f"{_plain(one.learner)}: guess {one.guess:.3g}, measured {one.measured:.3g}"
        yield (
            f'<circle cx="{_MARGIN + x:.1f}" cy="{_PLOT + _MARGIN - y:.1f}" r="6" fill="{_DOT}" fill-opacity="0.6">'
            f"<title>{escape(words)}</title></circle>"
        )


def _at(value: float, low: float, high: float) -> float:
    """In px from the origin, on a logarithmic axis unless that begins at 0; what lies outside stands at the edge."""
    if value <= low:
        return 0.0
    if low == 0.0:
        return min(1.0, value / high) * _PLOT
    return min(1.0, math.log(value / low) / math.log(high / low)) * _PLOT
