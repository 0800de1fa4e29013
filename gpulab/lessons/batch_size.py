"""Lesson 05, the batch size: samples that cost nothing to load, and gradient accumulation as an exercise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.utils.data import Dataset

from gpulab.errors import GpulabError
from gpulab.formatting import factor, size
from gpulab.lessons.check import Checked, NoAnswer, Note, Table, exercise, right, wrong
from gpulab.lessons.figures import plot
from gpulab.lessons.guesses import Question, times
from gpulab.lessons.measured import Swept, check_enough, experiment_named
from gpulab.lessons.memory import kept_bytes
from gpulab.views.waiting import waiting
from gpulab.views.wording import PARTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COPIES = 9  # of 1797 digits: several steps of an epoch even with large batches
NOISE = 0.1
BATCHES, BATCH_SIZE = (4, 3), 8  # batches of each call of the accumulation exercise, and samples of a batch
LEARNING_RATE = 0.1

Batch: TypeAlias = tuple[Tensor, Tensor]
OneStep: TypeAlias = Callable[[nn.Module, torch.optim.Optimizer, nn.Module, Sequence[Batch]], object]


class DigitsInMemory(Dataset[Batch]):
    """16,173 handwritten digits of 64 pixels, scikit-learn's 1797 with some noise, all in memory.

    A batch is picked at once: give `collate_fn=whole_batch` to the DataLoader. Raises GpulabError without scikit-learn.
    """

    def __init__(self) -> None:
        try:
            with waiting("reading the digits"):  # imports scikit-learn
                from sklearn.datasets import load_digits

                digits = load_digits()
        except ImportError as e:
            raise GpulabError("The lesson needs scikit-learn: pip install scikit-learn") from e
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


def draw_knee(fixed_in_samples: float) -> Figure:
    """A model's time per sample against the batch size: the fixed price is as much as so many samples."""
    sizes = 2 ** np.arange(0, 11)
    return _curve(sizes, 1 + fixed_in_samples / sizes, None, "time of a sample (1: without a fixed price), a model")


def draw_sweep(name: str, as_written: int) -> Figure | Note:
    """The time per sample of the sweep of that name, and the line of `a + b * B` through it by least squares.

    The fit is relative, so that small and large batches count alike.
    """
    experiment = experiment_named(name)
    times = Swept.of(experiment, "batch_size", as_written).times_us if experiment is not None else {}
    if len(times) < 3:
        return Note("Not measured.", f"There is no sweep {name!r} yet: run that cell first.")
    sizes, per_sample = np.array(list(times), dtype=float), np.array(list(times.values()))
    design = np.stack((1 / sizes, np.ones_like(sizes)), axis=1) / per_sample[:, None]
    fixed_us, sample_us = np.linalg.lstsq(design, np.ones_like(sizes), rcond=None)[0]
    title = f"your sweep: time of a sample; the line is {fixed_us:.0f} us a step + {sample_us:.1f} us a sample"
    return _curve(sizes, fixed_us / sizes + sample_us, per_sample, title)


def _curve(sizes: npt.NDArray[Any], line: npt.NDArray[Any], dots: npt.NDArray[Any] | None, title: str) -> Figure:
    y = "µs per sample" if dots is not None else "times the least"
    with plot(7, 2.6, title, "batch size", y) as (figure, axes):
        axes.plot(sizes, line, color=PARTS["compute"].colour, lw=1.5)
        if dots is not None:
            axes.plot(sizes, dots, "o", color=PARTS["data_wait"].colour, ms=6)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(color="#DDDDDD", lw=0.6)
    return figure


def losses_after(samples: int, batch_sizes: Sequence[int], learning_rates: Sequence[float]) -> Table:
    """Train a small network from the same start on so many samples, once per setting: its loss on all data at the end.

    A model of its own and fixed random numbers, in one thread's order: the same machine gives the same figures.
    """
    digits = DigitsInMemory()
    lines = ["batch size   learning rate   optimizer steps   loss after the same samples"]
    with torch.random.fork_rng(devices=[]), waiting("training from the same start with each batch size"):
        for size in batch_sizes:
            for rate in learning_rates:
                loss = _loss_after(digits, samples, size, rate)
                lines.append(f"{size:10}   {rate:13g}   {samples // size:15}   {loss:.3f}")
    return Table(tuple(lines))


def _loss_after(digits: DigitsInMemory, samples: int, size: int, rate: float) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    order = torch.randperm(len(digits))[:samples]
    for batch in order[: samples - samples % size].view(-1, size):
        optimizer.zero_grad()
        loss: Tensor = nn.functional.cross_entropy(model(digits.pixels[batch]), digits.labels[batch])
        torch.autograd.backward(loss)
        optimizer.step()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(digits.pixels), digits.labels))


def kept_for_backward(model: nn.Module, digits: DigitsInMemory, batch_sizes: Sequence[int]) -> Table:
    """The bytes that autograd keeps of one forward pass, per batch size: activations, without the weights."""
    device = next(model.parameters()).device
    lines = ["batch size   kept for the backward pass"]
    with waiting("counting what a forward pass keeps"):
        for count in batch_sizes:
            pixels, labels = digits.pixels[:count].to(device), digits.labels[:count].to(device)
            kept, _ = kept_bytes(model, lambda: nn.functional.cross_entropy(model(pixels), labels))  # noqa: B023
            lines.append(f"{count:10}   {size(kept)}")
    return Table(tuple(lines))


