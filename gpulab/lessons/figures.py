"""Figures that explain: lanes of work over time, drawn from figures that the lesson gives, and labelled as a model.

And what all figures of the lessons share; and sliders, by which a model is turned by hand.


What the lessons' figures share: matplotlib's defaults for their length, and text that is shown as it is.
"""

from __future__ import annotations

import base64
import io
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from gpulab.formatting import percent, plural
from gpulab.views.wording import PARTS, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

Kind = Literal["compute", "load", "wait", "launch", "copy", "communicate"]

COLOURS: dict[Kind, str] = {  # those of the report, where it has the same thing
    "compute": PARTS["compute"].colour,
    "load": "#6C7A89",
    "wait": PARTS["data_wait"].colour,
    "launch": PARTS["launch"].colour,
    "copy": PARTS["memcpy"].colour,
    "communicate": PARTS["communication"].colour,
}
MEANINGS: dict[Kind, str] = {  # in a figure of steps
    "compute": "computing",
    "load": "loading a batch",
    "wait": "waiting",
    "launch": "launching a kernel",
    "copy": "copying",
    "communicate": "exchanging between devices",
}
STEP_UNITS = ("ms", "µs")  # in another unit a figure is no figure of steps
WIDTH_IN, LANE_IN, MARGIN_IN, LEGEND_IN = 8.0, 0.42, 0.95, 0.25
A_MODEL = "a model, not a measurement"

Setting = TypeVar("Setting", bound=Struct)


@contextmanager
def plot(
    width_in: float, height_in: float, title: str = "", x: str = "", y: str = "", *, note: str = "", bare: str = ""
) -> Iterator[tuple[Figure, Axes]]:
    """A figure to draw into, with these labels; `note`: above it at the right, `bare`: its sides without a line."""
    from matplotlib.figure import Figure

    with own_style():
        figure = Figure(figsize=(width_in, height_in), dpi=90, layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title, loc="left", size=10)
        axes.set_xlabel(x, size=9)
        axes.set_ylabel(y, size=9)
        if note:
            axes.text(1, 1.02, note, transform=axes.transAxes, ha="right", size=8, color=GREY)
        for side in bare.split():
            axes.spines[side].set_visible(False)
        yield figure, axes


class Block(Struct, frozen=True):
    """One piece of work in a lane; all times in the same unit."""

    start: float
    length: float
    kind: Kind
    label: str = ""

    @property
    def end(self) -> float:
        return self.start + self.length


class Lane(Struct):
    """What is done one piece after the other. `free`: when the last one ends."""

    blocks: list[Block] = field(default_factory=list)
    free: float = 0.0

    def add(self, length: float, kind: Kind, label: str = "", ready: float = 0.0) -> float:
        """Begin when it is `ready` and the one before has ended; gives the end."""
        start = max(ready, self.free)
        self.blocks.append(Block(start, length, kind, label))
        self.free = start + length
        return self.free

    def wait(self, until: float) -> None:
        """Do nothing up to then."""
        if until > self.free + 1e-9:
            self.add(until - self.free, "wait")


def draw_lanes(
    lanes: Sequence[tuple[str, Sequence[Block]]],
    title: str,
    *,
    unit: str = "ms",
    meanings: Mapping[Kind, str] | None = None,
) -> Figure:
    """A figure with one lane per row, from top to bottom; it says that it is a model, not a measurement.

    `meanings`: what the legend calls each colour, those without a word are left out; None: the usual words in a figure
    of steps, else no legend.
    """
    usual = MEANINGS if unit in STEP_UNITS else {}
    shown = _legend(lanes, usual if meanings is None else meanings)
    height_in = LANE_IN * len(lanes) + MARGIN_IN + (LEGEND_IN if shown else 0)
    with plot(WIDTH_IN, height_in, title, unit, note=A_MODEL, bare="top right left") as (figure, axes):
        for row, (_, blocks) in enumerate(lanes):
            for block in blocks:
                axes.broken_barh(
                    [(block.start, block.length)], (row - 0.36, 0.72), facecolors=COLOURS[block.kind], edgecolor="white"
                )
                if block.label:
                    colour = "white" if block.kind in ("compute", "load", "communicate") else "black"
                    middle = block.start + block.length / 2
                    axes.text(middle, row, block.label, ha="center", va="center", color=colour, size=8)
        axes.set_yticks(range(len(lanes)), [name for name, _ in lanes])
        axes.invert_yaxis()
        axes.tick_params(length=0, labelsize=9)
        if shown:
            figure.legend(
                handles=shown, loc="outside lower center", ncols=len(shown), frameon=False, fontsize=8, handlelength=1.2
            )
    return figure


