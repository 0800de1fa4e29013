"""The cost of a setting: time, energy and money for a million samples, and the one-time cost before the steps.

Filling a cache, compiling and starting workers happen once; a speedup omits them (definitions.md, "One-time cost").
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from gpulab.analysis.facts import Facts
from gpulab.analysis.steps import LEAST_SETUP_S
from gpulab.formatting import capitalized, duration
from gpulab.tuning.record import Comparison, Side, Speed

MILLION = 1e6
LEAST_S = 2.0  # NVML's power is a mean over 1 s on Ampere and newer (pitfalls.md, "NVML"): energy needs seconds
LEAST_READINGS = 3


class Spending(Struct, frozen=True):
    """The cost of a million samples on one side. None: not measurable, with the reason in `why_no_energy`."""

    device_s: float | None  # time of the device, at the speed measured without the profiler
    mean_power_w: float | None  # of the GPU, over the counted steps
    energy_j: float | None
    cost: float | None  # in the currency of the price
    why_no_energy: str = ""


def spending(side: Side, price_per_hour: float | None = None) -> Spending:
    """Computed from the time per sample and the GPU's power. `price_per_hour` of the machine; None: no `cost`."""
    power_w, why = _power(side)
    if side.us_per_sample is None:
        return Spending(None, power_w, None, None, why or "the samples of a step are not known")
    device_s = side.us_per_sample * MILLION / 1e6
    return Spending(
        device_s=device_s,
        mean_power_w=power_w,
        energy_j=None if power_w is None else power_w * device_s,
        cost=None if price_per_hour is None else price_per_hour * device_s / 3600,
        why_no_energy=why,
    )


def _power(side: Side) -> tuple[float | None, str]:
    """Mean power of the GPU over the counted steps, or why it is unknown."""
    if side.facts is None:
        return None, f"{side.label} did not run"
    run, rows = side.facts.run, side.facts.selection.rows
    power = run.samples.get("power_w")
    if power is None or not len(power.value):
        return None, "no meter of power" if run.device.kind == "cuda" else "the CPU's power is not metered"
    if not len(rows):
        return None, "no untraced step"
    start, end = int(run.steps.start_ns[rows[0]]), int(run.steps.end_ns[rows[-1]])
    within = (power.t_ns >= start) & (power.t_ns <= end) & np.isfinite(power.value)
    if end - start < LEAST_S * 1e9 or within.sum() < LEAST_READINGS:
        return None, f"the untraced steps took less than {LEAST_S:g} s"
    return float(power.value[within].mean()), ""


class SetupCost(Struct, frozen=True):
    """`seconds` that a setting costs once. After `steps` of the baseline (95 % interval) it pays off.

    `steps` is None if the setting is not proved faster.
    """

    seconds: float
    steps: float | None
    interval: tuple[float, float] | None
    cell_steps: int | None  # steps that the cell runs; None: unknown

    @property
    def pays(self) -> bool:
        """Whether the cell runs enough steps to pay off; true if its number of steps is unknown."""
        return self.steps is None or self.cell_steps is None or self.steps <= self.cell_steps

    @property
    def words(self) -> str:
        """ "one-time cost 18.0 s, pays off after 150 steps (140–170)"."""
        cost = f"one-time cost {duration(self.seconds * 1e6)}"
        if self.steps is None or self.interval is None:
            return cost
        low, high = (f"{math.ceil(end):,}" for end in self.interval)
        after = f"after {math.ceil(self.steps):,} steps" + (f" ({low}–{high})" if low != high else "")
        if self.pays:
            return f"{cost}, pays off {after}"
        return f"{cost} pays off only {after}; the cell runs {self.cell_steps:,}"


def setup_s(a: Side, b: Side) -> float | None:
    """How much longer B took than A before its steps in its first run, full or block: later runs reuse caches.

    0 if a start of A took as long; None if it was not measured.
    """
    of_a = [block.setup_ns for block in a.blocks if block.setup_ns is not None]
    of_b = [ns for ns in (b.setup_ns, *(block.setup_ns for block in b.blocks[:1])) if ns is not None]
    if not of_a or not of_b:
        return None
    seconds = (max(of_b) - float(np.median(of_a))) / 1e9
    return seconds if seconds >= LEAST_SETUP_S and max(of_b) > max(of_a) else 0.0


def setup_cost(speed: Speed, step_us: float | None, cell_steps: int | None) -> SetupCost | None:
    """The one-time cost of a setting with this speed over a baseline with this step; None if it is negligible."""
    seconds, ratio, interval = speed.setup_s, speed.ratio, speed.interval
    if not seconds or seconds < LEAST_SETUP_S:
        return None
    if speed.verdict != "faster" or not step_us or ratio is None or interval is None:
        return SetupCost(seconds, None, None, cell_steps)
    steps, low, high = (seconds * 1e6 / (step_us * (1 - r)) for r in (ratio, *interval))
    return SetupCost(seconds, steps, (low, high), cell_steps)


def cell_ratio(speed: Speed, cost: SetupCost | None, step_us: float | None) -> float:
    """The time of the whole cell over the baseline's, one-time cost included.

    If the number of steps is unknown, the ratio of the steps.
    """
    once = cost.seconds * 1e6 / (cost.cell_steps * step_us) if cost and cost.cell_steps and step_us else 0.0
    return (speed.ratio or 1.0) + once


def cost_of(comparison: Comparison) -> SetupCost | None:
    return setup_cost(comparison, comparison.a.us_per_step, cell_steps(comparison.a.facts))


def cost_sentence(comparison: Comparison) -> str:
    """A sentence to append to another; empty without a cost."""
    cost = cost_of(comparison)
    return f" {capitalized(cost.words)}." if cost is not None else ""


def cell_steps(figures: Facts | None) -> int | None:
    """The number of steps of the whole cell; None if the run was ended early."""
    run = figures.run if figures is not None else None
    return len(run.steps) if run is not None and run.outcome == "completed" else None


def fastest(comparisons: Sequence[Comparison]) -> Comparison | None:
    """Of the comparisons with verdict "faster", the one whose cell takes least; settings that pay off come first."""
    faster = [c for c in comparisons if c.verdict == "faster"]
    return min(faster, key=lambda c: (not pays(c), cell_ratio(c, cost_of(c), c.a.us_per_step)), default=None)


def pays(comparison: Comparison) -> bool:
    cost = cost_of(comparison)
    return cost is None or cost.pays
