"""Whether the pairs that ran so far decide a comparison, so that it may end: looked at after each turn. Pure.

Who looks again and again with a 95 % interval finds by chance what is not there. So an early end needs an interval that
is far stricter, after Haybittle and Peto: each look then adds next to nothing to the 5 % of the last one. What is
reported is the usual interval. tests/tuning/test_early.py plays it with distributions of many kinds.
"""

from __future__ import annotations

import math

import numpy as np

from gpulab.run import Float64
from gpulab.tuning.compare.statistics import noise_floor, paired
from gpulab.verdict import is_decided, verdict

FEWEST_PAIRS = 4  # with three, the few that end have shown too narrow an interval by chance: 93 % where 95 are said
PRECISE = 0.05  # half the width of an interval, of settings that are compared with each other, too

# Student's t by degrees of freedom from 3 on, two-sided: 99.8 % for a difference, 99 % for its absence, where a look
# too many does less harm: the true ratio must lie at the very edge of the band.
_DIFFERENT = (10.21, 7.17, 5.89, 5.21, 4.79, 4.50, 4.30, 4.14, 4.02, 3.93, 3.85, 3.79, 3.73, 3.69, 3.65, 3.61)
_ALIKE = (5.84, 4.60, 4.03, 3.71, 3.50, 3.36, 3.25, 3.17, 3.11, 3.05, 3.01, 2.98, 2.95, 2.92, 2.90, 2.88)


def decide(ratios: Float64, same: Float64, *, precise: bool = False) -> bool:
    """Whether these ratios of B over A, and of A over itself, already carry the verdict that they would get now.

    `precise`: also whether the interval is narrow, as the choice among several settings needs it.
    """
    estimate, floor = paired(ratios), noise_floor(same)
    if estimate is None or estimate.interval is None or len(ratios) < FEWEST_PAIRS:
        return False
    said = verdict(estimate.ratio, estimate.interval, floor, estimate.count)
    if not is_decided(said):
        return False
    quantiles = _ALIKE if said == "no measurable difference" else _DIFFERENT
    strict = _interval(ratios, quantiles[min(len(ratios) - FEWEST_PAIRS, len(quantiles) - 1)])
    if verdict(estimate.ratio, strict, floor, estimate.count) != said:
        return False
    low, high = estimate.interval
    return not precise or math.log(high / low) / 2 <= PRECISE


def _interval(ratios: Float64, quantile: float) -> tuple[float, float]:
    """Of the mean of the logarithms: an outlier makes it wide, and the comparison goes on."""
    logs = np.log(ratios)
    middle, reach = float(logs.mean()), quantile * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    return math.exp(middle - reach), math.exp(middle + reach)
