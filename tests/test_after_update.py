"""What a loop does once the parameters are updated, and when that is: also where a closure trains inside the update."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from made_timelines import BACKWARD, MAIN, Span, timeline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gpulab
from gpulab.analysis.after_update import after_update
from gpulab.analysis.facts import facts
from gpulab.analysis.updates import step_times, update_times, zero_times
from gpulab.diagnosis.finding import Diagnosis
from gpulab.run import Category, Run

STEP, ZERO = "Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"
MARK = Category.USER_ANNOTATION


def profiled(before: Callable[[], object], after: Callable[[], object], epochs: int = 6) -> Run:
    """A loop on the CPU that does something before its backward pass, and something after its update."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8)
    with gpulab.profile(show=False, save=False, device="cpu") as p:
        for _ in range(epochs):
            for (x,) in loader:
                loss = model(x).sum()
                before()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                after()
    return p.run


def rest() -> None:
    time.sleep(0.02)


def nothing() -> None:
    pass


def logging(diagnosis: Diagnosis) -> list[str]:
    return [f.summary for f in diagnosis.findings if f.key == "logging_or_eval"]


def test_what_follows_the_update_of_each_step_is_told_with_its_line_and_its_gain() -> None:
    found = gpulab.diagnose(profiled(nothing, rest))
    first = found.first
    assert first.key == "logging_or_eval" and "after it has updated the parameters" in first.summary
    assert "time.sleep(0.02)" in first.source_line
    assert first.prediction is not None and first.prediction.ratio is not None and first.prediction.ratio < 0.5
    assert (first.recoverable_us_per_step or 0) > 0.5 * (found.step_us or 0)


def test_what_comes_before_the_backward_pass_may_be_training() -> None:
    run = profiled(rest, nothing)
    known = facts(run)
    assert known.breakdown is not None and known.optimizer is not None
    tails = after_update(run, known.breakdown, known.optimizer)
    assert not any("after it has updated" in words for words in logging(gpulab.diagnose(run)))
    assert (tails[:, 1] - tails[:, 0]).sum() < 0.5 * sum(s.end_ns - s.start_ns for s in known.breakdown.steps)


def test_a_backward_pass_after_the_update_is_training() -> None:
    other = nn.Linear(8, 1)

    def second() -> None:
        rest()
        other(torch.randn(4, 8)).sum().backward()  # whose update comes in another step

    run = profiled(nothing, second)
    known = facts(run)
    assert known.breakdown is not None and known.optimizer is not None
    assert not len(after_update(run, known.breakdown, known.optimizer))
    assert not logging(gpulab.diagnose(run))


def test_an_update_begins_where_the_passes_of_its_closure_end() -> None:
    spans = [
        Span(STEP, MARK, MAIN, 0, 100),
        Span(ZERO, MARK, MAIN, 5, 5),
        Span("aten::mm", Category.CPU_OP, MAIN, 12, 20),
        Span("autograd::engine::evaluate_function: MmBackward0", Category.CPU_OP, BACKWARD, 40, 30),
        Span("aten::_fused_sgd_", Category.CPU_OP, MAIN, 75, 20),
        Span(STEP, MARK, MAIN, 200, 50),
    ]
    found = timeline(spans)
    assert step_times(found).tolist() == [[70, 100], [200, 250]]
    assert zero_times(found).tolist() == [[5, 10]]
    assert update_times(found).tolist() == [[5, 10], [70, 100], [200, 250]]


@pytest.mark.parametrize("closure", [False, True])
def test_what_a_closure_computes_is_not_the_optimizers(closure: bool) -> None:
    """As Lightning trains: its passes run inside Optimizer.step."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.randn(2048, 64)), batch_size=256)

    def passes(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        y = model(x).repeat(1, 32)
        for _ in range(6):
            y = torch.tanh(0.9 * y)
        loss: torch.Tensor = y.sum()
        loss.backward()
        return loss

    with gpulab.profile(show=False, save=False, device="cpu") as p:
        for _ in range(5):
            for (x,) in loader:
                if closure:
                    optimizer.step(lambda x=x: passes(x))  # type: ignore[misc]
                else:
                    passes(x)
                    optimizer.step()
    known = facts(p.run)
    assert known.breakdown is not None
    parts = np.array([[s.parts_ns["compute"], s.parts_ns["optimizer"]] for s in known.breakdown.steps])
    assert (parts[:, 1] < parts[:, 0]).all()
    keys = [f.key for f in gpulab.diagnose(p.run).findings]
    assert "memory_bound_ops" in keys
