"""Figures that explain say what they are: a model or a formula, and no measurement."""

from __future__ import annotations

import re

import pytest
from matplotlib.figure import Figure

from gpulab.lessons.batch_size import draw_knee
from gpulab.lessons.lanes import draw_sweet_spot, draw_topologies
from gpulab.lessons.memory import draw_allocators, fragmented
from gpulab.lessons.profile_first import draw_limit
from gpulab.lessons.utilization import draw_sms


@pytest.mark.parametrize(
    "drawn",
    [
        draw_sweet_spot(),
        draw_topologies(0.1),
        draw_allocators(fragmented()),
        draw_knee(20),
        draw_limit(),
        draw_sms(),
    ],
)
def test_a_formula_is_no_measurement(drawn: Figure) -> None:
    axes = drawn.axes[0]
    said = [drawn.get_suptitle(), axes.get_title(loc="left"), *(text.get_text() for text in axes.texts)]
    assert re.search(
        r"a (model|formula)(, not a measurement| of a GPU with 8 SMs, not a measurement|$)", "\n".join(said), re.M
    )
