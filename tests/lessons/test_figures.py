"""Figures that explain: a legend of what the lanes have, and nothing of what they have not."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gpulab.lessons.figures import Block, Kind, draw_lanes, loading_lanes

WAITS = [("training", [Block(0, 1, "wait"), Block(1, 1, "compute")])]


@pytest.mark.parametrize(
    ("unit", "meanings", "legend"),
    [
        ("ms", None, ["computing", "waiting"]),
        ("seconds", None, []),
        ("seconds", {"wait": "a slow trial", "load": "not there"}, ["a slow trial"]),
        ("ms", {}, []),
    ],
)
def test_the_legend_has_the_colours_of_the_lanes(
    unit: str, meanings: Mapping[Kind, str] | None, legend: list[str]
) -> None:
    figure = draw_lanes(WAITS, "a step", unit=unit, meanings=meanings)
    assert [text.get_text() for one in figure.legends for text in one.get_texts()] == legend


def test_without_workers_nothing_waits() -> None:
    alone = draw_lanes(loading_lanes(load=30, compute=10, workers=0), "alone")
    assert [text.get_text() for text in alone.legends[0].get_texts()] == ["computing", "loading a batch"]
    assert "a model, not a measurement" in [text.get_text() for text in alone.axes[0].texts]
