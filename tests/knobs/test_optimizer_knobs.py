"""Fused kernels and accumulation for an optimizer that knows nothing of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from gpulab.knobs.accumulation import ACCUMULATE
from gpulab.knobs.fused_optimizer import FUSED_OPTIMIZER
from gpulab.knobs.knob import KnobEffects
from gpulab.knobs.mixed_precision import AMP
from gpulab.knobs.observation import Observation
from gpulab.run import Run
from tests.knobs.scenes import SCENE, optimizing
from tests.support.knob_cells import Cell, new_cell, same, traced

KINDS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {}),
    (torch.optim.Adagrad, {}),
]


def looks(optimizer: torch.optim.Optimizer) -> object:
    """All that a knob could leave on an optimizer, without its tensors' values."""
    return (
        [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        dict(optimizer.defaults),
        {name: value for name, value in vars(optimizer).items() if isinstance(value, bool)},
        [
            (name, value.dtype, value.device, value.stride()) if isinstance(value, torch.Tensor) else (name, value)
            for state in optimizer.state.values()
            for name, value in state.items()
            if name != "step" or isinstance(value, torch.Tensor)
        ],
    )


# -- fused -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize(("value", "trained_before"), [(True, False), (True, True), (False, True)])
def test_fused_trains_as_an_optimizer_built_so_and_is_taken_back(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], value: bool, trained_before: bool
) -> None:
    as_found = options if value else options | {"fused": True}
    cell, plain, built = new_cell(kind, **as_found), new_cell(kind, **as_found), new_cell(kind, fused=value, **options)
    if trained_before:
        for c in (cell, plain, built):
            c.run()
    with FUSED_OPTIMIZER.applied(value) as log:
        cell.run()
        assert all(bool(group["fused"]) is value for group in cell.optimizer.param_groups)
    plain.run()
    built.run()
    assert log.counts == {"optimizers": 1} and not log.refusals
    assert looks(cell.optimizer) == looks(plain.optimizer)
    if not trained_before:  # else their first steps were computed differently
        assert same(cell.weights, built.weights, exactly=True)
    assert same(cell.weights, plain.weights)
    cell.run()
    plain.run()
    assert same(cell.weights, plain.weights)


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("built_fused", [True, False])
def test_a_cell_with_a_grad_scaler_goes_on(value: bool, built_fused: bool) -> None:
    def train(cell: Cell, scaler: Any) -> None:
        data = torch.Generator().manual_seed(1)
        for step in range(8):
            cell.optimizer.zero_grad()
            x = torch.randn(4, 3, 6, 6, generator=data)
            scaler.scale(cell.model(x).square().mean() * (1e36 if step == 5 else 1)).backward()  # once too much
            scaler.step(cell.optimizer)
            scaler.update()

    cell, plain = new_cell(fused=built_fused), new_cell(fused=built_fused)
    with FUSED_OPTIMIZER.applied(value):
        train(cell, torch.amp.GradScaler("cpu"))
        assert getattr(cell.optimizer, "_step_supports_amp_scaling", False) is value
    train(plain, torch.amp.GradScaler("cpu"))
    assert same(cell.weights, plain.weights) and looks(cell.optimizer) == looks(plain.optimizer)


def test_groups_added_meanwhile_are_as_the_others() -> None:
    cell = new_cell()
    with FUSED_OPTIMIZER.applied(True):
        cell.run(steps=1)
        cell.optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
        assert cell.optimizer.param_groups[1]["fused"] is True
    assert [(g["fused"], g["foreach"]) for g in cell.optimizer.param_groups] == [(None, None)] * 2


