"""Lesson 09: the model that is turned by hand, and two exercises."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpulab.lessons.host import ManyHeads
from gpulab.lessons.model_timeline import Setting, play

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
    for name in ("kernel_us", "launch_us", "data_us"):
        assert _end(replace(setting, **{name: getattr(setting, name) + 3})) >= total - 1e-6
    assert _end(replace(setting, graph=True)) <= total + 1e-6, "a graph launches less"


def _end(setting: Setting) -> float:
    played = play(setting, steps=2)
    return max(block.end for block in (*played.host, *played.device))


def test_stacked_heads_are_the_same_heads() -> None:
    torch.manual_seed(0)
    loop = ManyHeads(4, 8)
    stacked = ManyHeads(4, 8, stacked=True)
    stacked.load_state_dict(loop.state_dict())
    x = torch.randn(3, 4, 8)
    assert torch.allclose(loop(x), stacked(x), atol=1e-6)
