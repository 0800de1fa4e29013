"""The heights written beside bars that are cut off: inside the panel, and never one over another."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpulab.views.report.step_bars import CutLabel, cut_labels

SPAN = 10.0


def over(a: CutLabel, b: CutLabel) -> bool:
    return a.line == b.line and a.left < b.right and b.left < a.right


@given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(1, 300)), min_size=1, max_size=30))
def test_no_height_is_written_over_another(bars: list[tuple[float, float]]) -> None:
    widths, heights = (np.array(column) for column in zip(*bars, strict=True))
    right = np.cumsum(widths) / widths.sum() * SPAN
    labels = cut_labels(right - widths / widths.sum() * SPAN, right, heights, 100.0, SPAN)
    assert len(labels) == min(3, int((heights > 100).sum()))
    assert all(0 <= label.left < label.right <= SPAN + 1e-9 for label in labels)
    assert not any(over(a, b) for i, a in enumerate(labels) for b in labels[:i])


def test_neighbours_have_a_line_each() -> None:
    """Two bars of which the second stands late: its height goes to the left, where that of the first is."""
    left, right = np.array([7.0, 8.1]), np.array([7.1, 8.2])
    labels = cut_labels(left, right, np.array([252.0, 240.0]), 100.0, SPAN)
    assert [label.line for label in labels] == [0, 1]
