"""An update whose closure trains: its passes are no part of the optimizer's time."""

from __future__ import annotations

import pytest

from gpulab.analysis.facts import facts
from gpulab.diagnosis.diagnose import diagnose
from gpulab.run import Place
from gpulab.tape.marks import Kind
from tests.support.host_loops import HostLoop, played
from tests.support.tapes import Told

STEP, ZERO = "Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"
FUNCTION = Place("train.py", 7, "computing", "return a @ a")
STEP_LINE = Place("train.py", 20, "step", "model(x).sum().backward()")


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
