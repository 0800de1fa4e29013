"""The geometry of bars and lines, as shares of a width: parts of a time, speedups with intervals, curves.

`templates/bars.html` draws them. The axis of factors is logarithmic: 2 is as far from 1 as 0.5 is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from markupsafe import Markup
from msgspec import Struct

from gpulab.formatting import percent
from gpulab.run import Float64
from gpulab.views.page import macros
from gpulab.views.wording import PARTS

BLUE = "#4477AA"  # Paul Tol's "bright" blue: visible on white and on black
VERDICTS = {"faster": "#1E9E77", "slower": "#D9661F"}
UNDECIDED = "#8A8A8A"
A_COLOUR, B_COLOUR = "#8A8A8A", "#8E63C0"  # visible on white and on black
PREDICTED = "#C78A1E"
FLOOR, POINT, _ONE = "rgba(128,128,128,0.42)", "rgba(128,128,128,0.70)", "rgba(128,128,128,0.95)"
_LEAST = 0.004  # share of a bar: a smaller part is not drawn, only listed in the legend
_THIN = 0.0025  # share of the width: a mark


class Segment(Struct, frozen=True):
    """One part of a bar: `share` of the bar's full width."""

    label: str
    share: float
    colour: str
    words: str = ""
    hatch: bool = False

    @property
    def is_visible(self) -> bool:
        """Whether the part is wide enough to be visible."""
        return self.share >= _LEAST


def of_parts(shares: Mapping[str, float], words: Callable[[float], str] = percent, width: float = 1.0) -> list[Segment]:
    """The parts of a step in a fixed order, with their shares in words; together they fill `width` of a bar."""
    return [
        Segment(part.label, shares[name] * width, part.colour, words(shares[name]), bool(part.hatch))
        for name, part in PARTS.items()
        if shares.get(name, 0) > 0
    ]


def parts_key(bars: Iterable[Mapping[str, float]]) -> list[Segment]:
    """What the colours of several such bars mean."""
    return of_parts({name: share for bar in bars for name, share in bar.items() if share >= _LEAST}, lambda _: "")


class Path(Struct, frozen=True):
    """A line or an area as an SVG path, in a box 1000 wide and 100 high."""

    d: str
    colour: str
    is_line: bool = False
    dashed: bool = False


