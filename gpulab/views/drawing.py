"""Drawing with matplotlib without its global state: text that is shown as it is, and many rectangles at once."""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
from msgspec import Struct

from gpulab.diagnosis.headline import Headline
from gpulab.run import Float64
from gpulab.views.wording import level_colour, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# In points. JupyterLab shows 1,100 pixels at about nine tenths: 10 points are then as high as its own text.
SMALL_PT, TITLE_PT = 10.0, 12.0
FONT = "DejaVu Sans"  # comes with matplotlib, so that the picture is the same everywhere
GREY = "#555555"
SHADE = "#F3EEDD"
WIDTH_IN, DPI = 11.0, 100
_UNKNOWN_GLYPH = "\u25a1"
_LEADING = 1.45 / 72  # inches per point of text size

Line = tuple[str, float, str, str]  # text, points, weight, colour


@contextmanager
def own_style() -> Iterator[None]:
    """Draw with matplotlib's defaults, whatever style the user has set, and put theirs back."""
    import matplotlib as mpl

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mpl.MatplotlibDeprecationWarning)
        defaults = {k: v for k, v in mpl.rcParamsDefault.items() if not k.startswith("backend")}
        with mpl.rc_context(defaults):
            yield


def ink(text: str) -> str:
    """Text as matplotlib shall draw it: no formula between dollar signs, no control character, no missing glyph."""
    from matplotlib import font_manager

    font = font_manager.get_font(font_manager.findfont(FONT))
    glyphs = (c if font.get_char_index(ord(c)) else _UNKNOWN_GLYPH for c in plain(text))
    return "".join(glyphs).replace("$", r"\$")


def ink_lines(text: str, width: int, most: int) -> list[str]:
    """Text wrapped to at most `most` lines of `width` characters; what does not fit is shown by an ellipsis."""
    return [ink(line) for line in textwrap.wrap(plain(text), width, max_lines=most, placeholder=" …")]


