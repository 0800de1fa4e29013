"""What a million samples take of time, energy and money."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from gpulab.tuning.record import Side

MILLION = 1e6
LEAST_S = 2.0  # power is a mean over 1 s on Ampere and newer (pitfalls.md, "NVML"), and energy needs seconds
LEAST_READINGS = 3


class Spending(Struct, frozen=True):
    """Of one side, for a million samples. None is "not measurable", with the reason in `why_no_energy`."""

    device_s: float | None  # time of the device, at the speed measured without the profiler
    mean_power_w: float | None  # of the GPU, over the counted steps
    energy_j: float | None
    cost: float | None  # in the currency of the price
    why_no_energy: str = ""


def spending(side: Side, price_per_hour: float | None = None) -> Spending:
    """From the time per sample and the GPU's power. `price_per_hour` of the machine: without it there is no cost."""
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
    """Mean power of the GPU while the counted steps ran, or why it is not known."""
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
