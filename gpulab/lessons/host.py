"""Lesson 09, waiting for the host: many small operators or few large ones, and reading a loss in every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from numbers import Real
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from gpulab.formatting import plural
from gpulab.lessons.check import (
    Checked,
    check_speed,
    exercise,
    fault,
    right,
    wrong,
)
from gpulab.lessons.guesses import Question, times
from gpulab.lessons.training import forward_and_backward, gradients_of, seeded, weights_of

LEAST_SPEEDUP = 2.0  # speedup: hundreds of small operators over a handful
SAMPLES, POINTS = 64, 16
MOST_OPERATORS = 40  # in one call: a handful, with room for other solutions
STEPS, LOG_EVERY = 40, 10
_READS = ("item", "tolist", "cpu", "numpy", "to", "__float__", "__int__", "__bool__")


class ManyHeads(nn.Module):
    """`heads` small layers side by side. `stacked`: all of them in one product of matrices, with the same weights."""

    def __init__(self, heads: int = 64, width: int = 32, *, stacked: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(heads, width, width) / math.sqrt(width))
        self.bias = nn.Parameter(torch.zeros(heads, width))
        self.stacked = stacked

    def forward(self, x: Tensor) -> Tensor:
        """[batch, heads, width] → the same shape."""
        if self.stacked:
            return torch.tanh(torch.einsum("bhi,hio->bho", x, self.weight) + self.bias)
        parts = zip(x.unbind(1), self.weight.unbind(0), self.bias.unbind(0), strict=True)
        return torch.stack([torch.tanh(one @ weight + bias) for one, weight, bias in parts], dim=1)


def point_by_point(points: Tensor, centre: Tensor) -> Tensor:
    """Of each sample, the mean distance of its points from the centre: [samples, points, 2], [2] → [samples].

    One small operator after the other, sample by sample, as a first version is often written.
    """
    distances = []
    for sample in points:
        total = torch.zeros((), dtype=points.dtype)
        for point in sample:
            total = total + torch.sqrt(((point - centre) ** 2).sum())
        distances.append(total / len(sample))
    return torch.stack(distances)


# -- exercise 1: few large operators -----------------------------------------------------------------------------------


def _squares(points: Tensor, centre: Tensor) -> Tensor:
    return ((points - centre) ** 2).sum(-1)


@exercise()
def check_distances(my_distances: Any) -> Checked:
    """Whether `my_distances(points, centre)` equals `point_by_point`, with its gradient, and is faster."""
    cases = [_points(shape, torch.float64) for shape in ((3, 5, 2), (1, 1, 2), (7, 2, 2))]
    if words := fault(
        my_distances,
        point_by_point,
        cases,
        (
            ("That is the sum of the distances; expected their mean.", lambda *of: _squares(*of).sqrt().sum(-1)),
            ("The square root is missing.", lambda *of: _squares(*of).mean(-1)),
            (
                "The root is taken of the mean; expected the mean of the roots.",
                lambda *of: _squares(*of).mean(-1).sqrt(),
            ),
        ),
        otherwise="Its values differ from those of the given function: try both on two points.",
        form=_form,
        same=torch.allclose,
    ):
        return wrong(words)
    for case in cases:
        (gradient,) = gradients_of(my_distances(*case), case[:1])
        (expected,) = gradients_of(point_by_point(*case), case[:1])
        if gradient is None or expected is None:
            return wrong("There is no gradient of the points: was the tensor detached, or taken to NumPy?")
        if not torch.allclose(gradient, expected):
            return wrong("The values are right, their gradients are not.")
    points, centre = _points((SAMPLES, POINTS, 2), torch.float32)
    with _Calls() as calls:
        my_distances(points, centre)
    if calls.count > MOST_OPERATORS:
        return wrong(
            f"The values are right. It starts {calls.count:,} operators for {SAMPLES} samples of {POINTS} points, and "
            "a handful is enough: is there still a loop in Python? One operator can take all samples at once."
        )
    return check_speed(
        lambda: forward_and_backward(point_by_point, points, centre),
        lambda: forward_and_backward(my_distances, points, centre),
        LEAST_SPEEDUP,
        good=f"Values and gradients are the same, with {calls.count} operators.",
        hint="The values are right, and the operators few, but they do far more work than is needed.",
    )


def _form(got: object, expected: Tensor) -> str:
    if not isinstance(got, Tensor):
        return f"It gives a {type(got).__name__}; expected a tensor."
    if got.shape != expected.shape:
        return (
            f"It gives the shape {list(got.shape)}; expected {list(expected.shape)}, one number per sample. Over which "
            "dimensions do you take the sum and the mean?"
        )
    return ""


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that run in its block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _points(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    points = torch.randn(shape, generator=random, dtype=dtype).requires_grad_()
    return points, torch.tensor([0.5, -0.25], dtype=dtype)


# -- exercise 2: no read in every step ---------------------------------------------------------------------------------


@exercise()
def check_loop(my_loop: Any) -> Checked:
    """Whether `my_loop(model, optimizer, batches, log)` logs the mean loss of every ten steps with one read each."""
    model, optimizer, batches = _small_training()
    logs: list[Any] = []
    logged_at: list[int] = []  # in steps of the optimizer
    steps: list[None] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(None))

    def log(value: object) -> None:
        logs.append(value)
        logged_at.append(len(steps))

    with _recorded_reads() as reads:
        my_loop(model, optimizer, batches, log)
    reference, reference_optimizer, _ = _small_training()
    expected: list[float] = []
    slow_loop(reference, reference_optimizer, batches, expected.append)
    strange = next((value for value in logs if not isinstance(value, Real)), None)
    kind = "tensors" if isinstance(strange, Tensor) else f"a {type(strange).__name__}"
    values = [float(value) for value in logs] if strange is None else []
    late = [at for number, at in enumerate(logged_at, start=1) if at >= (number + 1) * LOG_EVERY]
    if len(logs) != STEPS // LOG_EVERY:
        return wrong(
            f"It logs {len(logs)} values for {STEPS} steps; expected {STEPS // LOG_EVERY}: the mean loss of every "
            f"{LOG_EVERY} steps."
        )
    if strange is not None:
        return wrong(f"It logs {kind}. A log wants a number: read it once, when ten steps are over.")
    if not torch.allclose(weights_of(model), weights_of(reference), rtol=1e-5, atol=1e-6):
        return wrong("The weights are not what the given loop trains: every batch needs zero_grad, backward and step.")
    if not np.allclose(values, expected, rtol=1e-4):
        return wrong(
            f"The first value is {values[0]:.4f}, and the mean loss of the first ten steps is "
            f"{expected[0]:.4f}. Is it the mean of all ten losses, not the last one alone? And is the sum set to zero "
            "after each log?"
        )
    if len(reads) > 2 * len(logs):
        return wrong(
            f"It reads numbers from the device {len(reads)} times ({', '.join(sorted(set(reads)))}) for {len(logs)} "
            "values. On a GPU each read waits until all launched kernels have ended. Add the losses up as tensors "
            "(loss.detach()), and read the sum once."
        )
    if late:
        return wrong(
            f"The values are right, but one is logged only after {late[0]} steps. Log each as soon as "
            "its ten steps are over."
        )
    return right(f"{plural(len(reads), 'read')} for {STEPS} steps, the same weights and means.")


def slow_loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any], log: Callable[..., Any]) -> None:
    """The loop as often written first, and as in the notebook: it reads the loss in every step."""
    total = 0.0
    for number, (inputs, targets) in enumerate(batches, start=1):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        total += loss.item()
        if number % LOG_EVERY == 0:
            log(total / LOG_EVERY)
            total = 0.0


@contextmanager
def _recorded_reads() -> Iterator[list[str]]:
    """Records the name of every call in the block that reads a tensor's numbers into Python; patches are undone."""
    reads: list[str] = []
    inside = False  # a read that contains others counts once

    def counting(name: str) -> Any:
        original = getattr(Tensor, name)

        def read(self: Tensor, *arguments: Any, **options: Any) -> Any:
            nonlocal inside
            outer, inside = inside, True
            if not outer and (name != "to" or _is_read(self, arguments, options)):
                reads.append(name.strip("_"))
            try:
                return original(self, *arguments, **options)
            finally:
                inside = outer

        return read

    with ExitStack() as stack:
        for name in _READS:
            stack.enter_context(patch.object(Tensor, name, counting(name)))
        yield reads


def _is_read(tensor: Tensor, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Whether `.to(…)` moves a number to the host; batches and weights may go to any device."""
    targets = [*arguments[:1], options.get("device")]
    return tensor.numel() == 1 and any(str(target) == "cpu" for target in targets)


def _small_training() -> tuple[nn.Module, torch.optim.Optimizer, list[tuple[Tensor, Tensor]]]:
    with seeded():
        model = nn.Linear(4, 1)
        batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(STEPS)]
    return model, torch.optim.SGD(model.parameters(), lr=0.05), batches


QUESTIONS: Mapping[str, Question] = {
    "stacked": times(
        "What speedup do you expect when one operator does the work of 64?",
        "stacked",
        "with few large operators",
    ),
    "metric": times(
        "What speedup do you expect when the metric takes three operators for all samples?",
        "metric",
        "with the metric in three operators",
    ),
}
