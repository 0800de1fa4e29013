"""Lesson 04: four storages of the same pictures, cold and warm, and a dataset that must not decode."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from gpulab.errors import GpulabError
from gpulab.lessons import preprocessing
from gpulab.lessons.pairs import Speed
from gpulab.lessons.preprocessing import (
    InMemory,
    MemoryMap,
    PictureFiles,
    Shards,
    Transformed,
    check_dataset,
    check_random,
    cold_and_warm,
    forget,
    lesson_folder,
    loader_of,
    normalized,
    prepare,
    remove_files,
    same_samples,
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lesson")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPULAB_DIR", str(folder))
        patch.setattr(preprocessing, "COUNT", 48)
        prepare(kinds=("memmap", "shards", "hdf5"))
    return folder


@pytest.fixture
def folder(store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPULAB_DIR", str(store))
    monkeypatch.setattr(preprocessing, "COUNT", 48)
    return lesson_folder()


def test_every_storage_has_the_same_samples(folder: Path) -> None:
    said = repr(same_samples("memmap", "shards", "memory", "hdf5"))
    assert said.count("the same as decoding each file") == 4 and "NOT" not in said
    assert len(PictureFiles()) == len(MemoryMap()) == len(InMemory()) == 48
    assert sum(1 for _ in Shards()) == 48
    with pytest.raises(GpulabError, match="no storage 'tape'"):
        loader_of("tape")


def test_a_map_gives_batches_as_it_gives_items(folder: Path) -> None:
    mapped = MemoryMap()
    for (a, b), (c, d) in zip(mapped.__getitems__([5, 2]), [mapped[5], mapped[2]], strict=True):
        assert torch.equal(a, c) and torch.equal(b, d)
    images, _ = next(iter(DataLoader(mapped, batch_size=4, shuffle=True, num_workers=1)))
    assert images.shape == (4, 3, 32, 32)


def test_a_transform_of_a_batch_is_that_of_its_items(folder: Path) -> None:
    images = torch.stack([InMemory()[i][0] for i in range(4)])
    singles = torch.stack([Transformed(InMemory())[i][0] for i in range(4)])
    assert torch.equal(normalized(images), singles)


def test_cold_and_warm_name_what_cannot_be_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert repr(cold_and_warm()).count("per picture") == 4
    monkeypatch.delattr(os, "posix_fadvise")
    assert not forget([])
    assert "fetch, cold cache      not measurable here" in repr(cold_and_warm())


def test_the_lesson_takes_its_files_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPULAB_DIR", str(tmp_path))
    lesson_folder().mkdir()
    remove_files()
    remove_files()
    assert not lesson_folder().exists()


class Right:
    def __init__(self, root: Path) -> None:
        self.images, self.labels = np.load(root / "images.npy", mmap_mode="r"), np.load(root / "labels.npy")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(np.array(self.images[index])), torch.tensor(self.labels[index])


class Given:
    def __init__(self, root: Path) -> None: ...

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any: ...


class Decodes(Right):
    def __getitem__(self, index: int) -> Any:
        return PictureFiles()[index]


class Arrays(Right):
    def __getitem__(self, index: int) -> Any:
        return self.images[index], self.labels[index]


class Single(Right):
    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(np.array(self.images[index]))


class Turned(Right):
    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image.flip(-1), label


class Shifted(Right):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0], torch.tensor(self.labels[index - 1])


class Short(Right):
    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize(
    ("answer", "state", "hint"),
    [
        (..., "unanswered", "in place of the dots"),
        (Given, "unanswered", "in place of the dots"),
        (Decodes, "wrong", "It decodes pictures"),
        (Arrays, "wrong", "torch.from_numpy"),
        (Single, "wrong", "a pair (image, label)"),
        (Turned, "wrong", "not the one that decoding"),
        (Shifted, "wrong", "The label of sample 0"),
        (Short, "wrong", "It has 10 samples, and there are 48"),
    ],
)
def test_a_dataset_gets_a_hint(folder: Path, answer: Any, state: str, hint: str) -> None:
    before = Image.open
    checked = check_dataset(answer)
    assert (checked.state, hint in checked.hint) == (state, True), checked
    assert Image.open is before


@pytest.mark.parametrize(("low", "high", "state"), [(8, 9, "right"), (0.9, 1.1, "wrong"), (0.9, 9.0, "undecided")])
def test_equal_samples_are_judged_by_speed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, low: float, high: float, state: str
) -> None:
    speed = Speed((low * high) ** 0.5, (low, high), 1.0, 1.0, 5)
    monkeypatch.setattr(preprocessing, "time_pairs", lambda before, after, pairs: speed)
    assert check_dataset(Right).state == state


def test_without_the_map_the_check_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPULAB_DIR", str(tmp_path))
    assert "run it first" in check_dataset(Right).hint


@pytest.mark.parametrize(
    ("answer", "state", "hint"),
    [
        (..., "unanswered", "in place of the dots"),
        ({"random crop", "random flip"}, "right", "stay in the loader"),
        (["random crop"], "wrong", "'random flip' done once would be the same"),
        ({"random crop", "random flip", "decode"}, "wrong", "'decode' gives the same result each time"),
        ({"rotate"}, "wrong", "'rotate' is none of the five"),
        ("random crop", "wrong", "a set of names"),
    ],
)
def test_what_stays_random_gets_a_hint(answer: object, state: str, hint: str) -> None:
    checked = check_random(answer)
    assert (checked.state, hint in checked.hint) == (state, True), checked