def test_fused_refuses_what_cannot_be_and_leaves_it_alone(plain_run: Run) -> None:
    def step_with(kind: type[torch.optim.Optimizer], **options: Any) -> tuple[torch.optim.Optimizer, object]:
        cell = new_cell(kind, **options)
        before = looks(cell.optimizer)
        cell.optimizer.step()
        return cell.optimizer, before[0]  # type: ignore[index]

    cases: list[tuple[type[torch.optim.Optimizer], dict[str, Any], str]] = [
        (torch.optim.RMSprop, {}, "RMSprop has no fused implementation"),
        (torch.optim.Adam, {"differentiable": True}, "differentiable"),
    ]
    for kind, options, reason in cases:
        with FUSED_OPTIMIZER.applied(True) as log:
            optimizer, groups = step_with(kind, **options)
        assert reason in log.refusals[0] and not log.counts and looks(optimizer)[0] == groups  # type: ignore[index]
        assert FUSED_OPTIMIZER.verify(SCENE, True, log, plain_run).state == "no effect"
    sparse = nn.Embedding(3, 2, sparse=True)
    with FUSED_OPTIMIZER.applied(True) as log:
        sparse(torch.tensor([1])).sum().backward()
        torch.optim.SGD(sparse.parameters(), lr=0.1).step()
    assert "sparse" in log.refusals[0]


def test_fused_verifies_itself_by_the_trace(seen: Observation, plain_run: Run) -> None:
    with FUSED_OPTIMIZER.applied(False) as log:
        new_cell().run(steps=1)
    assert FUSED_OPTIMIZER.verify(seen, False, log, plain_run).state == "no effect"
    assert FUSED_OPTIMIZER.verify(seen, True, KnobEffects(Counter({"optimizers": 1})), plain_run).state == "no effect"
    unfused, (log,) = traced(new_cell(fused=True), (FUSED_OPTIMIZER, False))
    assert FUSED_OPTIMIZER.verify(optimizing(fused=True), False, log, unfused).state == "took effect"


