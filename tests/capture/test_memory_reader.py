"""The ledger of a run: whole, with modules and lines; and the training goes on as without it, whatever it does."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.nn.modules import module as modules
from torch.utils.checkpoint import checkpoint

import gpulab
from gpulab.capture import memory_reader, torch_hooks
from gpulab.capture.memory_reader import PATIENCE, ActivationHooks
from gpulab.memory import growth
from gpulab.memory.ledger import claims, holdings
from gpulab.memory.storages import live
from gpulab.memory_record import HoldingKind, Ledger, MemoryAccount
from gpulab.run import Run

BATCH, WIDTH = 64, 128
WEIGHTS = 4 * (2 * (WIDTH + 1) * WIDTH + WIDTH + 1)  # bytes of `model_of`
Step = Callable[[nn.Module, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def nothing_set() -> Iterator[None]:
    growth.forget_runs()
    yield
    assert top() is None and not modules._global_forward_hooks and not modules._global_forward_pre_hooks
    growth.forget_runs()


@pytest.fixture
def of() -> Callable[[Ledger, HoldingKind], int]:
    """The bytes of a kind, without those that earlier tests of this process have left."""
    gc.collect()
    now = live()
    before = Ledger("cpu", 0, "end", holdings(now.bytes, claims(now, {})))
    return lambda ledger, kind: ledger.of(kind) - before.of(kind)


def top() -> Any:
    autograd: Any = torch._C._autograd
    return autograd._top_saved_tensors_default_hooks(True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.dropout(self.linear(x))
        return torch.tanh(h) + x


def model_of() -> nn.Module:
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1))


def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).pow(2).mean()
    return loss


def trained(step: Step = plain, steps: int = 7, make: Callable[[], nn.Module] = model_of) -> list[Any]:
    """Losses, weights and generators after a training."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = make()
    optimizer, losses = torch.optim.Adam(model.parameters(), 1e-3), []
    for _ in range(steps):
        loss = step(model, torch.randn(BATCH, WIDTH))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    weights = [p.detach().numpy().tobytes() for p in model.parameters()]
    return [losses, weights, torch.rand(1).item(), random.random(), float(np.random.rand())]


def profiled(work: Callable[[], Any], code: str = "") -> tuple[Any, Run]:
    with gpulab.profile(show=False, save=False, trace=False, code=code) as p:
        result = work()
    return result, p.run


@pytest.fixture(autouse=True)
def nothing_compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier test of this process may have compiled something, and then no hooks are set."""
    if "compile" not in request.node.name:
        monkeypatch.setattr(torch_hooks, "_something_is_compiled", lambda: False)


def account_of(run: Run) -> MemoryAccount:
    assert run.memory_account is not None
    return run.memory_account


def test_a_ledger_is_all_live_storages(
    monkeypatch: pytest.MonkeyPatch, of: Callable[[Ledger, HoldingKind], int]
) -> None:
    monkeypatch.setattr(memory_reader, "EARLY_SHARE", 0)  # the run is short
    sums = []

    def counted() -> Any:
        now = live()
        sums.append(sum(now.bytes.values()))
        return now

    monkeypatch.setattr(memory_reader, "live", counted)
    _, run = profiled(trained)
    ledgers = account_of(run).ledgers
    assert len(ledgers) >= 3 and [ledger.bytes for ledger in ledgers] == sums[: len(ledgers)]
    assert [(ledger.step, ledger.moment) for ledger in ledgers[:2]] == [(1, "backward"), (1, "update")]
    assert {of(ledger, "parameters") for ledger in ledgers if ledger.moment != "end"} == {WEIGHTS}
    assert of(ledgers[0], "gradients") == 0 and of(ledgers[1], "gradients") == WEIGHTS
    assert of(ledgers[1], "optimizer state") == 2 * WEIGHTS + 6 * 4  # two moments, and Adam's count of steps


def test_activations_name_their_module_and_line() -> None:
    _, run = profiled(trained)
    rows = [h for h in account_of(run).ledgers[0].holdings if h.kind == "saved activations"]
    said = {(h.owner, h.line.partition(": ")[2]) for h in rows}
    assert {("0 (Block)", "return torch.tanh(h) + x"), ("1 (Block)", "return torch.tanh(h) + x")} <= said
    assert ("0.dropout (Dropout)", "h = self.dropout(self.linear(x))") in said
    (tanh,) = (h for h in rows if h.owner == "0 (Block)")
    assert tanh.bytes == BATCH * WIDTH * 4 and "test_memory_reader.py, line " in tanh.line
    later = [h.owner for ledger in account_of(run).ledgers[2:] for h in ledger.holdings if h.line]
    assert not later, "only the first ledger has lines"


# -- the training is the same ------------------------------------------------------------------------------------------


class Scale(torch.autograd.Function):
    """Keeps an account in an attribute of the weight, as Megatron does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        w.uses = w.uses + 1
        return gradient * w, (gradient * x).sum(0)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.w = Block(), nn.Parameter(torch.ones(WIDTH))
        self.w.uses = 0  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.block(Scale.apply(self.block(x), self.w))  # type: ignore[no-untyped-call]
        return result


