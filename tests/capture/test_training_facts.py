"""Facts of torch that are read at early backward passes: what a loop's gradients are for, and what is switched on."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import gpulab
from gpulab.capture.stack_sampler import ThreadSamples
from gpulab.capture.training_facts import EARLY, LATE, TrainingFactsReader, call_shares
from gpulab.run import Steps, TrainingFacts
from gpulab.store.run_format import decode, encode
from gpulab.timeline.labels import differentiates_twice
from tests.support.timelines import steps_between

NO_STEPS = Steps.empty()
ENGINE = ("/x/torch/autograd/graph.py", 2, "_engine_run_backward")
CHECKPOINT = ("/x/torch/utils/checkpoint.py", 3, "CheckpointFunction.backward")


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine ends no look early."""
    monkeypatch.setattr("gpulab.capture.training_facts.LONGEST_NS", 10**10)


class Loop:
    """Backward passes and updates, of which a reader is told as the hooks tell it."""

    def __init__(self) -> None:
        self.reader = TrainingFactsReader()

    def backward(self, loss: torch.Tensor, **how: Any) -> None:
        self.reader.backward(loss)
        loss.backward(**how)  # type: ignore[no-untyped-call]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.reader.step(optimizer)
        optimizer.step()
        optimizer.zero_grad()

    def facts(self) -> TrainingFacts:
        found = self.reader.finish(None, NO_STEPS, 0)
        assert found is not None
        return found


def trained(model: nn.Module, parameters: Sequence[nn.Parameter], x: torch.Tensor, passes: int = 20) -> TrainingFacts:
    loop, optimizer = Loop(), torch.optim.SGD(parameters, 0.1)
    for _ in range(passes):
        loop.backward(model(x).pow(2).mean())
        loop.step(optimizer)
    return loop.facts()


def test_gradients_of_what_no_optimizer_holds() -> None:
    body, head = nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 1)
    model, x = nn.Sequential(body, head), torch.ones(3, 4)
    facts = trained(model, [*head.parameters()], x)
    assert facts.unheld and len(facts.passes) == 1
    unused = dict(zip(facts.passes[0].nodes, facts.passes[0].unused, strict=True))
    assert unused["ReluBackward0"] == 1 and unused["MeanBackward0"] == 0
    assert facts.passes[0].nodes[-1] == "TBackward0" and facts.passes[0].unused[-1] == 1
    assert not trained(model, [*model.parameters()], x).passes
    assert not trained(model, [*head.parameters()], x, LATE[0] - 1).passes  # nobody knows yet whether it changes


def test_a_weight_between_used_ones_is_half_of_its_node() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    facts = trained(model, [*model[0].parameters(), *model[2].parameters()], torch.ones(3, 4))
    shares = [s for n, s in zip(facts.passes[0].nodes, facts.passes[0].unused, strict=True) if n == "AddmmBackward0"]
    assert shares == [0, 0.5, 0]


@pytest.mark.parametrize("in_place", [True, False])
def test_what_is_trained_by_hand_is_used(in_place: bool) -> None:
    body, head = nn.Linear(4, 8), nn.Linear(8, 1)
    loop, optimizer = Loop(), torch.optim.SGD(head.parameters(), 0.1)
    for _ in range(20):
        loop.backward(head(body(torch.ones(3, 4))).pow(2).mean())
        loop.step(optimizer)
        for p in body.parameters():
            assert p.grad is not None
            if in_place:
                with torch.no_grad():
                    p.sub_(p.grad)
            else:
                p.data -= 0.1 * p.grad
            p.grad = None
    assert not loop.facts().passes


def test_gradients_that_another_optimizer_drops() -> None:
    generator, critic = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 4)), nn.Linear(4, 1)
    loop = Loop()
    of_generator, of_critic = (torch.optim.SGD(m.parameters(), 0.01) for m in (generator, critic))
    for _ in range(10):
        fake = generator(torch.ones(3, 2))
        of_critic.zero_grad()
        loop.backward(critic(fake).mean() - critic(torch.ones(3, 4)).mean(), retain_graph=True)
        loop.step(of_critic)
        of_generator.zero_grad()
        loop.backward(-critic(fake).mean())
        loop.step(of_generator)
    facts = loop.facts()
    assert not facts.unheld and sorted(len(p.nodes) for p in facts.passes) == [8, 11]


