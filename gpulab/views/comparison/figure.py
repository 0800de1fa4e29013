"""The picture of a comparison: both steps, the speeds with their noise, the losses and the device, in one PNG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpulab.tuning.compare.headline import comparison_headline
from gpulab.tuning.record import Comparison
from gpulab.views.comparison import figure_panels as panels
from gpulab.views.comparison.sections import never_ran, opening
from gpulab.views.drawing import WIDTH_IN, Line, picture, place, title_height_in, title_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEFT_IN, _RIGHT_IN = 1.75, 0.35  # margins; the labels of bars need the left one
_HALF_IN = 4.0  # one of two panels beside each other
_BARS_IN, _PANEL_IN, _DEVICE_IN = 1.15, 2.0, 1.35
_ABOVE_IN, _BELOW_IN = 0.42, 0.62
_BAR_WIDTH_IN = 6.2


def draw(comparison: Comparison) -> bytes:
    """The picture as PNG, 1100 pixels wide. Main thread only."""
    lines = title_lines(comparison_headline(comparison), opening(comparison))
    if never_ran(comparison):
        return title_only(lines)
    with_device = panels.has_curves(comparison)
    heights = [_BARS_IN, _PANEL_IN, *([_DEVICE_IN] if with_device else [])]
    total_in = title_height_in(lines) + sum(_ABOVE_IN + height + _BELOW_IN for height in heights) - 0.1

    def fill(figure: Figure, top_in: float) -> None:
        y = top_in - _ABOVE_IN - _BARS_IN
        panels.bars(place(figure, _LEFT_IN, y, _BAR_WIDTH_IN, _BARS_IN), comparison)
        y -= _BELOW_IN + _ABOVE_IN + _PANEL_IN
        right_in = WIDTH_IN - _RIGHT_IN - _HALF_IN
        left_in = _LEFT_IN - 0.75
        wide_in = _HALF_IN + 0.2 if comparison.loss is not None else WIDTH_IN - _RIGHT_IN - left_in
        panels.speeds(place(figure, left_in, y, wide_in, _PANEL_IN), comparison)
        if comparison.loss is not None:
            panels.losses(place(figure, right_in, y, _HALF_IN, _PANEL_IN), comparison)
        if with_device:
            y -= _BELOW_IN + _ABOVE_IN + _DEVICE_IN
            panels.working(place(figure, left_in, y, _HALF_IN + 0.2, _DEVICE_IN), comparison)
            panels.memory(place(figure, right_in, y, _HALF_IN, _DEVICE_IN), comparison)

    return picture(lines, total_in, fill)


def title_only(lines: Sequence[Line]) -> bytes:
    """Where there is nothing to draw."""
    return picture(lines, title_height_in(lines), lambda figure, top_in: None)
