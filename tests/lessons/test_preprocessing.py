"""Lesson 04: four storages of the same pictures, cold and warm, and a dataset that must not decode."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from gpulab.errors import GpulabError, UsageError
from gpulab.lessons import preprocessing
from gpulab.lessons.check import Note
from gpulab.lessons.preprocessing import (
    Hdf5,
    InMemory,
    MemoryMap,
    PictureFiles,
    Shards,
    Transformed,
    check_dataset,
    cold_and_warm,
    draw_split,
    forget,
    lesson_folder,
    loader_of,
    normalized,
    prepare,
    remove_files,
    same_samples,
)


def test_every_storage_has_the_same_samples(pictures: Path) -> None:
    said = repr(same_samples("memmap", "shards", "memory", "hdf5"))
    assert said.count("the same as decoding each file") == 4 and "NOT" not in said
    assert len(PictureFiles()) == len(MemoryMap()) == len(InMemory()) == 48
    assert sum(1 for _ in Shards()) == 48
    with pytest.raises(GpulabError, match="no storage 'tape'"):
        loader_of("tape")


def test_a_map_gives_batches_as_it_gives_items(pictures: Path) -> None:
    mapped = MemoryMap()
    for (a, b), (c, d) in zip(mapped.__getitems__([5, 2]), [mapped[5], mapped[2]], strict=True):
        assert torch.equal(a, c) and torch.equal(b, d)
    images, _ = next(iter(DataLoader(mapped, batch_size=4, shuffle=True, num_workers=1)))
    assert images.shape == (4, 3, 32, 32)


def test_a_transform_of_a_batch_is_that_of_its_items(pictures: Path) -> None:
    images = torch.stack([InMemory()[i][0] for i in range(4)])
    singles = torch.stack([Transformed()[i][0] for i in range(4)])
    assert torch.equal(normalized(images), singles)


def test_cold_and_warm_name_what_cannot_be_measured(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert repr(cold_and_warm()).count("per picture") == 4
    monkeypatch.delattr(os, "posix_fadvise")
    assert not forget([])
    assert "fetch, cold cache      not measurable here" in repr(cold_and_warm())


EARLY: tuple[Callable[[], object], ...] = (
    MemoryMap,
    InMemory,
    Shards,
    cold_and_warm,
    lambda: loader_of("shards"),
    lambda: same_samples("memory"),
)


def test_what_comes_before_prepare_says_to_run_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it, and after its files were taken away; HDF5 has a cell of its own, and may be missing."""
    monkeypatch.setenv("GPULAB_DIR", str(tmp_path / "runs"))
    monkeypatch.setattr(preprocessing, "COUNT", 8)
    for turn in range(2):
        for early in EARLY:
            with pytest.raises(UsageError, match=r"run the cell prepare first, the one with prepare\(\)"):
                early()
        assert "run the cell prepare first" in check_dataset(MemoryMap).hint
        assert not lesson_folder().exists(), "nothing is written where nothing is done"
        if turn == 0:
            prepare()
            with pytest.raises(UsageError, match="run the cell hdf5 first"):
                Hdf5()
            monkeypatch.setitem(sys.modules, "h5py", None)
            with pytest.raises(GpulabError, match="pip install h5py"):
                prepare(kinds=("memmap", "shards", "hdf5"))
            assert repr(same_samples("memmap", "shards", "memory")).count("the same as") == 3
            remove_files()
    remove_files()


# -- the three runs of a training ----------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The picture of what a test of headspace measured."""

    def draw(**changed: Any) -> Any:
        measured: dict[str, Any] = {
            "ideal_us": 2000.0,
            "step_us": 16000.0,
            "cold_us": 18000.0,
            "preparation_us": 14000.0,
            "fetch_us": 2000.0,
            "verdicts": {"ideal": "faster", "cold": "slower"},
            "certain": frozenset({"ideal", "cold"}),
            "reasons": {},
        }
        result = SimpleNamespace(**measured | changed)
        monkeypatch.setattr(preprocessing, "headspaces", [SimpleNamespace(result=result)])
        return draw_split()

    return draw


def parts_of(figure: Any) -> dict[float, list[tuple[float, float]]]:
    """Start and length in ms of the pieces of each bar, by its row."""
    rows: dict[float, list[tuple[float, float]]] = {}
    for patch in figure.axes[0].patches:
        rows.setdefault(round(patch.get_y() + patch.get_height() / 2), []).append((patch.get_x(), patch.get_width()))
    return rows


def legend_of(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_each_bar_adds_one_cost_to_the_one_before(drawn: Callable[..., Any]) -> None:
    figure = drawn()
    assert parts_of(figure) == {
        0: [(0, 2.0)],
        1: [(0, 2.0), (2.0, 14.0)],
        2: [(0, 2.0), (2.0, 14.0), (16.0, 2.0)],
    }
    assert legend_of(figure) == ["computing", "preparation", "fetch"]
    assert [t.get_text() for t in figure.axes[0].texts] == ["2.00 ms", "16.0 ms", "18.0 ms"]


def test_a_part_that_is_not_certain_is_hatched_and_says_so(drawn: Callable[..., Any]) -> None:
    figure = drawn(verdicts={"ideal": "faster", "cold": "undecided"}, certain=frozenset({"ideal"}))
    assert legend_of(figure) == ["computing", "preparation", "fetch: undecided"]
    assert [bool(patch.get_hatch()) for patch in figure.axes[0].patches] == [False] * 5 + [True]
    none = drawn(verdicts={"ideal": "faster", "cold": "no measurable difference"}, certain=frozenset({"ideal"}))
    assert "fetch: nothing measurable" in legend_of(none)


def test_a_cache_that_cannot_be_dropped_has_no_bar(drawn: Callable[..., Any]) -> None:
    why = "the files stayed in the page cache"
    figure = drawn(cold_us=None, fetch_us=None, verdicts={"ideal": "faster"}, reasons={"cold": why})
    assert set(parts_of(figure)) == {0, 1}
    said = figure.axes[0].texts[-1].get_text().replace("\n", " ")
    assert said == f"not measurable here: {why}"


def test_without_the_three_runs_there_is_no_picture(drawn: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = drawn(ideal_us=None, reasons={"ideal": "stopped before it was measured"})
    assert isinstance(stopped, Note) and "stopped before it was measured" in stopped.words
    monkeypatch.setattr(preprocessing, "headspaces", [])
    early = draw_split()
    assert isinstance(early, Note) and "run the cell with %gpulab headspace first" in early.words
