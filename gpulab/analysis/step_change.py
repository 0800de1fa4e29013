"""What a setting did to a run: the step of the baseline, where this process measured it before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from gpulab.analysis.steps import LEAST_SETUP_S, Spread, select, setup_ns, spread_of_steps, steps_per_round
from gpulab.run import Run

_SAME_BATCH = 0.01  # as a comparison has it: an epoch's shorter last batch is no other batch size


class StepChange(Struct, frozen=True):
    """µs per `unit` without the profiler, now and in the baseline. One run after the other: no verdict."""

    now_us: float
    before_us: float
    unit: str  # "step", or "sample" where the batch differs
    setup_s: float | None = None  # that this run took longer before its steps; None: hardly, or not measured


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
    (now_us, now_samples, now_ns), (before_us, before_samples, before_ns) = now, before
    setup_s = (now_ns - before_ns) / 1e9 if now_ns is not None and before_ns is not None else 0.0
    change = StepChange(now_us, before_us, "step", setup_s if setup_s >= LEAST_SETUP_S else None)
    if now_samples == before_samples:
        return change
    if now_samples is None or before_samples is None:
        return None
    if abs(now_samples / before_samples - 1) <= _SAME_BATCH:
        return change
    return replace(change, now_us=now_us / now_samples, before_us=before_us / before_samples, unit="sample")


def _step(run: Run) -> tuple[float, float | None, int | None] | None:
    """The typical step, its samples where they are known, and the time before the steps."""
    rows = select(run).rows
    step: Spread | None = spread_of_steps(run, run.steps.time_ns[rows], rows, steps_per_round(run, rows))
    if step is None:
        return None
    samples = run.steps.sample_count[rows]
    return step.median, float(np.median(samples)) if (samples > 0).all() else None, setup_ns(run.steps, rows)
