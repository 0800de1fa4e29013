"""Loops without a DataLoader and without an optimizer: their updates of the weights make the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import gpulab
from gpulab.capture.arguments import Rhythm
from gpulab.run import Run, StepFlag
from tests.support.tapes import Told

STEPS = 12
MARKED = "backward passes"


def _measured(cell: Callable[[], None], **settings: Any) -> Run:
    settings = {"live": False, "save": False, **settings}
    with gpulab.profile(**settings) as session:
        cell()
    run = session.run
    assert run is not None
    run.check()
    return run


def _back(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 8), torch.randn(4, 1)


def _loss(net: nn.Module) -> torch.Tensor:
    x, y = _batch()
    return mse_loss(net(x), y)


def _updated(net: nn.Module, rate: float = 0.01) -> None:
    for p in net.parameters():
        assert p.grad is not None
        p.data.add_(p.grad, alpha=-rate)


def _through_data() -> None:
    """As word_language_model does: `.data` shares no version with the parameter."""
    net = nn.Linear(8, 1)
    for _ in range(STEPS):
        net.zero_grad()
        _back(_loss(net))
        _updated(net)


def _in_place() -> None:
    net = nn.Linear(8, 1)
    for _ in range(STEPS):
        _back(_loss(net))
        with torch.no_grad():
            for p in net.parameters():
                assert p.grad is not None
                p.sub_(0.01 * p.grad)
                p.grad = None


def _accumulated() -> None:
    net = nn.Linear(8, 1)
    for _ in range(STEPS):
        net.zero_grad()
        for _ in range(3):
            _back(_loss(net))
        _updated(net)


def _gan() -> None:
    generator, critic = nn.Linear(3, 8), nn.Linear(8, 1)
    for _ in range(STEPS):
        critic.zero_grad()
        loss = critic(torch.randn(4, 8)).mean() - critic(generator(torch.randn(4, 3)).detach()).mean()
        _back(loss)
        _updated(critic)
        generator.zero_grad()
        _back(critic(generator(torch.randn(4, 3))).mean())
        _updated(generator)


def _with_gradient_penalty() -> None:
    """Differentiates twice: a pass to the inputs, whose result a second one goes through."""
    critic = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    for _ in range(STEPS):
        critic.zero_grad()
        x = torch.randn(4, 8, requires_grad=True)
        (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        _back(critic(x).mean() + (slope.norm(dim=1) - 1).square().mean())
        _updated(critic)


def _functional() -> None:
    """Parameters made anew in each step."""
    weights = [torch.randn(8, 1, requires_grad=True), torch.zeros(1, requires_grad=True)]
    for _ in range(STEPS):
        x, y = _batch()
        grads = torch.autograd.grad(mse_loss(x @ weights[0] + weights[1], y), weights)
        pairs = zip(weights, grads, strict=True)
        weights = [(w - 0.01 * g).detach().requires_grad_() for w, g in pairs]


def _functional_and_kept() -> None:
    """The old ones stay alive."""
    weight, history = torch.randn(8, 1, requires_grad=True), []
    for _ in range(STEPS):
        x, y = _batch()
        (grad,) = torch.autograd.grad(mse_loss(x @ weight, y), [weight])
        history.append(weight)
        weight = (weight - 0.01 * grad).detach().requires_grad_()


def _by_func_grad() -> None:
    def loss(weight: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse_loss(x @ weight, y)

    weight = torch.randn(8, 1)
    for _ in range(STEPS):
        grads = [torch.func.grad(loss)(weight, *_batch()) for _ in range(2)]
        weight = weight - 0.01 * (grads[0] + grads[1])


def _evaluated_by_a_loader() -> None:
    held = DataLoader(TensorDataset(torch.randn(16, 8), torch.randn(16, 1)), batch_size=4)
    net = nn.Linear(8, 1)
    for step in range(STEPS):
        net.zero_grad()
        _back(_loss(net))
        _updated(net)
        if step % 4 == 3:
            with torch.no_grad():
                sum(mse_loss(net(a), b).item() for a, b in held)


@pytest.mark.parametrize(
    "cell",
    [
        _through_data,
        _in_place,
        _accumulated,
        _gan,
        _with_gradient_penalty,
        _functional,
        _functional_and_kept,
        _by_func_grad,
        _evaluated_by_a_loader,
    ],
)
def test_updates_by_hand_make_the_steps(cell: Callable[[], None]) -> None:
    torch.manual_seed(0)
    run = _measured(cell)
    assert run.step_source == MARKED
    whole = (run.steps.flags & StepFlag.PARTIAL) == 0
    assert STEPS - 1 <= len(run.steps) <= STEPS  # nothing marks the end of the last update
    assert whole.sum() == STEPS - 1
    assert not run.steps.batch_count.any()


def test_a_number_of_steps_ends_a_loop_by_hand() -> None:
    torch.manual_seed(0)
    run = _measured(_through_data, steps=5)
    assert run.outcome == "stopped"
    assert len(run.steps) == 5


def test_an_optimizer_makes_the_steps_once_it_is_there() -> None:
    def cell() -> None:
        _through_data()
        net = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(5):
            optimizer.zero_grad()
            _back(_loss(net))
            optimizer.step()

    run = _measured(cell)
    assert run.step_source == "Optimizer.step"
    assert len(run.steps) == 5


def test_gradients_without_an_update_make_no_steps() -> None:
    def cell() -> None:
        net = nn.Linear(8, 1)
        for _ in range(STEPS):
            _back(_loss(net))

    assert len(_measured(cell).steps) == 0


def test_the_first_step_begins_with_a_backward_pass() -> None:
    told = Told()
    told.backward(100, 110)
    for t_ns in (200, 300):
        assert told.backward(t_ns, t_ns + 10, updated=True)
    steps = told.steps(1_000)
    assert steps.start_ns.tolist() == [100, 200, 300]
    assert steps.end_ns.tolist() == [200, 300, 310]
    assert [bool(f & StepFlag.PARTIAL) for f in steps.flags] == [False, False, True]


def test_a_loader_that_feeds_each_step_makes_the_steps() -> None:
    told = Told()
    told.backward(10)
    assert told.backward(20, updated=True)
    for t_ns in (30, 40):
        told.asked(1, t_ns)
        told.answered(t_ns + 1, "batch", 4)
        closed = told.backward(t_ns + 5, updated=True)
    assert not closed


def test_a_rhythm_is_known_after_equal_updates() -> None:
    rhythm = Rhythm()
    for _ in range(4):
        for changed in (False, False, True):
            rhythm.add(changed)
    assert rhythm.size == 3
    assert [rhythm.next_is_first() for _ in range(6)] == [False, False, True, False, False, True]


def test_no_rhythm_where_updates_differ() -> None:
    rhythm = Rhythm()
    for changed in [False, True, False, False, True] * 3:
        rhythm.add(changed)
    assert rhythm.size == 0
