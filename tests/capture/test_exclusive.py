"""Only one thread measures at a time, runs inside a run of the same thread excepted."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from torch import nn

import gpulab
from gpulab.capture import threads
from gpulab.errors import UsageError


def train(steps: int = 3) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 2)).mean().backward()
        optimizer.step()


def profiled() -> None:
    with gpulab.profile(save=False, live=False, show=False, trace=False):
        train()


def compared() -> None:
    gpulab.experiment(train, {"channels_last": True}, pairs=1, save=False, show=False)


def on_another_thread(work: Callable[[], None]) -> BaseException | None:
    """What it raises there."""
    with ThreadPoolExecutor(1, thread_name_prefix="other") as pool:
        return pool.submit(work).exception()


@pytest.mark.parametrize("work", [profiled, compared])
def test_a_second_thread_is_refused_and_may_come_later(work: Callable[[], None]) -> None:
    with gpulab.profile(save=False, live=False, show=False, trace=False) as first:
        refused = on_another_thread(work)
        train()
    assert isinstance(refused, UsageError) and "on the thread 'MainThread'" in str(refused)
    assert "\n" not in str(refused)
    assert len(first.run.steps) == 3, "the first is not disturbed"
    assert not isinstance(on_another_thread(work), UsageError)


def test_a_run_inside_a_run_of_the_same_thread_is_allowed() -> None:
    with gpulab.profile(save=False, live=False, show=False, trace=False) as outer:
        profiled()
        train()
    assert len(outer.run.steps) == 6


def test_the_place_is_free_again_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError), gpulab.profile(save=False, live=False, show=False, trace=False):
        raise ZeroDivisionError
    assert on_another_thread(profiled) is None
    with monkeypatch.context() as broken:
        broken.setattr("gpulab.capture.recorder.Sampler", None)
        with pytest.raises(TypeError):
            profiled()
    assert on_another_thread(profiled) is None


def test_a_thread_that_has_ended_holds_nothing() -> None:
    with ExitStack() as late:
        assert on_another_thread(lambda: late.enter_context(threads.measuring())) is None
        profiled()
