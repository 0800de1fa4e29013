"""The verdict on a ratio of two times: the one place where a comparison is decided.

Ratios are times of B over A: below 1 is faster. All edges lie as far below 1 as above it in logarithms, so that a
floor of any size leaves room for both verdicts.
"""

from __future__ import annotations

from typing import Literal

Verdict = Literal["faster", "slower", "no measurable difference", "undecided", "not comparable"]

LEAST_EFFECT = 0.02  # a smaller difference is not called faster or slower; definitions.md, "Honest comparison" 6
EQUIVALENT = 0.03  # the band around 1: "no measurable difference" is said only of an interval that lies inside it
TOO_FEW = 5  # pairs: fewer cannot show that there is no difference


def verdict(ratio: float | None, interval: tuple[float, float] | None, floor: float | None, count: int) -> Verdict:
    """Faster or slower where the whole interval is beyond the noise floor, no difference where it is in the band.

    `floor` as a fraction, `count` are pairs. What shows neither a difference nor its absence is undecided.
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
    """Whether two ratios point in opposite directions, both by more than the least effect."""
    if own_ratio is None:
        return False
    low, high = sorted((ratio, own_ratio))
    return low <= 1 / (1 + LEAST_EFFECT) and high >= 1 + LEAST_EFFECT


def is_decided(said: Verdict) -> bool:
    """Whether the measurement answers the question: a difference, or none worth a word."""
    return said in ("faster", "slower", "no measurable difference")
