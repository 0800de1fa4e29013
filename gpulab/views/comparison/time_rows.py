"""Times as HTML: a bar per side or setting, as long as its step, divided by the parts of its one profiled run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpulab.formatting import duration, gib
from gpulab.tuning.compare.parts import both_us, comparable_accounts
from gpulab.tuning.record import Comparison, Experiment, Side
from gpulab.views import html_bars, wording
from gpulab.views.comparison.table import memory_peak_bytes, name, unprofiled_us
from gpulab.views.html_bars import Segment
from gpulab.views.html_rows import picture, row


def times_of_settings(experiment: Experiment) -> str:
    """Each setting's time by its parts, with its memory."""
    sides = [side for side in experiment.sides if us(side, experiment)]
    columns = [of_setting(side, experiment) for side in sides]
    figures = [f"{duration(sum(parts.values()))} · {gib(memory_peak_bytes(side))}" for side, parts in
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
    shown = [part for part in (*wording.PARTS, WHOLE) if parts.get(part, 0) > 0]
    return tuple(_segment(part, parts[part] / longest, duration(parts[part])) for part in shown)


def _segment(part: str, share: float, words: str) -> Segment:
    if part == WHOLE:
        return Segment("", share, html_bars.GREY, words)
    look = wording.PARTS[part]
    return Segment(look.label, share, look.colour, words, bool(look.hatch))


def _legend(parts: Sequence[str]) -> list[Segment]:
    return [_segment(part, 0.0, "") for part in parts]


WHOLE = "whole"  # of a bar: its time where no part of it is shown


def of_both(comparison: Comparison) -> tuple[tuple[dict[str, float], dict[str, float]], bool]:
    """The parts of A and of B in µs, each as long as its blocks say, and whether they are per sample."""
    of_samples = comparison.unit == "sample"
    if comparison.parts and comparison.parts[0].a_us_per_sample is None:
        of_samples = False
    parts = [{c.name: both_us(c, per_sample=of_samples)[i] for c in comparison.parts} for i in (0, 1)]
    times = [_side_us(side, comparison, of_samples) for side in (comparison.a, comparison.b)]
    return (as_long_as(parts[0], times[0]), as_long_as(parts[1], times[1])), of_samples


def of_setting(side: Side, experiment: Experiment) -> dict[str, float]:
    """As long as its blocks say, coloured by the shares of its profiled run, where that differs as the blocks do."""
    compared = next((c for c in experiment.comparisons if c.b is side), None)
    believed, figures = compared is None or not compared.parts_left_out, side.facts
    parts: Mapping[str, float] = {}
    if believed and figures is not None and figures.shares is not None and comparable_accounts(figures, figures):
        parts = figures.shares.share
    return as_long_as(parts, us(side, experiment)) if us(side, experiment) else {}


def per_sample(experiment: Experiment) -> bool:
    """Whether all settings are told per sample: some have another batch, and the samples of all are known."""
    ran = [side for side in experiment.sides if not side.failure]
    return any(c.unit == "sample" for c in experiment.comparisons) and all(side.us_per_sample for side in ran)


def us(side: Side, experiment: Experiment) -> float | None:
    """The time of a side in the unit of the experiment."""
    return side.us_per_sample if per_sample(experiment) else side.us_per_step


def as_long_as(parts: Mapping[str, float], us: float | None) -> dict[str, float]:
    """The parts in proportion, together as long as a measured time; without parts, the time as one piece."""
    whole = sum(parts.values())
    if us is None:
        return dict(parts)
    return {name: part * us / whole for name, part in parts.items()} if whole else {WHOLE: us}


def _side_us(side: Side, comparison: Comparison, of_samples: bool) -> float | None:
    """By the blocks; None where only profiled steps could be compared: then the parts themselves are the bar."""
    if unprofiled_us(side, comparison) is None:
        return None
    return side.us_per_sample if of_samples else side.us_per_step
