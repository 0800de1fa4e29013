"""Predictions in the light of those that came before: intervals as wide as the errors on this machine were.

The rule. An error is the logarithm of measured over predicted ratio. The formula's own interval counts as much as
`PRIOR` records; the n records count with the 95th percentile of their errors' size (with fewer than 20, the largest).
The middle is moved by the errors' median only from `LEAST_FOR_BIAS` records on, and only where it is further from 0
than chance allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from gpulab.formatting import plural, signed_percent
from gpulab.prediction.prediction import Prediction

PRIOR = 10.0  # records
LEAST_FOR_BIAS = 10
NARROWEST, WIDEST = 1 / 3, 10.0  # times the formula's own half-width


def recalibrated(prediction: Prediction, errors: Sequence[float]) -> Prediction:
    """The same with its interval widened or narrowed. `errors`: measured over predicted ratio, each above 0.

    Unchanged where nothing is predicted, only a range is, or there is no record.
    """
    usable = np.array([e for e in errors if e > 0 and math.isfinite(e)], dtype=np.float64)
    if prediction.ratio is None or prediction.interval is None or prediction.only_sign or not len(usable):
        return prediction
    logs = np.log(usable)
    bias = _bias(logs)
    below, above = (abs(math.log(edge / prediction.ratio)) for edge in prediction.interval)
    half = max((below + above) / 2, 1e-6)
    scale = _scale(np.abs(logs - bias), half)
    ratio = prediction.ratio * math.exp(bias)
    interval = (ratio * math.exp(-below * scale), ratio * math.exp(above * scale))
    count = plural(len(usable), "earlier prediction")
    words = f"interval from the formula and {count} held against a measurement here"
    moved = f"; moved by {signed_percent(math.expm1(bias))}, as far as those were off" if bias else ""
    return replace(prediction, ratio=ratio, interval=interval, basis=f"{prediction.basis}; {words}{moved}")


def _scale(sizes: np.ndarray, half: float) -> float:
    seen = float(np.max(sizes) if len(sizes) < 20 else np.percentile(sizes, 95))
    scale = (PRIOR + len(sizes) * seen / half) / (PRIOR + len(sizes))
    return min(max(scale, NARROWEST), WIDEST)


def _bias(logs: np.ndarray) -> float:
    """The median error where there are enough and it is beyond twice its own doubt; else 0."""
    if len(logs) < LEAST_FOR_BIAS:
        return 0.0
    middle = float(np.median(logs))
    deviation = 1.4826 * float(np.median(np.abs(logs - middle)))
    return middle if abs(middle) > 2 * 1.253 * deviation / math.sqrt(len(logs)) else 0.0
