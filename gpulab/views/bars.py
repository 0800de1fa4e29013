"""Bars as HTML, one row per thing, also of factors with their intervals on one axis."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

from msgspec import Struct

from gpulab.formatting import percent
from gpulab.run import Float64
from gpulab.user_code import PACKAGE_FOLDER
from gpulab.views.wording import PARTS, plain

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
    boxes = [_label_of(axis, tick) for tick in factor_ticks(axis.low, axis.high)]
    first = [box for box in boxes if box.words == "1"]
    shown = list(first)
    for box in boxes:
        if box not in first and all(_labels_apart(box, other) for other in shown):
            shown.append(box)
    return tuple(sorted(shown, key=lambda box: box.left))


def _label_of(axis: FactorAxis, tick: float) -> Label:
    words = f"{tick:g}"
    half = (len(words) * _CHARACTER_PX + _APART_PX) / 2 / _LEAST_PX
    middle = min(max(axis.place(tick), half), 1 - half)
    return Label(words, middle - half, middle + half)


def _labels_apart(a: Label, b: Label) -> bool:
    return a.right <= b.left or b.right <= a.left


VERDICTS = {"faster": "#1E9E77", "slower": "#D9661F"}
UNDECIDED = "#8A8A8A"
A_COLOUR, B_COLOUR = "#8A8A8A", "#8E63C0"  # seen on white and on black
PREDICTED = "#C78A1E"
_HIGH_PX = 20
_AXIS = "rgba(128,128,128,0.10)"
FLOOR, POINT, _ONE = "rgba(128,128,128,0.42)", "rgba(128,128,128,0.70)", "rgba(128,128,128,0.95)"
_THIN = 0.0025  # of the width: a mark


class Piece(Struct, frozen=True):
    """What is drawn on a track, from `left` to `right`: shares of its width."""

    left: float
    right: float
    colour: str


class _Layer(Struct, frozen=True):
    """From the top of its row."""

    top_px: int
    height_px: int


_LAYERS = (
    _Layer(0, _HIGH_PX), _Layer(5, 10), _Layer(0, _HIGH_PX), _Layer(15, 5), _Layer(0, 3), _Layer(5, 8), _Layer(2, 14)
)  # fmt: skip


class FactorRange(Struct, frozen=True):
    """A factor (None: only its range) with its interval, over the band of noise and the single points it rests on."""

    middle: float | None
    interval: tuple[float, float] | None
    colour: str
    floor: float = 0.0  # as a fraction: 0.05 is from 1/1.05 to 1.05
    points: tuple[float, ...] = ()
    predicted: tuple[float, float] | None = None
    bar: bool = False  # also a faint one from 1 to the middle

    @property
    def factors(self) -> tuple[float, ...]:
        """All that the axis must reach."""
        middle = () if self.middle is None else (self.middle,)
        floor = (1 + self.floor, 1 / (1 + self.floor))
        return (*middle, *(self.interval or self.points), *floor, *(self.predicted or ()))


def picture(*parts: str) -> str:
    """The parts below one another, no wider than is pleasant to read; empty where there is none."""
    inside = "".join(parts)
    return f'<div style="margin:10px 0 4px;max-width:860px">{inside}</div>' if inside else ""


def row(name: str, figures: str, drawn: str = "", *, note: str = "", colour: str = "") -> str:
    """A name on the left, its figures on the right (below it where there is no room), and what is drawn below both."""
    line = (
        '<div style="display:flex;flex-wrap:wrap;justify-content:space-between;column-gap:16px;font-size:13px;'
        f'line-height:1.45"><div style="overflow-wrap:anywhere">{_swatch(colour)}<b>{safe(name)}</b></div>'
        f"<div>{safe(figures)}</div></div>"
    )
    below = f'<div style="font-size:12px;{QUIET};overflow-wrap:anywhere">{safe(note)}</div>' if note else ""
    return f'<div style="margin:7px 0 0">{line}{drawn}{below}</div>'


def factor_row(axis: FactorAxis, shown: FactorRange) -> str:
    """The interval as a bar over the noise and the single points, its middle as a mark; aligned with others' rows."""
    return "".join(
        _layer(pieces, layer, _AXIS if layer is _LAYERS[0] else "")
        for pieces, layer in zip(layers(axis, shown), _LAYERS, strict=True)
    )


def factor_axis(axis: FactorAxis) -> str:
    """The numbers below the rows of an axis."""
    drawn, end = [], 0.0
    for label in labels(axis):
        drawn.append(_cell(label.left - end, "") + _cell(label.right - label.left, label.words))
        end = label.right
    return f'<div style="display:flex;font-size:11px;{QUIET};margin:1px 0 0">{"".join(drawn)}</div>'


