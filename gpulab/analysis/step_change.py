"""What a setting did to a run: the step of the baseline, where this process measured it before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from gpulab.analysis.steps import Spread, select, spread_of_steps, steps_per_round
from gpulab.run import Run

_SAME_BATCH = 0.01  # as a comparison has it: an epoch's shorter last batch is no other batch size


class StepChange(Struct, frozen=True):
    """µs per `unit` without the profiler, now and in the baseline. One run after the other: no verdict."""

    now_us: float
    before_us: float
    unit: str  # "step", or "sample" where the batch differs


def step_change(run: Run, earlier: Sequence[Run]) -> StepChange | None:
    """Against the latest baseline run of that code; None for a baseline, and without a time to compare."""
    if not run.settings.knobs or not run.code.strip():
        return None
    words = run.code.split()
    same = [
        other
        for other in earlier
        if other.id != run.id
        and not other.settings.knobs
        and other.code.split() == words
        and other.device.kind == run.device.kind
        and (other.job.rank if other.job else None) == (run.job.rank if run.job else None)
    ]
    now = _step(run)
    before = next((step for step in map(_step, reversed(same)) if step is not None), None)
    if now is None or before is None:
        return None
    (now_us, now_samples), (before_us, before_samples) = now, before
    if now_samples == before_samples:
        return StepChange(now_us, before_us, "step")
    if now_samples is None or before_samples is None:
        return None
    if abs(now_samples / before_samples - 1) <= _SAME_BATCH:
        return StepChange(now_us, before_us, "step")
    return StepChange(now_us / now_samples, before_us / before_samples, "sample")


def _step(run: Run) -> tuple[float, float | None] | None:
    """The typical step, and its samples where they are known."""
    rows = select(run).rows
    step: Spread | None = spread_of_steps(run, run.steps.time_ns[rows], rows, steps_per_round(run, rows))
    if step is None:
        return None
    samples = run.steps.sample_count[rows]
    return step.median, float(np.median(samples)) if (samples > 0).all() else None
