"""Lesson 08: the same attention twice, operators under a roof, and the exercise."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from matplotlib.text import Text

from gpulab.lessons.fused_kernels import (
    OperatorUse,
    Peak,
    attention_lanes,
    draw_roofline,
    four_operators,
    operator_table,
    operators_of,
)


def test_flop_and_bytes_of_an_operator_are_counted() -> None:
    a, b = torch.ones(8, 4), torch.ones(4, 2)
    uses = {use.name: use for use in operators_of(lambda: torch.tanh(a @ b))}
    assert (uses["aten.mm"].flops, uses["aten.mm"].bytes) == (2 * 8 * 4 * 2, 4 * (32 + 8 + 16))
    assert (uses["aten.tanh"].flops, uses["aten.tanh"].bytes) == (16, 4 * 32)
    assert [use.name for use in operators_of(lambda: a.view(-1).t())] == [], "views move no numbers"
    assert Peak(100e9, 10e9).ridge == 10 and draw_roofline([], Peak(100e9, 10e9)).axes
    assert "40 %" in operator_table([used("mm", 0.4, 1.0, 1.0), used("add", 0.6, 1.0, 1.0)]).lines[1]


def used(name: str, share: float, intensity: float, gflops: float) -> OperatorUse:
    """In a step of a second."""
    flops = gflops * 1e9 * share
    return OperatorUse(f"aten.{name}", 1, flops, flops / intensity, share)


ROOFLINES = {
    "as shipped once": [
        used("bmm", 0.25, 7.1, 95),
        used("masked_fill", 0.19, 0.12, 1.3),
        used("mm", 0.12, 20.5, 140),
        used("_softmax_backward_data", 0.09, 0.083, 1.3),
        used("_softmax", 0.09, 0.12, 1.4),
        used("addmm", 0.06, 20.5, 150),
        used("div", 0.05, 0.12, 5.6),
        used("clone", 0.02, 0.12, 2.7),
    ],
    "all in one place": [used(f"operator_{i}", 0.05, 0.12, 1.3) for i in range(20)],
    "at the right edge": [used(f"{'long_' * 12}{i}", 0.2, 400 + i, 190) for i in range(5)],
    "in any order": [used("small", 0.01, 1.0, 1.0), used("mm", 0.5, 1.0, 1.1), used("bmm", 0.49, 1.0, 1.0)],
}


@pytest.mark.parametrize("uses", ROOFLINES.values(), ids=ROOFLINES)
def test_no_two_names_on_the_roofline_overlap(uses: list[OperatorUse]) -> None:
    figure = draw_roofline(uses, Peak(203e9, 40e9))
    figure.draw_without_rendering()  # to draw on the canvas of a bare figure does nothing
    axes = figure.axes[0]
    named = [use for use in uses if use.seconds >= 0.03]
    assert len(axes.texts) == min(len(named), 10)
    boxes = [Text.get_window_extent(text) for text in axes.texts]  # without the line to its dot
    for one, other in combinations(boxes, 2):
        assert not one.overlaps(other), (one, other)
    assert all(axes.bbox.x1 <= box.x0 and box.x1 <= figure.bbox.x1 + 1 for box in boxes), "beside the axes"
    assert all(figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1 for box in boxes)


def test_one_operator_moves_what_attention_cannot_do_without() -> None:
    four, one = attention_lanes(sequences=2, heads=3, tokens=32, size=8).values()
    numbers = 2 * 3 * 32 * 8 * 4 / 1e6
    moved = sum(block.length for block in four)
    assert sum(block.length for block in one) == pytest.approx(4 * numbers)
    assert moved == pytest.approx(4 * numbers + 6 * 2 * 3 * 32 * 32 * 4 / 1e6)
    assert [(a.start + a.length) for a in four[:-1]] == pytest.approx([b.start for b in four[1:]])
    q, k, v = (torch.randn(2, 3, 32, 8) for _ in range(3))
    counted = sum(use.bytes for use in operators_of(lambda: four_operators(q, k, v))) / 1e6
    assert moved <= counted <= 2 * moved, "PyTorch's own operators do that and a little more"