def key(entries: Iterable[tuple[str, str]]) -> str:
    """What each colour means, as many to a line as there is room for."""
    shown = "".join(
        f'<div style="margin:0 16px 0 0">{_swatch(c)}<span style="{QUIET}">{safe(words)}</span></div>'
        for c, words in entries
    )
    return f'<div style="display:flex;flex-wrap:wrap;line-height:1.6;font-size:12px">{shown}</div>'


def layers(axis: FactorAxis, shown: FactorRange) -> tuple[tuple[Piece, ...], ...]:
    """The noise, the bar, 1, the points, the prediction, the interval, its middle: each in order, none over another."""
    floor = (1 / (1 + shown.floor), 1 + shown.floor) if shown.floor else None
    marks: list[Piece] = []
    for point in sorted(shown.points):
        mark = _mark(axis, point, POINT, _THIN)
        if axis.low <= point <= axis.high and all(_pieces_apart(mark, other) for other in marks):
            marks.append(mark)
    bar = (min(1.0, shown.middle), max(1.0, shown.middle)) if shown.bar and shown.middle is not None else None
    return (
        _span(axis, floor, FLOOR),
        _span(axis, bar, f"{shown.colour}55"),
        (_mark(axis, 1.0, _ONE, _THIN),),
        tuple(marks),
        _span(axis, shown.predicted, PREDICTED),
        _span(axis, shown.interval, shown.colour),
        () if shown.middle is None else (_mark(axis, shown.middle, shown.colour, 2.4 * _THIN),),
    )


def _span(axis: FactorAxis, ends: tuple[float, float] | None, colour: str) -> tuple[Piece, ...]:
    return () if ends is None else (Piece(axis.place(ends[0]), axis.place(ends[1]), colour),)


def _pieces_apart(a: Piece, b: Piece) -> bool:
    return a.right <= b.left or b.right <= a.left


def _mark(axis: FactorAxis, factor: float, colour: str, width: float) -> Piece:
    left = min(max(axis.place(factor) - width / 2, 0.0), 1 - width)
    return Piece(left, left + width, colour)


def _layer(pieces: Sequence[Piece], layer: _Layer, ground: str) -> str:
    """Pulled up over the ground by its margins: positions would not be kept everywhere."""
    drawn, end = [], 0.0
    for piece in pieces:
        drawn.append(_block(piece.left - end, "") + _block(piece.right - piece.left, piece.colour))
        end = piece.right
    up, down = (0, 0) if ground else (layer.top_px - _HIGH_PX, _HIGH_PX - layer.top_px - layer.height_px)
    look = f"display:flex;height:{layer.height_px}px;margin:{up}px 0 {down}px 0"
    look += f";background-color:{ground};border-radius:3px" if ground else ""
    return f'<div style="{look}">{"".join(drawn)}</div>' if pieces or ground else ""


def _block(width: float, colour: str) -> str:
    if width <= 0:
        return ""
    fill = f";background-color:{colour};min-width:2px" if colour else ""
    return f'<div style="width:{100 * width:.3f}%;height:100%{fill}"></div>'


def _cell(width: float, words: str) -> str:
    return f'<div style="width:{100 * max(width, 0.0):.3f}%;text-align:center;white-space:nowrap">{safe(words)}</div>'


def _swatch(colour: str) -> str:
    look = "display:inline-block;width:10px;height:10px;border-radius:2px;margin:0 6px 0 0"
    return f'<span style="{look};background-color:{colour}"></span>' if colour else ""


QUIET = "opacity:0.75"
GREY = "#A8A8A8"  # what nothing divides
BLUE = "#4477AA"  # Paul Tol's "bright" blue: seen on white and on black
_GROUND = "rgba(128,128,128,0.18)"
_HATCHED = "repeating-linear-gradient(45deg,transparent 0 3px,rgba(255,255,255,0.55) 3px 5px)"
_SWATCH = "display:inline-block;width:11px;height:11px;border-radius:2px;margin:0 6px 0 0;vertical-align:-1px"
_LEAST = 0.004  # of a bar: a smaller part is not drawn, and stands in the legend


class Segment(Struct, frozen=True):
    """One part of a bar: `share` of the bar's full width."""

    label: str
    share: float
    colour: str
    words: str = ""
    hatch: bool = False


def bar(segments: Sequence[Segment], height_px: int = 22) -> str:
    """The segments from left to right."""
    drawn = "".join(
        f'<div title="{safe(f"{s.label} {s.words}")}" style="width:{100 * s.share:.2f}%;height:{height_px}px;'
        f'{_fill(s)}"></div>'
        for s in segments
        if s.share >= _LEAST
    )
    look = f"display:flex;border-radius:4px;overflow:hidden;background:{_GROUND};margin:2px 0"
    return f'<div style="{look}">{drawn}</div>'


