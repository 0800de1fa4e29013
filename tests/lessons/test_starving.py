"""Lesson 03: images that arrive slowly, images that take work, and the exercise whose answer is a DataLoader."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gpulab.lessons import starving
from gpulab.lessons.pairs import Speed
from gpulab.lessons.starving import DistantDigits, Feeding, HeavyDigits, ItemsInMemory, check_loader, pass_on

DATA = TensorDataset(torch.zeros(64, 1), torch.zeros(64))


def loader(dataset: TensorDataset = DATA, **options: object) -> DataLoader[tuple[torch.Tensor, ...]]:
    chosen = {"batch_size": 8, "shuffle": True, "drop_last": True, **options}
    return DataLoader(dataset, **chosen)  # type: ignore[arg-type]


GIVEN = loader()


@pytest.mark.parametrize(
    ("answer", "state", "hint"),
    [
        (..., "unanswered", "DataLoader(…)"),
        (DATA, "wrong", "That is a TensorDataset"),
        (loader(TensorDataset(torch.zeros(64, 1))), "wrong", "another dataset"),
        (loader(batch_size=32), "wrong", "32 samples instead of 8"),
        (loader(shuffle=False), "wrong", "shuffle=True"),
        (loader(drop_last=False), "wrong", "drop_last=True"),
    ],
)
def test_another_training_is_no_answer(answer: object, state: str, hint: str) -> None:
    def must_not_run(loader: object) -> None:
        raise AssertionError("nothing is to be measured")

    checked = check_loader(answer, GIVEN, must_not_run)
    assert (checked.state, hint in checked.hint) == (state, True), checked


def fed(wait_fraction: float) -> Feeding:
    feeding = Feeding(GIVEN, lambda loader: None)
    feeding._steps_s, feeding._waits_s = [0.05], [0.05 * wait_fraction]
    return feeding


@pytest.mark.parametrize(
    ("workers", "low", "high", "waits", "state", "hint"),
    [
        (4, 3.8, 4.2, 0.4, "right", "That is with 4 workers. It waits 40 % of each step."),
        (2, 1.6, 1.8, 0.08, "right", "there is nothing left to gain here"),
        (1, 1.2, 1.3, 0.75, "wrong", "workers could keep up"),
        (0, 0.9, 1.1, 0.8, "wrong", "Which option lets other processes load them?"),
        (0, 0.4, 9.0, 0.8, "undecided", "leaves open whether it is reached"),
        (4, 1.5, 4.0, 0.4, "undecided", "leaves open whether it is reached"),
        (0, 0.5, 3.0, 0.05, "undecided", "leaves open"),
    ],
)
def test_a_loader_is_judged_by_its_interval(
    workers: int, low: float, high: float, waits: float, state: str, hint: str
) -> None:
    speed = Speed(math.sqrt(low * high), (low, high), 0.1, 0.05, 5)
    checked = starving._judged(workers, speed, fed(waits))
    assert (checked.state, hint in checked.hint) == (state, True), checked


def test_both_loaders_really_feed_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starving, "WANTED", math.inf)  # on a busy machine either may be the faster, by chance
    monkeypatch.setattr(starving, "HARDLY_WAITS", -1.0)
    feeds: list[tuple[object, int]] = []

    def train(loader: DataLoader[tuple[torch.Tensor, ...]]) -> None:
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        for epoch in range(4):
            feeds.append((loader, epoch))
            for inputs, _ in loader:
                (inputs * parameter).sum().backward()
                optimizer.step()

    answer = loader()
    checked = check_loader(answer, GIVEN, train)
    assert checked.state == "wrong" and "one after the other" in checked.hint
    assert {GIVEN, answer} == {loader for loader, _ in feeds}
    assert max(epoch for _, epoch in feeds) < 3, "ended early, after the steps that count"


def test_a_training_that_ends_too_early_is_named() -> None:
    with pytest.raises(ValueError, match="too early to measure"):
        check_loader(loader(), GIVEN, lambda loader: None)


def test_distant_digits_repeat_and_take_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    digits = DistantDigits(fetch_ms=5, root=tmp_path / "digits")
    first, label = digits[100]
    assert torch.equal(first, digits[100][0]) and first.shape == (1, 32, 32) and first.dtype == torch.float32
    assert label == digits.labels[100]
    assert digits.labels == [int(path.parent.name) for path in digits.paths]
    assert len(digits) == len(digits.labels) == 599 and set(digits.labels) == set(range(10))
    assert slept == [0.005, 0.005]


def test_heavy_digits_repeat_and_are_no_less() -> None:
    digits = HeavyDigits()
    image, label = digits[100]
    assert image.shape == (1, 32, 32) and torch.equal(image, digits[100][0])
    assert len(digits) == 599 and label in range(10)


def test_whole_batches_are_the_same_as_items() -> None:
    items, whole = ItemsInMemory(), ItemsInMemory(whole=True)
    single = next(iter(DataLoader(items, batch_size=16)))
    picked = next(iter(DataLoader(whole, batch_size=16, collate_fn=pass_on)))  # type: ignore[arg-type]
    assert torch.equal(single[0], picked[0]) and torch.equal(single[1], picked[1])
