"""What a loop does beside training, also where a closure trains inside the update."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gpulab
from gpulab.analysis.facts import facts
from gpulab.diagnosis.diagnose import diagnose
from gpulab.diagnosis.finding import Finding
from gpulab.run import Category, Place, Run
from gpulab.tape.marks import Kind
from tests.support.host_loops import HostLoop, played
from tests.support.scripted_looks import installed
from tests.support.tapes import Told

STEP, ZERO = "Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"
MARK = Category.USER_ANNOTATION


@pytest.fixture(autouse=True)
def steady_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real loops are looked at by script: who gets a core, and when, is no matter here."""
    installed(monkeypatch.setattr)


def rest() -> None:
    time.sleep(0.02)


def nothing() -> None:
    pass


@cache
def profiled(before: Callable[[], object], after: Callable[[], object]) -> Run:
    """A loop on the CPU that does something before its backward pass, and something after its update."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8)
    with gpulab.profile(show=False, save=False, device="cpu") as p:
        for _ in range(6):
            for (x,) in loader:
                loss = model(x).sum()
                before()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                after()
    return replace(p.run, call_looks=None)


@cache
def without_loader(before: Callable[[], object], after: Callable[[], object]) -> Run:
    """A loop that makes its batches itself, whose update is called in a function of its own."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def update(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    with gpulab.profile(show=False, save=False, device="cpu") as p:
        for _ in range(40):
            before()
            x = torch.randn(8, 8)
            update(x)
            after()
    return replace(p.run, call_looks=None)


def logging(run: Run) -> Finding | None:
    return diagnose(facts(run)).of("logging_or_eval")


@pytest.mark.parametrize("loop", [profiled, without_loader])
@pytest.mark.parametrize(("before", "after"), [(nothing, rest), (rest, nothing)], ids=["after", "before"])
def test_work_beside_training_is_named_with_its_line(
    loop: Callable[..., Run], before: Callable[[], object], after: Callable[[], object]
) -> None:
    told = logging(loop(before, after))
    assert told is not None and told.title == "your own Python code" and "time.sleep(0.02)" in told.source_line
    assert "DataLoader with workers" in told.cure


def test_without_looks_nothing_is_named() -> None:
    assert logging(replace(profiled(rest, nothing), stack=None)) is None


FUNCTION = Place("train.py", 7, "computing", "return a @ a")
STEP_LINE = Place("train.py", 20, "step", "model(x).sum().backward()")


def test_a_library_is_seen_coming_back_to_the_users_code() -> None:
    library = "def fit(step):\n    for _ in range(40):\n        time.sleep(0.01)\n        step()\n"
    names: dict[str, Callable[[Callable[[], None]], None]] = {"time": time}  # type: ignore[dict-item]
    exec(compile(library, "/usr/lib/site-packages/fitting.py", "exec"), names)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        time.sleep(0.01)
        model(torch.randn(8, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with gpulab.profile(show=False, save=False, device="cpu") as p:
        names["fit"](step)
    assert p.run.stack is not None and p.run.stack.calls_users.any()


def passes(loop: HostLoop) -> None:
    """Forward and backward: a layer, simple operations in a row, Python, and gradients."""
    with loop.annotated(ZERO):
        loop.operator("aten::zero_", 10, 1)
    loop.operator("aten::linear", 300, 1)
    for _ in range(6):
        loop.operator("aten::mul", 400, 1)
        loop.operator("aten::tanh", 400, 1)
    loop.python(200, 1)
    loop.operator("autograd::engine::evaluate_function: AddmmBackward0", 500, 1)


@pytest.mark.parametrize("closure", [False, True])
def test_what_a_closure_computes_is_not_the_optimizers(closure: bool) -> None:
    """As Lightning trains: its passes run inside Optimizer.step."""

    def step(loop: HostLoop) -> None:
        loop.python(20, 0)  # from one update to the next
        if not closure:
            passes(loop)
        with loop.annotated(STEP):
            if closure:
                passes(loop)
            loop.operator("aten::_fused_sgd_", 60, 1)
            loop.python(70, 1)

    run = played(step, FUNCTION, STEP_LINE).run()
    account = facts(run).breakdown
    assert account is not None
    for parts in (s.parts_ns for s in account.steps):
        assert (parts["compute"], parts["optimizer"]) == (5_670_000, 70_000)
    assert diagnose(facts(run)).of("memory_bound_ops") is not None


def test_the_clock_of_an_update_starts_after_its_closure() -> None:
    told = Told()
    for begin_ns in (0, 1_000):
        told.mark(begin_ns + 100, Kind.STEP, 1)
        told.backward(begin_ns + 300, begin_ns + 400)
        told.mark(begin_ns + 450, Kind.STEPPED, 1)
    assert told.steps(2_000).optimizer_ns.tolist() == [50, 50]
