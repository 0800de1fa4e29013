"""Curves of both sides as HTML: their losses by step, and how busy the device was in the profiled run of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpulab.formatting import duration
from gpulab.run import Float64, Series
from gpulab.tuning.record import LossComparison, Side
from gpulab.views import curves, html_bars
from gpulab.views.html_rows import A_COLOUR, B_COLOUR, key, picture
from gpulab.views.wording import plain

_LOSS_POINTS = 300


def losses(loss: LossComparison) -> str:
    """Both curves over the steps; empty where neither has a figure."""
    both = [np.asarray(curve, np.float64) for curve in (loss.a, loss.b)]
    finite = np.concatenate([curve[np.isfinite(curve)] for curve in both])
    if not len(finite):
        return ""
    low, high = float(finite.min()), float(finite.max())
    longest = max(len(curve) for curve in both)
    lines = [(_along(curve, longest), _within(curve, low, high), colour) for curve, colour in
             zip(both, (A_COLOUR, B_COLOUR), strict=True)]  # fmt: skip
    title = f"Loss by step, from {low:.4g} to {high:.4g}"
    return picture(html_bars.panel(html_bars.lines(lines), title, f"step {longest:,}"), _of_sides())


def device_curves(a: Side, b: Side) -> str:
    """How busy the device was in the profiled run of each; empty where that was read of neither."""
    for kind in ("gpu_utilization_pct", "cpu_pct"):
        readings = [(side.facts.run.samples.get(kind), colour) for side, colour in ((a, A_COLOUR), (b, B_COLOUR))
                    if side.facts is not None]  # fmt: skip
        shown = [(series, colour) for series, colour in readings if series is not None and curves.has_readings(series)]
        if shown:
            return _over_time(shown)
    return ""


def _over_time(shown: Sequence[tuple[Series, str]]) -> str:
    end_ns = max(float(series.t_ns[-1]) for series, _ in shown) or 1.0
    top = max(100.0, curves.highest([series for series, _ in shown]))
    lines = []
    for series, colour in shown:
        t_ns, _, mean, _ = curves.at_most(series, _LOSS_POINTS)
        lines.append((t_ns / end_ns, mean / top, colour))
    title = f"{plain(shown[0][0].label)}, 0 to {top:.0f} %, in one profiled run of each"
    return picture(html_bars.panel(html_bars.lines(lines), title, duration(end_ns / 1e3)), _of_sides())


def _of_sides() -> str:
    return key([(A_COLOUR, "A"), (B_COLOUR, "B")])


def _along(curve: Float64, longest: int) -> Float64:
    return np.arange(len(curve), dtype=np.float64) / max(longest - 1, 1)


def _within(curve: Float64, low: float, high: float) -> Float64:
    values = np.where(np.isfinite(curve), curve, np.nan)
    return (values - low) / (high - low) if high > low else values * 0 + 0.5