# -- the exercise ------------------------------------------------------------------------------------------------------


class _Outcome(Struct):
    """What the reader's function did to a small model."""

    moved: tuple[Tensor, Tensor]  # by the first and by the second call, all weights in one vector
    steps: tuple[int, int]
    gradients: bool  # some are there
    largest_batch: int  # samples that the model was given at once
    most_alive: int  # batches whose results were kept for a backward pass at the same time


@exercise()
def check_accumulation(one_step: OneStep) -> Checked:
    """Whether `one_step(model, optimizer, loss_function, batches)` trains as on one batch of all samples together."""
    try:
        mine = _tried(one_step)
    except Exception as e:
        return wrong(f"It does not run. {type(e).__name__}: {e}")
    if not any(mine.steps):
        if mine.gradients:
            return wrong("There are gradients, but the optimizer never made its step: call optimizer.step().")
        raise NoAnswer
    if mine.steps[0] > 1:
        return wrong(
            f"The optimizer made {mine.steps[0]} steps for {BATCHES[0]} batches; expected one: "
            "optimizer.step() belongs after the loop, not into it."
        )
    if mine.largest_batch > BATCH_SIZE:
        return wrong(
            f"The model was given {mine.largest_batch} samples at once: that is a large batch, with its "
            "memory. Give it one batch after the other."
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
    return _judged(mine, _tried(_as_one_batch))


def _judged(mine: _Outcome, wanted: _Outcome) -> Checked:
    first, second = (_times_as_far(m, w) for m, w in zip(mine.moved, wanted.moved, strict=True))
    if first is not None and abs(first - BATCHES[0]) < 1e-3:
        return wrong(
            f"The step goes the right way and {BATCHES[0]} times too far: each loss is a mean over its own batch, and "
            f"their gradients add up. Divide each loss by the number of batches, len(batches)."
        )
    if first is None:
        return wrong(
            "The step goes another way than with one large batch. Does every batch count? optimizer.zero_grad() inside "
            "the loop throws away what the batches before have added."
        )
    if abs(first - 1) > 1e-3:
        return wrong(f"The step goes the right way, but {factor(first)} times as far as with one large batch.")
    if second is not None and abs(second - BATCHES[1] / BATCHES[0]) < 1e-3:
        return wrong(
            f"With {BATCHES[0]} batches it is right, with {BATCHES[1]} it is not: divide by the number of batches that "
            "were given, len(batches)."
        )
    if second is None or abs(second - 1) > 1e-3:
        return wrong(
            "The first call is right, the second is not: gradients of the first are still there and are added. "
            "Call optimizer.zero_grad() once per call."
        )
    return right(
        f"{BATCHES[0]} batches of {BATCH_SIZE} samples moved the weights exactly as one batch of "
        f"{BATCHES[0] * BATCH_SIZE}. No two of them had their results in memory at once."
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
    alive = _count_alive(model)
    moved, steps = [], []
    for count in BATCHES:
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        one_step(model, optimizer, nn.CrossEntropyLoss(), _batches(random, count))
        moved.append(nn.utils.parameters_to_vector(model.parameters()).detach() - before)
        steps.append(len(counted))
        counted.clear()
    gradients = any(p.grad is not None for p in model.parameters())
    return _Outcome((moved[0], moved[1]), (steps[0], steps[1]), gradients, max(sizes), max(alive))


def _count_alive(model: nn.Module) -> list[int]:
    """Of every forward pass of `model` from now on, how many have not yet been through backward then."""
    alive: set[int] = set()
    counts = [0]

    def forward(_: nn.Module, __: object, output: Tensor) -> None:
        if output.requires_grad:
            number = len(counts)
            alive.add(number)
            output.register_hook(lambda _: alive.discard(number))  # type: ignore[no-untyped-call]
        counts.append(len(alive))

    model.register_forward_hook(forward)
    return counts


def _batches(random: torch.Generator, count: int) -> list[Batch]:
    inputs = torch.randn(count, BATCH_SIZE, 6, generator=random, dtype=torch.float64)
    labels = torch.randint(3, (count, BATCH_SIZE), generator=random)
    return list(zip(inputs, labels, strict=True))


def _as_one_batch(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_function: nn.Module, batches: Sequence[Batch]
) -> None:
    optimizer.zero_grad()
    inputs, labels = zip(*batches, strict=True)
    loss_function(model(torch.cat(inputs)), torch.cat(labels)).backward()
    optimizer.step()


# -- what the notebook asks --------------------------------------------------------------------------------------------


def check_enough_batch(enough_batch: object) -> Checked:
    """Whether that is the smallest batch that is as good per sample as the best of the sweep."""
    return check_enough(enough_batch, "knee", "batch_size", as_written=8)


QUESTIONS: Mapping[str, Question] = {
    "batch": times(
        "What speedup per sample do batches of 32 give?",
        "batch-of-32",
        "per sample with batches of 32",
    ),
    "accumulate": times(
        "What speedup per sample does one optimizer step for every four batches of 8 give?",
        "four-batches",
        "with four batches per optimizer step",
    ),
}
EXERCISES: Mapping[str, Callable[..., Checked]] = {"enough-batch": check_enough_batch, "one-step": check_accumulation}
