"""Lesson 03: images that arrive slowly, images that take work, and the exercise whose answer is a DataLoader."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gpulab.lessons import starving
from gpulab.lessons.check import NotMeasured, Speed
from gpulab.lessons.digits import DigitsInMemory, DistantDigits, HeavyDigits, SomeDistantDigits, whole_batch
from gpulab.lessons.starving import Feeding, check_loader, judge_claim, steps_ms

DATA = TensorDataset(torch.zeros(64, 1), torch.zeros(64))


def loader(dataset: TensorDataset = DATA, **options: object) -> DataLoader[tuple[torch.Tensor, ...]]:
    chosen = {"batch_size": 8, "shuffle": True, "drop_last": True, **options}
    return DataLoader(dataset, **chosen)  # type: ignore[arg-type]


GIVEN = loader()


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
    checked = starving._verdict(workers, speed, fed(waits))
    assert (checked.state, hint in checked.hint) == (state, True), checked


def test_both_loaders_really_feed_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starving, "LEAST_SPEEDUP", math.inf)  # on a busy machine either may be the faster, by chance
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


def test_some_distant_digits_are_the_same_and_few_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    some, all_ = SomeDistantDigits(fetch_ms=80), DistantDigits(0.0)
    assert len(some) == len(all_) == 599
    assert torch.equal(some[100][0], all_[100][0]) and some[100][1] == all_[100][1]
    slept.clear()
    for index in range(len(some)):
        some[index]
    assert slept == [0.08] * 4


def ran(monkeypatch: pytest.MonkeyPatch, name: str, experiment: Any) -> None:
    """That experiment ran under that name, and no other."""

    def latest(other: str) -> Any:
        if other != name:
            raise NotMeasured(f"There is no experiment {other!r} yet")
        return experiment

    monkeypatch.setattr(starving, "latest_experiment", latest)


def case(label: str, works: float | None, verdict: str, others: float = 0.02) -> Any:
    figures = None if works is None else SimpleNamespace(works=works, cores=SimpleNamespace(others_fraction=others))
    return SimpleNamespace(b=SimpleNamespace(label=label, facts=figures), verdict=verdict)


@pytest.mark.parametrize(
    ("loaders", "begin", "words"),
    [
        ([("workers=2", 0.8, "faster"), ("cache=on", 0.96, "faster")], "It holds here.", "96 %, with cache=on"),
        (
            [("workers=2", 0.8, "faster"), ("workers=4", 0.7, "faster")],
            "It does not hold here.",
            "80 %, with workers=2",
        ),
        ([("workers=2", 0.89, "faster")], "Undecided.", "too close"),
        ([("workers=2", 0.92, "faster")], "Undecided.", "too close"),
        ([("workers=2", 0.5, "faster"), ("cache=on", 0.97, "undecided")], "Undecided.", "did not decide"),
        ([("workers=2", 0.5, "faster", 0.4), ("cache=on", 0.7, "faster")], "Undecided.", "other programs took cores"),
        ([("workers=2", 0.5, "faster", 0.4), ("cache=on", 0.97, "faster")], "It holds here.", "97 %"),
        ([("workers=2", None, "faster")], "Not measured.", "Run"),
        ([], "Not measured.", "Run"),
    ],
)
def test_a_claim_gets_a_verdict_from_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, loaders: list[tuple[Any, ...]], begin: str, words: str
) -> None:
    ran(monkeypatch, "how-many", SimpleNamespace(comparisons=[case(*one) for one in loaders]))
    monkeypatch.setattr(starving, "working_share", lambda figures: figures.works if figures is not None else None)
    note = judge_claim("how-many", "no-loading")
    assert note.opening == begin and words in note.words


def test_a_late_image_keeps_step_with_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = [SimpleNamespace(us_per_step=50_000.0), SimpleNamespace(us_per_step=6_000.0)]
    ran(monkeypatch, "cache", SimpleNamespace(sides=sides))
    assert steps_ms("cache", 8) == pytest.approx(48) and steps_ms("never ran", 8) == pytest.approx(80)
    sides[-1].us_per_step = 1e6
    assert steps_ms("cache", 8) == 250, "on a busy machine the lesson ends all the same"


def test_heavy_digits_repeat_and_are_no_less() -> None:
    digits = HeavyDigits()
    image, label = digits[100]
    assert image.shape == (1, 32, 32) and torch.equal(image, digits[100][0])
    assert len(digits) == 599 and label in range(10)


def test_whole_batches_are_the_same_as_items() -> None:
    items, whole = DigitsInMemory(1, whole=False), DigitsInMemory(1)
    assert len(items) == 1797
    single = next(iter(DataLoader(items, batch_size=16)))
    picked = next(iter(DataLoader(whole, batch_size=16, collate_fn=whole_batch)))  # type: ignore[arg-type]
    assert torch.equal(single[0], picked[0]) and torch.equal(single[1], picked[1])
