"""Figures that explain: what their legend has, that models say so, and what a reader without a kernel sees of them."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from matplotlib.figure import Figure

from gpulab.lessons import bucket_timeline, model_timeline, pipeline_timeline, sharing_timeline
from gpulab.lessons.batch_size import draw_knee
from gpulab.lessons.bucket_timeline import Exchange
from gpulab.lessons.figures import (
    Block,
    ByHand,
    Kind,
    Loading,
    draw_lanes,
    draw_loading,
    loading_lanes,
    png,
    turn_loading,
)
from gpulab.lessons.memory import draw_allocators, fragmented
from gpulab.lessons.pipeline_timeline import Pipeline
from gpulab.lessons.profile_first import draw_limit
from gpulab.lessons.utilization import draw_sms

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


@pytest.mark.parametrize(
    ("turn", "drawn", "title"),
    [
        (model_timeline.turn_by_hand, model_timeline.draw(model_timeline.Setting()), ""),
        (
            sharing_timeline.turn_by_hand,
            sharing_timeline.draw(sharing_timeline.Setting()),
            "time slicing, 2 jobs: 2.0 times one alone; each at 100 % speed",
        ),
        (bucket_timeline.turn_exchange, bucket_timeline.draw_exchange(Exchange(buckets=4)), ""),
        (pipeline_timeline.turn_pipeline, pipeline_timeline.draw_pipeline(Pipeline()), ""),
        (turn_loading, draw_loading(Loading()), "2 workers: 15 ms per step, the device computes 67 % of it"),
    ],
)
def test_a_model_is_named_so_and_has_a_static_twin(turn: Callable[[], object], drawn: Figure, title: str) -> None:
    assert "a model, not a measurement" in [text.get_text() for text in drawn.axes[0].texts]
    assert title in drawn.axes[0].get_title(loc="left")
    turned = turn()
    assert isinstance(turned, ByHand)
    bundle = turned._repr_mimebundle_()
    assert base64.b64decode(bundle["image/png"]) == png(drawn), "what a reader without a kernel sees"
    assert "application/vnd.jupyter.widget-view+json" in bundle and "interactive(" not in bundle["text/plain"]
    assert len([child for child in turned.sliders.children if hasattr(child, "description")]) >= 2
    for widget in (*turned.sliders.children, turned.sliders):
        widget.close()


@pytest.mark.parametrize(
    "drawn",
    [
        bucket_timeline.draw_sweet_spot(),
        bucket_timeline.draw_topologies(0.1),
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


@pytest.mark.parametrize(
    ("setting", "wrong", "words"),
    [
        (model_timeline.Setting, [{"kernels": 0}], "at least one kernel"),
        (
            sharing_timeline.Setting,
            [{"jobs": 0}, {"busy_pct": 0}, {"fills_pct": 101}, {"way": "luck"}],
            "at least one job",
        ),
        (Exchange, [{"buckets": 0}, {"mb_per_s": 0.0}, {"latency_ms": -1.0}], r"bucket|negative"),
        (Pipeline, [{"stages": 0}, {"micro_batches": 0}, {"slowest": 0.0}], "at least one stage"),
    ],
)
def test_no_model_of_what_cannot_be(setting: Callable[..., object], wrong: list[dict[str, Any]], words: str) -> None:
    for values in wrong:
        with pytest.raises(ValueError, match=words):
            setting(**values)
