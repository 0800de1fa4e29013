"""Lesson 12 inside the ranks: the stage of a pipeline on a stand-in for its device, and bytes that a rank notes.

What a rank measures by itself reaches the notebook in its trace: as the name of an annotation.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gpulab.options import at_most
from gpulab.run import Run

WIDTH = 64
SAMPLE_MS = 3.0  # that the stand-in works on one sample in the forward pass; in the backward pass twice as long
QUICK_SAMPLE_MS = 0.8
FORWARD, BACKWARD = "lesson::forward", "lesson::backward"  # as the report names them
_NOTE = "lesson notes "


@torch.library.custom_op(FORWARD, mutates_args=())
def _forward(x: Tensor, ms: float) -> Tensor:
    time.sleep(ms / 1e3)
    return x.clone()


@torch.library.custom_op(BACKWARD, mutates_args=())
def _backward(x: Tensor, ms: float) -> Tensor:
    time.sleep(ms / 1e3)
    return x.clone()


@_forward.register_fake
@_backward.register_fake
def _shape(x: Tensor, ms: float) -> Tensor:
    return torch.empty_like(x)


class _DeviceWork(torch.autograd.Function):
    """The time in which the stage's device is busy. Its values pass unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sample_ms: float) -> Tensor:
        ctx.ms = len(x) * sample_ms
        result: Tensor = _forward(x, ctx.ms)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _backward(gradients[0], 2 * ctx.ms), None


class Stage(nn.Module):
    """Two small layers, whose work takes as long as on a device that needs `sample_ms` for each sample.

    The layers are computed as they are: weights, gradients and loss are those of a training. The time is a fixed wait
    which stands for a device, because two processes seldom have two cores for themselves.
    """

    def __init__(self, width: int = WIDTH, sample_ms: float = SAMPLE_MS) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.sample_ms = at_most(sample_ms, QUICK_SAMPLE_MS)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, width] → the same shape."""
        worked: Tensor = _DeviceWork.apply(self.layers(x), self.sample_ms)  # type: ignore[no-untyped-call]
        return worked


class KeptActivations:
    """How many bytes autograd keeps from forward passes for backward passes; `peak_bytes`: the most at once.

    What several operators keep, such as one's output that is the next one's input, counts once.
    """

    def __init__(self) -> None:
        self.now_bytes = self.peak_bytes = 0
        self._holders: Counter[tuple[int, int]] = Counter()  # of each piece of memory: its place and its size

    def keep(self, piece: tuple[int, int]) -> None:
        """One more operator keeps it."""
        if not self._holders[piece]:
            self.now_bytes += piece[1]
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        self._holders[piece] += 1

    def release(self, piece: tuple[int, int]) -> None:
        """One less."""
        self._holders[piece] -= 1
        if not self._holders[piece]:
            self.now_bytes -= piece[1]


@contextmanager
def kept_activations(model: nn.Module) -> Iterator[KeptActivations]:
    """Counts what is saved inside for backward passes, without the model's parameters: those are there anyway."""
    kept = KeptActivations()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> _Kept | Tensor:
        return tensor if tensor.untyped_storage().data_ptr() in parameters else _Kept(tensor, kept)

    def unpack(packed: _Kept | Tensor) -> Tensor:
        return packed.tensor if isinstance(packed, _Kept) else packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield kept


class _Kept:
    """One saved tensor, counted until autograd lets go of it."""

    def __init__(self, tensor: Tensor, kept: KeptActivations) -> None:
        self.tensor, self._kept = tensor, kept
        self._piece = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        kept.keep(self._piece)

    def __del__(self) -> None:
        self._kept.release(self._piece)


def local_bytes(tensors: Iterable[Tensor | None]) -> int:
    """What of these tensors lies in this process: of a tensor that is divided among ranks, this rank's part."""
    parts = (getattr(tensor, "to_local", lambda tensor=tensor: tensor)() for tensor in tensors if tensor is not None)
    return sum(part.numel() * part.element_size() for part in parts)


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor | None]:
    """Weights, their gradients, and the optimizer's tensors of the same shapes."""
    for parameter in model.parameters():
        yield parameter
        yield parameter.grad
        state = optimizer.state.get(parameter, {})
        yield from (v for v in state.values() if isinstance(v, Tensor) and v.shape == parameter.shape)


def note(name: str, count: int) -> None:
    """Write a figure into the trace, where `noted` reads it; `name` is one word."""
    with torch.profiler.record_function(f"{_NOTE}{name}={count}"):
        pass


def noted(run: Run, name: str) -> int | None:
    """The largest figure of that name in a run's trace; None where there is none."""
    beginning = f"{_NOTE}{name}="
    names = run.timeline.names if run.timeline is not None else ()
    return max((int(n.removeprefix(beginning)) for n in names if n.startswith(beginning)), default=None)
