"""What a change would bring, as a figure with its doubt: made before the change is run, and held against it after.

And what it may rest on beyond the run itself: earlier predictions held against the truth, short runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from gpulab.formatting import plural, signed_percent

Removal = Literal["pauses", "waits"]  # what an edit of the code leaves out
TO_TRY = "try it: "  # how the reason begins where no figures tell, and a run would


class Prediction(Struct, frozen=True):
    """Of one setting of the knobs.

    `ratio` is the predicted time per sample (per step where the samples stay the same) over today's, `interval` the
    range it should lie in with 95 %; both None where `refused` says why nothing is predicted. `only_sign`: the
    range is all that the evidence carries, its middle is no estimate. `memory_ratio` likewise of the peak of the
    GPU's memory, without a range; None: not predicted. `memory_basis` says from what it is or that there is none;
    empty where no GPU computes. `setup_s` is taken once, before the steps; None: not predicted. `basis` is one
    sentence: from which figures and which formula.
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
        """Whether it is refused because only a run tells."""
        return self.refused.startswith(TO_TRY)

    @property
    def reason(self) -> str:
        """Why it is refused, in words; empty where it is not."""
        return self.refused.removeprefix(TO_TRY)


class PriorEvidence(Struct, frozen=True):
    """What earlier runs on this machine say beyond the run itself.

    `errors`: of each knob, measured over predicted ratio of the predictions that were held against a measurement on
    this machine. `sizes`: median step (µs) and peak memory (bytes; None unknown) by batch size, from short runs.
    `values_before`: the value of each name as the code has it, where that was seen.
    """

    errors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    sizes: Mapping[int, tuple[float, int | None]] = field(default_factory=dict)
    values_before: Mapping[str, str] = field(default_factory=dict)


NOTHING = PriorEvidence()


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
    words = f"range from the formula and {count} measured on this machine"
    moved = f"; corrected by {signed_percent(math.expm1(bias))}, their median error" if bias else ""
    return replace(prediction, ratio=ratio, interval=interval, basis=f"{prediction.basis}; {words}{moved}")


def _scale(sizes: np.ndarray, half: float) -> float:
    typical_error = float(np.max(sizes) if len(sizes) < 20 else np.percentile(sizes, 95))
    scale = (PRIOR + len(sizes) * typical_error / half) / (PRIOR + len(sizes))
    return min(max(scale, NARROWEST), WIDEST)


def _bias(logs: np.ndarray) -> float:
    """The median error where there are enough and it is beyond twice its own doubt; else 0."""
    if len(logs) < LEAST_FOR_BIAS:
        return 0.0
    middle = float(np.median(logs))
    deviation = 1.4826 * float(np.median(np.abs(logs - middle)))
    return middle if abs(middle) > 2 * 1.253 * deviation / math.sqrt(len(logs)) else 0.0