def with_func(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weights: dict[str, torch.Tensor] = dict(model.named_parameters())

    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x,)).pow(2).mean()  # type: ignore[no-any-return]

    torch.func.vmap(torch.func.grad(loss), randomness="different")(x[:3])
    torch.func.jacrev(torch.exp)(x[0, :2])
    second: torch.Tensor = torch.func.hessian(torch.exp)(x[0, 0])
    return plain(model, x) + second


def checkpointed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for layer in model.children():
        x = checkpoint(layer, x.requires_grad_(), use_reentrant=layer is next(model.children()))
    return x.mean()


def penalized(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    slope = torch.autograd.grad(model(x.requires_grad_()).sum(), x, create_graph=True)[0]
    return slope.pow(2).mean() + plain(model, x)


def in_autocast(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return plain(model, x)


def refusing(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with disable_saved_tensors_hooks("not here"):
        return plain(model, x)


def on_the_cpu(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with save_on_cpu():
        return plain(model, x)


def in_place(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    h = nn.functional.relu_(model[0](x).mul_(2))  # type: ignore[index]
    return h.pow(2).mean()


def sparse_and_complex(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    edges, empty = torch.eye(BATCH).to_sparse(), torch.ones(3, device="meta")
    spectrum = torch.fft.rfft(torch.sparse.mm(edges, model(x)), dim=0)
    loss: torch.Tensor = spectrum.abs().mean() + empty.numel()
    return loss


STEPS = (*(plain, with_func, checkpointed, penalized, in_autocast, refusing, on_the_cpu, in_place, sparse_and_complex),)


@pytest.mark.parametrize("step", STEPS)
def test_a_training_is_bit_for_bit_the_same(step: Step) -> None:
    before = trained(step)
    after, run = profiled(lambda: trained(step))
    assert before == after
    assert account_of(run).ledgers


def test_functions_of_the_users_own_get_the_weight_itself() -> None:
    before = trained(make=Scaled)
    after, run = profiled(lambda: trained(make=Scaled))
    assert before[:2] == after[:2]
    rows = account_of(run).ledgers[0].holdings
    assert any(h.owner == "block (Block)" and h.line for h in rows), "the hooks come back after it"


@pytest.mark.parametrize("around", [save_on_cpu, lambda: saved_tensors_hooks(lambda x: x, lambda x: x)])
@pytest.mark.parametrize("inside", ["forward", "backward", "update", "loop"])
def test_hooks_of_the_users_around_parts_of_a_step(
    around: Callable[[], AbstractContextManager[Any]], inside: str
) -> None:
    def train() -> list[bytes]:
        torch.manual_seed(0)
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with around() if inside == "loop" else nullcontext():
            for number in range(7):
                with around() if inside != "loop" else nullcontext():
                    loss = plain(model, torch.randn(BATCH, WIDTH))
                    if inside != "forward":
                        loss.backward()  # type: ignore[no-untyped-call]
                    if inside == "update":
                        optimizer.step()
                if inside == "forward":
                    loss.backward()  # type: ignore[no-untyped-call]
                if inside != "update":
                    optimizer.step()
                assert inside == "loop" or number < 3 or top() is None
                optimizer.zero_grad()
        return [p.detach().numpy().tobytes() for p in model.parameters()]

    before = train()
    after, _ = profiled(train)
    assert before == after


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_an_error_in_the_step_of_the_ledger_leaves_nothing(error: type[BaseException], place: str) -> None:
    passes = 0

    class Raising(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal passes
            passes += 1
            if passes == 2 and place == "forward":
                raise error("mine")
            y = x * 2
            if passes == 2:
                y.register_hook(self.fail)  # type: ignore[no-untyped-call]
            return y

        def fail(self, gradient: torch.Tensor) -> None:
            raise error("mine")

    with pytest.raises(error, match="mine"), gpulab.profile(show=False, save=False, trace=False) as p:
        trained(make=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Raising()))
    failure = account_of(p.run).failure
    assert (failure is not None) is (error is MemoryError)
    assert failure is None or (failure.steps == 1 and "raise error" in failure.line)


def test_changed_activations_are_still_an_error() -> None:
    steps = 0

    def changing(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        steps += 1
        h = model(x).exp()
        y = h.pow(2).mean()
        if steps == 2:
            h.add_(1)
        return y  # type: ignore[no-any-return]

    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*is at version 1; expected version 0"):
        profiled(lambda: trained(changing))
    assert steps == 2


def test_a_graph_that_is_dropped_frees_its_memory() -> None:
    hooks, x = ActivationHooks(), torch.ones(1000, requires_grad=True)
    gc.collect()
    before = sum(live().bytes.values())
    hooks.begin()
    for _ in range(3):
        y = x.exp().tanh()
        y = y.mul(2).sigmoid_()
    result = weakref.ref(y)
    del y
    assert hooks.finish()
    gc.collect()
    assert result() is None and sum(live().bytes.values()) == before


def test_a_tensor_class_that_raises_is_let_through() -> None:
    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "exp" not in str(function) and "sum" not in str(function):
                raise RuntimeError(f"not {function}")
            return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    hooks = ActivationHooks()
    hooks.begin()
    mine = torch.ones(5, requires_grad=True).as_subclass(Mine)
    result = torch.exp(mine)
    assert type(result) is Mine and hooks.finish()


def test_compiled_models_get_no_hooks() -> None:
    count = 0

    def backend(graph: Any, example: Any) -> Any:
        nonlocal count
        count += 1
        return graph.forward

    model: Any = torch.compile(model_of(), backend=backend)
    model(torch.ones(BATCH, WIDTH)).mean().backward()
    assert count == 1
    _, run = profiled(lambda: trained(make=lambda: model))
    assert count == 1, "nothing is compiled again"
    assert not any(h.line for ledger in account_of(run).ledgers for h in ledger.holdings)


# -- other loops -------------------------------------------------------------------------------------------------------


def test_one_step_has_no_ledger() -> None:
    _, run = profiled(lambda: trained(steps=1))
    assert account_of(run).ledgers == () and account_of(run).failure is None


def test_kept_graphs_grow_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_reader, "EARLY_SHARE", 0)  # the run is short
    kept: list[torch.Tensor] = []
    pile = [torch.ones(5_000_000)]  # large, but it grows more slowly
    for name, value in (("kept", kept), ("pile", pile)):
        monkeypatch.setattr(sys.modules["__main__"], name, value, raising=False)

    def keeps() -> None:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(30):
            optimizer.zero_grad()
            loss = plain(model, torch.randn(BATCH, WIDTH))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            kept.append(plain(model, torch.randn(20 * BATCH, WIDTH)))
            pile.append(torch.ones(10_000))

    fastest, slower = account_of(profiled(keeps)[1]).growth
    assert fastest.owner == "kept" and fastest.bytes_each >= 20 * BATCH * WIDTH * 4
    assert slower.owner == "pile" and slower.bytes_each == pytest.approx(
        40_000, rel=0.05
    )  # of 29 steps, give or take one


def test_a_loop_without_an_optimizer_and_one_with_two(of: Callable[[Ledger, HoldingKind], int]) -> None:
    def by_hand() -> None:
        model = model_of()
        for _ in range(PATIENCE + 1):
            plain(model, torch.randn(BATCH, WIDTH)).backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                for p in model.parameters():
                    assert p.grad is not None
                    p.sub_(0.1 * p.grad)
                    p.grad = None

    def adversarial() -> None:
        a, b = model_of(), model_of()
        both = [torch.optim.Adam(m.parameters()) for m in (a, b)]
        for _ in range(6):
            for model, optimizer in zip((a, b), both, strict=True):
                optimizer.zero_grad()
                plain(model, torch.randn(BATCH, WIDTH)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()

    first = account_of(profiled(by_hand)[1]).ledgers[0]
    assert of(first, "saved activations") > 2 * BATCH * WIDTH * 4
    gc.collect()
    ledgers = account_of(profiled(adversarial)[1]).ledgers
    assert len(ledgers) > 1
    assert all(of(ledger, "parameters") == 2 * WEIGHTS for ledger in ledgers if ledger.moment != "end")


def test_memory_that_grows_is_told_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_reader, "EARLY_SHARE", 0)  # the run is short
    code = "history = []\nfor x in data:\n    history.append(x)\n"
    history: list[torch.Tensor] = []

    def keeping(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        history.append(torch.ones(100_000))
        return plain(model, x)

    import __main__

    vars(__main__)["history"] = history
    try:
        _, run = profiled(lambda: trained(keeping, steps=30), code)
    finally:
        del vars(__main__)["history"]
    (grown, *_) = account_of(run).growth
    assert grown.owner == "history" and grown.bytes_each == pytest.approx(400_000, rel=0.01)
    assert grown.line == "line 3: history.append(x)"


# -- a fault of gpulab costs only the account --------------------------------------------------------------------------


OF_HOOKS = ("storages_of", "users_spot", "attribute", "unobserved")
OF_LEDGERS = ("live", "claims", "notebook", "search", "growth_of_runs", "room_of", "_unclaimed")


@pytest.mark.parametrize("name", [*OF_HOOKS, *OF_LEDGERS])
def test_a_fault_in_the_ledger_costs_only_the_account(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise LookupError("a fault of gpulab")

    before = trained()
    monkeypatch.setattr(memory_reader, name, broken)
    after, run = profiled(trained, "x = 1")
    assert before == after and len(run.steps) == 7
    account = run.memory_account
    assert account is None or not account.ledgers or name in OF_HOOKS