def test_gradients_that_add_up_by_hand_are_used() -> None:
    """Each of some passes' gradients is taken and put away, and one optimizer steps later."""
    model, loop = nn.Linear(4, 1), Loop()
    optimizer, sums = torch.optim.SGD(model.parameters(), 0.1), [torch.zeros(1, 4), torch.zeros(1)]
    for number in range(20):
        loop.backward(model(torch.ones(3, 4)).mean())
        for total, p in zip(sums, model.parameters(), strict=True):
            assert p.grad is not None
            total += p.grad
            p.grad = total.clone() if number % 4 == 3 else None
        if number % 4 == 3:
            loop.step(optimizer)
    assert not loop.facts().passes


def test_a_table_whose_rows_are_mostly_left_alone() -> None:
    table, loop = nn.Embedding(20_000, 4), Loop()
    optimizer = torch.optim.Adagrad(table.parameters())
    for number in range(10):
        loop.backward(table(torch.arange(number, 20_000, 10)).sum())
        loop.step(optimizer)
    (dense,) = loop.facts().dense_gradients
    assert (
        dense.rows == 20_000 and dense.parameters_fraction == 1 and dense.used_fraction == pytest.approx(0.1, abs=0.05)
    )
    tied, head = nn.Embedding(20_000, 4), Loop()
    plain = torch.optim.SGD(tied.parameters(), 0.1)
    for _ in range(10):
        head.backward((tied(torch.arange(5)) @ tied.weight.T).sum())
        head.step(plain)
    assert head.facts().dense_gradients[0].used_fraction == 1


def test_a_graph_that_grows_and_wide_parameters() -> None:
    cell, loop = nn.GRUCell(2, 3).double(), Loop()
    optimizer, state = torch.optim.SGD(cell.parameters(), 0.0), torch.zeros(1, 3, dtype=torch.float64)
    for _ in range(20):
        state = cell(torch.ones(1, 2, dtype=torch.float64), state)
        loop.backward(state.sum(), retain_graph=True)
        optimizer.zero_grad()
    facts = loop.facts()
    assert facts.repeated_fraction > 0.5 and facts.float64_fraction == 1
    plain = trained(nn.Linear(2, 2), [*nn.Linear(2, 2).parameters()], torch.ones(1, 2))
    assert (plain.float64_fraction, plain.repeated_fraction, plain.padding_fraction, plain.profiled) == (0, 0, 0, False)


@pytest.mark.parametrize("alike", [True, False])
def test_passes_that_look_the_same_share_what_is_unused(alike: bool) -> None:
    """A generator's gradients are dropped after the first pass through both, and used after the second."""
    generator, critic = nn.Linear(2, 4), nn.Linear(4, 1)
    loop = Loop()
    of_generator, of_critic = (torch.optim.SGD(m.parameters(), 0.01) for m in (generator, critic))
    for _ in range(10):
        fake = generator(torch.ones(3, 2))
        loop.backward(critic(fake).mean(), retain_graph=True)
        loop.step(of_critic)
        of_generator.zero_grad()
        loop.backward(critic(fake).mean() if alike else critic(fake).relu().mean())
        loop.step(of_generator)
    most = [max(p.unused) for p in loop.facts().passes]
    assert most == [0.5 if alike else 1.0]


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_batch_that_hangs_on_a_graph(by_hand: bool) -> None:
    rows = torch.ones(64, 2, requires_grad=by_hand)
    loop, model = Loop(), nn.Linear(2, 1)
    optimizer, batches = torch.optim.SGD(model.parameters(), 0.1), iter(DataLoader(TensorDataset(rows), 4))
    for (x,) in batches:
        loop.reader.batch(batches, [x])
        loop.backward(model(x).mean())
        loop.step(optimizer)
    assert (loop.facts().batch_nodes_fraction > 0.5) is by_hand


@pytest.mark.parametrize(
    ("lengths", "width", "fraction"), [((2, 3), 10, 0.7), ((10, 3), 10, 0.0), ((1, 1), 1, 0.0), ((0, 0), 8, 0.0)]
)
def test_columns_that_are_padding_in_all_rows(lengths: tuple[int, int], width: int, fraction: float) -> None:
    table, loop = nn.Embedding(20, 4), Loop()
    optimizer = torch.optim.SGD(table.parameters(), 0.1)
    for number in range(8):
        x = torch.zeros(2, width, dtype=torch.long)
        for row, length in enumerate(lengths):
            x[row, :length] = torch.arange(length) + 1 + row + number % 2
        loop.backward(table(x if number % 3 else x.flip(1)).sum())
        loop.step(optimizer)
    assert loop.facts().padding_fraction == pytest.approx(fraction)


@pytest.mark.parametrize("able", [True, False])
def test_parameters_that_the_cpu_emulates(able: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: able)
    model = nn.Linear(2, 2).bfloat16()
    facts = trained(model, [*model.parameters()], torch.ones(1, 2, dtype=torch.bfloat16))
    assert facts.emulated_fraction == (0 if able else 1)


