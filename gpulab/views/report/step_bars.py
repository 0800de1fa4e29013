"""The bars of a picture of the steps over time, few enough to be drawn, with what is known of each step."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from msgspec import Struct

from gpulab.analysis.breakdown import StepParts
from gpulab.analysis.facts import Facts
from gpulab.run import Float64, Int64
from gpulab.views import wording

MOST_BARS = 150
REST = "rest"  # of a step, beside its waiting for data: the profiled steps alone tell how it divides
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

    @property
    def top_ms(self) -> float:
        """As high as the highest bar, unless a few stand so far out that the others would be flat."""
        usual, highest = float(np.percentile(self.height_ms, 90)), float(self.height_ms.max())
        return highest if highest <= 2.5 * usual else 1.5 * usual


def bars(facts: Facts, until_ns: int | None = None) -> Bars:
    """The steps as at most about 150 bars, those that began before `until_ns`; profiled steps are never averaged with
    others."""
    steps = facts.run.steps
    count = len(steps) if until_ns is None else int(np.searchsorted(steps.start_ns, until_ns))
    parts = {name: ns[:count] for name, ns in _parts_ns(facts).items()}
    profiled = np.isin(steps.number[:count], [s.number for s in profiled_steps(facts)])
    per_bar = max(1, -(-count // MOST_BARS))
    start_ns, end_ns = (ns[:count] for ns in _windows(facts))
    pause = np.concatenate([[0], start_ns[1:] - end_ns[:-1]]) > _PAUSE * facts.run.wall_ns
    # the row at which each bar begins: after every `per_bar` steps, a change of profiling, or a pause
    change = np.flatnonzero(pause | (np.diff(profiled, prepend=profiled[0]) != 0))
    edges = np.unique(np.concatenate([[0], change, [len(profiled)]]))
    first = np.concatenate([np.arange(a, b, per_bar) for a, b in pairwise(edges)])
    last = np.append(first[1:], count) - 1
    per = last - first + 1
    return Bars(
        left_s=start_ns[first] / 1e9,
        right_s=end_ns[last] / 1e9,
        parts_ms={name: np.add.reduceat(ns, first) / per / 1e6 for name, ns in parts.items()},
        profiled=profiled[first],
        per_bar=int(per.max()),
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
    parts[REST] = steps.time_ns - wait
    for step in profiled_steps(facts):
        row = steps.number == step.number
        parts[REST][row] = 0
        for name, ns in step.parts_ns.items():
            parts[name][row] = ns
    return parts
