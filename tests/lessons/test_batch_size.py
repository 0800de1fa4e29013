"""Lesson 05: data that cost nothing to load, the exercise on accumulation, and its figures."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from gpulab.lessons import batch_size
from gpulab.lessons.batch_size import (
    Batch,
    DigitsInMemory,
    check_accumulation,
    draw_knee,
    draw_sweep,
    kept_for_backward,
    losses_after,
    whole_batch,
)
from gpulab.lessons.check import Note

Batches = Sequence[Batch]


def test_digits_in_memory_come_in_whole_batches() -> None:
    digits = DigitsInMemory()
    pixels, labels = next(iter(DataLoader(digits, batch_size=16, collate_fn=whole_batch)))  # type: ignore[arg-type]
    assert pixels.shape == (16, 64) and labels.tolist() == digits.labels[:16].tolist()
    assert torch.equal(pixels[3], digits[3][0])
    assert len(digits) == 9 * 1797
    assert torch.equal(digits.pixels, DigitsInMemory().pixels)


def unfinished(model: nn.Module, optimizer: Optimizer, loss_function: nn.Module, batches: Batches) -> None: ...


def step_in_the_loop(
    model: nn.Module, optimizer: Optimizer, loss_function: nn.Module, batches: Sequence[Batch]
) -> None:
    for inputs, labels in batches:
        optimizer.zero_grad()
        loss_function(model(inputs), labels).backward()
        optimizer.step()


def no_step(model: nn.Module, optimizer: Optimizer, loss_function: nn.Module, batches: Batches) -> None:
    for inputs, labels in batches:
        (loss_function(model(inputs), labels) / len(batches)).backward()


def not_divided(model: nn.Module, optimizer: Optimizer, loss_function: nn.Module, batches: Batches) -> None:
    optimizer.zero_grad()
    for inputs, labels in batches:
        loss_function(model(inputs), labels).backward()
    optimizer.step()


def only_the_last(model: nn.Module, optimizer: Optimizer, loss_function: nn.Module, batches: Batches) -> None:
    for inputs, labels in batches:
        optimizer.zero_grad()
        (loss_function(model(inputs), labels) / len(batches)).backward()
    optimizer.step()


def never_zeroed(model: nn.Module, optimizer: Optimizer, loss_function: nn.Module, batches: Batches) -> None:
    for inputs, labels in batches:
        (loss_function(model(inputs), labels) / len(batches)).backward()
    optimizer.step()


def zeroed_too_late(model: nn.Module, optimizer: Optimizer, loss_function: nn.Module, batches: Batches) -> None:
    for inputs, labels in batches:
        (loss_function(model(inputs), labels) / len(batches)).backward()
    optimizer.zero_grad()
    optimizer.step()


def halved(model: nn.Module, optimizer: Optimizer, loss_function: nn.Module, batches: Batches) -> None:
    optimizer.zero_grad()
    for inputs, labels in batches:
        (loss_function(model(inputs), labels) / 2).backward()
    optimizer.step()


def all_at_once(model: nn.Module, optimizer: Optimizer, loss_function: nn.Module, batches: Batches) -> None:
    batch_size._as_one_batch(model, optimizer, loss_function, batches)


def broken(model: nn.Module, optimizer: Optimizer, loss_function: nn.Module, batches: Batches) -> None:
    raise KeyError("labels")


def zeroed_at_the_end(
    model: nn.Module, optimizer: Optimizer, loss_function: nn.Module, batches: Sequence[Batch]
) -> None:
    for inputs, labels in batches:
        (loss_function(model(inputs), labels) / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


def summed_first(model: nn.Module, optimizer: Optimizer, loss_function: nn.Module, batches: Batches) -> None:
    optimizer.zero_grad()
    losses = [loss_function(model(inputs), labels) for inputs, labels in batches]
    torch.stack(losses).mean().backward()
    optimizer.step()


def four_assumed(model: nn.Module, optimizer: Optimizer, loss_function: nn.Module, batches: Batches) -> None:
    optimizer.zero_grad()
    for inputs, labels in batches:
        (loss_function(model(inputs), labels) / 4).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("answer", "state", "hint"),
    [
        (..., "unanswered", "in place of the dots"),
        (unfinished, "unanswered", "in place of the dots"),
        (step_in_the_loop, "wrong", "made 4 steps for 4 batches"),
        (no_step, "wrong", "call optimizer.step()"),
        (not_divided, "wrong", "4 times too far"),
        (only_the_last, "wrong", "throws away"),
        (never_zeroed, "wrong", "The first call is right, the second is not"),
        (zeroed_too_late, "wrong", "there were no gradients"),
        (halved, "wrong", "2.0 times as far"),
        (all_at_once, "wrong", "32 samples at once"),
        (summed_first, "wrong", "The results of 4 batches are kept at once"),
        (four_assumed, "wrong", "With 4 batches it is right, with 3 it is not"),
        (broken, "wrong", "KeyError: 'labels'"),
        (zeroed_at_the_end, "right", "exactly as one batch of 32"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_accumulation_is_told_what_is_wrong_with_it(answer: object, state: str, hint: str) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    checked = check_accumulation(answer)  # type: ignore[arg-type]
    assert (checked.state, hint in checked.hint) == (state, True), checked
    assert torch.equal(torch.get_rng_state(), before), "the reader's random numbers are untouched"


def test_the_same_start_gives_the_same_loss() -> None:
    table = losses_after(256, (8, 64), (1e-3,))
    assert table == losses_after(256, (8, 64), (1e-3,)), "no random number of the reader's is used"
    assert [line.split()[:3] for line in table.lines[1:]] == [["8", "0.001", "32"], ["64", "0.001", "4"]]


def test_what_is_kept_grows_with_the_batch_alone() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    lines = kept_for_backward(model, DigitsInMemory(), (64, 8)).lines[1:]
    assert [line.split()[0] for line in lines] == ["64", "8"]
    assert "KiB" in lines[0]


def test_the_curves_are_drawn_or_say_what_is_missing() -> None:
    assert draw_knee(20).axes[0].get_title(loc="left").endswith("a model")
    note = draw_sweep("no-such-sweep", as_written=8)
    assert isinstance(note, Note) and "run that cell first" in note.words
