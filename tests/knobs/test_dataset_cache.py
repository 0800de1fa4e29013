"""The knob `cache`: all items in memory, the same data and random numbers, and what it refuses."""

from __future__ import annotations

import gc
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gpulab.knobs import dataset_cache
from gpulab.knobs.dataset_cache import DatasetCache, item_bytes, same
from gpulab.knobs.description import observed_loader
from gpulab.knobs.knob import KnobEffects
from gpulab.knobs.loader_options import WORKERS
from gpulab.knobs.observation import Observation
from gpulab.run import Device
from tests.support.knob_cells import captured

LENGTH = 20


class Counted(Dataset[Any]):
    """Counts how often it is asked in this process."""

    title = "counted"

    def __init__(self, make: Callable[[int], Any] = lambda i: (torch.full((3,), float(i)), i)) -> None:
        self.asked = 0
        self.make = make

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, i: int) -> Any:
        self.asked += 1
        return self.make(i)


class Several(Counted):
    def __getitem__(self, i: int) -> Any:
        raise AssertionError("torch asks __getitems__ where there is one")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked += len(indices)
        return [self.make(i) for i in indices]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(8.0))


@pytest.fixture
def cache() -> Iterator[DatasetCache]:
    knob = DatasetCache()
    yield knob
    knob.forget()


def data(loader: DataLoader[Any]) -> list[Any]:
    return [(x.tolist(), y.tolist()) for x, y in loader]


def observation(loader: DataLoader[Any]) -> Observation:
    return Observation(Device("cpu", "CPU"), (observed_loader(loader),))


@pytest.mark.parametrize("kind", [Counted, Several])
@pytest.mark.parametrize("workers", [0, 2])
def test_items_come_from_memory_and_are_the_same(kind: type[Counted], workers: int, cache: DatasetCache) -> None:
    def story(loader: DataLoader[Any]) -> list[Any]:
        torch.manual_seed(1)
        return [*data(loader), *data(loader), torch.rand(2).tolist()]

    loader = DataLoader(kind(), 4, shuffle=True)
    expected = story(loader)
    dataset = loader.dataset
    with WORKERS.applied(workers), cache.applied(True) as log:
        seen = story(loader)
        dataset.make = None  # type: ignore[attr-defined] # from here on only memory can answer
        assert story(loader) == expected
    assert seen == expected
    assert log.counts["loaders"] == 1 and not log.refusals
    assert "20 items" in log.notes[0] and log.preparation_s > 0
    assert loader.dataset is dataset


def test_filled_once_for_all_blocks_and_dropped_at_the_end(cache: DatasetCache) -> None:
    loader = DataLoader(Counted(), 4)
    dataset: Any = loader.dataset
    with cache.applied(True):
        data(loader)
    filled = dataset.asked
    for _ in range(2):
        with cache.applied(True) as log:
            data(loader)
        assert not log.notes
    assert dataset.asked == filled + 2 * dataset_cache.CHECKED_AGAIN
    dataset.make = lambda i: (torch.full((3,), -float(i)), i)
    expected = data(loader)
    with cache.applied(True) as log:
        assert data(loader) == expected
    assert any("changed" in note for note in log.notes), "it is loaded anew"
    cache.forget()
    with cache.applied(True) as log:
        data(loader)
    assert log.notes
    del loader, dataset
    gc.collect()
    assert not cache._items_by_dataset.values()


own = np.random.default_rng(1)
AUGMENTED: dict[str, Callable[[int], Any]] = {
    "torch": lambda i: (torch.rand(3), i),
    "numpy": lambda i: (torch.tensor(np.random.rand(3)), i),
    "sometimes": lambda i: (torch.full((3,), -1.0 if random.random() < 0.01 else float(i)), i),
    "its own": lambda i: (torch.tensor(own.random(3)), i),
}


@pytest.mark.parametrize("kind", AUGMENTED)
def test_random_augmentation_is_refused_and_data_stay(kind: str, cache: DatasetCache) -> None:
    def seeded() -> list[Any]:
        global own
        own = np.random.default_rng(1)
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        return data(loader)

    loader = DataLoader(Counted(AUGMENTED[kind]), 4, shuffle=True)
    expected = seeded()
    with cache.applied(True) as log:
        seen = seeded()
    assert "random augmentation" in log.refusals[0] and "loaders" not in log.counts
    if kind != "its own":  # whose random numbers nobody else can put back
        assert seen == expected


