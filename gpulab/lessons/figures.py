"""Figures of the lessons: a frame with labels, rows of bars, and models with sliders.

A figure of a model or a formula says so in a note, so that nobody mistakes it for a measurement.
"""

from __future__ import annotations

import base64
import io
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from gpulab.formatting import percent
from gpulab.views.wording import PARTS, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FONT = "DejaVu Sans"  # comes with matplotlib, so that the picture is the same everywhere
_UNKNOWN_GLYPH = "\u25a1"
BLUE, ORANGE, GREEN = (PARTS[part].colour for part in ("compute", "data_wait", "communication"))
GREY, PALE, GRID = "#555555", "#BBBBBB", "#DDDDDD"
A_MODEL = "a model, not a measurement"
BARE = ("top", "right", "left")  # the sides without a line in a figure of rows

Setting = TypeVar("Setting", bound=Struct)


@contextmanager
def own_style() -> Iterator[None]:
    """Draw with matplotlib's defaults, whatever style the user has set, and restore the user's style."""
    import matplotlib as mpl

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mpl.MatplotlibDeprecationWarning)
        defaults = {k: v for k, v in mpl.rcParamsDefault.items() if not k.startswith("backend")}
        with mpl.rc_context(defaults):
            yield


def ink(text: str) -> str:
    """Text that matplotlib draws as is: no formula between dollar signs, no control character, no missing glyph."""
    from matplotlib import font_manager

    font = font_manager.get_font(font_manager.findfont(FONT))
    glyphs = (c if font.get_char_index(ord(c)) else _UNKNOWN_GLYPH for c in plain(text))
    return "".join(glyphs).replace("$", r"\$")


def ink_lines(text: str, width: int, most: int) -> list[str]:
    """Text wrapped to at most `most` lines of `width` characters; an ellipsis marks a cut."""
    return [ink(line) for line in textwrap.wrap(plain(text), width, max_lines=most, placeholder=" …")]


@contextmanager
def panels(count: int, width_in: float, height_in: float) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure with `count` axes side by side, in matplotlib's own style whatever the notebook has set."""
    from matplotlib.figure import Figure

    with own_style():
        figure = Figure(figsize=(width_in, height_in), dpi=90, layout="constrained")
        yield figure, [figure.add_subplot(1, count, place) for place in range(1, count + 1)]


@contextmanager
def plot(
    width_in: float,
    height_in: float,
    title: str = "",
    x: str = "",
    y: str = "",
    *,
    note: str = "",
    bare: Sequence[str] = (),
    log: Mapping[str, int] | None = None,
    ticks: Sequence[int] = (),
    legend: Mapping[str, Any] | None = None,
) -> Iterator[tuple[Figure, Axes]]:
    """A figure to draw into, with these labels; `note` is above it at the right, `bare` sides have no line.

    `log`: the base by axis, "x" or "y", and a grid; `ticks` of x, as plain numbers. `legend`: its position, as in
    `Axes.legend`; "outside" is below the axes.
    """
    with panels(1, width_in, height_in) as (figure, (axes,)):
        axes.set_title(title, loc="left", size=10)
        axes.set_xlabel(x, size=9)
        axes.set_ylabel(y, size=9)
        if note:
            axes.text(1, 1.02, note, transform=axes.transAxes, ha="right", size=8, color=GREY)
        for side in bare:
            axes.spines[side].set_visible(False)
        yield figure, axes
        for name, base in (log or {}).items():
            axis = getattr(axes, f"{name}axis")
            axis._set_axes_scale("log", base=base)
            axis.set_major_formatter("{x:g}")
        if log:
            axes.grid(color=GRID, lw=0.6, which="major")
        if ticks:
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        if legend is not None:
            outside = str(legend.get("loc", "")).startswith("outside")
            (figure if outside else axes).legend(**{"fontsize": 8, "frameon": False, **legend})


class Bar(Struct, frozen=True):
    """A part of a row, in the unit of its figure. `label` is drawn in it, in colour `ink`; `hatch`: it is uncertain."""

    start: float
    length: float
    colour: str
    label: str = ""
    ink: str = "white"
    hatch: str = ""


class Row(Struct, frozen=True):
    """A row of a figure, made of bars; `words` follow the last bar."""

    name: str
    bars: Sequence[Bar] = ()
    words: str = ""


def stacked(lengths: Iterable[tuple[float, str]], start: float = 0.0) -> list[Bar]:
    """One bar after the other, each by its length and colour."""
    bars: list[Bar] = []
    for length, colour in lengths:
        bars.append(Bar(bars[-1].start + bars[-1].length if bars else start, length, colour))
    return bars


