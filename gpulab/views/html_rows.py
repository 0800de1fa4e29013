"""Pictures as HTML, one row per thing: its name and figures in a line, and its bar below them in the full width.

No figure stands on a bar or beside its end, so none crosses an edge, at whatever width. Only elements with inline
styles, which a notebook keeps even of outputs that it does not trust; no text has a colour of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from gpulab.views.html_bars import QUIET, safe
from gpulab.views.interval_places import FactorAxis, labels

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
        if axis.low <= point <= axis.high and all(_apart(mark, other) for other in marks):
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


def _apart(a: Piece, b: Piece) -> bool:
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
