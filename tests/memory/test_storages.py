"""Each block of memory is counted once, however tensors share it, and nothing that hooks have packed is unpacked."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gpulab.memory.storages import live, storages_of

KB = 1000
FLOAT = 4


class Raising(torch.Tensor):
    """A tensor whose every operator and attribute raises."""

    calls = 0

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        cls.calls += 1
        raise RuntimeError("a tensor of the user's own")


class Odd(type):
    """Its classes cannot be hashed."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(cls, other: object) -> bool:
        raise RuntimeError("compared")


class Square(torch.autograd.Function):
    """Keeps what it needs as an attribute rather than with `save_for_backward`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.doubled, ctx.parts = 2 * x, [x + 1]
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.doubled


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    gc.collect()


def total() -> int:
    return sum(live().bytes.values())


@contextmanager
def adding(count: int) -> Iterator[None]:
    """The code adds that many bytes to what is alive."""
    before = total()
    yield
    assert total() - before == count


def weight(count: int) -> torch.Tensor:
    return torch.ones(count, requires_grad=True)


def csr(count: int) -> torch.Tensor:
    rows = torch.arange(count + 1)
    return torch.sparse_csr_tensor(rows, torch.zeros(count, dtype=torch.int64), torch.ones(count), (count, 1))


def wide_and_narrow() -> tuple[torch.Tensor, torch.Tensor]:
    array = np.ones(KB, np.float32)
    return torch.from_numpy(array), torch.from_numpy(array[:10])


def tied() -> nn.Module:
    table, head = nn.Embedding(10, 50), nn.Linear(50, 10, bias=False)
    head.weight = table.weight
    return nn.Sequential(table, head)


def with_gradient() -> torch.Tensor:
    x = weight(KB)
    x.sum().backward()  # type: ignore[no-untyped-call]
    return x


def faked() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(KB)


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: torch.ones(KB)[:3], KB * FLOAT),
        (lambda: [x := torch.ones(KB), x.view(10, 100), x.data, x.detach(), x[None].T], KB * FLOAT),
        (tied, 500 * FLOAT),
        (with_gradient, 2 * KB * FLOAT),
        (lambda: torch.ones(KB, dtype=torch.complex64).real, KB * 8),
        (lambda: torch.eye(KB).to_sparse(), KB * (2 * 8 + FLOAT)),
        (lambda: csr(KB), KB * (8 + FLOAT) + (KB + 1) * 8),
        (lambda: torch.sparse_csc_tensor(torch.arange(2), torch.zeros(1).long(), torch.ones(1)), 3 * 8 + FLOAT),
        (lambda: torch.ones(KB, device="meta"), 0),
        (faked, 0),
        (lambda: torch.ones(0), 0),
        (wide_and_narrow, KB * FLOAT),
        (lambda: torch.ones(KB).as_subclass(Raising), KB * FLOAT),
    ],
)
def test_each_storage_counts_once(make: Callable[[], Any], count: int) -> None:
    with adding(count):
        things = make()
    del things


def test_nested_tensors_are_their_values() -> None:
    parts = [torch.ones(KB), torch.ones(KB // 2)]
    with adding(1500 * FLOAT + 3 * 8):
        nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    del nested


def test_tensors_and_classes_of_the_users_own_run_no_code() -> None:
    thing = Odd("Thing", (), {})()
    mine = torch.ones(KB, requires_grad=True).as_subclass(Raising)
    Raising.calls = 0
    assert live().bytes and storages_of(mine)[0].bytes == KB * FLOAT
    assert Raising.calls == 0
    del thing


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Any] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(operator)
        return operator(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("called")


def test_modes_of_the_users_see_nothing() -> None:
    things = [torch.eye(3).to_sparse(), graph_of(weight(KB)), with_gradient()]
    count = total()
    with Counting() as mode, Functions():
        assert total() == count and not mode.operators
    del things


def graph_of(x: torch.Tensor) -> torch.Tensor:
    return x.exp().exp()


def test_what_a_graph_has_saved() -> None:
    x = weight(KB)
    with adding(2 * KB * FLOAT):
        y = graph_of(x)
        key = storages_of(y)[0].key
        assert key in live().graph
    with adding(KB * FLOAT):
        z = y * y  # saves y, which is there
    with adding(-2 * KB * FLOAT):  # the first result of exp, and z; then the gradient comes
        z.sum().backward()  # type: ignore[no-untyped-call]
        x.grad = None
        del z
    assert key not in live().graph


def test_attributes_of_a_custom_functions_context() -> None:
    x = weight(KB)
    with adding(3 * KB * FLOAT):
        y = Square.apply(x)  # type: ignore[no-untyped-call]
    with adding(-2 * KB * FLOAT):
        del y.grad_fn.doubled, y.grad_fn.parts


def test_two_graphs_share_nodes() -> None:
    x = weight(KB)
    trunk = graph_of(x)
    with adding(2 * KB * FLOAT):
        heads = [trunk.exp(), trunk.exp()]
    del trunk
    with adding(-KB * FLOAT):
        heads.pop()
    with adding(-3 * KB * FLOAT):
        heads.pop()


@pytest.mark.parametrize("keep", [True, False])
def test_packed_tensors_stay_packed(keep: bool) -> None:
    calls = []

    def pack(x: torch.Tensor) -> Any:
        return x.clone() if keep else x.shape

    def unpack(x: Any) -> torch.Tensor:
        calls.append(x)
        raise RuntimeError("unpacked")

    x = weight(KB)
    with adding(3 * KB * FLOAT if keep else KB * FLOAT), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = graph_of(x)
    assert not calls and storages_of(y)[0].key not in live().graph


def test_checkpointed_code_is_not_computed_again() -> None:
    from torch.utils.checkpoint import checkpoint

    calls = []

    def block(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return graph_of(x)

    x = weight(KB)
    with adding(KB * FLOAT):
        y = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
    assert len(calls) == 1
    del y


class Ledger:
    """A dumber account: nodes of a graph that list what they save, and names that hold a storage and a node."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.names: list[tuple[int, dict[str, Any] | None]] = []

    def new(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    @property
    def bytes(self) -> int:
        alive, waiting = set[int](), [node for _, node in self.names if node is not None]
        alive.update(storage for storage, _ in self.names)
        while waiting:
            node = waiting.pop()
            alive.update(node["saves"])
            waiting += node["next"]
        return sum(self.sizes[storage] for storage in alive) * FLOAT

    def backward(self, node: dict[str, Any]) -> None:
        order, waiting = [node], [node]
        while waiting:
            for one in waiting.pop()["next"]:
                if one not in order:
                    order.append(one)
                    waiting.append(one)
        for one in order:
            if one["leaf"] and len(one["saves"]) == 1:
                one["saves"].append(self.new(self.sizes[one["saves"][0]]))
            elif not one["leaf"]:
                one["freed"] = one["freed"] or bool(one["saves"])
                one["saves"].clear()


def freed(node: dict[str, Any]) -> bool:
    return bool(node["freed"]) or any(map(freed, node["next"]))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 20)), max_size=25))
