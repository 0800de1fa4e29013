"""A chart of both runs as data, so that what is saved as SVG and what a live bench draws with a cursor are the same."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from gpulab.run import Float64
from gpulab.views import html_bars


class Line(Struct, frozen=True):
    """A NaN breaks it. Of a stacked chart: from each x on that height, on top of the lines before it."""

    label: str
    colour: str
    x: Float64
    y: Float64
    dashed: bool = False  # so that one below it is seen where both are equal


class Chart(Struct, frozen=True):
    """Lines over an axis from 0 to `x_end`; charts with one `x_unit` share their cursor."""

    title: str
    below: str  # at the right end of the axis
    x_unit: str
    x_end: float
    unit: str
    low: float
    top: float
    lines: tuple[Line, ...]
    stacked: bool = False
    height_px: int = 110

    def html(self) -> str:
        """As SVG; a bench that lives draws in its place, for it knows the charts in their order."""
        return f'<div class="gp-chart">{html_bars.panel(self._svg(), self.title, self.below)}</div>'

    def _svg(self) -> str:
        if self.stacked:
            edges = self.lines[0].x / self.x_end
            stacks = [(line.colour, line.y[:-1]) for line in self.lines]
            return html_bars.columns(edges[:-1], edges[1:], stacks, self.top, self.height_px)
        high = self.top - self.low
        curves = [
            (line.x / self.x_end, (line.y - self.low) / high if high else line.y * 0 + 0.5, line.colour, line.dashed)
            for line in self.lines
        ]
        return html_bars.lines(curves, self.height_px)

    def data(self) -> dict[str, object]:
        """For the front end."""
        return {
            "xUnit": self.x_unit,
            "xEnd": self.x_end,
            "unit": self.unit,
            "low": self.low,
            "top": self.top,
            "stacked": self.stacked,
            "lines": [
                {
                    "label": line.label,
                    "colour": line.colour,
                    "dashed": line.dashed,
                    "x": _short(line.x, 7),
                    "y": _short(line.y, 4),
                }
                for line in self.lines
            ],
        }


def _short(column: Float64, digits: int) -> list[float | None]:
    return [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in column.tolist()]
