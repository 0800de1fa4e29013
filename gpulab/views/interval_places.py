"""Where factors and their intervals stand on an axis: in logarithms, as far from 1 to 2 as from 1 to a half. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec import Struct

LEAST_SPAN = 0.04  # of an axis, in logarithms
_ROOM = 0.06  # beyond the outermost factor, as a share of the span
_STEP = 1.5  # times from one end to the next of an axis that grows
_NARROW = 6.0  # times from one end of an axis to the other: below, its ticks are as on a linear one
_WIDE = 300.0  # from here on, only its powers of ten are marked
_MOST_TICKS = 6
_LEAST_PX = 240.0  # the narrowest that an axis is shown
_CHARACTER_PX, _APART_PX = 7.0, 6.0


class FactorAxis(Struct, frozen=True):
    """From the lowest to the highest factor."""

    low: float
    high: float

    def place(self, factor: float) -> float:
        """Where a factor stands, as a share of the width; what lies outside, at the nearer end."""
        share = math.log(factor / self.low) / math.log(self.high / self.low)
        return min(max(share, 0.0), 1.0)


class Label(Struct, frozen=True):
    """A word under an axis and the box that holds it: shares of the width."""

    words: str
    left: float
    right: float


def axis_of(factors: Iterable[float]) -> FactorAxis:
    """An axis on which all of them stand, and 1, none of them at its very end."""
    logs = [0.0, *(math.log(factor) for factor in factors)]
    low, high = min(logs), max(logs)
    lacking = max(LEAST_SPAN - (high - low), 0.0) / 2
    low, high = low - lacking, high + lacking
    room = _ROOM * (high - low)
    return FactorAxis(math.exp(low - room), math.exp(high + room))


def stepped_axis(factors: Iterable[float], before: FactorAxis | None) -> FactorAxis:
    """An axis for what is drawn again and again: its ends move in steps and outwards only, so that little jumps."""
    wanted = axis_of(factors)
    low, high = (
        _STEP ** towards(math.log(end) / math.log(_STEP))
        for end, towards in ((wanted.low, math.floor), (wanted.high, math.ceil))
    )
    return FactorAxis(low, high) if before is None else FactorAxis(min(low, before.low), max(high, before.high))


def factor_ticks(low: float, high: float) -> list[float]:
    """Round factors within the bounds, 1 among them where it lies there: 0.5, 1, 2, 5 over a wide range."""
    ticks = _linear_ticks(low, high) if high / low < _NARROW else _decade_ticks(low, high)
    return [tick for tick in ticks if low <= tick <= high]


def _linear_ticks(low: float, high: float) -> list[float]:
    steps = (step * 10.0**power for power in range(-4, 6) for step in (1, 2, 5))
    step = next(step for step in steps if (high - low) / step <= _MOST_TICKS)
    return [round(i * step, 6) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _decade_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low < _WIDE else (1,)
    return [float(f"{step}e{decade}") for decade in decades for step in steps]


def labels(axis: FactorAxis) -> tuple[Label, ...]:
    """The ticks' words: within the axis and apart from each other even where it is narrow; 1 is never left out."""
    boxes = [_box(axis, tick) for tick in factor_ticks(axis.low, axis.high)]
    first = [box for box in boxes if box.words == "1"]
    shown = list(first)
    for box in boxes:
        if box not in first and all(_apart(box, other) for other in shown):
            shown.append(box)
    return tuple(sorted(shown, key=lambda box: box.left))


def _box(axis: FactorAxis, tick: float) -> Label:
    words = f"{tick:g}"
    half = (len(words) * _CHARACTER_PX + _APART_PX) / 2 / _LEAST_PX
    middle = min(max(axis.place(tick), half), 1 - half)
    return Label(words, middle - half, middle + half)


def _apart(a: Label, b: Label) -> bool:
    return a.right <= b.left or b.right <= a.left
