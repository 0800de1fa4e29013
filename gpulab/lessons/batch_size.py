"""Lesson 05, the batch size: the fixed cost of a step, the cost of a larger batch, and gradient accumulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gpulab.formatting import factor, size
from gpulab.lessons.check import Checked, NotMeasured, Table, exercise, right, wrong
from gpulab.lessons.digits import Batch, DigitsInMemory
from gpulab.lessons.figures import BLUE, ORANGE, plot
from gpulab.lessons.guesses import Question, times
from gpulab.lessons.measured import ONE_OF_THE_SWEEP, Swept, check_enough, latest_experiment, notes
from gpulab.lessons.memory import activation_bytes
from gpulab.lessons.training import seeded, weights_of
from gpulab.views.waiting import waiting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCHES, BATCH_SIZE = (4, 3), 8  # batches of each call of the accumulation exercise, and samples of a batch
LEARNING_RATE = 0.1

OneStep: TypeAlias = Callable[[nn.Module, torch.optim.Optimizer, nn.Module, Sequence[Batch]], object]
Sizes: TypeAlias = npt.NDArray[Any]


def draw_knee(fixed_in_samples: float) -> Figure:
    """A model's time per sample against the batch size; the fixed cost is that of `fixed_in_samples` samples."""
    sizes = 2.0 ** np.arange(0, 11)
    title = "time of a sample (1: without a fixed price), a model"
    return _curve(sizes, 1 + fixed_in_samples / sizes, None, title, "times the least")


@notes
def draw_sweep(name: str, as_written: int) -> Figure:
    """The time per sample of the sweep of that name, and the line of `a + b * B` through it by least squares.

    The fit is relative, so that small and large batches count alike.
    """
    times = Swept.of(latest_experiment(name), "batch_size", as_written).times_us
    if len(times) < 3:
        raise NotMeasured(f"There is no sweep {name!r} yet: run that cell first.")
    sizes, per_sample = np.array(list(times), dtype=float), np.array(list(times.values()))
    design = np.stack((1 / sizes, np.ones_like(sizes)), axis=1) / per_sample[:, None]
    fixed_us, sample_us = np.linalg.lstsq(design, np.ones_like(sizes), rcond=None)[0]
    title = f"your sweep: time of a sample; the line is {fixed_us:.0f} us a step + {sample_us:.1f} us a sample"
    return _curve(sizes, fixed_us / sizes + sample_us, per_sample, title, "µs per sample")


def _curve(sizes: Sizes, line: Sizes, dots: Sizes | None, title: str, y: str) -> Figure:
    with plot(7, 2.6, title, "batch size", y, log={"x": 2, "y": 2}, ticks=sizes.tolist()) as (figure, axes):
        axes.plot(sizes, line, color=BLUE, lw=1.5)
        if dots is not None:
            axes.plot(sizes, dots, "o", color=ORANGE, ms=6)
    return figure


def losses_after(samples: int, batch_sizes: Sequence[int], learning_rates: Sequence[float]) -> Table:
    """Train a small network from the same start on so many samples, once per setting: its loss on all data at the end.

    Uses a separate model, fixed random numbers and one thread, so that a machine always gives the same figures.
    """
    digits = DigitsInMemory()
    rows = []
    with waiting("training from the same start with each batch size"):
        for count in batch_sizes:
            for rate in learning_rates:
                with seeded():
                    loss = _loss_after(digits, samples, count, rate)
                rows.append((count, f"{rate:g}", samples // count, f"{loss:.3f}"))
    return Table.of(("batch size", "learning rate", "optimizer steps", "loss after the same samples"), rows)


def _loss_after(digits: DigitsInMemory, samples: int, count: int, rate: float) -> float:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    order = torch.randperm(len(digits))[:samples]
    for batch in order[: samples - samples % count].view(-1, count):
        optimizer.zero_grad()
        loss: Tensor = nn.functional.cross_entropy(model(digits.pixels[batch]), digits.labels[batch])
        torch.autograd.backward(loss)
        optimizer.step()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(digits.pixels), digits.labels))


def activations_by_batch_size(model: nn.Module, digits: DigitsInMemory, batch_sizes: Sequence[int]) -> Table:
    """The bytes that autograd saves in one forward pass, per batch size: activations, without the weights."""
    device = next(model.parameters()).device
    rows = []
    with waiting("counting what a forward pass keeps"):
        for count in batch_sizes:
            pixels, labels = digits.pixels[:count].to(device), digits.labels[:count].to(device)
            saved_bytes, _ = activation_bytes(model, lambda: nn.functional.cross_entropy(model(pixels), labels))  # noqa: B023
            rows.append((count, size(saved_bytes)))
    return Table.of(("batch size", "kept for the backward pass"), rows)


# -- the exercises -----------------------------------------------------------------------------------------------------


@exercise(ONE_OF_THE_SWEEP)
def check_enough_batch(enough_batch: object) -> Checked:
    """Whether `enough_batch` is the smallest batch that is as good per sample as the best of the sweep."""
    return check_enough(enough_batch, "knee", "batch_size", as_written=8)


