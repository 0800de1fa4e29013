"""How sure a ratio of times is: its estimate, its 95 % interval, the noise floor, and the verdict they allow.

definitions.md, "Honest comparison" 4 and 5. Ratios are times of B over A: below 1 is faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gpulab.run import Float64
from gpulab.tuning.record import LEAST_EFFECT, Verdict

RESAMPLES = 4_000
SEED = 20_240_731  # the same blocks give the same interval
TOO_FEW = 5  # pairs: with fewer, a difference cannot be excluded

# The plain bootstrap of a median covers 87 to 93 % at 7 to 15 values (simulated: normal, Student's t with 2 degrees of
# freedom, one-sided spikes); drawing two values fewer than there are, one fewer below eight, covers 94 to 96 %.
_FEWER_DRAWN, _LEAST_FOR_TWO = (1, 2), 8

# Below six values even their whole range covers the median in less than 95 % of cases (1 - 2 / 2**5 = 93.75 %), so no
# bootstrap can: Student's t on the logarithms then, which is wide where there are few.
LEAST_FOR_BOOTSTRAP = 6
_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # by degrees of freedom, from 1


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio and its 95 % interval; no interval where there are too few values for any."""

    ratio: float
    interval: tuple[float, float] | None
    count: int  # pairs, or the blocks of the side that has fewer


def paired(ratios: Float64) -> Estimate | None:
    """Median of the ratios of pairs, with a percentile bootstrap over pairs; None without a pair."""
    if len(ratios) == 0:
        return None
    middle = float(np.median(ratios))
    if len(ratios) < 2:
        return Estimate(middle, None, len(ratios))
    if len(ratios) < LEAST_FOR_BOOTSTRAP:
        logs = np.log(ratios)
        return Estimate(middle, _student(logs.mean(), logs.var(ddof=1) / len(logs), len(logs) - 1), len(ratios))
    return Estimate(middle, _percentiles(_resampled_medians(ratios, np.random.default_rng(SEED))), len(ratios))


def unpaired(a: Float64, b: Float64) -> Estimate | None:
    """Median of b over median of a, both resampled on their own; None without a value on either side."""
    if len(a) == 0 or len(b) == 0:
        return None
    middle, count = float(np.median(b) / np.median(a)), min(len(a), len(b))
    if count < 2:
        return Estimate(middle, None, count)
    if count < LEAST_FOR_BOOTSTRAP:
        return Estimate(middle, _welch(np.log(a), np.log(b)), count)
    rng = np.random.default_rng(SEED)
    return Estimate(middle, _percentiles(_resampled_medians(b, rng) / _resampled_medians(a, rng)), count)


def noise_floor(same: Estimate | None) -> float | None:
    """How large a difference the same measurement shows where nothing was changed; None where that is not known.

    Half the width of the 95 % interval of A against A. Its distance from 1 alone is near 0 by luck as often as not.
    """
    if same is None or same.interval is None:
        return None
    return (same.interval[1] - same.interval[0]) / 2


def verdict(estimate: Estimate | None, floor: float | None) -> Verdict:
    """Faster or slower only where the interval excludes 1 and the effect is at least 2 % and the noise floor."""
    if estimate is None:
        return "not comparable"
    effect = abs(estimate.ratio - 1)
    if estimate.interval is None or effect < max(LEAST_EFFECT, floor or 0.0):
        return "no measurable difference"
    low, high = estimate.interval
    if high < 1:
        return "faster"
    return "slower" if low > 1 else "no measurable difference"


def student_975(freedom: int) -> float:
    """The 97.5th percentile of Student's t; beyond ten degrees of freedom that of ten, which is a little wider."""
    return _T_975[min(max(freedom, 1), len(_T_975)) - 1]


def _resampled_medians(values: Float64, rng: np.random.Generator) -> Float64:
    drawn = len(values) - _FEWER_DRAWN[len(values) >= _LEAST_FOR_TWO]
    rows = rng.integers(0, len(values), (RESAMPLES, drawn))
    medians: Float64 = np.median(values[rows], axis=1)
    return medians


def _percentiles(values: Float64) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def _student(mean: float, variance: float, freedom: float) -> tuple[float, float]:
    """The interval of a mean of logarithms, as ratios."""
    reach = student_975(int(freedom)) * math.sqrt(variance)
    return math.exp(mean - reach), math.exp(mean + reach)


def _welch(a: Float64, b: Float64) -> tuple[float, float]:
    spread_a, spread_b = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    below = spread_a**2 / (len(a) - 1) + spread_b**2 / (len(b) - 1)
    freedom = (spread_a + spread_b) ** 2 / below if below > 0 else 1
    return _student(float(b.mean() - a.mean()), float(spread_a + spread_b), freedom)