def _legend(lanes: Sequence[tuple[str, Sequence[Block]]], meanings: Mapping[Kind, str]) -> list[Patch]:
    """A patch for each kind that the lanes have and that has a meaning, in the order of the colours."""
    from matplotlib.patches import Patch

    kinds = {block.kind for _, blocks in lanes for block in blocks}
    return [Patch(color=COLOURS[kind], label=meanings[kind]) for kind in COLOURS if kind in kinds & meanings.keys()]


def png(figure: Figure) -> bytes:
    """The figure as an image, as a notebook shows it."""
    with own_style(), io.BytesIO() as file:
        figure.savefig(file, format="png", facecolor="white")
        return file.getvalue()


def loading_lanes(load: float, compute: float, workers: int, steps: int = 4) -> list[tuple[str, list[Block]]]:
    """The lanes of a training whose batches take `load` each, computed on for `compute` each; 0 workers: in turn.

    Workers have a core each and make whole batches in turn; definitions.md, "Feeding".
    """
    training, *of_workers = lanes = [Lane() for _ in range(1 + workers)]
    for step in range(steps):
        loading = of_workers[step % workers] if workers else training
        training.wait(loading.add(load, "load", str(step)))
        training.add(compute, "compute", str(step))
    names = ["training", *(f"worker {number}" for number in range(1, 1 + workers))]
    return [(name, lane.blocks) for name, lane in zip(names, lanes, strict=True)]


class Loading(Struct, frozen=True):
    """A DataLoader: to load a batch, to compute on it, and worker processes."""

    load_ms: int = 30
    compute_ms: int = 10
    workers: int = 2

    @property
    def step_ms(self) -> float:
        """definitions.md, "Feeding", without handing over and with cores enough."""
        if not self.workers:
            return self.load_ms + self.compute_ms
        return max(self.compute_ms, self.load_ms / self.workers)


def draw_loading(setting: Loading) -> Figure:
    """The training and its workers over six steps."""
    lanes = loading_lanes(setting.load_ms, setting.compute_ms, setting.workers, steps=6)
    busy = setting.compute_ms / setting.step_ms
    per_step = f"{setting.step_ms:.0f} ms per step, the device computes {percent(busy)} of it"
    return draw_lanes(lanes, f"{plural(setting.workers, 'worker')}: {per_step}")


def turn_loading() -> ByHand | Figure:
    """Sliders for the model; without ipywidgets the drawing of the first setting."""
    sliders = {
        "workers": ("workers", 0, 6, 1),
        "load_ms": ("load ms", 1, 60, 1),
        "compute_ms": ("compute ms", 1, 60, 1),
    }
    return by_hand(draw_loading, Loading(), sliders)


class ByHand:
    """Sliders for a model. A page without a kernel, such as GitHub's, shows the drawing of the first setting."""

    def __init__(self, sliders: Any, first: Callable[[], Figure]) -> None:
        self.sliders = sliders
        self._first = first

    def __repr__(self) -> str:
        return "The model as the sliders have it at first. To turn it, run this cell in a notebook with widgets."

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        """A front end with widgets takes the sliders, every other one the image."""
        widget = self.sliders._repr_mimebundle_() if self.sliders._repr_mimebundle_ else {}
        image = base64.b64encode(png(self._first())).decode("ascii")
        return {**widget, "text/plain": repr(self), "image/png": image}


def by_hand(
    draw: Callable[[Setting], Figure], first: Setting, sliders: Mapping[str, tuple[Any, ...]]
) -> ByHand | Figure:
    """A model to be turned, from `first` on; without ipywidgets the drawing of that.

    `sliders`: by field of the setting its label, and of a number the least, the most and the step; of a text all words.
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

    def shown(**values: Any) -> None:
        display(draw(replace(first, **values)))  # type: ignore[no-untyped-call]

    controls = {name: control(getattr(first, name), *words) for name, words in sliders.items()}
    return ByHand(widgets.interactive(shown, **controls), lambda: draw(first))


FONT = "DejaVu Sans"  # comes with matplotlib, so that the picture is the same everywhere
GREY = "#555555"
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
    glyphs = (c if font.get_char_index(ord(c)) else _UNKNOWN_GLYPH for c in plain(text))
    return "".join(glyphs).replace("$", r"\$")


def ink_lines(text: str, width: int, most: int) -> list[str]:
    """Text wrapped to at most `most` lines of `width` characters; what does not fit is shown by an ellipsis."""
    return [ink(line) for line in textwrap.wrap(plain(text), width, max_lines=most, placeholder=" …")]