class _Trial:
    """Records what a function does to a small model in two calls, in double precision, so that only mistakes differ."""

    def __init__(self, one_step: OneStep) -> None:
        random = torch.Generator().manual_seed(0)
        with seeded():
            model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        self.steps: list[int] = []  # of the optimizer, by call
        self.moved: list[Tensor] = []  # change by each call, all weights in one vector
        self.largest_batch = 0  # most samples in one call of the model
        self.most_alive = 0  # most batches whose results were kept for a backward pass at once
        self._alive: set[Tensor] = set()
        model.register_forward_hook(self._after_forward)
        optimizer.register_step_post_hook(self._after_step)
        for count in BATCHES:
            inputs = torch.randn(count, BATCH_SIZE, 6, generator=random, dtype=torch.float64)
            labels = torch.randint(3, (count, BATCH_SIZE), generator=random)
            before = weights_of(model)
            self.steps.append(0)
            one_step(model, optimizer, nn.CrossEntropyLoss(), list(zip(inputs, labels, strict=True)))
            self.moved.append(weights_of(model) - before)

    def _after_forward(self, _: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        self.largest_batch = max(self.largest_batch, len(inputs[0]))
        if output.requires_grad:
            self.most_alive = max(self.most_alive, len(self._alive) + 1)
            self._alive.add(output)
            output.register_hook(lambda _: self._alive.discard(output))  # type: ignore[no-untyped-call]

    def _after_step(self, *_: object) -> None:
        self.steps[-1] += 1


def as_one_batch(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_function: nn.Module, batches: Sequence[Batch]
) -> None:
    """The step that accumulation should reproduce, with the memory of the large batch."""
    optimizer.zero_grad()
    inputs, labels = zip(*batches, strict=True)
    loss_function(model(torch.cat(inputs)), torch.cat(labels)).backward()
    optimizer.step()


@exercise()
def check_one_step(one_step: OneStep) -> Checked:
    """Whether `one_step(model, optimizer, loss_function, batches)` trains as on one batch of all samples together."""
    mine = _Trial(one_step)
    expected = _Trial(as_one_batch)
    first, second = (_times_as_far(m, w) for m, w in zip(mine.moved, expected.moved, strict=True))
    if not any(mine.steps):
        return wrong("The optimizer never made its step: call optimizer.step().")
    if mine.steps[0] > 1:
        return wrong(
            f"The optimizer made {mine.steps[0]} steps for {BATCHES[0]} batches; expected one: optimizer.step() "
            "belongs after the loop, not into it."
        )
    if mine.largest_batch > BATCH_SIZE:
        return wrong(
            f"The model was given {mine.largest_batch} samples at once: that is a large batch, with its memory. Give "
            "it one batch after the other."
        )
    if mine.most_alive > 1:
        return wrong(
            f"The results of {mine.most_alive} batches are kept at once: a sum of losses holds them all until "
            "backward(). That is the memory of the large batch. Call backward() for each batch."
        )
    if not mine.moved[0].any():
        return wrong(
            "The optimizer made its step, but there were no gradients: zero_grad() comes before the loop, backward() "
            "into it, step() after it."
        )
    if _is(first, BATCHES[0]):
        return wrong(
            f"The step goes the right way and {BATCHES[0]} times too far: each loss is a mean over its own batch, and "
            "their gradients add up. Divide each loss by the number of batches, len(batches)."
        )
    if first is None:
        return wrong(
            "The step goes another way than with one large batch. Does every batch count? optimizer.zero_grad() inside "
            "the loop throws away what the batches before have added."
        )
    if not _is(first, 1):
        return wrong(f"The step goes the right way, but {factor(first or 0.0)} times as far as with one large batch.")
    if _is(second, BATCHES[1] / BATCHES[0]):
        return wrong(
            f"With {BATCHES[0]} batches it is right, with {BATCHES[1]} it is not: divide by the number of batches that "
            "were given, len(batches)."
        )
    if not _is(second, 1):
        return wrong(
            "The first call is right, the second is not: gradients of the first are still there and are added. Call "
            "optimizer.zero_grad() once per call."
        )
    return right(
        f"{BATCHES[0]} batches of {BATCH_SIZE} samples moved the weights exactly as one batch of "
        f"{BATCHES[0] * BATCH_SIZE}. No two of them had their results in memory at once."
    )


def _is(times: float | None, expected: float) -> bool:
    return times is not None and abs(times - expected) < 1e-3


def _times_as_far(moved: Tensor, expected: Tensor) -> float | None:
    """The length of the update as a multiple of the expected one; None if its direction differs."""
    times = float(moved @ expected / (expected @ expected))
    return times if torch.allclose(moved, times * expected, rtol=1e-6, atol=1e-9) else None


QUESTIONS: Mapping[str, Question] = {
    "batch": times("What speedup per sample do batches of 32 give?", "batch-of-32", "per sample with batches of 32"),
    "accumulate": times(
        "What speedup per sample does one optimizer step for every four batches of 8 give?",
        "four-batches",
        "with four batches per optimizer step",
    ),
}
