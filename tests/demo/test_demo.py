"""The demo's data is real files, its loader really works for each sample, and the notebook shows the very same code."""

from __future__ import annotations

import html
import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytest.importorskip("sklearn")
pytest.importorskip("PIL")

import nbformat
import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits

from gpulab.demo import DigitsFolder, cell, digits
from gpulab.demo.__main__ import main
from gpulab.errors import GpulabError


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("demo") / "digits"
    digits.write_digits(root)
    return root


def test_every_digit_becomes_an_image_file_in_its_class(root: Path) -> None:
    source = load_digits()
    for number in (0, 7, 1796):
        path = root / str(source.target[number]) / f"{number:04d}.png"
        with Image.open(path) as image:
            assert (image.format, image.size) == ("PNG", (digits.STORED_PIXELS, digits.STORED_PIXELS))
            small = np.asarray(image.resize((8, 8), Image.Resampling.BOX), dtype=float)
        assert np.corrcoef(small.ravel(), source.images[number].ravel())[0, 1] > 0.95
    counts = [len(list((root / str(label)).iterdir())) for label in range(10)]
    assert counts == np.bincount(source.target).tolist()


def test_the_files_are_written_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "_write_images", lambda folder: pytest.fail("the images are written again"))
    digits.write_digits(root)
    assert [path.name for path in root.parent.iterdir()] == [root.name]


def test_another_process_may_be_the_first_to_have_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = digits._write_images

    def write_late(folder: Path) -> None:
        monkeypatch.setattr(digits, "_write_images", write)
        digits.write_digits(tmp_path / "digits")
        write(folder)

    monkeypatch.setattr(digits, "_write_images", write_late)
    assert len(DigitsFolder(tmp_path / "digits")) == 1797
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]


def test_what_cannot_be_written_or_is_damaged_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(self: Image.Image, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("GPULAB_DEMO_DATA", str(tmp_path / "digits"))
    monkeypatch.setattr(Image.Image, "save", full_disk)
    with pytest.raises(GpulabError, match="No space left"):
        DigitsFolder()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "digits" / "3").mkdir(parents=True)
    (tmp_path / "digits" / "3" / "0003.png").touch()
    with pytest.raises(GpulabError, match="holds 1 digit images instead of 1797"):
        DigitsFolder()


def test_samples_are_augmented_and_normalised(root: Path) -> None:
    dataset = DigitsFolder(root)
    dataset.paths[0] = root / "gone.png"
    with pytest.raises(FileNotFoundError):
        dataset[0]  # each sample is read from its file, each time
    torch.manual_seed(0)
    first, label = dataset[1500]
    again, _ = dataset[1500]
    torch.manual_seed(0)
    same, _ = dataset[1500]
    assert first.shape == (1, digits.SAMPLE_PIXELS, digits.SAMPLE_PIXELS)
    assert first.dtype == torch.float32
    assert label == int(dataset.paths[1500].parent.name)
    assert not torch.equal(first, again)
    assert torch.equal(first, same)
    pixels = torch.stack([dataset[index][0] for index in range(20, 1797, 20)])
    assert abs(pixels.mean().item()) < 0.2
    assert 0.7 < pixels.std().item() < 1.3


def test_the_cell_trains(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GPULAB_DEMO_DATA", str(root))
    namespace: dict[str, object] = {}
    exec(compile(cell.SETUP, "<setup>", "exec"), namespace)
    namespace["dataset"] = torch.utils.data.Subset(DigitsFolder(root), range(0, 1797, 3))
    exec(compile(cell.TRAINING, "<cell>", "exec"), namespace)
    losses = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 2
    assert losses[1] < losses[0] < 2.3, "untrained, ten classes cost ln 10 = 2.303"


def test_the_notebook_shows_the_demos_own_code() -> None:
    notebook = nbformat.read(ROOT / "notebooks" / "00_quick_start.ipynb", as_version=4)
    sources = {c.id: c.source for c in notebook.cells}
    assert sources["setup"] == cell.SETUP.rstrip("\n")
    magic, _, training = sources["training"].partition("\n")
    assert magic == "%%gpuprofile quick-start"
    assert training == cell.TRAINING.rstrip("\n")


def test_a_file_that_arrives_late_is_waited_for_asleep(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    torch.manual_seed(0)
    late = DigitsFolder(root, arrive_ms=2)[3]
    torch.manual_seed(0)
    assert torch.equal(late[0], DigitsFolder(root)[3][0]) and slept == [0.002]


@pytest.fixture
def demo(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPULAB_DEMO_DATA", str(root))
    return lambda *options: main(options)


def test_the_command_prints_the_report_and_writes_one_page(
    demo: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo("--steps", "20", "--html", "page.html") == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    headline = re.search("<h1[^>]*>(.*?)</h1>", page)
    assert headline is not None and html.unescape(headline[1]) in " ".join(capsys.readouterr().out.split())
    assert "<svg" in page and list(tmp_path.glob("*.tmp")) == []
    assert demo("--steps", "8", "--html", "no/such/folder/page.html") == 1
    assert "gpulab demo: " in capsys.readouterr().err


def test_json_is_all_that_is_printed(
    demo: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cell, "TRAINING", "print('the cell speaks')\n" + cell.TRAINING)
    assert demo("--steps", "10", "--json") == 0
    printed = capsys.readouterr()
    assert isinstance(json.loads(printed.out), dict)
    assert "the cell speaks" in printed.err


def test_a_slower_loader_is_named_and_all_its_time_is_data_wait(
    demo: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo("--steps", "10", "--slow-ms", "20", "--json") == 0
    slow = json.loads(capsys.readouterr().out)
    planted_us = 32 * 20_000  # of 32 samples: at least, for a busy machine takes longer
    wait_us, step_us = slow["data_wait_per_step_us"]["median"], slow["step_us"]["median"]
    assert planted_us <= wait_us <= step_us
    parts_us = slow["breakdown"]["median_us"]
    lacked_us = parts_us.get("core_wait") or 0.0  # beside other programs
    assert parts_us["data_wait"] + lacked_us >= 0.99 * planted_us, "on the clock of the trace"
    named = ("data_starved", "cpu_preprocessing", "cpu_shared")  # measured inside: it computes
    assert slow["headline"]["key"] in named


@pytest.mark.parametrize("options", [("--steps", "0"), ("--slow-ms", "-1"), ("--steps", "many"), ("--colour",)])
def test_bad_options_end_before_anything_runs(
    demo: Callable[..., int], options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo(*options)
    assert "error: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