def shortened(name: str, most: int) -> str:
    """A name cut to `most` letters."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def share_row(name: str, share: float | None, colour: str, why: str, *, whole: float = 1.0, hatch: str = "") -> Row:
    """A bar of a share, 0 to 1, on an axis up to `whole`, with its figure; without a share, `why` in its place."""
    if share is None:
        return Row(name, (), why)
    length, words = min(share, 1.0), percent(share)
    if length < 0.8:
        return Row(name, [Bar(0.0, whole * length, colour, hatch=hatch)], words)
    return Row(name, [Bar(0.0, whole * length, colour, words, "black" if hatch or colour == PALE else "white", hatch)])


def fill_rows(axes: Axes, rows: Sequence[Row], *, height: float = 0.72, size: float = 8) -> None:
    """Draw the rows, the first at the top."""
    for at, row in enumerate(rows):
        for bar in row.bars:
            axes.barh(at, bar.length, height, left=bar.start, color=bar.colour, hatch=bar.hatch, edgecolor="white")
            if bar.label:
                middle = bar.start + bar.length / 2
                axes.text(middle, at, bar.label, ha="center", va="center", color=bar.ink, size=size)
        if row.words:
            end = max((bar.start + bar.length for bar in row.bars), default=0.0)
            axes.annotate(row.words, (end, at), (4, 0), textcoords="offset points", va="center", size=size)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], size=9)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(length=0, labelsize=9)


def draw_rows(
    rows: Sequence[Row],
    title: str,
    x: str = "",
    *,
    note: str = "",
    legend: Mapping[str, str] | None = None,
    row_in: float = 0.42,
    size: float = 8,
) -> Figure:
    """A figure of rows; `legend`: the colour of each meaning."""
    from matplotlib.patches import Patch

    height_in = row_in * len(rows) + (1.2 if legend else 0.95)
    with plot(8, height_in, title, x, note=note, bare=BARE) as (figure, axes):
        fill_rows(axes, rows, size=size)
        if legend:
            patches = [Patch(color=colour, label=meaning) for meaning, colour in legend.items()]
            style = {"ncols": 4, "frameon": False, "fontsize": 8, "handlelength": 1.2}
            figure.legend(handles=patches, loc="outside lower center", **style)
    return figure


def png(figure: Figure) -> bytes:
    """The figure as a PNG image, as a notebook shows it."""
    with own_style(), io.BytesIO() as file:
        figure.savefig(file, format="png", facecolor="white")
        return file.getvalue()


class ByHand:
    """Sliders for a model. A page without a kernel, such as GitHub's, shows the drawing of the first setting."""

    def __init__(self, sliders: Any, first: Callable[[], Figure]) -> None:
        self.sliders = sliders
        self._first = first

    def __repr__(self) -> str:
        return "The model as the sliders have it at first. To turn it, run this cell in a notebook with widgets."

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        """A front end with widgets shows the sliders, every other front end the image."""
        widget = self.sliders._repr_mimebundle_() if self.sliders._repr_mimebundle_ else {}
        image = base64.b64encode(png(self._first())).decode("ascii")
        return {**widget, "text/plain": repr(self), "image/png": image}


def by_hand(
    draw: Callable[[Setting], Figure], first: Setting, sliders: Mapping[str, tuple[Any, ...]]
) -> ByHand | Figure:
    """A model with sliders, starting at `first`; without ipywidgets, only the drawing of `first`.

    `sliders`: for each field of the setting its label, and for a number its minimum, maximum and step, for a text all
    words.
    """
    try:
        import ipywidgets as widgets
    except ImportError:
        return draw(first)
    from IPython.display import display

    def control(value: object, label: str, *range_: Any) -> Any:
        if isinstance(value, bool):
            return widgets.ToggleButton(value, description=label)
        if isinstance(value, str):
            kind = widgets.ToggleButtons if len(range_) == 2 else widgets.Dropdown
            return kind(options=range_, value=value, description=label)
        kind = widgets.IntSlider if isinstance(value, int) else widgets.FloatSlider
        low, high, step = range_
        return kind(value=value, min=low, max=high, step=step, description=label, continuous_update=False)

    def redraw(**values: Any) -> None:
        display(draw(replace(first, **values)))  # type: ignore[no-untyped-call]

    controls = {name: control(getattr(first, name), *words) for name, words in sliders.items()}
    return ByHand(widgets.interactive(redraw, **controls), lambda: draw(first))
