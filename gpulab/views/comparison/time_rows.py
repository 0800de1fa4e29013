"""Times as HTML: a bar per side or setting, as long as its step, divided by the parts of its one profiled run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpulab.formatting import duration, size
from gpulab.tuning.record import Experiment
from gpulab.views import html_bars, wording
from gpulab.views.comparison import part_times
from gpulab.views.comparison.table import memory_peak_bytes, name
from gpulab.views.html_bars import Segment
from gpulab.views.html_rows import picture, row

_WHOLE = "#A8A8A8"


def times_of_settings(experiment: Experiment) -> str:
    """Each setting's time by its parts, with its memory."""
    sides = [side for side in experiment.sides if part_times.us(side, experiment)]
    columns = [part_times.of_setting(side, experiment) for side in sides]
    figures = [f"{duration(sum(parts.values()))} · {size(memory_peak_bytes(side))}" for side, parts in
               zip(sides, columns, strict=True)]  # fmt: skip
    return picture(time_rows([name(side) for side in sides], columns, figures)) if len(sides) > 1 else ""


def time_rows(names: Sequence[str], columns: Sequence[Mapping[str, float]], figures: Sequence[str]) -> str:
    """A bar per time, as long as it is of the longest, stacked in one order of parts, and the legend of all."""
    longest = max((sum(parts.values()) for parts in columns), default=0.0) or 1.0
    rows = (
        row(label, figure, html_bars.bar(segments(parts, longest), height_px=16))
        for label, parts, figure in zip(names, columns, figures, strict=True)
    )
    seen = [part for part in wording.PARTS if any(parts.get(part, 0) > 0.004 * longest for parts in columns)]
    return "".join(rows) + (html_bars.legend(_legend(seen)) if seen else "")


def segments(parts: Mapping[str, float], longest: float) -> tuple[Segment, ...]:
    """The parts as shares of the longest time."""
    shown = [part for part in (*wording.PARTS, part_times.WHOLE) if parts.get(part, 0) > 0]
    return tuple(_segment(part, parts[part] / longest, duration(parts[part])) for part in shown)


def _segment(part: str, share: float, words: str) -> Segment:
    if part == part_times.WHOLE:
        return Segment("", share, _WHOLE, words)
    look = wording.PARTS[part]
    return Segment(look.label, share, look.colour, words, bool(look.hatch))


def _legend(parts: Sequence[str]) -> list[Segment]:
    return [_segment(part, 0.0, "") for part in parts]
