"""What explains a verdict: the part of the step, or the first steps of epochs, that a good share of it comes from."""

from __future__ import annotations

import numpy as np

from gpulab.analysis.facts import Facts
from gpulab.formatting import durations
from gpulab.run import Phase, StepFlag
from gpulab.tuning.compare.parts import both_us, change_us, most_changed
from gpulab.tuning.record import Comparison

LEAST_COVERED = 1 / 3  # of the measured difference: what covers less of it is not its cause
_ODD = StepFlag.FIRST | StepFlag.PROFILER_EDGE | StepFlag.COMPILE | StepFlag.PARTIAL


def because(found: Comparison) -> str:
    """What changed most, as the end of a sentence; that no part shows it, where none covers a third of the difference.

    Empty where the parts cannot be compared in the unit of the verdict.
    """
    per_sample = found.unit == "sample"
    if not found.parts or (per_sample and found.parts[0].a_us_per_sample is None):
        return ""
    part = most_changed(found.parts, found.verdict, per_sample=per_sample)
    of_part = abs(change_us(part, per_sample=per_sample)) if part is not None else 0.0
    starts, of_starts = _epoch_starts(found)
    if max(of_part, of_starts) <= LEAST_COVERED * abs(_difference_us(found)):
        return _unnamed(found, per_sample)
    if part is None or of_starts > of_part:
        return f": {starts}"
    return f": {part.label} {_change(*both_us(part, per_sample=per_sample))} of each {found.unit}"


def _unnamed(found: Comparison, per_sample: bool) -> str:
    """Where no part that has a name covers the difference."""
    unknown = next((part for part in found.parts if part.name == "unknown"), None)
    if unknown is None or unknown.grew is not (found.verdict == "slower"):
        return ": the parts of the profiled steps do not show where"
    if abs(change_us(unknown, per_sample=per_sample)) <= LEAST_COVERED * abs(_difference_us(found)):
        return ": the parts of the profiled steps do not show where"
    change = _change(*both_us(unknown, per_sample=per_sample))
    return f": what the trace does not name (unknown) {change} of each {found.unit}"


def _difference_us(found: Comparison) -> float:
    """Of B and A, in the unit of the comparison."""
    of_a = found.a.us_per_sample if found.unit == "sample" else found.a.us_per_step
    return (of_a or 0.0) * ((found.ratio or 1.0) - 1)


def _epoch_starts(found: Comparison) -> tuple[str, float]:
    """How the first steps of epochs changed, in words; and by how much that moves the mean step or sample, in µs.

    Nothing where they changed the other way than the verdict has it. No accounting has these steps: they are odd ones.
    """
    if found.a.facts is None or found.b.facts is None:
        return "", 0.0
    (first_a, more_a), (first_b, more_b) = (_first_steps(side, found.unit) for side in (found.a.facts, found.b.facts))
    change = more_b - more_a
    if not first_a or not first_b or (change > 0) != (found.verdict == "slower"):
        return "", 0.0
    return f"the first step of each epoch {_change(first_a, first_b)}", abs(change)


def _first_steps(known: Facts, unit: str) -> tuple[float, float]:
    """The mean first step of an epoch, and how much longer the mean step (or sample) is by these, in µs; 0 if none."""
    steps = known.run.steps
    counts = ((steps.flags & _ODD) == 0) & (steps.phase != Phase.TRACED)
    first = counts & ((steps.flags & StepFlag.EPOCH_START) != 0)
    others = counts & ~first
    if not first.any() or not others.any():
        return 0.0, 0.0
    wall_us = steps.time_ns / 1e3
    longer = float(wall_us[counts].mean() - wall_us[others].mean())
    samples = float(np.mean(steps.sample_count[counts])) if unit == "sample" else 1.0
    return float(wall_us[first].mean()), longer / samples if samples > 0 else 0.0


def _change(before_us: float, after_us: float) -> str:
    """ "grew from 1.20 ms to 3.40 ms": two times in one unit, so that they compare at a glance."""
    before, after = durations(before_us, after_us)
    return f"{'grew' if after_us > before_us else 'shrank'} from {before} to {after}"
