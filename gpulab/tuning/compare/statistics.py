"""Statistics of a ratio of times: its estimate, its 95 % interval, the noise floor, and how many pairs would decide it.

definitions.md, "Honest comparison" 4 and 5. Ratios are times of B over A: below 1 is faster. All computations use
logarithms of ratios: twice as fast and half as fast are equally far from 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct

from gpulab.run import Float64, Int64
from gpulab.verdict import EQUIVALENT, TOO_FEW

RESAMPLES = 4_000
SEED = 20_240_731  # the same blocks give the same interval
MOST_MORE = 5  # times as many pairs: if more would be needed, a quieter machine is needed instead

# The plain bootstrap of a median covers 87 to 93 % at 7 to 15 values (simulated: normal, Student's t with 2 degrees of
# freedom, one-sided spikes); drawing two values fewer than there are, one fewer below eight, covers 94 to 96 %.
_FEWER_DRAWS, _LEAST_FOR_TWO = (1, 2), 8

# Below six values even their whole range covers the median in less than 95 % of cases (1 - 2 / 2**5 = 93.75 %), so no
# bootstrap can: then Student's t on the logarithms is used, which is wide for few values.
LEAST_FOR_BOOTSTRAP = 6
_MAD_IN_SD, _MEDIAN_IN_MEAN = 1.4826, 1.2533  # normal values: from median deviation to standard error of the median

# Successive pairs are not always independent: a load burst of another process spans several. The effective number of
# pairs is then n (1 - r) / (1 + r), with the correlation r of neighbours (Bayley and Hammersley, 1946). For short
# series the estimate of r is too small by (1 + 4 r) / n (Marriott and Pope, 1954).
_MOST_CORRELATED = 0.6  # chosen by gpulab; doubles the interval: ten pairs give r only to within 0.3
_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # by degrees of freedom, from 1


class Estimate(Struct, frozen=True):
    """A ratio and its 95 % interval; no interval if there are too few values."""

    ratio: float
    interval: tuple[float, float] | None
    count: int  # pairs, or the blocks of the side that has fewer


def paired(ratios: Float64) -> Estimate | None:
    """Median of the ratios of pairs, in order, with a percentile bootstrap over pairs; None without a pair.

    The interval is widened if neighbouring pairs are correlated.
    """
    if len(ratios) == 0:
        return None
    logs = np.log(ratios)
    middle = _median_ratio(logs)
    if len(logs) < 2:
        return Estimate(middle, None, len(logs))
    if len(logs) < LEAST_FOR_BOOTSTRAP:
        interval = _student(logs.mean(), logs.var(ddof=1) / len(logs), len(logs) - 1)
    else:
        interval = _percentiles(_resampled_medians(logs))
    low, high = ((edge / middle) ** _widening(logs) * middle for edge in interval)
    return Estimate(middle, (low, high), len(logs))


def unpaired(a: Float64, b: Float64) -> Estimate | None:
    """Median of b over median of a, each resampled separately; None if a side has no value."""
    if len(a) == 0 or len(b) == 0:
        return None
    in_a, in_b = np.log(a), np.log(b)
    middle, count = _median_ratio(in_b) / _median_ratio(in_a), min(len(a), len(b))
    if count < 2:
        return Estimate(middle, None, count)
    if count < LEAST_FOR_BOOTSTRAP:
        return Estimate(middle, _welch(in_a, in_b), count)
    return Estimate(middle, _percentiles(_resampled_medians(in_b) - _resampled_medians(in_a, 1)), count)


def noise_floor(same: Float64) -> float | None:
    """How much A typically differs from itself, as a fraction: 0.05 means up to 1.05 times as long or as short.

    One standard error of the median of A's ratios against itself, in logarithms, from their median deviation, which
    is robust against outliers. None for fewer than two ratios.
    """
    if len(same) < 2:
        return None
    logs = np.log(same)
    deviation = _MAD_IN_SD * float(np.median(np.abs(logs - np.median(logs))))
    few = student_975(len(logs) - 1) / _T_975[-1]
    return math.expm1(few * _MEDIAN_IN_MEAN * deviation / math.sqrt(len(logs)))


def pairs_to_decide(estimate: Estimate, floor: float | None) -> int | None:
    """About how many pairs would decide an undecided ratio, if the machine stays as noisy; None: far too many.

    Interval and floor become narrower with the square root of the pairs.
    """
    if estimate.interval is None:
        return None
    middle = abs(math.log(estimate.ratio))
    reach = max(abs(math.log(edge) - math.log(estimate.ratio)) for edge in estimate.interval)
    band = math.log1p(EQUIVALENT)
    to_differ = (reach + math.log1p(floor or 0.0)) / middle if middle > 0 else math.inf
    to_equal = reach / (band - middle) if band > middle else math.inf
    times = min(to_differ, to_equal) ** 2
    return max(TOO_FEW, estimate.count + 1, math.ceil(estimate.count * times)) if times <= MOST_MORE else None


def student_975(freedom: int) -> float:
    """The 97.5th percentile of Student's t; beyond ten degrees of freedom that of ten, which is slightly larger."""
    return _T_975[min(max(freedom, 1), len(_T_975)) - 1]


