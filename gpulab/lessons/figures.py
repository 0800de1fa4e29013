"""Figures that explain: lanes of work over time, drawn from figures that the lesson gives, and labelled as a model."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from gpulab.views.drawing import FONT, GREY, own_style
from gpulab.views.wording import PARTS

if TYPE_CHECKING:
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


class Block(Struct, frozen=True):
    """One piece of work in a lane; all times in the same unit."""

    start: float
    length: float
    kind: Kind
    label: str = ""


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
    from matplotlib.figure import Figure

    usual = MEANINGS if unit in STEP_UNITS else {}
    shown = _legend(lanes, usual if meanings is None else meanings)
    height_in = LANE_IN * len(lanes) + MARGIN_IN + (LEGEND_IN if shown else 0)
    with own_style():
        figure = Figure(figsize=(WIDTH_IN, height_in), dpi=90, layout="constrained")
        axes = figure.add_subplot()
        for row, (_, blocks) in enumerate(lanes):
            for block in blocks:
                axes.broken_barh(
                    [(block.start, block.length)], (row - 0.36, 0.72), facecolors=COLOURS[block.kind], edgecolor="white"
                )
                if block.label:
                    colour = "white" if block.kind in ("compute", "load", "communicate") else "black"
                    middle = block.start + block.length / 2
                    axes.text(middle, row, block.label, ha="center", va="center", color=colour, size=8, family=FONT)
        axes.set_yticks(range(len(lanes)), [name for name, _ in lanes])
        axes.invert_yaxis()
        axes.tick_params(length=0, labelsize=9)
        axes.set_xlabel(unit, size=9)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.set_title(title, loc="left", size=10, family=FONT)
        axes.text(1, 1.02, "a model, not a measurement", transform=axes.transAxes, ha="right", size=8, color=GREY)
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
    if workers == 0:
        blocks = []
        for step in range(steps):
            start = step * (load + compute)
            blocks += [Block(start, load, "load", str(step)), Block(start + load, compute, "compute", str(step))]
        return [("training", blocks)]
    names = ["training", *(f"worker {w + 1}" for w in range(workers))]
    lanes: list[tuple[str, list[Block]]] = [(name, []) for name in names]
    free = [0.0] * workers
    device_free = 0.0
    for step in range(steps):
        worker = step % workers
        ready = free[worker] + load
        lanes[1 + worker][1].append(Block(free[worker], load, "load", str(step)))
        free[worker] = ready
        if ready > device_free:
            lanes[0][1].append(Block(device_free, ready - device_free, "wait"))
        start = max(ready, device_free)
        lanes[0][1].append(Block(start, compute, "compute", str(step)))
        device_free = start + compute
    return lanes
