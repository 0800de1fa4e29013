"""What every test of the lessons needs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether an answer is slow does not depend here on what else this machine does."""
    monkeypatch.setattr("gpulab.lessons.check.LEAST_OTHERS", math.inf)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 48 of lesson 04's pictures, in all its storages."""
    from gpulab.lessons import preprocessing

    folder = tmp_path_factory.mktemp("lesson")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPULAB_DIR", str(folder))
        patch.setattr(preprocessing, "COUNT", 48)
        preprocessing.prepare(kinds=("memmap", "shards", "hdf5"))
    return folder


@pytest.fixture
def pictures(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The same as the lesson's own folder. Whoever looks at how it is read puts that back."""
    from PIL import Image

    from gpulab.lessons import preprocessing

    before = Image.open
    monkeypatch.setenv("GPULAB_DIR", str(prepared))
    monkeypatch.setattr(preprocessing, "COUNT", 48)
    yield preprocessing.lesson_folder()
    assert Image.open is before
