"""Panel: one stacked bar per step over time, with what is known about the step."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from gpulab.analysis.breakdown import StepParts
from gpulab.analysis.facts import Facts
from gpulab.formatting import duration, percent, time_unit
from gpulab.run import Float64, Int64
from gpulab.views import wording
from gpulab.views.drawing import SHADE, SMALL_PT, Key, frame, legend_beside, rectangles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_BARS = 150
_UNSHARED_PARTS = ("data_wait", "optimizer", "start_up")  # may be drawn without a share of the profiled steps
_REST = "rest"
_PROFILED = "#7A5C00"
_NARROWEST = 0.004  # of the panel: a profiled step stays visible in a long run
_PAUSE = 0.02  # of the run: a bar does not reach over a longer pause between steps


class Bars(Struct, frozen=True):
    """Bars in order of time. `parts_ms` are means over the steps of a bar; `per_bar` is the most steps in one bar."""

    left_s: Float64
    right_s: Float64
    parts_ms: dict[str, Float64]
    profiled: np.ndarray
    per_bar: int

    @property
    def height_ms(self) -> Float64:
        """The full height of each bar: its steps' mean wall time."""
        height: Float64 = np.sum(list(self.parts_ms.values()), axis=0)
        return height


def bars(facts: Facts) -> Bars:
    """The steps as at most about 150 bars; profiled steps are never averaged with others."""
    steps = facts.run.steps
    parts = _parts_ns(facts)
    profiled = np.isin(steps.number, [s.number for s in profiled_steps(facts)])
    per_bar = max(1, -(-len(steps) // MOST_BARS))
    start_ns, end_ns = _windows(facts)
    pause = np.concatenate([[0], start_ns[1:] - end_ns[:-1]]) > _PAUSE * facts.run.wall_ns
    first = _first_rows(profiled, pause, per_bar)
    last = np.append(first[1:], len(steps)) - 1
    count = last - first + 1
    return Bars(
        left_s=start_ns[first] / 1e9,
        right_s=end_ns[last] / 1e9,
        parts_ms={name: np.add.reduceat(ns, first) / count / 1e6 for name, ns in parts.items()},
        profiled=profiled[first],
        per_bar=int(count.max()),
    )


def profiled_steps(facts: Facts) -> tuple[StepParts, ...]:
    """The steps with full parts; a window that stands as one is no step of the run."""
    return () if facts.breakdown is None or facts.breakdown.whole_window else facts.breakdown.steps


def _windows(facts: Facts) -> tuple[Int64, Int64]:
    """Begin and end of each step: a profiled one lies where its device works for it."""
    steps = facts.run.steps
    start_ns, end_ns = steps.start_ns.copy(), steps.end_ns.copy()
    for step in profiled_steps(facts):
        row = steps.number == step.number
        start_ns[row], end_ns[row] = step.start_ns, step.end_ns
    return start_ns, end_ns


def _parts_ns(facts: Facts) -> dict[str, Int64]:
    """Per part a column of nanoseconds; unprofiled steps have data wait and the rest."""
    steps = facts.run.steps
    parts = {name: np.zeros(len(steps), np.int64) for name in wording.PARTS}
    wait = np.minimum(steps.data_wait_ns, steps.time_ns)
    parts["data_wait"][:] = wait
    parts[_REST] = steps.time_ns - wait
    for step in profiled_steps(facts):
        row = steps.number == step.number
        parts[_REST][row] = 0
        for name, ns in step.parts_ns.items():
            parts[name][row] = ns
    return parts


def _first_rows(profiled: np.ndarray, pause: np.ndarray, per_bar: int) -> Int64:
    """The row at which each bar begins: after every `per_bar` steps, a change of profiling, or a pause."""
    change = np.flatnonzero(pause | (np.diff(profiled, prepend=profiled[0]) != 0))
    edges = np.unique(np.concatenate([[0], change, [len(profiled)]]))
    return np.concatenate([np.arange(a, b, per_bar) for a, b in pairwise(edges)])


def draw(axes: Axes, facts: Facts, seconds_per_unit: float) -> None:
    """The panel, its time axis in units of `seconds_per_unit`. Needs at least one step."""
    steps = bars(facts)
    unit_us, unit = time_unit(float(np.median(steps.height_ms)) * 1e3)
    unit_ms = unit_us / 1e3
    top = _top(steps.height_ms) / unit_ms
    width = facts.run.wall_ns / 1e9 * _NARROWEST
    end = facts.run.wall_ns / 1e9
    left = np.where(steps.profiled, np.minimum(steps.left_s, end - width), steps.left_s) / seconds_per_unit
    right = np.where(steps.profiled, np.maximum(steps.right_s, steps.left_s + width), steps.right_s) / seconds_per_unit
    edge = 0.5 if len(left) <= 80 else 0.0
    for chosen in (~steps.profiled, steps.profiled):
        base = np.zeros(len(left))
        for name, ms in steps.parts_ms.items():
            drawn = chosen & (ms > 0)
            part = wording.NOT_PROFILED if name == _REST else wording.PARTS[name]
            if drawn.any():
                tops = np.minimum(base + ms / unit_ms, 2 * top)
                rectangles(
                    axes, left[drawn], right[drawn], base[drawn], tops[drawn], part.colour, hatch=part.hatch, edge=edge
                )
            base = base + ms / unit_ms
    axes.set_ylim(0, top)
    _mark_cut(axes, steps, left, right, top, unit_ms)
    _label(axes, steps, unit)
    _legend(axes, facts, steps)


def _top(height: Float64) -> float:
    """Room for the highest bar, unless a few stand so far out that the others would be flat."""
    usual, highest = float(np.percentile(height, 90)), float(height.max())
    return (highest if highest <= 2.5 * usual else 1.5 * usual) * 1.22 or 1.0


_LABEL_WIDTH, _LATE = 0.14, 0.8  # of the panel
_FIRST_LINE = 0.88  # of its height: above it stands the name of the profiled steps


class CutLabel(Struct, frozen=True):
    """The height of a bar that is cut off: from where to where it stands, and on which line from the top."""

    bar: int
    left: float
    right: float
    line: int


def cut_labels(left: Float64, right: Float64, height: Float64, top: float, span: float) -> tuple[CutLabel, ...]:
    """Beside at most three of the bars that are cut off, the highest first: inside the panel, none over another."""
    placed: list[CutLabel] = []
    width = _LABEL_WIDTH * span
    cut = np.flatnonzero(height > top)
    for i in cut[np.argsort(-height[cut])][:3]:
        start = float(left[i]) - width if left[i] > _LATE * span else float(right[i])
        start = min(max(start, 0.0), span - width)
        taken = {one.line for one in placed if one.left < start + width and start < one.right}
        placed.append(CutLabel(int(i), start, start + width, next(n for n in range(4) if n not in taken)))
    return tuple(placed)


def _mark_cut(axes: Axes, bars: Bars, left: Float64, right: Float64, top: float, unit_ms: float) -> None:
    span = axes.get_xlim()[1]
    for label in cut_labels(left, right, bars.height_ms / unit_ms, top, span):
        late = left[label.bar] > _LATE * span
        axes.annotate(
            f"\u2191 {duration(bars.height_ms[label.bar] * 1e3)}",
            (label.right if late else label.left, _FIRST_LINE - 0.1 * label.line), xycoords=("data", "axes fraction"),
            xytext=(-3 if late else 3, 0), textcoords="offset points", ha="right" if late else "left", va="top",
            fontsize=SMALL_PT, bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )  # fmt: skip


def _label(axes: Axes, bars: Bars, unit: str) -> None:
    if bars.per_bar == 1:
        frame(axes, "Steps over time: one bar per step")
        axes.set_ylabel(f"{unit} per step", fontsize=SMALL_PT)
        return
    frame(axes, f"Steps over time: each bar is the mean of up to {bars.per_bar:,} steps")
    axes.set_ylabel(f"{unit} per step\n(mean of up to {bars.per_bar:,})", fontsize=SMALL_PT)


def shade_profiled(axes: Axes, facts: Facts, seconds_per_unit: float, *, name: bool = False) -> None:
    """A band behind the profiled steps, with its name at the top if `name`."""
    if facts.breakdown is None or not facts.breakdown.steps:
        return
    steps = facts.breakdown.steps
    start, end = steps[0].start_ns / 1e9 / seconds_per_unit, steps[-1].end_ns / 1e9 / seconds_per_unit
    end = max(end, start + _NARROWEST * axes.get_xlim()[1])
    axes.axvspan(start, end, color=SHADE, zorder=0, linewidth=0)
    if name:
        late = end > 0.93 * axes.get_xlim()[1]
        axes.annotate(
            "profiled", (end if late else (start + end) / 2, 1.0), xycoords=("data", "axes fraction"), xytext=(0, -4),
            textcoords="offset points", va="top", ha="right" if late else "center", fontsize=SMALL_PT, color=_PROFILED,
        )  # fmt: skip
        axes.plot(
            [start, end], [1, 1], transform=axes.get_xaxis_transform(), color=_PROFILED, linewidth=2, clip_on=False
        )


def _legend(axes: Axes, facts: Facts, bars: Bars) -> None:
    share = facts.breakdown.share if facts.breakdown and profiled_steps(facts) else {}
    names = [n for n in wording.PARTS if share.get(n) or (n in _UNSHARED_PARTS and bars.parts_ms[n].any())]
    withheld = facts.breakdown is None and facts.run.timeline is not None
    rest = "rest of the step" if withheld else "rest of an unprofiled step"
    keys = [Key(rest, wording.NOT_PROFILED.colour)] if bars.parts_ms[_REST].any() else []
    for name in reversed(names):
        part = wording.part_of(name, facts.breakdown) if facts.breakdown is not None else wording.PARTS[name]
        label = f"{part.label}  {percent(share[name])}" if share.get(name) else part.label
        keys.append(Key(label, part.colour, part.hatch))
    legend_beside(axes, keys, offset_in=0.18, spare_in=0.5, title="share of the profiled steps" if share else "")
