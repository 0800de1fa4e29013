"""Python code of the user's that calls PyTorch for single numbers, beside a model that trains."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import gpulab
from gpulab.run import Place, Run
from tests.support.host_loops import HostLoop, played
from tests.support.scripted_looks import ScriptedWatcher, installed

NUMBERS = Place("train.py", 19, "confusion", "table[a, b] += 1")
TRAINING = Place("train.py", 35, "train", "nn.functional.cross_entropy(said, y).backward()")
UPDATE = Place("train.py", 36, "train", "optimizer.step()")
PLACES = (NUMBERS, TRAINING, UPDATE)


def train(loop: HostLoop, between_us: float = 15) -> None:
    """A small model, from each of whose operators to the next Python takes so long."""
    for name in ("aten::linear", "aten::relu", "aten::linear", "aten::cross_entropy_loss"):
        loop.operator(name, 30, 1)
        loop.python(between_us, 1)
    for node in ("NllLossBackward0", "AddmmBackward0", "ReluBackward0", "AddmmBackward0"):
        loop.operator(f"autograd::engine::evaluate_function: {node}", 40, 1)
        loop.python(10, 1)
    with loop.annotated("Optimizer.step#AdamW.step"):
        loop.operator("aten::_fused_adamw_", 25, 2)
        loop.python(10, 2)


def measure(loop: HostLoop, rows: int) -> None:
    """Counts each prediction in a table."""
    for _ in range(rows):
        for name in ("aten::item", "aten::item", "aten::select", "aten::select", "aten::add_"):
            loop.operator(name, 3, 0)
            loop.python(3, 0)


def measured_and_trained(loop: HostLoop) -> None:
    measure(loop, 300)
    train(loop)


def confusion(of: torch.Tensor, by: torch.Tensor, looking: ScriptedWatcher) -> float:
    table = torch.zeros(8, 8)
    for a, b in looking.each(zip(of, by, strict=True)):
        table[a, b] += 1
    return float(table.diag().sum())


def blamed(run: Run) -> list[str]:
    return [f.key for f in gpulab.diagnose(run).findings if "Python code of yours" in f.summary]


def test_a_small_model_is_no_such_code() -> None:
    assert blamed(played(train, *PLACES, steps=40).run()) == []


def test_looks_without_a_core_count_for_their_own_step_only() -> None:
    """On a busy machine the thread that looks comes late, and finds whatever line is the last."""

    def interrupted(loop: HostLoop) -> None:
        waits_us = 20_000 if len(loop.steps_us) in (1, 3) else 0
        train(loop, between_us=100)
        loop.python(waits_us, 1)

    loop = played(interrupted, *PLACES)
    assert blamed(loop.run([loop.steps_us[i][1] - 1 for i in (1, 3)])) == []


def test_one_look_a_step_is_enough_for_a_call_with_the_lock() -> None:
    def held(loop: HostLoop) -> None:
        train(loop)
        loop.python(30_000, 0)

    loop = played(held, *PLACES, steps=3)
    assert blamed(loop.run([end - 1 for _, end in loop.steps_us])) == ["logging_or_eval"]


def test_a_real_loop_that_measures_has_operators_and_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    looking = installed(monkeypatch.setattr)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 8))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x, y = torch.randn(1024, 32), torch.randint(0, 8, (1024,))
    with gpulab.profile(show=False, save=False, device="cpu", steps=40) as p:
        for _ in range(60):
            optimizer.zero_grad()
            said = model(x)
            confusion(said.argmax(1), y, looking)
            nn.functional.cross_entropy(said, y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    timeline, stack = p.run.timeline, p.run.stack
    assert timeline is not None and stack is not None and len(stack.calls_users) == len(stack.t_ns)
    called = np.bincount(timeline.name_id, minlength=len(timeline.names))
    assert called[timeline.names.index("aten::add_")] >= 1024 * len(p.run.traced_numbers)
    assert any("for a, b in" in place.text for place in p.run.places)
    told = [f for f in gpulab.diagnose(p.run).findings if f.key == "logging_or_eval"]
    assert all("for a, b in" in f.source_line for f in told)
