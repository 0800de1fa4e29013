"""The picture of a climb as HTML: a bar per try, as long as what it leaves of the time of the cell as written."""

from __future__ import annotations

from collections.abc import Sequence

from gpulab.tuning.climb.record import Climb
from gpulab.views import html_bars
from gpulab.views.climb.attempts import NONE, change, in_turn, ladder
from gpulab.views.comparison.prediction import speed_words
from gpulab.views.html_bars import Segment
from gpulab.views.html_rows import A_COLOUR, UNDECIDED, VERDICTS, key, picture, row
from gpulab.views.layout import Row, Section

_LABEL, _TIME, _GAIN = 0, 1, -2  # cells of a line of the ladder


def picture_of(climb: Climb) -> str:
    """The picture; empty before the cell as written was measured."""
    if climb.written is None or climb.written.facts is None:
        return ""
    return of_ladder(ladder(climb), [rung.kept for rung in climb.rungs], _whole(climb))


def of_ladder(lines: Section, kept: Sequence[bool], whole: str = "") -> str:
    """The lines of the ladder; `kept` says of each try whether it was, `whole` is the line of all kept together."""
    colours = [A_COLOUR, *(VERDICTS["faster"] if one else UNDECIDED for one in kept)]
    title = f"Time of {lines.columns[_TIME].title}, by the blocks; bars: of the longest time"
    rows = [_row(line, colour) for line, colour in zip(lines.rows, colours, strict=True)]
    entries = [(VERDICTS["faster"], "kept"), (UNDECIDED, "as written, and not kept")]
    return picture(html_bars.caption(title), *rows, whole, key(entries) if kept else "")


def _row(line: Row, colour: str) -> str:
    label, time, gain, words = line.cells[_LABEL], line.cells[_TIME], line.cells[_GAIN], line.cells[-1]
    figures = [] if time == NONE else [time]
    figures += [] if gain == NONE else [f"{gain} times as fast"]
    note = words if words != "the reference" else ""
    return row(label, " · ".join(figures), _bar(label, line.bar or 0.0, colour), note=note)


def _whole(climb: Climb) -> str:
    """All that was kept against the cell as written, which is what the headline has."""
    whole = climb.whole
    if whole is None or not in_turn(whole) or whole.ratio is None or whole.ratio > 1:
        return ""
    before, after = whole.a.us_per_step, whole.b.us_per_step
    if whole.unit == "sample":
        before, after = whole.a.us_per_sample, whole.b.us_per_sample
    figures = f"{change(before, after)} a {whole.unit} · " if before and after else ""
    colour = VERDICTS.get(whole.verdict, UNDECIDED)
    named = ", ".join(f"{name}={value}" for name, value in climb.kept.items())
    figures += speed_words(whole.ratio, whole.interval)
    return row(f"All together, at the end: {named}", figures, _bar(named, whole.ratio, colour))


def _bar(label: str, share: float, colour: str) -> str:
    return html_bars.bar([Segment(label, share, colour)], height_px=14) if share else ""