# -- accumulation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [3, 4])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_accumulated_training_equals_training_on_larger_batches(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], batches: int
) -> None:
    """In float64: Adam makes as large a step of a gradient near zero, whatever rounding its sign is."""
    x, y = torch.randn(48, 3, 6, 6, dtype=torch.float64), torch.randint(4, (48,))

    def train(cell: Cell, batch: int, to_none: bool = True) -> list[torch.Tensor]:
        cell.model.double()
        for i in range(0, 48, batch):
            cell.optimizer.zero_grad(set_to_none=to_none)
            nn.CrossEntropyLoss()(cell.model(x[i : i + batch]), y[i : i + batch]).backward()
            cell.optimizer.step()
        return cell.weights

    large = train(new_cell(kind, **options), 4 * batches)
    for to_none in (True, False):
        with ACCUMULATE.applied(batches) as log:
            assert same(train(new_cell(kind, **options), 4, to_none), large)
        assert log.counts == {"steps passed over": 12 - 12 // batches, "optimizer steps": 12 // batches}


def gradients(cell: Cell) -> list[torch.Tensor]:
    """One for each parameter."""
    given = [p.grad for p in cell.model.parameters() if p.grad is not None]
    assert len(given) == len(list(cell.model.parameters()))
    return given


def test_the_user_finds_gradients_as_without_it() -> None:
    cell, plain = new_cell(), new_cell()
    with ACCUMULATE.applied(3):
        cell.run(steps=1)
        kept = gradients(cell)
    plain.run(steps=1)
    assert same(kept, gradients(plain), exactly=True)
    cell, plain, norms = new_cell(), new_cell(), {"cell": [], "plain": []}  # type: ignore[var-annotated]
    for name, c in (("cell", cell), ("plain", plain)):
        c.after_backward = lambda c=c, name=name: norms[name].append(
            float(torch.nn.utils.clip_grad_norm_(c.model.parameters(), 0.1))
        )
    with ACCUMULATE.applied(100):
        cell.run(steps=3)
    assert same(cell.weights, new_cell().weights, exactly=True)
    plain.run(steps=1)
    assert norms["cell"][0] == norms["plain"][0]


def test_networks_trained_in_turn_do_not_mix() -> None:
    """The generator's pass also leaves gradients on the discriminator, which its `zero_grad` is to drop."""

    def train(batches: int, batch: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        g, d = nn.Linear(2, 2), nn.Linear(2, 1)
        of_g = torch.optim.SGD(g.parameters(), lr=0.1)
        of_d = torch.optim.SGD(d.parameters(), lr=0.1)
        x = torch.arange(16.0).reshape(8, 2) / 16
        with ACCUMULATE.applied(batches):
            for i in range(0, 8, batch):
                of_d.zero_grad()
                (d(x[i : i + batch]).mean() - d(g(x[i : i + batch]).detach()).mean()).backward()
                of_d.step()
                of_g.zero_grad()
                d(g(x[i : i + batch])).mean().backward()
                of_g.step()
        return [p.detach() for p in (*g.parameters(), *d.parameters())]

    assert same(train(8, 1)[2:], train(1, 8)[2:])


def test_sparse_gradients_are_accumulated_too() -> None:
    def train(batches: int, batch: int) -> torch.Tensor:
        torch.manual_seed(0)
        table = nn.Embedding(5, 3, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.5)
        words = torch.tensor([0, 1, 1, 4])
        with ACCUMULATE.applied(batches):
            for i in range(0, 4, batch):
                optimizer.zero_grad()
                table(words[i : i + batch]).square().sum(1).mean().backward()
                optimizer.step()
        return table.weight.detach()

    assert same([train(4, 1)], [train(1, 4)])


@pytest.mark.parametrize("first", [AMP, ACCUMULATE])
def test_an_overflow_of_fp16_does_not_get_into_the_mean(first: object) -> None:
    cell = new_cell(torch.optim.SGD)
    order = [(AMP, "fp16"), (ACCUMULATE, 2)] if first is AMP else [(ACCUMULATE, 2), (AMP, "fp16")]
    with ExitStack() as undo:
        logs = {knob.name: undo.enter_context(knob.applied(value)) for knob, value in order}  # type: ignore[arg-type]
        for step in range(5):
            cell.optimizer.zero_grad()
            (cell.model(torch.ones(1, 3, 6, 6)).mean() * (1e6 if step == 1 else 1)).backward()
            cell.optimizer.step()
    AMP.forget()
    assert logs["amp"].counts["steps skipped"] == 1
    assert logs["accumulate"].counts == {"steps passed over": 2, "optimizer steps": 2}
    assert all(w.isfinite().all() for w in cell.weights)


def test_a_closure_and_scaled_gradients_pass_and_are_reported(plain_run: Run) -> None:
    cell, plain = new_cell(), new_cell()

    def closing(c: Cell) -> Callable[[], Any]:
        def closure() -> Any:
            c.optimizer.zero_grad()
            loss = c.model(torch.ones(1, 3, 6, 6)).square().sum()
            loss.backward()
            return loss

        return closure

    with ACCUMULATE.applied(2) as log:
        for _ in range(3):
            cell.optimizer.step(closing(cell))
    for _ in range(3):
        plain.optimizer.step(closing(plain))
    said = ACCUMULATE.verify(SCENE, 2, log, plain_run)
    assert same(cell.weights, plain.weights, exactly=True)
    assert said.state == "no effect" and "closure" in said.evidence


def test_a_step_that_raises_leaves_the_gradients_to_the_user() -> None:
    class Raising(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ValueError("no step")

    cell = new_cell(Raising)
    with pytest.raises(ValueError, match="no step"), ACCUMULATE.applied(2):
        cell.run()
    assert all(p.grad is not None for p in cell.model.parameters())


def test_accumulate_says_what_it_did(seen: Observation, plain_run: Run) -> None:
    with ACCUMULATE.applied(2) as log:
        new_cell().run()
    steps = replace(plain_run.steps, batch_count=plain_run.steps.batch_count * 0 + 4)
    assert "accumulates 4 batches" in ACCUMULATE.verify(seen, 2, log, replace(plain_run, steps=steps)).evidence
    assert ACCUMULATE.verify(seen, 1, KnobEffects(), plain_run).state == "no effect"
