"""Which part of the step changed: the accounting of both traced runs, part by part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from gpulab.analysis.breakdown import PARTS, Breakdown, StepParts
from gpulab.analysis.facts import Facts
from gpulab.analysis.steps import loaded_ahead
from gpulab.run import Float64, Run, StepFlag
from gpulab.tuning.record import Comparison, PartChange

LEAST_SHARE = 0.02  # of A's profiled step: a smaller change of a part is not told
LEAST_STEPS = 3  # profiled steps on each side: with fewer their spread is not known
AGREES = 1.25  # times: the profiled steps may lie so far outside the interval of the blocks, in either direction
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
        "optimizer": "optimizer",
        "launch": "launching",
        "queued": "queued, not started",
        "start_up": "starting up, once",
        "other": "other named work",
        "unknown": "unknown",
    }
)


def part_changes(a: Facts | None, b: Facts | None, *, per_sample: bool) -> tuple[PartChange, ...]:
    """Every part that took time on either side; empty where a side has no accounting of steps.

    Each is a mean over the typical profiled steps, so that the parts sum to the step. A part grew or shrank where its
    mean changed by at least 2 % of A's step and the middle 80 % of its steps on both sides do not overlap.
    """
    if a is None or b is None or not comparable_accounts(a, b):
        return ()
    assert a.breakdown is not None and b.breakdown is not None
    in_a, in_b = _Account(a.run, a.breakdown), _Account(b.run, b.breakdown)
    judged_per_sample = per_sample and in_a.samples is not None and in_b.samples is not None
    changes = (_change(part, in_a, in_b, judged_per_sample) for part in PARTS)
    return tuple(c for c in changes if c.a_us or c.b_us)


def comparable_accounts(a: Facts, b: Facts) -> bool:
    """Both have an accounting of steps, of the same kind of device."""
    if a.breakdown is None or b.breakdown is None or a.breakdown.whole_window or b.breakdown.whole_window:
        return False
    return (a.breakdown.busy_fraction is None) == (b.breakdown.busy_fraction is None)


def mean_parts_us(figures: Facts, *, per_sample: bool) -> dict[str, float] | None:
    """Each part's mean over the typical profiled steps; None without an accounting of steps or of their samples."""
    if figures.breakdown is None or figures.breakdown.whole_window:
        return None
    account = _Account(figures.run, figures.breakdown)
    if not per_sample:
        return {part: float(account.us(part).mean()) for part in PARTS}
    means = {part: account.per_sample(part) for part in PARTS}
    return None if account.samples is None else {part: us or 0.0 for part, us in means.items()}


def typical_steps(run: Run, account: Breakdown) -> Sequence[StepParts]:
    """The profiled steps without odd ones, where at least three others remain.

    Odd are the first and the last, the first of an epoch, those with a compile or a profiler's edge, and those whose
    batches were loaded while the profiler started.
    """
    steps: Sequence[StepParts] = account.steps
    ahead = loaded_ahead(run.loader) if run.loader is not None else 0
    unfed = steps[ahead:]
    for fewer in (unfed, [s for s in (unfed if len(unfed) >= LEAST_STEPS else steps) if not s.flags & _ODD]):
        if len(fewer) >= LEAST_STEPS:
            steps = fewer
    return steps


def profiled_runs_agree(comparison: Comparison) -> bool:
    """Whether the one profiled run of each differs as the blocks do: else its parts tell of the machine, not of B.

    The profiler makes short steps longer than long ones, so half the difference, in logarithms, may be missing; there
    is no reason for a larger one.
    """
    of_a, of_b = summed_us(comparison.parts, per_sample=comparison.unit == "sample")
    if not comparison.ratio or not of_a or not of_b:
        return False
    middle, profiled = math.log(comparison.ratio), math.log(of_b / of_a)
    low, high = (math.log(edge) for edge in comparison.interval or (comparison.ratio, comparison.ratio))
    spare, missing = math.log(AGREES), max(math.log(AGREES), abs(middle) / 2)
    below, above = (spare, missing) if middle < 0 else (missing, spare)
    return low - below <= profiled <= high + above


def summed_us(parts: Sequence[PartChange], *, per_sample: bool) -> tuple[float, float]:
    """The profiled step, or sample, of both sides."""
    both = [both_us(part, per_sample=per_sample) for part in parts]
    return sum(a for a, _ in both), sum(b for _, b in both)


def most_changed(parts: Sequence[PartChange], verdict: str, *, per_sample: bool) -> PartChange | None:
    """The part that explains the verdict: it changed in the same direction, and most of all; never "unknown"."""
    wanted = {"faster": False, "slower": True}.get(verdict)
    candidates = [c for c in parts if c.grew is not None and c.grew is wanted and c.name != "unknown"]
    return max(candidates, key=lambda c: abs(change_us(c, per_sample=per_sample)), default=None)


def both_us(change: PartChange, *, per_sample: bool) -> tuple[float, float]:
    """The part on both sides, per sample where that is asked for and known, else per step."""
    if per_sample and change.a_us_per_sample is not None and change.b_us_per_sample is not None:
        return change.a_us_per_sample, change.b_us_per_sample
    return change.a_us, change.b_us


def change_us(change: PartChange, *, per_sample: bool) -> float:
    a_us, b_us = both_us(change, per_sample=per_sample)
    return b_us - a_us


class _Account:
    """The typical profiled steps of one side as columns."""

    def __init__(self, run: Run, account: Breakdown) -> None:
        self.steps = typical_steps(run, account)
        numbers = [s.number for s in self.steps]
        samples = run.steps.sample_count[np.isin(run.steps.number, numbers)]
        counted = len(samples) == len(numbers) and (samples > 0).all()
        self.samples: Float64 | None = samples.astype(np.float64) if counted else None

    def us(self, part: str) -> Float64:
        return np.array([s.parts_ns[part] for s in self.steps], np.float64) / 1e3

    def per_sample(self, part: str) -> float | None:
        return None if self.samples is None else float(self.us(part).sum() / self.samples.sum())

    def wall_us(self) -> Float64:
        return np.array([s.end_ns - s.start_ns for s in self.steps], np.float64) / 1e3

    def in_unit(self, us: Float64, per_sample: bool) -> Float64:
        if not per_sample:
            return us
        assert self.samples is not None
        quotient: Float64 = us / self.samples
        return quotient


def _change(part: str, a: _Account, b: _Account, per_sample: bool) -> PartChange:
    counted = a.samples is not None and b.samples is not None
    return PartChange(
        name=part,
        label=LABELS[part],
        a_us=float(a.us(part).mean()),
        b_us=float(b.us(part).mean()),
        grew=_grew(
            a.in_unit(a.us(part), per_sample),
            b.in_unit(b.us(part), per_sample),
            float(a.in_unit(a.wall_us(), per_sample).mean()),
        ),
        a_us_per_sample=a.per_sample(part) if counted else None,
        b_us_per_sample=b.per_sample(part) if counted else None,
    )


def _grew(a: Float64, b: Float64, step: float) -> bool | None:
    change = float(b.mean() - a.mean())
    if min(len(a), len(b)) < LEAST_STEPS or abs(change) < LEAST_SHARE * step:
        return None
    (a_low, a_high), (b_low, b_high) = np.percentile(a, [10, 90]), np.percentile(b, [10, 90])
    if change > 0:
        return True if b_low > a_high else None
    return False if b_high < a_low else None