def legend(segments: Iterable[Segment]) -> str:
    """Each segment's swatch, name and figure, as many to a line as there is room for."""
    keys = "".join(
        f'<span style="white-space:nowrap;margin:0 18px 0 0"><span style="{_SWATCH};{_fill(s)}"></span>'
        f"{safe(s.label)}{f' <b>{safe(s.words)}</b>' if s.words else ''}</span> "
        for s in segments
    )
    return f'<div style="display:flex;flex-wrap:wrap;line-height:1.6;font-size:13px">{keys}</div>'


def of_parts(shares: Mapping[str, float], words: Callable[[float], str] = percent, width: float = 1.0) -> list[Segment]:
    """The parts of a step in one order, their shares in words; all together `width` of a bar."""
    return [
        Segment(look.label, shares[name] * width, look.colour, words(shares[name]), bool(look.hatch))
        for name, look in PARTS.items()
        if shares.get(name, 0) > 0
    ]


def parts_legend(columns: Iterable[Mapping[str, float]]) -> str:
    """What the colours of several such bars mean."""
    drawn = {name: share for column in columns for name, share in column.items() if share >= _LEAST}
    return legend(of_parts(drawn, lambda _: "")) if drawn else ""


def caption(text: str) -> str:
    """A quiet line."""
    return f'<div style="font-size:12px;{QUIET};margin:6px 0 1px">{safe(text)}</div>'


def panel(svg: str, top: str, below: str) -> str:
    """A drawing with the words at its upper left and lower right corners."""
    under = f'<div style="font-size:11px;{QUIET};text-align:right">{safe(below)}</div>' if below else ""
    return f"{caption(top)}{svg}{under}"


def columns(
    left: Float64, right: Float64, stacks: Sequence[tuple[str, Float64]], top: float, height_px: int = 84
) -> str:
    """Stacked bars side by side: `left` and `right` are shares of the width, `stacks` a colour and heights each."""
    base = [0.0] * len(left)
    paths = []
    for colour, heights in stacks:
        path = []
        for i, high in enumerate(heights):
            lower, upper = base[i], min(top, base[i] + float(high))
            base[i] += float(high)
            if upper > lower:
                path.append(_box(float(left[i]), float(right[i]), 100 * (1 - upper / top), 100 * (upper - lower) / top))
        if path:
            paths.append(f'<path fill="{colour}" d="{"".join(path)}"/>')
    return _svg("".join(paths), height_px)


def line(x: Float64, y: Float64, colour: str, height_px: int = 48) -> str:
    """A curve; `x` and `y` are shares of the width and of the height, and a NaN breaks it."""
    return _svg(_path(x, y, colour), height_px)


def lines(curves: Iterable[tuple[Float64, Float64, str, bool]], height_px: int = 110) -> str:
    """Several curves on one ground: `x`, `y`, colour of each, and whether it is dashed."""
    return _svg("".join(_path(*curve) for curve in curves), height_px)


def _path(x: Float64, y: Float64, colour: str, dashed: bool = False) -> str:
    drawn, pen = [], "M"
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        if b != b:
            pen = "M"
            continue
        drawn.append(f"{pen}{1000 * a:.0f} {100 - 98 * b:.1f}")
        pen = "L"
    look = f'fill="none" stroke="{colour}" stroke-width="1.6" vector-effect="non-scaling-stroke"'
    look += ' style="stroke-dasharray:6 4"' if dashed else ""
    return f'<path {look} d="{"".join(drawn)}"/>'


def _box(left: float, right: float, top: float, height: float) -> str:
    wide = max(1000 * (right - left), 0.8)
    return f"M{1000 * left:.1f} {top:.1f}h{wide:.1f}v{height:.1f}h-{wide:.1f}z"


def _svg(inside: str, height_px: int) -> str:
    look = f"display:block;width:100%;height:{height_px}px;background:{_GROUND};border-radius:4px"
    return f'<svg viewBox="0 0 1000 100" preserveAspectRatio="none" style="{look}">{inside}</svg>'


def _fill(segment: Segment) -> str:
    ground = f"background-color:{segment.colour}"
    return f"{ground};background-image:{_HATCHED}" if segment.hatch else ground


def part_colour(name: str) -> str:
    """Of a part of the step; grey for what no trace divides."""
    return PARTS[name].colour if name in PARTS else GREY


def safe(text: str) -> str:
    """Text for an element or a quoted attribute: no control character, no markup."""
    return html.escape(plain(text), quote=True)


@cache
def static(name: str) -> str:
    """A style sheet, a template or a script of `views/static`."""
    return (PACKAGE_FOLDER / "views" / "static" / name).read_text(encoding="utf-8")
