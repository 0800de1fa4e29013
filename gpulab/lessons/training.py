"""Helpers for the small trainings of exercises: fixed initial weights, weights in one vector, one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def default_device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Fixed random numbers in the block; afterwards the notebook's generator continues as before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """One compute thread in the block: small matrix products gain nothing from a second thread, but may wait for it."""
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
    """The bytes of a tensor's numbers, on any device."""
    return tensor.numel() * tensor.element_size()


def gradients_of(result: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The gradients of the sum of squares of a result by each input; None if it does not depend on the input."""
    if not result.requires_grad:
        return [None] * len(inputs)
    gradients: Sequence[Tensor | None] = torch.autograd.grad(result.square().sum(), list(inputs), allow_unused=True)
    return gradients


def forward_and_backward(function: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Call the function, and run the backward pass of the sum of its result."""
    for tensor in inputs:
        tensor.grad = None
    torch.autograd.backward(function(*inputs).sum())


FIRST_SCALE = 1024.0


class RecordingScaler(torch.amp.GradScaler):
    """A gradient scaler with a small model and an optimizer; it records what a training step does with all three.

    It doubles its scale after each good step, so that a missing update() shows.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device.type, init_scale=FIRST_SCALE, growth_interval=1)
        with seeded():
            self.model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.device, self._random, self._by_scaler = device, torch.Generator().manual_seed(0), False
        self.model.register_forward_hook(self._after_forward)
        self.optimizer.register_step_post_hook(self._after_step)

    def run(self, amp_step: Callable[..., object], enlarged: float) -> None:
        """Call `amp_step` once with a batch whose numbers are `enlarged` times as large as usual."""
        inputs = enlarged * torch.randn(32, 16, generator=self._random)
        self._targets = torch.randint(4, (32,), generator=self._random).to(self.device)
        self.calls: list[str] = []  # calls of the scaler, in order
        self.forward = False
        self.autocast: torch.dtype | None = None  # the format of the forward pass
        self.short_weights = self.backward_in_autocast = False
        self.stale = False  # whether gradients of an earlier call existed before the backward pass
        self.times_scaled: float | None = None  # factor on the loss in the backward pass
        self.norm: float | None = None  # of the gradients of all weights together, at scaler.step
        self.raw_norm = 0.0  # the same before clipping, if known
        self.own_steps, self.error = 0, ""  # steps of the optimizer without the scaler
        before, self.scale_before = weights_of(self.model), self.get_scale()
        try:
            amp_step(self.model, self.optimizer, self, inputs.to(self.device), self._targets)
        except Exception as e:
            self.error = f"{type(e).__name__}: {e}"
        self.weights = weights_of(self.model).float().cpu()
        self.moved = not torch.equal(before.cpu(), self.weights)

    def _norm(self) -> float:
        gradients = [p.grad.flatten().float() for p in self.model.parameters() if p.grad is not None]
        return float(torch.cat(gradients).norm()) if gradients else 0.0

    def _after_forward(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        kind = self.device.type
        self.forward = True
        self.autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self.short_weights |= any(p.dtype is not torch.float32 for p in module.parameters())
        if not output.requires_grad:
            return
        with torch.autocast(kind, enabled=False):
            plain = functional.softmax(output.detach().float(), -1)
            plain = (plain - functional.one_hot(self._targets, plain.shape[-1])) / len(plain)

        def entering(gradient: Tensor) -> None:
            self.times_scaled = float(gradient.float().norm() / plain.norm())
            self.backward_in_autocast = torch.is_autocast_enabled(kind)
            self.stale = self._norm() > 0

        output.register_hook(entering)  # type: ignore[no-untyped-call]

    def _after_step(self, *_: object) -> None:
        self.own_steps += not self._by_scaler

    def scale(self, outputs: Any) -> Any:
        self.calls.append("scale")
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls += [] if self._by_scaler else ["unscale_"]
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        self.calls.append("step")
        self.norm, self._by_scaler = self._norm(), True
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            self._by_scaler = False

    def update(self, new_scale: float | Tensor | None = None) -> None:
        self.calls.append("update")
        super().update(new_scale)