def _widening(logs: Float64) -> float:
    """The factor by which the correlation of neighbouring pairs widens an interval."""
    beside, count = logs - logs.mean(), len(logs)
    total = float((beside**2).sum())
    alike = float((beside[1:] * beside[:-1]).sum()) / total if total > 0 else 0.0
    correlation = min(_MOST_CORRELATED, max(0.0, alike + (1 + 4 * alike) / count if total > 0 else 0.0))
    return math.sqrt((1 + correlation) / (1 - correlation))


def _resampled_medians(values: Float64, sample: int = 0) -> Float64:
    medians: Float64 = np.sort(values)[_middle_ranks(len(values), sample)].mean(axis=0)
    return medians


@functools.lru_cache(maxsize=64)
def _middle_ranks(count: int, sample: int) -> Int64:
    """The ranks, among `count` values, of the two middle values of each resample: [2, RESAMPLES].

    Each `sample` has other random numbers. The k-th smallest of n uniform draws is distributed as Beta(k, n - k + 1);
    the draw below it is the largest of k - 1.
    """
    draws = count - _FEWER_DRAWS[count >= _LEAST_FOR_TWO]
    rng = np.random.default_rng((SEED, sample))
    low, high = (draws + 1) // 2, draws // 2 + 1
    above = rng.beta(high, draws - high + 1, RESAMPLES)
    below = above if low == high else above * rng.random(RESAMPLES) ** (1 / low)
    return (np.stack((below, above)) * count).astype(np.int64)


def _percentiles(values: Float64) -> tuple[float, float]:
    """The central 95 % of logarithms, as ratios."""
    low, high = np.percentile(values, [2.5, 97.5])
    return math.exp(low), math.exp(high)


def _median_ratio(logs: Float64) -> float:
    return math.exp(float(np.median(logs)))


def _student(mean: float, variance: float, freedom: float) -> tuple[float, float]:
    """The interval of a mean of logarithms, as ratios."""
    reach = student_975(int(freedom)) * math.sqrt(variance)
    return math.exp(mean - reach), math.exp(mean + reach)


def _welch(a: Float64, b: Float64) -> tuple[float, float]:
    spread_a, spread_b = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    below = spread_a**2 / (len(a) - 1) + spread_b**2 / (len(b) - 1)
    freedom = (spread_a + spread_b) ** 2 / below if below > 0 else 1
    return _student(float(b.mean() - a.mean()), float(spread_a + spread_b), freedom)


class ScalingPoint(Struct, frozen=True):
    """One number of ranks. `efficiency`: work per second and rank, over the same with the fewest ranks.

    `interval` is its 95 % interval; None with fewer than two rounds, and for the fewest ranks.
    `speedup`: work per second, over the same with the fewest ranks.
    """

    ranks: int
    step_us: float  # median over the rounds
    efficiency: float
    interval: tuple[float, float] | None
    speedup: float


def scaling(step_us: Mapping[int, Sequence[float]]) -> tuple[ScalingPoint, ...]:
    """Scaling points in order. `step_us`: by number of ranks, the slowest rank's step in each round (one run each)."""
    counts = sorted(step_us)
    if not counts:
        return ()
    fewest = np.asarray(step_us[counts[0]], dtype=np.float64)
    points = []
    for count in counts:
        times = np.asarray(step_us[count], dtype=np.float64)
        rounds = min(len(times), len(fewest))
        estimate = paired(times[:rounds] / fewest[:rounds])
        if estimate is None:
            continue
        spread = None if count == counts[0] else estimate.interval  # all are compared with the fewest
        interval = None if spread is None else (1 / spread[1], 1 / spread[0])
        efficiency = 1 / estimate.ratio
        speedup = efficiency * count / counts[0]
        points.append(ScalingPoint(count, float(np.median(times)), efficiency, interval, speedup))
    return tuple(points)