@pytest.mark.parametrize(
    ("free", "limit_s", "probed", "first", "words"),
    [
        (40 * 2**20, 60.0, None, 2**18, r"20\.0 MiB.*10\.0 MiB|10\.0 MiB.*20\.0 MiB"),
        (None, 60.0, None, 2**18, "free memory cannot be read"),
        (2**40, 0.0, None, 2**18, r"loading the \d+ items would take .* s, more than 0 s"),
        (40 * 2**20, 60.0, 1, 1, r"10\.0 MiB"),  # the items after the first are larger
    ],
)
def test_too_large_or_too_slow_is_refused_with_the_figure(
    cache: DatasetCache,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    limit_s: float,
    probed: int | None,
    first: int,
    words: str,
) -> None:
    batch = 4 if probed is None else 1
    loader = DataLoader(Counted(lambda i: (torch.zeros(2**18 if first > 1 else 2**20 if i else 1), i)), batch)
    monkeypatch.setattr(dataset_cache, "free_host_bytes", lambda: free)
    monkeypatch.setattr(dataset_cache, "LIMIT_S", limit_s)
    monkeypatch.setattr(dataset_cache, "PROBED", probed or dataset_cache.PROBED)
    with cache.applied(True) as log:
        data(loader)
    assert re.search(words, log.refusals[0]) and not cache._items_by_dataset.values()
    asked = loader.dataset.asked  # type: ignore[attr-defined]
    with cache.applied(True) as log:  # the next block
        next(iter(loader))
    assert log.refusals and loader.dataset.asked == asked + batch  # type: ignore[attr-defined]


def test_workers_that_are_not_forked_need_the_memory_once_each(
    cache: DatasetCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset: Dataset[Any] = Counted(lambda i: (torch.zeros(2**18), i))
    monkeypatch.setattr(dataset_cache, "free_host_bytes", lambda: 100 * 2**20)
    spawning = DataLoader(dataset, 4, num_workers=1, multiprocessing_context="spawn")
    assert dataset_cache._copies(spawning, 3) == 3
    assert dataset_cache._copies(DataLoader(dataset, 4, num_workers=1, multiprocessing_context="fork"), 3) == 0
    with WORKERS.applied(0), cache.applied(True) as log:
        data(spawning)
    assert not log.refusals


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DataLoader(Stream(), 4), "IterableDataset"),
        (lambda: DataLoader([1.0, 2.0], 1), "already in memory"),  # type: ignore[arg-type]
        (lambda: DataLoader(Counted(lambda i: 1 // (i - 7)), 1), "ZeroDivisionError"),
    ],
)
def test_datasets_that_cannot_be_cached(make: Callable[[], DataLoader[Any]], words: str, cache: DatasetCache) -> None:
    loader = make()
    with cache.applied(True) as log:
        next(iter(loader))
    assert words in log.refusals[0]


def test_an_item_changed_by_collate_is_whole_next_epoch(cache: DatasetCache) -> None:
    def collate(items: list[Any]) -> list[float]:
        return [float(item["x"].add_(1)) + item.pop("y") for item in items]

    loader = DataLoader(Counted(lambda i: {"x": torch.tensor(float(i)), "y": 10}), 4, collate_fn=collate)
    expected = list(loader)
    with cache.applied(True):
        assert list(loader) == expected
        assert list(loader) == expected


def test_the_users_dataset_shows_through(cache: DatasetCache) -> None:
    loader = DataLoader(Counted(), 4)
    with cache.applied(True):
        iterator: Any = iter(loader)
        served = iterator._dataset
        assert served.title == "counted" and len(served) == LENGTH
        assert torch.equal(served[-1][0], loader.dataset[-1][0])
        assert not hasattr(served, "no such thing")


def test_verified_from_a_run(cache: DatasetCache) -> None:
    def run(loader: DataLoader[Any], *, on: bool) -> tuple[Any, KnobEffects]:
        done, logs, _ = captured(lambda: data(loader), (cache, on), trace=False)
        return done, logs["cache"]

    loader, random = DataLoader(Counted(), 4), DataLoader(Counted(AUGMENTED["torch"]), 4)
    (cached, log), (plain, off), (refused, why) = run(loader, on=True), run(loader, on=False), run(random, on=True)
    seen = observation(loader)
    assert cache.verify(seen, True, log, cached).state == "took effect"
    assert cache.verify(seen, False, off, plain).state == "no effect"
    other = replace(cached, loader=replace(cached.loader, dataset="Other"))
    assert cache.verify(seen, True, log, other).state == "no effect"
    log.count("Counted unchanged")
    assert cache.verify(seen, True, log, cached).state == "cannot tell"
    result = cache.verify(observation(random), True, why, refused)
    assert result.state == "no effect" and "random augmentation" in result.evidence


def test_sizes_and_sameness() -> None:
    assert item_bytes(torch.zeros(1000)) >= 4000 <= item_bytes({"a": [np.zeros(500)]})
    nan = float("nan")
    assert same(
        {"a": [torch.tensor([nan, 1.0]), np.array([nan]), nan]}, {"a": [torch.tensor([nan, 1.0]), np.array([nan]), nan]}
    )
    for a, b in ((torch.tensor(1.0), torch.tensor(2.0)), ([1], [2]), ({"a": 1}, {"b": 1}), (1, 1.0), ("a", "b")):
        assert same(a, a) and not same(a, b)
    first, second = Counted(), Counted(first_make := (lambda i: i))
    first.make = first_make
    assert same(first, second)
    second.asked = 1
    assert not same(first, second)
