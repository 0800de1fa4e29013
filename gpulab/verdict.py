"""The verdict on a ratio of two times: the one place where a comparison is decided.

Ratios are times of B over A: below 1 is faster. All bounds are symmetric around 1 in logarithms, so that a floor of
any size leaves room for both verdicts.
"""

from __future__ import annotations

from typing import Literal

Verdict = Literal["faster", "slower", "no measurable difference", "undecided", "not comparable"]

LEAST_EFFECT = 0.02  # a smaller difference is not called faster or slower; definitions.md, "Honest comparison" 6
EQUIVALENT = 0.03  # half width of the band around 1; "no measurable difference" requires an interval inside it
TOO_FEW = 5  # pairs: fewer cannot show that there is no difference


def verdict(ratio: float | None, interval: tuple[float, float] | None, floor: float | None, count: int) -> Verdict:
    """Faster or slower if the whole interval is beyond the noise floor, no difference if it is inside the band.

    `floor`: a fraction; `count`: pairs. If neither a difference nor its absence is shown, the verdict is undecided.
    """
    if ratio is None:
        return "not comparable"
    if interval is None:
        return "undecided"
    low, high = interval
    beyond, least = 1 + (floor or 0.0), 1 + LEAST_EFFECT
    if high < 1 / beyond and ratio <= 1 / least:
        return "faster"
    if low > beyond and ratio >= least:
        return "slower"
    inside = low >= 1 / (1 + EQUIVALENT) and high <= 1 + EQUIVALENT
    return "no measurable difference" if inside and count >= TOO_FEW else "undecided"


def contradicts(ratio: float, own_ratio: float | None) -> bool:
    """Whether two ratios have opposite directions, both by more than the least effect."""
    if own_ratio is None:
        return False
    low, high = sorted((ratio, own_ratio))
    return low <= 1 / (1 + LEAST_EFFECT) and high >= 1 + LEAST_EFFECT


def is_decided(said: Verdict) -> bool:
    """Whether the measurement answers the question: a difference, or no measurable one."""
    return said in ("faster", "slower", "no measurable difference")
