"""A prediction: the effect of a change as a figure with its uncertainty, made before the change is run. Also the
evidence beyond the run itself: earlier predictions with their measurements, and short runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from gpulab.formatting import plural, signed_percent

Removal = Literal["pauses", "waits"]  # what an edit of the code removes
TO_TRY = "try it: "  # begin of the reason if only a run can show the effect


class Prediction(Struct, frozen=True):
    """The prediction for one setting of the knobs.

    `ratio` is the predicted time per sample (per step if the samples stay the same) over the current time, `interval`
    its 95 % range; both are None if `refused`, which says why. `only_sign`: the evidence supports only the range, its
    middle is not an estimate. `memory_ratio` is the predicted peak of the GPU's memory over the current peak, without a
    range; None: not predicted. `memory_basis` names its basis or says that there is none; empty if no GPU computes.
    `setup_s` is a one-time cost before the steps; None: not predicted. `basis` is one sentence: from which figures and
    which formula.
    """

    settings: dict[str, str]
    ratio: float | None
    interval: tuple[float, float] | None
    basis: str
    memory_ratio: float | None = None
    only_sign: bool = False
    refused: str = ""
    memory_basis: str = ""
    setup_s: float | None = None

    @property
    def needs_run(self) -> bool:
        """Whether it is refused because only a run can show the effect."""
        return self.refused.startswith(TO_TRY)

    @property
    def reason(self) -> str:
        """Why it is refused, in words; empty if it is not."""
        return self.refused.removeprefix(TO_TRY)


class PriorEvidence(Struct, frozen=True):
    """Evidence from earlier runs on this machine.

    `errors`: for each knob, measured over predicted ratio, for predictions that were followed by a measurement on this
    machine. `sizes`: median step (µs) and peak memory (bytes; None unknown) by batch size, from short runs.
    `values_before`: the value of each name in the code, if known.
    """

    errors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    sizes: Mapping[int, tuple[float, int | None]] = field(default_factory=dict)
    values_before: Mapping[str, str] = field(default_factory=dict)


NOTHING = PriorEvidence()


PRIOR = 10.0  # in records
LEAST_FOR_BIAS = 10
NARROWEST, WIDEST = 1 / 3, 10.0  # times the formula's own half-width


def recalibrated(prediction: Prediction, errors: Sequence[float]) -> Prediction:
    """The prediction with its interval widened or narrowed by `errors`: measured over predicted ratios, each above 0.

    Unchanged if nothing or only a range is predicted, or if there are no errors.
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
    words = f"range from the formula and {count} measured on this machine"
    moved = f"; corrected by {signed_percent(math.expm1(bias))}, their median error" if bias else ""
    return replace(prediction, ratio=ratio, interval=interval, basis=f"{prediction.basis}; {words}{moved}")


def _scale(sizes: np.ndarray, half: float) -> float:
    typical_error = float(np.max(sizes) if len(sizes) < 20 else np.percentile(sizes, 95))
    scale = (PRIOR + len(sizes) * typical_error / half) / (PRIOR + len(sizes))
    return min(max(scale, NARROWEST), WIDEST)


def _bias(logs: np.ndarray) -> float:
    """The median error if there are enough and it exceeds twice its standard error; else 0."""
    if len(logs) < LEAST_FOR_BIAS:
        return 0.0
    middle = float(np.median(logs))
    deviation = 1.4826 * float(np.median(np.abs(logs - middle)))
    return middle if abs(middle) > 2 * 1.253 * deviation / math.sqrt(len(logs)) else 0.0