def area_path(x: Float64, y: Float64, colour: str) -> Path:
    """Steps: from each x on, `y` high. `x` and `y` are shares of the width and of the height; the last y is 0."""
    edges = (f"H{1000 * a:.1f}V{100 - 100 * b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))
    return Path(f"M0 100{''.join(edges)}z", colour)


def line_path(x: Float64, y: Float64, colour: str, *, dashed: bool = False) -> Path:
    """A curve; `x` and `y` are shares of the width and of the height, and a NaN breaks it."""
    d, pen = "", "M"
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        if math.isnan(b):
            pen = "M"
        else:
            d, pen = f"{d}{pen}{1000 * a:.0f} {100 - 98 * b:.1f}", "L"
    return Path(d, colour, True, dashed)


# factors on an axis

LEAST_SPAN = 0.04  # the least length of an axis, in logarithms
_ROOM = 0.06  # beyond the outermost factor, as a share of the span
_STEP = 1.5  # factor by which an end of a growing axis moves
_NARROW = 6.0  # ratio of the ends of an axis: below it, ticks are those of a linear axis
_WIDE = 300.0  # ratio of the ends from which on only powers of ten are marked
_MOST_TICKS = 6
_LEAST_PX = 240.0  # the narrowest axis on screen
_CHARACTER_PX, _APART_PX = 7.0, 6.0


class FactorAxis(Struct, frozen=True):
    """A logarithmic axis from the lowest to the highest factor."""

    low: float
    high: float

    def place(self, factor: float) -> float:
        """The position of a factor as a share of the width; a factor outside the axis is drawn at the nearer end."""
        share = math.log(factor / self.low) / math.log(self.high / self.low)
        return min(max(share, 0.0), 1.0)


class Label(Struct, frozen=True):
    """The text below a tick and the box around it, in shares of the width."""

    words: str
    left: float
    right: float


def axis_of(factors: Iterable[float]) -> FactorAxis:
    """An axis that holds all factors and 1, with some room at both ends."""
    logs = [0.0, *(math.log(factor) for factor in factors)]
    low, high = min(logs), max(logs)
    lacking = max(LEAST_SPAN - (high - low), 0.0) / 2
    low, high = low - lacking, high + lacking
    room = _ROOM * (high - low)
    return FactorAxis(math.exp(low - room), math.exp(high + room))


def stepped_axis(factors: Iterable[float], before: FactorAxis | None) -> FactorAxis:
    """An axis for a picture that is redrawn: its ends move in steps and only outwards, so that it rarely jumps."""
    tight = axis_of(factors)
    low, high = (
        _STEP ** towards(math.log(end) / math.log(_STEP))
        for end, towards in ((tight.low, math.floor), (tight.high, math.ceil))
    )
    return FactorAxis(low, high) if before is None else FactorAxis(min(low, before.low), max(high, before.high))


def factor_ticks(low: float, high: float) -> list[float]:
    """Round factors within the bounds, including 1 if it lies within: 0.5, 1, 2, 5 over a wide range."""
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
    """Labels of the ticks that do not overlap even on a narrow axis; 1 always has one."""
    boxes = [_label_of(axis, tick) for tick in factor_ticks(axis.low, axis.high)]
    visible: list[Label] = []
    for box in sorted(boxes, key=lambda box: box.words != "1"):
        if all(_apart(box, other) for other in visible):
            visible.append(box)
    return tuple(sorted(visible, key=lambda box: box.left))


def _label_of(axis: FactorAxis, tick: float) -> Label:
    words = f"{tick:g}"
    half = (len(words) * _CHARACTER_PX + _APART_PX) / 2 / _LEAST_PX
    middle = min(max(axis.place(tick), half), 1 - half)
    return Label(words, middle - half, middle + half)


class Piece(Struct, frozen=True):
    """A coloured stretch of a layer, from `left` to `right` in shares of its width."""

    left: float
    right: float
    colour: str


class Layer(Struct, frozen=True):
    """Pieces that lie side by side, from the top of their row."""

    top_px: int
    height_px: int
    pieces: tuple[Piece, ...]


class FactorRange(Struct, frozen=True):
    """A factor, its interval, the noise around 1 and the single measurements. `middle` None: only a range is known."""

    middle: float | None
    interval: tuple[float, float] | None
    colour: str
    floor: float = 0.0  # noise as a fraction: 0.05 means from 1/1.05 to 1.05
    points: tuple[float, ...] = ()
    predicted: tuple[float, float] | None = None
    bar: bool = False  # whether to draw a faint bar from 1 to the middle

    @property
    def factors(self) -> tuple[float, ...]:
        """All factors that the axis must hold."""
        middle = () if self.middle is None else (self.middle,)
        floor = (1 + self.floor, 1 / (1 + self.floor))
        return (*middle, *(self.interval or self.points), *floor, *(self.predicted or ()))


class BarRow(Struct, frozen=True):
    """A name and its figures above a bar of parts or a factor on an axis, with a note below."""

    name: str
    figures: str
    note: str = ""
    parts: Sequence[Segment] = ()
    layers: tuple[Layer, ...] = ()


def bar_rows(title: str, rows: Sequence[BarRow], labels: Sequence[Label] = ()) -> Markup:
    """A picture of rows below a title, with the labels of their axis; rows without a drawing come last."""
    picture: Markup = macros("bars.html").bar_rows(title, rows, labels)
    return picture


def layers(axis: FactorAxis, estimate: FactorRange) -> tuple[Layer, ...]:
    """Noise, bar, 1, points, prediction, interval, middle, from back to front; pieces of a layer do not overlap."""
    floor = (1 / (1 + estimate.floor), 1 + estimate.floor) if estimate.floor else None
    marks: list[Piece] = []
    for point in sorted(estimate.points):
        mark = _mark(axis, point, POINT, _THIN)
        if axis.low <= point <= axis.high and all(_apart(mark, other) for other in marks):
            marks.append(mark)
    bar = (
        (min(1.0, estimate.middle), max(1.0, estimate.middle)) if estimate.bar and estimate.middle is not None else None
    )
    middle = () if estimate.middle is None else (_mark(axis, estimate.middle, estimate.colour, 2.4 * _THIN),)
    return (
        Layer(0, 20, _span(axis, floor, FLOOR)),
        Layer(5, 10, _span(axis, bar, f"{estimate.colour}55")),
        Layer(0, 20, (_mark(axis, 1.0, _ONE, _THIN),)),
        Layer(15, 5, tuple(marks)),
        Layer(0, 3, _span(axis, estimate.predicted, PREDICTED)),
        Layer(5, 8, _span(axis, estimate.interval, estimate.colour)),
        Layer(2, 14, middle),
    )


def _span(axis: FactorAxis, ends: tuple[float, float] | None, colour: str) -> tuple[Piece, ...]:
    return () if ends is None else (Piece(axis.place(ends[0]), axis.place(ends[1]), colour),)


def _apart(a: Piece | Label, b: Piece | Label) -> bool:
    return a.right <= b.left or b.right <= a.left


def _mark(axis: FactorAxis, factor: float, colour: str, width: float) -> Piece:
    left = min(max(axis.place(factor) - width / 2, 0.0), 1 - width)
    return Piece(left, left + width, colour)
