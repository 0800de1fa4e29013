"""Lesson 05: data that cost nothing to load, the exercise on accumulation, and its figures."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader

from gpulab.lessons.batch_size import (
    DigitsInMemory,
    draw_knee,
    draw_sweep,
    kept_for_backward,
    losses_after,
    whole_batch,
)
from gpulab.lessons.check import Note


def test_digits_in_memory_come_in_whole_batches() -> None:
    digits = DigitsInMemory()
    pixels, labels = next(iter(DataLoader(digits, batch_size=16, collate_fn=whole_batch)))  # type: ignore[arg-type]
    assert pixels.shape == (16, 64) and labels.tolist() == digits.labels[:16].tolist()
    assert torch.equal(pixels[3], digits[3][0])
    assert len(digits) == 9 * 1797
    assert torch.equal(digits.pixels, DigitsInMemory().pixels)


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
