"""The losses of a loop on a GPU: what a CUDA graph overwrites, what cannot be read, what is being captured."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from gpulab.capture.training_facts import Losses, _copy_of, _owns_memory
from gpulab.run import Steps
from tests.support.fake_cuda import FakeCuda


class Compiled(torch.autograd.Function):
    """A compiled module that returns its loss: its node in the graph is of this kind."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


compiled: Callable[[Tensor], Tensor] = Compiled.apply


def recording(step: Callable[[int], None], count: int) -> tuple[float, ...]:
    """The losses that were heard of so many steps."""
    losses, edges, origin_ns = Losses(), [0], perf_counter_ns()
    with losses.recording():
        for i in range(count):
            step(i)
            edges.append(perf_counter_ns() - origin_ns)
    at = np.array(edges)
    steps = replace(Steps.empty(), number=np.arange(count), start_ns=at[:-1], end_ns=at[1:])
    return losses.per_step(steps, origin_ns)


LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "of an operator": (lambda x: x * 2, True),
    "after a compiled module": (lambda x: compiled(x) * 2, True),
    "the compiled module's own": (compiled, False),
    "a view of it": (lambda x: compiled(x).view(1, 1), False),
    "divided in place": (lambda x: compiled(x).div_(4), False),
}


@pytest.mark.parametrize(("compute", "own"), LOSSES.values(), ids=LOSSES)
def test_which_losses_need_no_copy(compute: Callable[[Tensor], Tensor], own: bool) -> None:
    assert _owns_memory(compute(torch.tensor(3.0, requires_grad=True))) is own


def test_what_torch_compile_gives_is_recognized() -> None:
    model, x = torch.nn.Linear(4, 1), torch.ones(3, 4)
    whole = torch.compile(lambda: model(x).mean(), backend="aot_eager")
    try:
        assert not _owns_memory(whole()) and _owns_memory(whole() / 4)
    finally:
        torch._dynamo.reset()  # what was compiled here closes hooks of later tests


def test_a_loss_of_a_cuda_graph_is_read_after_the_next_replay(fake_cuda: FakeCuda) -> None:
    fake_cuda.start()
    copy: list[Any] = []

    def step(i: int) -> None:
        for loss in copy:
            loss.overwritten = True
        copy.append(compiled(fake_cuda.tensor(float(i)).requires_grad_()))
        copy[-1].backward()

    assert recording(step, 3) == (0.0, 1.0, 2.0)


def test_an_error_that_stays_does_not_reach_backward(fake_cuda: FakeCuda) -> None:
    fake_cuda.start()
    x = fake_cuda.tensor(1.0).requires_grad_()

    def step(i: int) -> None:
        if i == 1:
            fake_cuda.error = "device-side assert triggered"
        compiled(x).backward()  # type: ignore[no-untyped-call]

    assert all(math.isnan(loss) for loss in recording(step, 2)), "none of them can be read"


def test_nothing_is_put_into_a_graph_that_is_captured(fake_cuda: FakeCuda) -> None:
    fake_cuda.start()
    x = fake_cuda.tensor(1.0).requires_grad_()

    def step(i: int) -> None:
        with fake_cuda.capture():
            compiled(x).backward()  # type: ignore[no-untyped-call]

    assert math.isnan(recording(step, 1)[0])
    assert fake_cuda.captured == [] and fake_cuda.violations == []


def test_the_cpu_is_asked_nothing_of_cuda(fake_cuda: FakeCuda) -> None:
    x = torch.tensor(2.0, requires_grad=True)
    assert recording(lambda i: (x * i).backward(), 3) == (0.0, 2.0, 4.0)  # type: ignore[no-untyped-call]
    loss = compiled(x)
    assert _copy_of(loss).data_ptr() == loss.data_ptr(), "nothing overwrites it: no copy"
    assert fake_cuda.calls == [] and fake_cuda.started_by is None
