"""Which part of the step changed: both sides' breakdowns, part by part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from msgspec import Struct

from gpulab.analysis.breakdown import PARTS, Breakdown, StepParts
from gpulab.analysis.facts import Facts
from gpulab.analysis.step_shares import StepShares
from gpulab.analysis.steps import loaded_ahead
from gpulab.run import Float64, Run, StepFlag
from gpulab.tuning.record import Block, Comparison, PartChange, Side

ONE_RUN_EACH = "one traced run each"
LEAST_SHARE = 0.02  # of A's profiled step: a smaller change of a part is not reported
LEAST_STEPS = 3  # profiled steps on each side: with fewer their spread is unknown
AGREES = 1.25  # factor by which a run may lie outside the blocks, or outside their interval, in either direction
_ODD = (
    StepFlag.FIRST | StepFlag.LAST | StepFlag.EPOCH_START | StepFlag.PROFILER_EDGE | StepFlag.COMPILE | StepFlag.PARTIAL
)

LABELS: Mapping[str, str] = MappingProxyType(
    {
        "compute": "computing",
        "communication": "communicating",
        "memcpy": "copying data",
        "memset": "clearing memory",
        "data_wait": "waiting for the DataLoader",
        "core_wait": "waiting for a core",
        "sync_wait": "waiting for results",
        "blocking_copy": "blocked by a copy",
        "allocator": "allocating memory",
        "optimizer": "optimizer overhead",
        "launch": "launching",
        "queued": "queued, not started",
        "start_up": "starting up, once",
        "other": "other named work",
        "unknown": "unknown",
    }
)


def part_changes(a: Side, b: Side, *, per_sample: bool) -> tuple[PartChange, ...]:
    """Every part that took time on either side; empty if a side has no breakdown of steps.

    Each side has the fractions of its report, scaled to its time in the comparison: the parts sum to that time. A part
    grew or shrank if it changed by at least 2 % of A's step and the middle 80 % of the profiled steps of the two sides
    do not overlap. If workers deliver batches in bursts, rounds of steps are compared instead of steps.
    """
    if a.facts is None or b.facts is None or not comparable_accounts(a.facts, b.facts):
        return ()
    in_a, in_b = _Account.of(a, a.facts), _Account.of(b, b.facts)
    by_sample = per_sample and in_a.us_per_sample is not None and in_b.us_per_sample is not None
    changes = (_change(part, in_a, in_b, by_sample) for part in PARTS)
    return tuple(c for c in changes if c.a_us or c.b_us)


def comparable_accounts(a: Facts, b: Facts) -> bool:
    """Whether both have a breakdown of steps on the same kind of device."""
    if a.breakdown is None or b.breakdown is None or a.breakdown.whole_window or b.breakdown.whole_window:
        return False
    return (a.breakdown.busy_fraction is None) == (b.breakdown.busy_fraction is None)


def typical_steps(run: Run, account: Breakdown, round_steps: int = 1) -> Sequence[StepParts]:
    """The profiled steps without the odd ones, if at least three steps (or three rounds) remain; whole rounds only.

    Odd steps: the first and the last, the first of an epoch, steps with a compile or a profiler's edge, and steps
    whose batches were loaded while the profiler started.
    """
    steps: Sequence[StepParts] = account.steps
    ahead = loaded_ahead(run.loader) if run.loader is not None else 0
    unfed, least = steps[ahead:], LEAST_STEPS * round_steps
    for fewer in (unfed, [s for s in (unfed if len(unfed) >= least else steps) if not s.flags & _ODD]):
        if len(fewer) >= least:
            steps = fewer
    return steps[: len(steps) // round_steps * round_steps] or steps


def profiled_runs_agree(comparison: Comparison) -> bool:
    """Whether the profiled runs differ as the times do; if not, their parts reflect the machine, not B.

    The profiler lengthens short steps more than long ones, so half the difference, in logarithms, may be missing. A
    larger difference has no such reason.
    """
    of_a, of_b = profiled_us(comparison)
    if not comparison.ratio or not of_a or not of_b:
        return False
    middle, profiled = math.log(comparison.ratio), math.log(of_b / of_a)
    low, high = (math.log(edge) for edge in comparison.interval or (comparison.ratio, comparison.ratio))
    spare, missing = math.log(AGREES), max(math.log(AGREES), abs(middle) / 2)
    below, above = (spare, missing) if middle < 0 else (missing, spare)
    return low - below <= profiled <= high + above


def run_agrees(run_us: float | None, blocks: Sequence[Block], other_us: float | None = None) -> bool:
    """Whether a step of the full run takes as long as in the blocks, or as `other_us` if there are no blocks.

    If not, the parts of the full run do not describe that time.
    """
    each = [b.time_ns / b.step_count / 1e3 for b in blocks if b.step_count and b.time_ns] or [other_us or 0.0]
    return not run_us or not all(each) or min(each) / AGREES <= run_us <= max(each) * AGREES


def run_us(facts: Facts | None) -> float | None:
    """The step of the full run, as in its report."""
    step = facts.typical_step_us if facts is not None else None
    return step.median if step is not None else None


def profiled_us(comparison: Comparison) -> tuple[float, float]:
    """The mean profiled step of both sides, or sample if the comparison is per sample; 0 if there is none."""
    sides = [_profiled_us(side, comparison.unit) for side in (comparison.a, comparison.b)]
    return sides[0], sides[1]


def _profiled_us(side: Side, unit: str) -> float:
    if side.facts is None or side.facts.breakdown is None or side.facts.breakdown.whole_window:
        return 0.0
    steps = typical_steps(side.facts.run, side.facts.breakdown, side.facts.round_steps)
    wall_us = sum(step.own_ns for step in steps) / 1e3
    if unit == "step":
        return wall_us / max(1, len(steps))
    samples = side.facts.run.steps.sample_count[np.isin(side.facts.run.steps.number, [s.number for s in steps])]
    return wall_us / float(samples.sum()) if len(samples) == len(steps) and (samples > 0).all() else 0.0


def most_changed(parts: Sequence[PartChange], verdict: str, *, per_sample: bool) -> PartChange | None:
    """The part that explains the verdict: the largest change in the same direction; never "unknown"."""
    grew = {"faster": False, "slower": True}.get(verdict)
    candidates = [c for c in parts if c.grew is not None and c.grew is grew and c.name != "unknown"]
    return max(candidates, key=lambda c: abs(change_us(c, per_sample=per_sample)), default=None)


def both_us(change: PartChange, *, per_sample: bool) -> tuple[float, float]:
    """The part on both sides, per sample if requested and known, else per step."""
    if per_sample and change.a_us_per_sample is not None and change.b_us_per_sample is not None:
        return change.a_us_per_sample, change.b_us_per_sample
    return change.a_us, change.b_us


def change_us(change: PartChange, *, per_sample: bool) -> float:
    a_us, b_us = both_us(change, per_sample=per_sample)
    return b_us - a_us


class _Account(Struct, frozen=True):
    """One side: its breakdown, the time that the breakdown divides, and the spread of the profiled steps."""

    shares: StepShares
    steps: Sequence[StepParts]
    round_steps: int
    us_per_step: float
    us_per_sample: float | None

    @classmethod
    def of(cls, side: Side, figures: Facts) -> _Account:
        assert figures.breakdown is not None and figures.shares is not None
        us_per_step = side.us_per_step or figures.shares.step_us or 0.0
        steps = typical_steps(figures.run, figures.breakdown, figures.round_steps)
        return cls(figures.shares, steps, figures.round_steps, us_per_step, side.us_per_sample)

    def us(self, part: str) -> float:
        return self.shares.share[part] * self.us_per_step

    def per_sample(self, part: str) -> float | None:
        return None if self.us_per_sample is None else self.shares.share[part] * self.us_per_sample

    def each(self, part: str, *, per_sample: bool) -> Float64:
        """The part in each profiled step (or whole round of steps, if there are enough), scaled to the shown mean."""
        mean_us = (self.per_sample(part) if per_sample else self.us(part)) or 0.0
        ns = np.array([s.parts_ns[part] for s in self.steps], np.float64)
        if (rounds := len(ns) // self.round_steps) >= LEAST_STEPS:
            ns = ns[: rounds * self.round_steps].reshape(rounds, -1).mean(1)
        return ns * (mean_us / ns.mean()) if ns.any() else np.full(len(ns), mean_us)


def _change(part: str, a: _Account, b: _Account, per_sample: bool) -> PartChange:
    whole_us = (a.us_per_sample if per_sample else None) or a.us_per_step
    return PartChange(
        name=part,
        label=LABELS[part],
        a_us=a.us(part),
        b_us=b.us(part),
        grew=_grew(a.each(part, per_sample=per_sample), b.each(part, per_sample=per_sample), whole_us),
        a_us_per_sample=a.per_sample(part),
        b_us_per_sample=b.per_sample(part),
    )


def _grew(a: Float64, b: Float64, step: float) -> bool | None:
    change = float(b.mean() - a.mean())
    if min(len(a), len(b)) < LEAST_STEPS or abs(change) < LEAST_SHARE * step:
        return None
    (a_low, a_high), (b_low, b_high) = np.percentile(a, [10, 90]), np.percentile(b, [10, 90])
    if change > 0:
        return True if b_low > a_high else None
    return False if b_high < a_low else None