def test_a_profiler_that_is_always_on() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert trained(nn.Linear(2, 2), [*nn.Linear(2, 2).parameters()], torch.ones(1, 2)).profiled


class Readings(IterableDataset[torch.Tensor]):
    def __init__(self, divided: bool) -> None:
        self.divided = divided

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = torch.utils.data.get_worker_info()
        assert worker is not None
        first, by = (worker.id, worker.num_workers) if self.divided else (0, 1)
        yield from (torch.full((2,), float(i)) for i in range(first, 64, by))


@pytest.mark.parametrize(("divided", "copies"), [(True, 1), (False, 2)])
def test_batches_that_come_from_all_workers(divided: bool, copies: int) -> None:
    reader, batches = TrainingFactsReader(), iter(DataLoader(Readings(divided), 4, num_workers=2))
    for batch in batches:
        reader.batch(batches, {"x": [batch]})
    facts = reader.finish(None, NO_STEPS, 0)
    assert facts is not None and facts.batch_copies == copies


def test_looks_below_what_a_switch_makes_torch_call() -> None:
    stacks = [
        (("/lib/traceback.py", 1, "extract"), ("/x/torch/fx/traceback.py", 2, "format_stack"), ("cell", 3, "<module>")),
        (("/x/torch/distributions/constraints.py", 1, "_Real.check"), ("cell", 4, "<module>")),
        (("cell", 5, "<module>"),),
        (("net", 1, "forward"), CHECKPOINT, ENGINE, ("cell", 5, "<module>")),
        (ENGINE, CHECKPOINT, ENGINE, ("cell", 5, "<module>")),  # the backward pass of what was computed again
    ]
    numbers = [2] * 30 + [0] * 40 + [1] * 10 + [3] * 20 + [4] * 40
    samples = ThreadSamples([100 + i for i in range(140)], numbers, stacks, 100)
    steps = steps_between([30, 90], [60, 129])
    assert call_shares(samples, steps, 100) == {
        "anomaly_detection": 0.4,
        "argument_validation": 0.1,
        "recomputation": 0.2,
    }
    assert call_shares(samples, steps_between([0], [20]), 100) == {}


def weights(measured: bool) -> tuple[list[torch.Tensor], gpulab.Run | None, weakref.ref[nn.Module]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10_001, 3), nn.Dropout(), nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model[0].parameters())
    run: gpulab.Run | None = None
    data = DataLoader(TensorDataset(torch.arange(60)), 3)

    def train() -> None:
        with torch.autograd.set_detect_anomaly(True):
            for (x,) in data:
                optimizer.zero_grad()
                model(x).pow(2).mean().backward()
                optimizer.step()

    if measured:
        with gpulab.profile(save=False, trace=False) as profiled:
            train()
        run = profiled.run
    else:
        train()
    return [p.detach().clone() for p in model.parameters()], run, weakref.ref(model)


@pytest.mark.parametrize("twice", [False, True])
def test_a_gradient_that_is_differentiated(twice: bool) -> None:
    model, x = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)), torch.ones(3, 2, requires_grad=True)
    optimizer = torch.optim.Adam(model.parameters())
    with gpulab.profile() as profiled:
        for _ in range(12):
            slope = torch.autograd.grad(model(x).sum(), x, create_graph=twice, retain_graph=True)[0]
            (model(x) if not twice else slope).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert profiled.run.training is not None and profiled.run.training.differentiates_twice is twice
    assert differentiates_twice(replace(profiled.run, training=None)) is twice  # of the trace alone


def test_a_run_keeps_facts_and_nothing_of_the_training() -> None:
    plain, _, _ = weights(measured=False)
    measured, run, model = weights(measured=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, measured, strict=True))
    assert run is not None and run.training is not None
    assert run.training.anomaly_detection and run.training.unheld
    document, columns = encode(run)
    assert decode(document, io.BytesIO(columns)).training == run.training
    older = document.replace(b'"training":', b'"of_a_later_version":')
    assert decode(older, io.BytesIO(columns)).training is None
    gc.collect()
    assert model() is None


def test_a_fault_tells_nothing_and_a_look_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    for _ in range(EARLY[-1]):
        loop.reader.backward(object())
        loop.reader.step(object())
        loop.reader.batch(loop, object())
    assert loop.facts() == TrainingFacts()
    monkeypatch.setattr("gpulab.capture.training_facts.LONGEST_NS", -1)
    monkeypatch.setattr("gpulab.capture.training_facts.LONGEST_FRACTION", 0)
    assert trained(nn.Linear(2, 1), [*nn.Linear(2, 1).parameters()], torch.ones(1, 2)).passes == ()
