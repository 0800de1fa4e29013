"""Pictures as HTML: bars and lines in the colours of what they show, on whatever ground and in whatever font is there.

No text has a colour of its own, so each can be read on a light and on a dark ground; the width is that of the page.
Bars are elements with inline styles, which a notebook keeps even of outputs that it does not trust; lines and the bars
of many steps are inline SVG, which it then leaves out.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

from msgspec import Struct

from gpulab.formatting import percent
from gpulab.run import Float64
from gpulab.user_code import PACKAGE_FOLDER
from gpulab.views.wording import PARTS, plain

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
