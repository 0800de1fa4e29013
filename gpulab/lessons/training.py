"""What the exercises' small trainings share: the same start each time, weights in one vector, one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def default_device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """The same random numbers each time inside; those of the notebook are as before afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Small products of matrices gain nothing from a second thread, and wait for it where the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def weights_of(model: nn.Module) -> Tensor:
    """A copy of all weights of a model in one vector."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def bytes_of(tensor: Tensor) -> int:
    """Of its numbers, wherever they lie."""
    return tensor.numel() * tensor.element_size()


def gradients_of(result: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Of the sum of squares of a result by each input; None where it does not depend on one."""
    if not result.requires_grad:
        return [None] * len(inputs)
    gradients: Sequence[Tensor | None] = torch.autograd.grad(result.square().sum(), list(inputs), allow_unused=True)
    return gradients


def forward_and_backward(function: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Call it, and let the sum of its result go backward to the inputs."""
    for tensor in inputs:
        tensor.grad = None
    torch.autograd.backward(function(*inputs).sum())