def picture(lines: Sequence[Line], height_in: float, fill: Callable[[Figure, float], None]) -> bytes:
    """A figure of that height as PNG: the title lines, and below them what `fill` draws."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with own_style():
        figure = Figure(figsize=(WIDTH_IN, round(height_in, 2)), dpi=DPI, facecolor="white")
        canvas = FigureCanvasAgg(figure)
        fill(figure, _write_title(figure, lines))
        png = io.BytesIO()
        canvas.print_png(png, pil_kwargs={"compress_level": 2})  # type: ignore[no-untyped-call]
    return png.getvalue()


def title_lines(headline: Headline, opening: str) -> list[Line]:
    """The headline, its evidence and what was run."""
    return [
        *((line, 15.0, "bold", level_colour(headline.level)) for line in ink_lines(headline.sentence, 84, 3)),
        *((line, 11.5, "normal", "black") for line in ink_lines(headline.evidence, 108, 2)),
        *((line, SMALL_PT, "normal", GREY) for line in ink_lines(f"gpulab · {opening}", 125, 2)),
    ]


def title_height_in(lines: Sequence[Line]) -> float:
    """The room that the title takes."""
    return 0.2 + sum(points * _LEADING for _, points, _, _ in lines)


def _write_title(figure: Figure, lines: Sequence[Line]) -> float:
    """Writes the lines; returns where the panels may begin, in inches from the bottom."""
    height_in = float(figure.get_figheight())
    y = height_in - 0.15
    for text, points, weight, colour in lines:
        figure.text(0.25 / WIDTH_IN, y / height_in, text, fontsize=points, fontweight=weight, color=colour, va="top")
        y -= points * _LEADING
    return y - 0.05


def place(figure: Figure, left_in: float, bottom_in: float, width_in: float, height_in: float) -> Axes:
    """A panel at a place in inches from the lower left corner."""
    wide, high = figure.get_size_inches()
    return figure.add_axes((left_in / wide, bottom_in / high, width_in / wide, height_in / high))


def say(axes: Axes, sentence: str, *, width: int = 56, middle: float = 0.6) -> None:
    """In place of a panel, why it is empty; `middle` is the share of its height at which the sentence stands."""
    axes.set_axis_off()
    text = "\n".join(ink_lines(sentence, width, 4))
    axes.text(0, middle, text, transform=axes.transAxes, fontsize=SMALL_PT, color=GREY, va="center")


def rectangles(
    axes: Axes,
    left: Float64,
    right: Float64,
    bottom: Float64,
    top: Float64,
    colour: str,
    *,
    hatch: str = "",
    edge: float = 0.0,
) -> None:
    """One collection of rectangles; `edge` is the width of the white line between neighbours, in points."""
    from matplotlib.collections import PolyCollection

    corners = np.stack([left, bottom, left, top, right, top, right, bottom], axis=1).reshape(-1, 4, 2)
    line = "white" if hatch or edge else "none"
    axes.add_collection(
        PolyCollection(list(corners), facecolors=colour, edgecolors=line, linewidths=edge, hatch=hatch), autolim=False
    )


def frame(axes: Axes, title: str) -> None:
    """A panel's title on the left, quiet axes, no box."""
    axes.set_title(ink(title), loc="left", fontsize=TITLE_PT, fontweight="bold", pad=6, y=1.0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#999999")
    axes.tick_params(labelsize=SMALL_PT, color="#999999")


Dashes = Literal["-", "--", "-.", ":"]


class Key(Struct, frozen=True):
    """One entry of a legend: a swatch of a colour, a line where `dashes` is set, or only text without a colour."""

    label: str
    colour: str = ""
    hatch: str = ""
    dashes: Dashes | None = None


_LINE_IN, _ENTRY_IN, _SWATCH_IN, _SWATCH_HIGH_IN, _LABEL_IN = 0.165, 0.195, 0.18, 0.13, 0.32


def legend_beside(axes: Axes, keys: Sequence[Key], *, offset_in: float, spare_in: float, title: str = "") -> None:
    """The legend in the free column right of a panel, placed by hand: matplotlib's own takes as long as the plot.

    Long ones go on for `spare_in` below the panel, and then close up.
    """
    figure = cast("Figure", axes.figure)
    width_in, height_in = figure.get_size_inches()
    corner = axes.get_position()
    wished_in = sum(_ENTRY_IN + _LINE_IN * key.label.count("\n") for key in keys) + (_ENTRY_IN if title else 0)
    closeness = min(1.0, (corner.height * height_in + spare_in) / max(wished_in, _ENTRY_IN))
    line_in, entry_in = closeness * _LINE_IN, closeness * _ENTRY_IN
    left_in, y_in = corner.x1 * width_in + offset_in, corner.y1 * height_in - line_in / 2
    if title:
        figure.text(left_in / width_in, y_in / height_in, title, fontsize=SMALL_PT, va="center_baseline", color=GREY)
        y_in -= entry_in
    for key in keys:
        _swatch(figure, key, left_in / width_in, y_in / height_in)
        for line in key.label.split("\n"):
            x, y = (left_in + _LABEL_IN) / width_in, y_in / height_in
            colour = "black" if key.colour else GREY
            figure.text(x, y, line, fontsize=SMALL_PT, va="center_baseline", color=colour)
            y_in -= line_in
        y_in -= entry_in - line_in


def _swatch(figure: Figure, key: Key, left: float, middle: float) -> None:
    """What a label belongs to; positions in figure widths and heights."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    width, height = _SWATCH_IN / figure.get_figwidth(), _SWATCH_HIGH_IN / figure.get_figheight()
    if key.dashes:
        right = left + 1.3 * width
        line = Line2D([left, right], [middle, middle], color=key.colour, linestyle=key.dashes, linewidth=1.4)
        line.set_transform(figure.transFigure)
        figure.add_artist(line)
    elif key.colour:
        box = Rectangle(
            (left, middle - height / 2), width, height, facecolor=key.colour, edgecolor="white", linewidth=0
        )
        box.set_hatch(key.hatch)
        box.set_transform(figure.transFigure)
        figure.add_artist(box)
