"""The picture of a run: the headline, the steps, the device and one step from within, in one PNG that stands alone.

Uses matplotlib's `Figure` objects only: no pyplot, no display, and the user's settings are as before. Main thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from gpulab.analysis.facts import Facts
from gpulab.diagnosis.headline import Headline
from gpulab.views.drawing import DPI, SMALL_PT, picture, place, say, title_height_in, title_lines
from gpulab.views.report import device_curves, step_bars, step_zoom
from gpulab.views.report.sections import opening, why_no_breakdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEIGHT_IN = 8.8
_LEFT_IN, _PANEL_IN = 1.45, 6.45
_MOST_STRETCH = 1.25  # with few panels the picture is less high rather than its panels odd
_STRIP_IN = 0.4  # a panel that only says why it is empty
_TITLE_IN, _AXIS_IN, _TICKS_IN, _BETWEEN_IN, _BELOW_TITLE_IN = 0.36, 0.5, 0.12, 0.16, 0.05


class _Panel(Struct, frozen=True):
    """A panel to place: its wish for height, the room under it, and how it is drawn."""

    height_in: float
    below_in: float
    draw: Callable[[Axes], None]
    stretches: bool = True

    @property
    def above_in(self) -> float:
        return _TITLE_IN if self.stretches else 0.0


def draw(facts: Facts, headline: Headline | None) -> bytes:
    """The picture as PNG, 1100 pixels wide and up to 880 high; without a headline it needs a text beside it."""
    lines = title_lines(headline, opening(facts)) if headline else []
    panels = [_steps_panel(facts), _device_panel(facts), _zoom_panel(facts)]
    fixed_in = title_height_in(lines) + _BELOW_TITLE_IN
    fixed_in += sum(p.above_in + p.below_in + (0 if p.stretches else p.height_in) for p in panels)
    wished_in = sum(p.height_in for p in panels if p.stretches)
    stretch = min(_MOST_STRETCH, (HEIGHT_IN - fixed_in) / wished_in) if wished_in else 1.0
    height_in = fixed_in + stretch * wished_in
    return picture(lines, height_in, lambda figure, top_in: _place(figure, panels, stretch, top_in - _BELOW_TITLE_IN))


def _place(figure: Figure, panels: list[_Panel], stretch: float, top_in: float) -> None:
    """The panels from top to bottom."""
    y = top_in
    for panel in panels:
        height = panel.height_in * (stretch if panel.stretches else 1)
        y -= panel.above_in + height
        panel.draw(place(figure, _LEFT_IN, y, _PANEL_IN, height))
        y -= panel.below_in


def _steps_panel(facts: Facts) -> _Panel:
    if not len(facts.run.steps):
        return _sentence("No step was found: there are no bars to draw.")
    alone = not any(device_curves.shown(facts))

    def draw_steps(axes: Axes) -> None:
        seconds_per_unit = _time_axis(axes, facts, labelled=alone)
        step_bars.shade_profiled(axes, facts, seconds_per_unit, name=True)
        step_bars.draw(axes, facts, seconds_per_unit)

    return _Panel(2.5, _BETWEEN_IN + (_AXIS_IN if alone else _TICKS_IN), draw_steps)


def _device_panel(facts: Facts) -> _Panel:
    if not any(device_curves.shown(facts)):
        return _sentence(device_curves.why_none(facts))

    def draw_device(axes: Axes) -> None:
        seconds_per_unit = _time_axis(axes, facts, labelled=True)
        step_bars.shade_profiled(axes, facts, seconds_per_unit)
        device_curves.draw(axes, facts, seconds_per_unit)

    return _Panel(1.5, _BETWEEN_IN + _AXIS_IN, draw_device)


def _zoom_panel(facts: Facts) -> _Panel:
    account, timeline = facts.breakdown, facts.run.timeline
    if account is None or timeline is None:
        return _sentence(f"No view into a step: {why_no_breakdown(facts)}.")
    zoom = step_zoom.Zoom.into(timeline, account, facts.run.device.kind)
    return _Panel(max(0.28 * zoom.rows, 1.2), _AXIS_IN + 0.05, lambda axes: zoom.draw(axes, _PANEL_IN * DPI))


def _time_axis(axes: Axes, facts: Facts, *, labelled: bool) -> float:
    """The whole run from left to right; returns the seconds per unit of the axis."""
    seconds_per_unit, unit = (60.0, "min") if facts.run.wall_ns > 600e9 else (1.0, "s")
    axes.set_xlim(0, max(facts.run.wall_ns, 1) / 1e9 / seconds_per_unit)
    axes.set_autoscalex_on(False)
    axes.tick_params(labelbottom=labelled)
    if labelled:
        axes.set_xlabel(f"time since the start of the run ({unit})", fontsize=SMALL_PT)
    return seconds_per_unit


def _sentence(sentence: str) -> _Panel:
    """A strip that says why there is no panel."""
    return _Panel(_STRIP_IN, _BETWEEN_IN, lambda axes: say(axes, sentence, width=100, middle=0.5), stretches=False)
