"""How long each side's step took, and how that divides: the shares of its one profiled run, where they tell of it."""

from __future__ import annotations

from collections.abc import Mapping

from gpulab.tuning.compare.parts import both_us, mean_parts_us, profiled_runs_agree
from gpulab.tuning.record import Comparison, Experiment, Side
from gpulab.views.comparison.table import unprofiled_us

WHOLE = "whole"  # of a bar: its time where no part of it is shown


def of_both(comparison: Comparison) -> tuple[tuple[dict[str, float], dict[str, float]], bool]:
    """The parts of A and of B in µs, each as long as its blocks say, and whether they are per sample."""
    of_samples = comparison.unit == "sample"
    if comparison.parts and comparison.parts[0].a_us_per_sample is None:
        of_samples = False
    believed = comparison.ratio is None or profiled_runs_agree(comparison)
    parts = [
        {c.name: both_us(c, per_sample=of_samples)[i] for c in comparison.parts} if believed else {} for i in (0, 1)
    ]
    times = [_side_us(side, comparison, of_samples) for side in (comparison.a, comparison.b)]
    return (as_long_as(parts[0], times[0]), as_long_as(parts[1], times[1])), of_samples


def of_setting(side: Side, experiment: Experiment) -> dict[str, float]:
    """As long as its blocks say, coloured by the shares of its profiled run, where that differs as the blocks do."""
    compared = next((c for c in experiment.comparisons if c.b is side), None)
    believed = compared is None or compared.ratio is None or profiled_runs_agree(compared)
    parts = {}
    if side.facts is not None and believed:
        parts = mean_parts_us(side.facts, per_sample=per_sample(experiment)) or {}
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
