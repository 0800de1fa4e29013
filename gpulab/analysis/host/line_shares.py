"""The few lines of the user's source around a hot one, each with its share of the time, as line profilers show them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from gpulab.analysis.host.hot_line import Counted
from gpulab.run import Excerpt, Place, Run

AROUND = 3  # lines shown above the hot one and below it


class SourceLine(Struct, frozen=True):
    """One line as it was when it ran. `share` of the time in question; None where no look has met the line."""

    number: int
    text: str
    share: float | None


def lines_beside_cost(run: Run, hot: Place, counts: Sequence[Counted], total: int) -> tuple[SourceLine, ...]:
    """The window around that line; empty where its source was not kept. `counts` and `total` are of the looks."""
    looks = {line.place.line: 0 for line in counts}
    for line in counts:
        if line.place.file == hot.file:
            looks[line.place.line] += line.looks
    window = range(hot.line - AROUND, hot.line + AROUND + 1)
    excerpt = next((e for e in run.excerpts if e.file == hot.file and _holds(e, hot.line)), None)
    if excerpt is None or not total:
        return ()
    numbered = enumerate(excerpt.lines, start=excerpt.first)
    shown = [(number, text) for number, text in numbered if number in window]
    return tuple(SourceLine(n, text, looks[n] / total if looks.get(n) else None) for n, text in _trimmed(shown))


def _holds(excerpt: Excerpt, line: int) -> bool:
    return excerpt.first <= line < excerpt.first + len(excerpt.lines)


def _trimmed(lines: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """Without empty lines at both ends, and without the indent that all have."""
    filled = [i for i, (_, text) in enumerate(lines) if text.strip()]
    inner = lines[filled[0] : filled[-1] + 1] if filled else ()
    indent = min((len(text) - len(text.lstrip()) for _, text in inner if text.strip()), default=0)
    return [(number, text[indent:]) for number, text in inner]
