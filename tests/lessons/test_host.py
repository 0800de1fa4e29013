"""Lesson 09: the model that is turned by hand, and two exercises."""

from __future__ import annotations

import base64
import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpulab.lessons import host
from gpulab.lessons.figures import png
from gpulab.lessons.host import ManyHeads, as_given, check_distances
from gpulab.lessons.model_timeline import ByHand, Setting, draw, play, turn_by_hand
from gpulab.lessons.pairs import Speed

times_us = st.floats(0.5, 100)
SETTINGS = st.builds(
    Setting,
    kernels=st.integers(1, 30),
    kernel_us=times_us,
    launch_us=times_us,
    syncs=st.integers(0, 6),
    data_us=st.just(0.0) | times_us,
    graph=st.booleans(),
)


@given(SETTINGS)
def test_nothing_overlaps_and_nothing_runs_before_its_launch(setting: Setting) -> None:
    played = play(setting, steps=3)
    for lane in (played.host, played.device):
        for before, after in pairwise(lane):
            assert after.start >= before.start + before.length - 1e-6
    assert len(played.device) == 3 * setting.kernels
    assert 0 <= played.busy_fraction <= 1 + 1e-9
    if not setting.graph:
        launches = [block.start + block.length for block in played.host if block.kind == "launch"]
        assert all(k.start >= launch - 1e-6 for k, launch in zip(played.device, launches, strict=True))


@given(st.integers(1, 40), times_us, times_us)
def test_a_settled_step_is_the_slower_of_both(kernels: int, kernel_us: float, launch_us: float) -> None:
    played = play(Setting(kernels, kernel_us, launch_us), steps=40)
    assert played.step_us == pytest.approx(kernels * max(kernel_us, launch_us), rel=1e-6)


@settings(deadline=None)
@given(SETTINGS)
def test_more_of_anything_never_makes_a_step_shorter(setting: Setting) -> None:
    total = _end(setting)
    for change in (
        {"kernel_us": setting.kernel_us + 3},
        {"launch_us": setting.launch_us + 3},
        {"data_us": setting.data_us + 3},
    ):
        values = {name: getattr(setting, name) for name in Setting.__struct_fields__}
        assert _end(Setting(**(values | change))) >= total - 1e-6
    values = {name: getattr(setting, name) for name in Setting.__struct_fields__}
    assert _end(Setting(**(values | {"graph": True}))) <= total + 1e-6, "a graph launches less"


def _end(setting: Setting) -> float:
    played = play(setting, steps=2)
    return max(block.start + block.length for block in (*played.host, *played.device))


def test_the_model_says_that_it_is_one() -> None:
    texts = [text.get_text() for text in draw(Setting()).axes[0].texts]
    assert "a model, not a measurement" in texts
    with pytest.raises(ValueError, match="at least one kernel"):
        Setting(kernels=0)


def test_sliders_have_a_static_twin() -> None:
    turned = turn_by_hand()
    assert isinstance(turned, ByHand)
    children = turned.sliders.children
    assert {child.description for child in children if hasattr(child, "description")} >= {"kernel µs", "syncs"}
    bundle = turned._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert base64.b64decode(bundle["image/png"]) == png(draw(Setting())), "what a reader without a kernel sees"
    assert "interactive(" not in bundle["text/plain"] and "sliders" in bundle["text/plain"]
    for widget in (*children, turned.sliders):
        widget.close()


def test_other_models_have_a_static_twin_of_their_own() -> None:
    other = draw(Setting(kernels=3))
    bundle = ByHand(SimpleNamespace(_repr_mimebundle_=None), lambda: other)._repr_mimebundle_()
    assert base64.b64decode(bundle["image/png"]) == png(other)


def test_stacked_heads_are_the_same_heads() -> None:
    torch.manual_seed(0)
    loop = ManyHeads(4, 8)
    stacked = ManyHeads(4, 8, stacked=True)
    stacked.load_state_dict(loop.state_dict())
    x = torch.randn(3, 4, 8)
    assert torch.allclose(loop(x), stacked(x), atol=1e-6)


def large(points: Tensor, centre: Tensor) -> Tensor:
    return (points - centre).square().sum(-1).sqrt().mean(-1)


def by_samples(points: Tensor, centre: Tensor) -> Tensor:
    return torch.stack([(sample - centre).square().sum(-1).sqrt().mean() for sample in points])


def by_points(points: Tensor, centre: Tensor) -> Tensor:
    distances = [(point - centre).square().sum(-1).sqrt() for point in points.unbind(1)]
    return torch.stack(distances, 1).mean(1)


@pytest.mark.parametrize(("low", "high", "state"), [(9, 12, "right"), (0.9, 1.1, "wrong"), (0.9, 4.0, "undecided")])
def test_few_operators_are_judged_by_speed(
    monkeypatch: pytest.MonkeyPatch, low: float, high: float, state: str
) -> None:
    speed = Speed(math.sqrt(low * high), (low, high), 1.0, 1.0, 7)
    monkeypatch.setattr(host, "time_pairs", lambda before, after: speed)
    assert check_distances(large).state == state


@pytest.mark.parametrize("answer", [as_given, by_samples, by_points])
def test_a_loop_in_python_is_no_handful_of_operators(answer: Any) -> None:
    checked = check_distances(answer)
    assert checked.state == "wrong" and "is there still a loop in Python?" in checked.hint, checked