def test_random_programs_against_a_ledger(program: list[tuple[int, int]]) -> None:
    tensors: list[torch.Tensor] = []
    ledger, before = Ledger(), total()
    for operation, number in program:
        i = number % len(tensors) if tensors else 0
        if operation == 0 or not tensors:
            tensors.append(torch.ones(100 + number))
            ledger.names.append((ledger.new(100 + number), None))
            continue
        x, (storage, node) = tensors[i], ledger.names[i]
        size = ledger.sizes[storage]
        if operation == 1:
            tensors.append(weight(50 + number))
            own = ledger.new(50 + number)
            ledger.names.append((own, {"leaf": True, "saves": [own], "next": [], "freed": False}))
        elif operation == 2:
            tensors.append(x.detach()[: 1 + number])
            ledger.names.append((storage, None))
        elif operation == 3:
            del tensors[i], ledger.names[i]
        elif operation in (4, 5, 6):
            tensors.append((x.exp(), x * x, x + 1)[operation - 4])
            own = ledger.new(size if x.numel() * FLOAT == x.untyped_storage().nbytes() else x.numel())
            saves = ([own], [storage], [])[operation - 4]
            ledger.names.append((own, node and {"leaf": False, "saves": saves, "next": [node], "freed": False}))
        elif node is not None and not node["leaf"] and not freed(node):
            x.sum().backward()  # type: ignore[no-untyped-call]
            ledger.backward(node)
        del x
    assert total() - before == ledger.bytes
