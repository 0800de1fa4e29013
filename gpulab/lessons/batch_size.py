"""Lesson 05, the batch size: samples that cost nothing to load, and gradient accumulation as an exercise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from gpulab.errors import GpulabError
from gpulab.formatting import factor
from gpulab.lessons.check import Checked, is_unanswered, right, unanswered, wrong

COPIES = 9  # of 1797 digits: several steps of an epoch even with large batches
NOISE = 0.1
PARTS, PART_SIZE = 4, 8  # batches of the accumulation exercise, and samples of each
LEARNING_RATE = 0.1
BEGIN = "Write the body of the function in place of the dots, then run that cell and this one again."

Batch: TypeAlias = tuple[Tensor, Tensor]
OneStep: TypeAlias = Callable[[nn.Module, torch.optim.Optimizer, nn.Module, Sequence[Batch]], object]


class DigitsInMemory(Dataset[Batch]):
    """16,173 handwritten digits of 64 pixels, scikit-learn's 1797 with some noise, all in memory.

    A batch is picked at once: give `collate_fn=whole_batch` to the DataLoader. Raises GpulabError without scikit-learn.
    """

    def __init__(self) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError as e:
            raise GpulabError("The lesson needs scikit-learn: pip install scikit-learn") from e
        digits = load_digits()
        pixels = torch.tensor(digits.data, dtype=torch.float32).repeat(COPIES, 1) / 16
        noise = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0))
        self.pixels = pixels + NOISE * noise
        self.labels = torch.tensor(digits.target).repeat(COPIES)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return self.pixels[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> Batch:
        chosen = torch.tensor(indices)
        return self.pixels[chosen], self.labels[chosen]


def whole_batch(batch: Batch) -> Batch:
    """A collate_fn for a dataset that already gives whole batches."""
    return batch


# -- the exercise ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Outcome:
    """What the reader's function did to a small model."""

    moved: tuple[Tensor, Tensor]  # by the first and by the second call, all weights in one vector
    steps: tuple[int, int]
    gradients: bool  # some are there
    largest_batch: int  # samples that the model was given at once


def check_accumulation(one_step: OneStep) -> Checked:
    """Whether `one_step(model, optimizer, loss_function, batches)` trains as on one batch of all samples together."""
    if is_unanswered(one_step):
        return unanswered(BEGIN)
    try:
        mine = _tried(one_step)
    except Exception as e:
        return wrong(f"It does not run. {type(e).__name__}: {e}")
    if not any(mine.steps):
        if mine.gradients:
            return wrong("There are gradients, but the optimizer never made its step: call optimizer.step().")
        return unanswered(BEGIN)
    if mine.steps[0] > 1:
        return wrong(
            f"The optimizer made {mine.steps[0]} steps for {PARTS} batches, and one is wanted: "
            "optimizer.step() belongs after the loop, not into it."
        )
    if mine.largest_batch > PART_SIZE:
        return wrong(
            f"The model was given {mine.largest_batch} samples at once: that is a large batch, with its "
            "memory. Give it one batch after the other."
        )
    if not mine.moved[0].any():
        return wrong(
            "The optimizer made its step, but there were no gradients: zero_grad() comes before the loop, backward() "
            "into it, step() after it."
        )
    return _judged(mine, _tried(_as_one_batch))


def _judged(mine: _Outcome, wanted: _Outcome) -> Checked:
    first, second = (_times_as_far(m, w) for m, w in zip(mine.moved, wanted.moved, strict=True))
    if first is not None and abs(first - PARTS) < 1e-3:
        return wrong(
            f"The step goes the right way and {PARTS} times too far: each loss is a mean over its own batch, and their "
            f"gradients add up. Divide each loss by the number of batches, len(batches)."
        )
    if first is None:
        return wrong(
            "The step goes another way than with one large batch. Does every batch count? optimizer.zero_grad() inside "
            "the loop throws away what the batches before have added."
        )
    if abs(first - 1) > 1e-3:
        return wrong(f"The step goes the right way, but {factor(first)} times as far as with one large batch.")
    if second is None or abs(second - 1) > 1e-3:
        return wrong(
            "The first call is right, the second is not: gradients of the first are still there and are added. "
            "Call optimizer.zero_grad() once per call."
        )
    return right(
        f"{PARTS} batches of {PART_SIZE} samples moved the weights exactly as one batch of {PARTS * PART_SIZE}."
    )


def _times_as_far(moved: Tensor, wanted: Tensor) -> float | None:
    """How long the way is as a multiple of the wanted one; None where it leads elsewhere."""
    factor = float(moved @ wanted / (wanted @ wanted))
    return factor if torch.allclose(moved, factor * wanted, rtol=1e-6, atol=1e-9) else None


def _tried(one_step: OneStep) -> _Outcome:
    """Call it twice on a small model of its own, in double precision, so that only mistakes make a difference."""
    random = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    counted: list[object] = []
    sizes = [0]
    model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    optimizer.register_step_post_hook(lambda *_: counted.append(None))
    moved, steps = [], []
    for _ in range(2):
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        one_step(model, optimizer, nn.CrossEntropyLoss(), _batches(random))
        moved.append(nn.utils.parameters_to_vector(model.parameters()).detach() - before)
        steps.append(len(counted))
        counted.clear()
    gradients = any(p.grad is not None for p in model.parameters())
    return _Outcome((moved[0], moved[1]), (steps[0], steps[1]), gradients, max(sizes))


def _batches(random: torch.Generator) -> list[Batch]:
    inputs = torch.randn(PARTS, PART_SIZE, 6, generator=random, dtype=torch.float64)
    labels = torch.randint(3, (PARTS, PART_SIZE), generator=random)
    return list(zip(inputs, labels, strict=True))


def _as_one_batch(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_function: nn.Module, batches: Sequence[Batch]
) -> None:
    optimizer.zero_grad()
    inputs, labels = zip(*batches, strict=True)
    loss_function(model(torch.cat(inputs)), torch.cat(labels)).backward()
    optimizer.step()
