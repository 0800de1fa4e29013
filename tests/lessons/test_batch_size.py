"""Lesson 05: data that cost nothing to load, the exercise on accumulation, and its figures."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from gpulab.lessons.batch_size import losses_after
from gpulab.lessons.digits import DigitsInMemory, whole_batch


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
