"""An evaluation reaches from `model.eval()` to `model.train()` of its function; times and lines are the script's."""

from __future__ import annotations

from time import perf_counter_ns

import torch
from torch import nn

from gpulab.capture.pauses import EvalMode, Stretch
from tests.capture.test_steps_by_hand import _measured

LOOP, EVALUATE = ("cell", 9, "main"), ("cell", 3, "evaluate")


def test_a_function_that_switches_back_is_taken_as_a_whole() -> None:
    mode = EvalMode()
    mode.switch(100, EVALUATE, trains=False)
    mode.switch(310, EVALUATE, trains=True)
    mode.train(400)
    assert mode.widened([Stretch(150, 200), Stretch(210, 250)], (LOOP,)) == (Stretch(100, 310),)


def test_what_the_loop_switches_back_is_no_end() -> None:
    mode = EvalMode()
    mode.switch(100, LOOP, trains=False)
    mode.switch(910, LOOP, trains=True)
    assert mode.widened([Stretch(150, 200)], (LOOP,)) == (Stretch(100, 200),)


def test_without_a_line_that_trains_only_the_beginning_is_sure() -> None:
    mode = EvalMode()
    mode.switch(100, EVALUATE, trains=False)
    mode.switch(310, EVALUATE, trains=True)
    assert mode.widened([Stretch(150, 200)], ()) == (Stretch(100, 200),)


def test_training_ends_what_was_evaluated() -> None:
    """A model that is trained in evaluation mode, as frozen batch norms are."""
    mode = EvalMode()
    mode.switch(100, LOOP, trains=False)
    mode.train(120)
    assert mode.widened([Stretch(500, 600)], (LOOP,)) == (Stretch(500, 600),)


def test_a_second_evaluation_does_not_begin_with_the_first() -> None:
    mode = EvalMode()
    mode.switch(100, EVALUATE, trains=False)
    assert mode.widened([Stretch(150, 200), Stretch(300, 350)], (LOOP,)) == (Stretch(100, 200), Stretch(300, 350))


def test_code_before_and_after_no_grad_is_evaluation() -> None:
    """Really run: the metric is computed after the gradients are on again."""
    net = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    took_ns: list[int] = []

    def evaluate() -> None:
        net.eval()
        begun_ns = perf_counter_ns()
        held = torch.randn(512, 64)
        with torch.no_grad():
            for _ in range(300):
                net(held)
        sum(i * i for i in range(300_000))
        took_ns.append(perf_counter_ns() - begun_ns)
        net.train()

    def train() -> None:
        for step in range(12):
            loss = net(torch.randn(8, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 4 == 3:
                evaluate()

    run = _measured(train)
    evaluations = [p for p in run.pauses if p.kind == "evaluation"]
    assert len(evaluations) == 3
    assert all(p.end_ns - p.start_ns > ns for p, ns in zip(evaluations, took_ns, strict=True))
    assert "train" not in vars(net)
    assert nn.Module.train.__module__ == "torch.nn.modules.module"
    assert all(run.places[p.place].function.endswith("evaluate") for p in evaluations)
