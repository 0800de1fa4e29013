"""How long pauses of one kind hold the training up, spread over its steps."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from gpulab.intervals import Intervals, clip, intersect, measure, subtract, union, union_of
from gpulab.run import Pause, PauseKind, Phase, Run

# Where one lies within another its time belongs to the first of these: garbage is collected in all of them.
_ORDER: tuple[PauseKind, ...] = ("compile", "checkpoint_save", "evaluation", "logging", "callback", "gc")
_LEAST = 2  # ours: one pause may be chance


class PausedTime(Struct, frozen=True):
    """Pauses of one kind after the warm-up, spread over the steps (µs): in the typical step, and besides it."""

    pauses: list[Pause]
    times_ns: Intervals  # when, without other kinds that count before it
    within_us: float
    between_us: float
    share: float  # of all time from the warm-up on

    @property
    def regular_fraction(self) -> float:
        """Their time if the longest of them were like the others, over the time that they took."""
        total, longest = sum(map(length_ns, self.pauses)), max(map(length_ns, self.pauses))
        return (total - longest) / max(1, total) * len(self.pauses) / (len(self.pauses) - 1)


def paused_time(
    run: Run, kind: PauseKind, step_us: float | None, whole_us: float | None, idle: float | None
) -> PausedTime | None:
    """None where there were none, too few to tell from chance, or no steps to spread them over.

    `step_us` is the typical step, `whole_us` a mean step with all that lies between steps, `idle` the GPU's share of
    the typical step: a pause that the device works through holds nothing up.
    """
    first = np.flatnonzero(run.steps.phase != Phase.WARMUP)
    if not step_us or not len(first):
        return None
    since, until = int(run.steps.start_ns[first[0]]), int(run.steps.end_ns[-1])
    pauses = [p for p in run.pauses if p.kind == kind and since <= p.start_ns < until]
    if len(pauses) < _LEAST:
        return None
    outer = [p for p in run.pauses if _ORDER.index(p.kind) < _ORDER.index(kind)]
    times = clip(subtract(_covered(pauses), _covered(outer)), since, until)
    count = len(run.steps) - int(first[0])
    mean_us = measure(times) / count / 1e3
    within_us = min(mean_us, _typical_us(run, times, int(first[0])))  # of steps with and without one chance picks
    between_us = mean_us - within_us
    if idle is not None:
        within_us = min(within_us, idle * step_us)
    share = (within_us + between_us) / max(whole_us or 0.0, step_us + between_us)
    return PausedTime(pauses, times, within_us, between_us, share)


def length_ns(pause: Pause) -> int:
    """How long it lasts."""
    return pause.end_ns - pause.start_ns


def _covered(pauses: list[Pause]) -> Intervals:
    return union_of((p.start_ns, p.end_ns) for p in pauses)


def _typical_us(run: Run, times: Intervals, first: int) -> float:
    """Median over the steps of how long one stands still; 0 where fewer than half of them do."""
    windows = np.stack((run.steps.start_ns[first:], run.steps.end_ns[first:]), axis=1)
    inside = intersect(times, union(windows[:, 0], windows[:, 1]))
    at = np.searchsorted(windows[:, 0], inside[:, 0], side="right") - 1
    per_step = np.zeros(len(windows), dtype=np.int64)
    np.add.at(per_step, at, inside[:, 1] - inside[:, 0])
    return float(np.median(per_step)) / 1e3
