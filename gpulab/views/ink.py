"""Drawing with matplotlib without its global state: text that is shown as it is, and many rectangles at once."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from gpulab.run import Float64
from gpulab.views.words import plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FONT = "DejaVu Sans"  # comes with matplotlib, so that the picture is the same everywhere
GREY = "#555555"
SHADE = "#F3EEDD"
_UNKNOWN_GLYPH = "\u25a1"


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
    known = (c if font.get_char_index(ord(c)) else _UNKNOWN_GLYPH for c in plain(text))
    return "".join(known).replace("$", r"\$")


def ink_lines(text: str, width: int, most: int) -> list[str]:
    """Text wrapped to at most `most` lines of `width` characters; what does not fit is shown by an ellipsis."""
    return [ink(line) for line in textwrap.wrap(plain(text), width, max_lines=most, placeholder=" …")]


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
    axes.set_title(ink(title), loc="left", fontsize=10, fontweight="bold", pad=6, y=1.0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#999999")
    axes.tick_params(labelsize=8, color="#999999")


Dashes = Literal["-", "--", "-.", ":"]


@dataclass(frozen=True, slots=True)
class Key:
    """One entry of a legend: a swatch of a colour, a line where `dashes` is set, or only text without a colour."""

    label: str
    colour: str = ""
    hatch: str = ""
    dashes: Dashes | None = None


_LINE_IN, _ENTRY_IN, _SWATCH_IN, _SWATCH_HIGH_IN, _LABEL_IN = 0.135, 0.165, 0.17, 0.11, 0.31


def legend_beside(axes: Axes, keys: Sequence[Key], *, offset_in: float, title: str = "") -> None:
    """The legend in the free column right of a panel, placed by hand: matplotlib's own takes as long as the plot."""
    figure = cast("Figure", axes.figure)
    width_in, height_in = figure.get_size_inches()
    corner = axes.get_position()
    left_in, y_in = corner.x1 * width_in + offset_in, corner.y1 * height_in - _LINE_IN / 2
    if title:
        figure.text(left_in / width_in, y_in / height_in, title, fontsize=8, va="center_baseline", color=GREY)
        y_in -= _ENTRY_IN
    for key in keys:
        _swatch(figure, key, left_in / width_in, y_in / height_in)
        for line in key.label.split("\n"):
            x, y = (left_in + _LABEL_IN) / width_in, y_in / height_in
            figure.text(x, y, line, fontsize=8, va="center_baseline", color="black" if key.colour else GREY)
            y_in -= _LINE_IN
        y_in -= _ENTRY_IN - _LINE_IN


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
