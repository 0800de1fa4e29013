"""Figures for papers: what they show, in the user's own style, and no word cut off or over another."""

from __future__ import annotations

import io
import subprocess
import sys
import warnings
from itertools import combinations
from typing import Any, cast

import matplotlib as mpl
import matplotlib.style
import numpy as np
import pytest
from cycler import cycler
from matplotlib.backend_bases import RendererBase
from matplotlib.cbook import is_math_text
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from msgspec.structs import replace

from gpulab.analysis.facts import facts
from gpulab.errors import UsageError
from gpulab.run import Samples, Steps
from gpulab.tuning.record import Comparison, Experiment
from gpulab.views.comparison import Compared
from gpulab.views.run_figure import segments
from tests.support import comparisons as made
from tests.support import synthetic
from tests.views.every_view import CASES, hostile_comparison, noisy, nothing

RUNS = {**{name: case.run for name, case in CASES.items()}, "long": synthetic.long_case(2_000).run}
COMPARED: dict[str, Comparison | Experiment] = {
    "two": made.a_comparison(),
    "sweep": made.a_sweep(),
    "undecided": noisy(),
    "hostile_pair": hostile_comparison(),
}


def boxes_of(figure: Figure, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Bbox]]:
    """What is written, and where."""
    boxes: dict[Text, Bbox] = {}
    draw = Text.draw

    def noted(text: Text, *args: RendererBase) -> None:
        if text.get_visible() and text.get_text().strip():
            boxes[text] = text.get_window_extent()  # the last drawing counts: the layout takes one before
        draw(text, *args)

    monkeypatch.setattr(Text, "draw", noted)
    figure.savefig(io.BytesIO(), dpi=figure.dpi)
    return [(text.get_text(), box) for text, box in boxes.items()]


@pytest.mark.parametrize(
    ("name", "style"), [*((name, "default") for name in (*RUNS, *COMPARED)), ("gpu", "ggplot"), ("sweep", "ggplot")]
)
def test_no_word_is_cut_off_or_stands_over_another(name: str, style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with matplotlib.style.context(style), warnings.catch_warnings():
        warnings.simplefilter("ignore" if "hostile" in name else "error")  # the font may lack its glyphs
        figure = RUNS[name].plot() if name in RUNS else Compared(COMPARED[name]).plot()
        boxes = boxes_of(figure, monkeypatch)
    width, height = figure.get_size_inches() * figure.dpi
    assert len(boxes) > 5
    for text, box in boxes:
        assert box.x0 >= -1 and box.x1 <= width + 1 and box.y0 >= -1 and box.y1 <= height + 1, text
        assert not is_math_text(text)
    over = [(a, b) for (a, one), (b, other) in combinations(boxes, 2) if one.padded(-2).overlaps(other.padded(-2))]
    assert not over


def test_it_is_the_users_style_and_stays_so() -> None:
    """The colours of the parts are those of the report; pyplot knows nothing of the figure."""
    with mpl.rc_context({"axes.prop_cycle": cycler(color=["#123456"]), "figure.figsize": (5, 7), "font.size": 8}):
        before = dict(mpl.rcParams)
        figure = RUNS["gpu"].plot()
        assert dict(mpl.rcParams) == before
    assert tuple(figure.get_size_inches()) == (5, 7)
    bars = [bar for bar in figure.axes[0].patches if isinstance(bar, Rectangle)]
    parts = segments(facts(RUNS["gpu"]))
    assert [bar.get_facecolor() for bar in bars] == [to_rgba(part.colour) for part in parts]
    assert [bool(bar.get_hatch()) for bar in bars] == [part.hatch for part in parts]
    assert {line.get_color() for axes in figure.axes[2:] for line in axes.lines} == {"#123456"}
    assert cast("Any", figure)._repr_png_().startswith(b"\x89PNG")


def test_bars_are_as_long_as_the_shares_and_as_high_as_the_steps() -> None:
    typical, over_time = RUNS["cpu"].plot().axes[:2]
    widths = np.array([bar.get_width() for bar in typical.patches if isinstance(bar, Rectangle)])
    lefts = [bar.get_x() for bar in typical.patches if isinstance(bar, Rectangle)]
    assert sum(widths) == pytest.approx(1) and lefts == pytest.approx([*np.cumsum(widths) - widths])
    shares = [part.share for part in segments(facts(RUNS["cpu"]))]
    assert widths == pytest.approx(shares)
    tops = [bar.get_y() + bar.get_height() for bar in over_time.patches if isinstance(bar, Rectangle)]
    assert max(tops) == pytest.approx(RUNS["cpu"].steps.wall_ns.max() / 1e6) and over_time.get_ylabel() == "ms"


def test_a_comparison_has_a_row_for_each_setting_and_its_figures() -> None:
    shown = Compared(made.a_sweep())
    figure = shown.plot()
    (axes,) = figure.axes
    assert [t.get_text() for t in axes.get_yticklabels()] == [c.b.label for c in shown.comparisons]
    assert axes.get_xscale() == "log" and axes.get_xlabel() == "speedup vs. baseline, per sample (log scale)"
    middles = [container.lines[0].get_xdata()[0] for container in axes.containers if hasattr(container, "lines")]
    assert middles == [c.times_as_fast for c in shown.comparisons if c.times_as_fast]


@pytest.mark.parametrize("nothing_at_all", [True, False])
def test_where_there_is_nothing_to_plot_it_says_so(nothing_at_all: bool) -> None:
    run = replace(CASES["no_trace"].run, steps=Steps.empty(), samples=Samples(()))
    with pytest.raises(UsageError, match="There is nothing to plot"):
        run.plot() if nothing_at_all else Compared(nothing()).plot()


def test_nothing_imports_matplotlib_until_a_plot_is_asked_for() -> None:
    program = (
        "import sys; from tests.support import synthetic; from gpulab.views.report.report import Report;"
        "c = synthetic.cpu_case(); Report(c.facts, c.diagnosis).bundle();"
        "assert not {'matplotlib', 'torch', 'IPython'} & set(sys.modules);"
        "c.run.plot(); assert 'matplotlib.pyplot' not in sys.modules"
    )
    path = f"import sys; sys.path[:0] = {sys.path!r};"
    subprocess.run([sys.executable, "-c", path + program], check=True)
