"""Whether a change of speed is a change of the training too: the losses of both sides from the same start."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gpulab.formatting import difference, plural
from gpulab.run import Float64
from gpulab.tuning.compare.statistics import student_975
from gpulab.tuning.record import LossComparison, LossVerdict, Side

SAME = 1e-6  # relative: the last bits of float32, which another order of additions changes
UNMOVED = "the other seeds changed nothing: your code sets its own seed, or draws no random numbers"
UNSEEDED = "how far another seed alone moves them was not measured (--seeds 3 does)"
Losses = tuple[float, ...]


def compare_losses(
    a: Side, b: Side, *, same_start: bool = True, changes_training: str = "", other_steps: bool = False
) -> LossComparison | None:
    """Both curves, and the verdict on them; None where no loss was recorded on either side.

    `other_steps`: the same step takes other samples on both sides (another batch, accumulation), `changes_training`
    says why. Else losses that differ are judged by the band, which needs `a.seed_losses`: without, the seeds were not
    run; where they changed nothing, every difference is the setting's.
    """
    if not a.losses and not b.losses:
        return None
    of_seeds = [losses for losses in a.seed_losses if np.isfinite(losses).any()]  # a run that failed has none
    unmoved = bool(of_seeds) and all(repeats(a.losses, losses) for losses in of_seeds)
    band = loss_band([a.losses, *of_seeds]) if of_seeds and not unmoved else ()
    seeds = len(of_seeds)

    def said(verdict: LossVerdict, words: str) -> LossComparison:
        return LossComparison(a.losses, b.losses, band, seeds, verdict, words)

    common = min(len(a.losses), len(b.losses))
    of_a, of_b = np.array(a.losses[:common], np.float64), np.array(b.losses[:common], np.float64)
    identical, broken = np.array_equal(of_a, of_b, equal_nan=True), _broken(of_a, of_b)
    if broken:
        return said("same" if identical else "different", broken)
    if not (np.isfinite(of_a) & np.isfinite(of_b)).any():
        return said("not measurable", "No step of both sides began its backward pass at a single loss")
    if identical:
        return said("same", f"Bitwise identical over {plural(common, 'step')}")
    apart = _apart(of_a, of_b)
    first, worst = float(apart[np.isfinite(apart)][0]), float(np.nanmax(apart))
    if worst <= SAME:
        return said("same", f"Equal within {SAME:g} of their value over {plural(common, 'step')}")
    if other_steps:
        why = changes_training or "the steps use different samples"
        return said("not comparable", f"Losses aren't comparable: {why}")
    how_far = f"differ by up to {_percent(worst)} over {plural(common, 'step')}, by {_percent(first)} in the first"
    if not same_start:
        return said("not comparable", f"Losses {how_far}; the two did not start from the same state")
    if unmoved:
        return said("different", f"Losses {how_far}; {UNMOVED}")
    if not band:
        return said("seeds not run", f"Losses {how_far}; {UNSEEDED}")
    curves = [a.losses, *of_seeds]
    if _distance(of_b, curves) <= student_975(len(curves) - 1):
        return said(
            "within the band", f"Losses {how_far}, no further than another seed may move them ({seeds + 1} seeds)"
        )
    return said(
        "outside the band",
        f"Losses {how_far}, further than another seed moves them ({seeds + 1} seeds): another training",
    )


def loss_band(curves: Sequence[Losses]) -> tuple[tuple[float, float], ...]:
    """Lowest and highest loss of each step that all curves have."""
    common = min(map(len, curves))
    table = np.array([curve[:common] for curve in curves], np.float64)
    return tuple((float(low), float(high)) for low, high in zip(table.min(axis=0), table.max(axis=0), strict=True))


def repeats(first: Losses, again: Losses) -> bool:
    """Whether two runs at identical settings gave the same losses, as far as both have any."""
    common = min(len(first), len(again))
    apart = _apart(np.array(first[:common], np.float64), np.array(again[:common], np.float64))
    return bool(np.nanmax(apart, initial=0.0) <= SAME)


def _broken(a: Float64, b: Float64) -> str:
    """Where a loss stopped being a number on one side only, or on both."""
    lines = []
    for side, own, other in (("A", a, b), ("B", b, a)):
        last = len(own) - 1  # the last step may have been cut off before its loss
        bad = [i for i in range(last) if math.isinf(own[i]) or (math.isnan(own[i]) and math.isfinite(other[i]))]
        if bad:
            kind = "infinite" if math.isinf(own[bad[0]]) else "not a number"
            lines.append(f"{side}'s loss is {kind} from step {bad[0] + 1} on")
    return "; ".join(lines)


def _apart(a: Float64, b: Float64) -> Float64:
    with np.errstate(invalid="ignore", divide="ignore"):
        scale = np.maximum(np.abs(a), np.abs(b))
        difference: Float64 = np.where(a == b, 0.0, np.abs(a - b) / scale)
    return difference


def _distance(b: Float64, seeds: Sequence[Losses]) -> float:
    """How far b is from the mean of the seeds, over what one more seed would be expected to be: a Student's t.

    Root mean square over the steps, so that a curve that lies apart all along and one that strays count alike.
    """
    common = min(len(b), *map(len, seeds))
    table = np.array([curve[:common] for curve in seeds], np.float64)
    judged = np.isfinite(b[:common]) & np.isfinite(table).all(axis=0)
    if not judged.any():
        return math.inf
    table, own = table[:, judged], b[:common][judged]
    apart = math.sqrt(((own - table.mean(axis=0)) ** 2).mean())
    expected = math.sqrt(table.var(axis=0, ddof=1).mean() * (1 + 1 / len(table)))
    return apart / expected if expected else (math.inf if apart else 0.0)


def _percent(fraction: float) -> str:
    return difference(fraction) if math.isfinite(fraction) else "an unknown part"
