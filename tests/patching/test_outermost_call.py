"""The outermost module call and the optimizer's step: found once, wrapped in a fixed order, and let go."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.variables import nn_module
from torch.optim import Optimizer

from gpulab.patching.hook_points import HookOrder, Layer, OptimizerHook, around_outermost, around_steps
from tests.support.knob_cells import Net, new_cell

X = torch.ones(1, 3, 6, 6)


def noting(name: str, notes: list[str]) -> Any:
    def around(module: Any, call: Any, args: Any, kwargs: Any) -> Any:
        notes.append(f"{name} {type(module).__name__}")
        return call(args, kwargs)

    return around


def on_another_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_only_outermost_calls_are_wrapped_each_time() -> None:
    notes: list[str] = []
    model, loss = Net(), nn.MSELoss()
    with around_outermost(Layer.AUTOCAST, noting("a", notes)):
        loss(model(X), torch.zeros(1, 4))
        with pytest.raises(RuntimeError):
            model(torch.ones(1))
        model.head(torch.ones(16))
    model(X)
    assert notes == ["a Net", "a MSELoss", "a Net", "a Linear"]


@pytest.mark.parametrize("reverse", [False, True])
def test_layers_nest_by_rank_in_any_order_of_entering(reverse: bool) -> None:
    notes: list[str] = []
    layers = sorted(Layer, reverse=reverse)
    with ExitStack() as undo:
        for layer in layers:
            undo.enter_context(around_outermost(layer, noting(layer.name, notes)))
        Net()(X)
    assert notes == ["INPUTS Net", "AUTOCAST Net", "COMPILED Net", "CHECKPOINTED Net"]


def test_what_goes_in_and_what_comes_out_can_be_changed() -> None:
    def around(module: Any, call: Any, args: Any, kwargs: Any) -> Any:
        return call((args[0] * 2,), {}) + 1

    with around_outermost(Layer.INPUTS, around):
        assert nn.Identity()(torch.tensor(3.0)).item() == 7


def test_another_thread_is_left_alone() -> None:
    notes: list[str] = []
    with around_outermost(Layer.AUTOCAST, noting("a", notes)):
        on_another_thread(lambda: Net()(X))
    assert notes == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are not forked here")
def test_a_forked_worker_is_left_alone() -> None:
    notes: list[str] = []
    with around_outermost(Layer.AUTOCAST, noting("a", notes)):
        child = os.fork()
        if child == 0:
            nn.Identity()(X)
            os._exit(len(notes))
        _, status = os.waitpid(child, 0)
        nn.Identity()(X)
    assert os.waitstatus_to_exitcode(status) == 0 and notes == ["a Identity"]


def test_contexts_may_end_in_any_order() -> None:
    notes: list[str] = []
    original = nn.Module.__call__
    first, second = ExitStack(), ExitStack()
    first.enter_context(around_outermost(Layer.AUTOCAST, noting("a", notes)))
    second.enter_context(around_outermost(Layer.COMPILED, noting("b", notes)))
    first.close()
    nn.Identity()(X)
    assert notes == ["b Identity"] and nn.Module.__call__ is not original
    second.close()
    assert nn.Module.__call__ is original


def test_recomputed_calls_of_a_backward_pass_are_not_outermost() -> None:
    from torch.utils.checkpoint import checkpoint

    class Saving(nn.Sequential):
        def forward(self, x: Any) -> Any:
            return checkpoint(self[0], x, use_reentrant=False)

    notes: list[str] = []
    with around_outermost(Layer.AUTOCAST, noting("a", notes)):
        Saving(nn.Linear(4, 4))(torch.ones(1, 4)).sum().backward()
    assert notes == ["a Saving"]


class Graphs:
    """A backend that counts what it compiles."""

    count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        return graph.forward


def test_what_is_compiled_meanwhile_knows_nothing_of_the_patch() -> None:
    graphs = Graphs()
    original = nn.Module.__call__
    model, notes = Net(), list[str]()
    torch.compiler.reset()
    try:
        with around_outermost(Layer.AUTOCAST, noting("a", notes)):
            compiled: Any = torch.compile(model, backend=graphs)
            in_place = Net()
            in_place.compile(backend=graphs)
            compiled(X), compiled(X), in_place(X)
            assert vars(nn_module)["unpatched_nn_module_call"] is nn.Module.__call__ is not original
        count = graphs.count
        compiled(X), in_place(X)
        assert notes == ["a OptimizedModule", "a OptimizedModule", "a Net"] and count >= 1
        assert graphs.count == count, "compiled anew after the patch was gone"
        assert compiled.forward.__wrapped__.__func__ is original
    finally:
        torch.compiler.reset()
    assert sys.modules["torch._dynamo.utils"].unpatched_nn_module_call is original
    assert vars(nn_module)["unpatched_nn_module_call"] is original


class Part(nn.Linear):
    def forward(self, x: Any) -> Any:
        return super().forward(x).relu()


class InPieces(nn.Module):
    """Its parts are called after a graph break each."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(4, 4) for _ in range(12))

    def forward(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
            torch._dynamo.graph_break()
        return x


def test_a_module_compiled_in_pieces_stays_so_under_the_patch() -> None:
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    def graphs(wrapped: bool) -> int:
        found = Graphs()
        torch.compiler.reset()
        model = InPieces()
        model.compile(backend=found)
        with ExitStack() as undo:
            if wrapped:
                undo.enter_context(around_outermost(Layer.AUTOCAST, noting("a", notes)))
            model(torch.ones(1, 4))
            assert not (wrapped and _debug_get_cache_entry_list(nn.Module.__call__.__code__))
        return found.count

    notes: list[str] = []
    try:
        assert graphs(wrapped=True) == graphs(wrapped=False) > 0
    finally:
        torch.compiler.reset()
    assert notes == ["a InPieces"]


def test_calls_within_a_compiled_function_are_passed_through() -> None:
    notes: list[str] = []
    model = Net()

    def looped(x: Any) -> Any:
        for _ in range(2):  # a loop with a graph break in it is not compiled, what it calls is
            torch._dynamo.graph_break()
            out = model(x * 2)
        return out

    step = torch.compile(looped, backend="eager")
    try:
        with around_outermost(Layer.AUTOCAST, noting("a", notes)):
            assert torch.allclose(step(X), model(X * 2))
    finally:
        torch.compiler.reset()
    assert notes == ["a Net"]


class Noting(OptimizerHook):
    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def before(self, optimizer: Any, closure: bool) -> None:
        self.notes.append(f"before {self.name}{' closure' if closure else ''}")

    def after(self, optimizer: Any) -> None:
        self.notes.append(f"after {self.name}")


@pytest.mark.parametrize("reverse", [False, True])
def test_steps_are_told_by_turn_and_back(reverse: bool) -> None:
    notes: list[str] = []
    with ExitStack() as undo:
        for turn in sorted((HookOrder.SCALING, HookOrder.ACCUMULATING), reverse=reverse):
            undo.enter_context(around_steps(turn, Noting(turn.name, notes)))
        optimizer = new_cell().optimizer
        optimizer.step()
        optimizer.step(lambda: 0.0)
        on_another_thread(optimizer.step)
    optimizer.step()
    told = ["before SCALING", "before ACCUMULATING", "after ACCUMULATING", "after SCALING"]
    assert notes == [*told, *(n + " closure" if n.startswith("before") else n for n in told)]


def test_the_outer_of_nested_optimizers_counts_also_after_error() -> None:
    inner = new_cell().optimizer

    class Outer(Optimizer):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            inner.step()
            if self.defaults["raises"]:
                raise ValueError("no step")

    outer = Outer(inner.param_groups[0]["params"], {"raises": True})
    notes: list[str] = []
    with around_steps(HookOrder.SCALING, Noting("s", notes)):
        with pytest.raises(ValueError, match="no step"):
            outer.step()
        outer.defaults["raises"] = False
        outer.step()
    assert notes == ["before s", "before s", "after s"]
