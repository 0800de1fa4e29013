"""Gradients taken away for the length of one optimizer step, which passes parameters without one over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Taken:
    """What was taken and belongs to the user's code."""

    def __init__(self) -> None:
        self._taken: list[tuple[Tensor, Tensor, tuple[int, ...]]] = []

    def take(self, parameters: Sequence[Tensor]) -> None:
        self._taken += [(p, p.grad, p.stride()) for p in parameters if p.grad is not None]
        for p in parameters:
            p.grad = None

    def give_back(self) -> None:
        """Each as it was, but laid out as the parameter is now should that have been laid out anew."""
        taken, self._taken = self._taken, []
        for p, gradient, stride in taken:
            p.grad = gradient if p.stride() == stride else laid_out_like(gradient, p)


def laid_out_like(value: Tensor, weight: Tensor) -> Tensor:
    """The same values, laid out as the weight is."""
    import torch

    if value.stride() == weight.stride() or value.layout != torch.strided:
        return value
    return torch.empty_like(weight, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value.detach())
