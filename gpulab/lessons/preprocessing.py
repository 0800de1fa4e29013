"""Lesson 04, preprocessing and storage: the same pictures as files, as a memory map, in HDF5 and in shards."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gpulab.api.experiment import headspaces
from gpulab.errors import GpulabError, UsageError
from gpulab.formatting import duration, plural, size
from gpulab.lessons.check import (
    BEGIN,
    Checked,
    NoAnswer,
    NotMeasured,
    Table,
    check_speed,
    exercise,
    right,
    seconds_of,
    unanswered,
    wrong,
)
from gpulab.lessons.digits import load_digits
from gpulab.lessons.figures import BLUE, ORANGE, Bar, Row, draw_rows
from gpulab.lessons.guesses import Question, times
from gpulab.lessons.measured import notes
from gpulab.store.folders import default_root
from gpulab.verdict import is_decided
from gpulab.views.waiting import waiting

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Sample = tuple[Tensor, Tensor]

COUNT = 600  # pictures
STORED_PIXELS, PIXELS = 160, 32  # sides of a stored picture, and of the model's input
SHARDS = 4
LEAST_SPEEDUP = 3.0  # speedup: reading a row over decoding a picture
READ_BYTES = 1 << 16
IMAGES, LABELS, HDF5 = "images.npy", "labels.npy", "pictures.h5"
SHARD_NAMES = tuple(f"shard-{shard}.tar" for shard in range(SHARDS))


def lesson_folder() -> Path:
    """The folder of the lesson's pictures: `.gpulab/lesson04` in the working folder; `remove_files` deletes it."""
    return default_root().parent / "lesson04"


def remove_files() -> None:
    """Delete the files that the lesson has written."""
    shutil.rmtree(lesson_folder(), ignore_errors=True)


def picture_folder() -> Path:
    """A folder of JPEG files, "0000_3.jpg" with the label at the end; written on first use.

    scikit-learn's digits, enlarged and in colour. Raises GpulabError if they cannot be written.
    """
    root = lesson_folder() / "pictures"
    if len(list(root.glob("*.jpg"))) == COUNT:
        return root
    digits = load_digits()
    try:
        with waiting("writing the lesson's pictures"):
            root.mkdir(parents=True, exist_ok=True)
            for number in range(COUNT):
                grey = Image.fromarray((digits.images[number] * (255 / 16)).astype("uint8"))
                large = grey.resize((STORED_PIXELS, STORED_PIXELS), Image.Resampling.BICUBIC).convert("RGB")
                large.save(root / f"{number:04d}_{digits.target[number]}.jpg", quality=92)
    except OSError as e:
        raise GpulabError(f"The lesson's pictures cannot be written to {str(root)!r}: {e.strerror or e}.") from e
    return root


def decoded(path: Path) -> Tensor:
    """The model's input from a file: float32 [3, 32, 32], between 0 and 1."""
    with Image.open(path) as file:
        small = file.convert("RGB").resize((PIXELS, PIXELS), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.asarray(small, dtype=np.float32).transpose(2, 0, 1) / 255)


class PictureFiles(Dataset[Sample]):
    """The pictures as usually stored: each is opened, decoded and shrunk whenever it is read."""

    def __init__(self) -> None:
        self.paths = sorted(picture_folder().glob("*.jpg"))
        self.labels = torch.tensor([int(path.stem.rpartition("_")[2]) for path in self.paths])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Sample:
        return decoded(self.paths[index]), self.labels[index]


def prepare(kinds: tuple[str, ...] = ("memmap", "shards")) -> Table:
    """Do the work once: every picture is decoded and written in the requested fast formats.

    The table has the time and size of each. Raises GpulabError if a format's package is missing.
    """
    root, pictures = lesson_folder(), PictureFiles()
    began = time.perf_counter()
    files = {"JPEG files": pictures.paths, "memory map": [root / IMAGES]}
    with waiting("decoding every picture once"):
        images, labels = torch.stack([pictures[i][0] for i in range(len(pictures))]).numpy(), pictures.labels.numpy()
        np.save(root / IMAGES, images)
        np.save(root / LABELS, labels)
        if "shards" in kinds:
            files["shards"] = _write_shards(root, images, labels)
        if "hdf5" in kinds:
            files["HDF5"] = _write_hdf5(root, images, labels)
    lines = [f"decoded {len(pictures)} pictures once, in {time.perf_counter() - began:.1f} s"]
    for name, paths in files.items():
        amount = sum(path.stat().st_size for path in paths)
        lines.append(f"{name:12} {size(amount):>10}  {plural(len(paths), 'file')}")
    return Table(tuple(lines))


def _write_shards(root: Path, images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> list[Path]:
    """Tar files in the format of webdataset: the data of a sample next to its label, one sample after the other."""
    for name, rows in zip(SHARD_NAMES, np.array_split(np.arange(len(labels)), SHARDS), strict=True):
        with tarfile.open(root / name, "w") as tar:
            for row in rows:
                label = json.dumps({"label": int(labels[row])}).encode()
                for ending, content in (("npy", images[row].tobytes()), ("json", label)):
                    entry = tarfile.TarInfo(f"{row:04d}.{ending}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
    return [root / name for name in SHARD_NAMES]


def _write_hdf5(root: Path, images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> list[Path]:
    try:
        import h5py
    except ImportError as e:
        raise GpulabError("HDF5 needs h5py: pip install h5py") from e
    with h5py.File(root / HDF5, "w") as file:
        file.create_dataset("images", data=images, chunks=(1, *images.shape[1:]))
        file.create_dataset("labels", data=labels)
    return [root / HDF5]


def _prepared(folder: Path | None, names: Sequence[str], call: str = "prepare()") -> Path:
    """The folder with these files, which `call` writes. Raises UsageError naming its cell if a file is missing."""
    root = lesson_folder() if folder is None else folder
    missing = [name for name in names if not (root / name).is_file()]
    if missing:
        cell = "hdf5" if "hdf5" in call else "prepare"
        raise UsageError(f"{missing[0]} is not in the lesson's folder: run the cell {cell} first, the one with {call}.")
    return root


class MemoryMap(Dataset[Sample]):
    """The decoded pictures in one file that the system maps into memory: only the pages in use are read.

    Raises UsageError before `prepare`, like all readers of its files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        root = _prepared(folder, (IMAGES, LABELS))
        self.images = np.load(root / IMAGES, mmap_mode="r")
        self.labels = torch.from_numpy(np.load(root / LABELS))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        return torch.from_numpy(np.array(self.images[index])), self.labels[index]

    def __getitems__(self, indices: list[int]) -> list[Sample]:
        return list(zip(torch.from_numpy(self.images[indices]), self.labels[indices], strict=True))


class InMemory(MemoryMap):
    """All decoded pictures in memory: the end state of a cache."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(folder)
        self.images = np.array(self.images)


class Hdf5(Dataset[Sample]):
    """The decoded pictures in HDF5, one chunk per picture; each worker opens the file itself."""

    def __init__(self) -> None:
        root = _prepared(None, (HDF5, LABELS), 'prepare(kinds=("hdf5",))')
        self.path = root / HDF5
        self.labels = torch.from_numpy(np.load(root / LABELS))
        self._file: Any = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        if self._file is None:
            import h5py

            self._file = h5py.File(self.path, "r")
        return torch.from_numpy(self._file["images"][index]), self.labels[index]


class Shards(IterableDataset[Sample]):
    """The decoded pictures from tar files, read sequentially, which suits remote storage best. Not shuffled."""

    def __init__(self) -> None:
        root = _prepared(None, SHARD_NAMES)
        self.paths = [root / name for name in SHARD_NAMES]

    def __iter__(self) -> Iterator[Sample]:
        for path in self.paths:
            with tarfile.open(path) as tar:
                image = torch.empty(0)
                for entry in tar:
                    file = tar.extractfile(entry)
                    content = file.read() if file is not None else b""
                    if entry.name.endswith(".npy"):
                        image = torch.frombuffer(bytearray(content), dtype=torch.float32).view(3, PIXELS, PIXELS)
                    else:
                        yield image, torch.tensor(json.loads(content)["label"])


STORAGES: Mapping[str, Callable[[], Any]] = {
    "files": PictureFiles,
    "memmap": MemoryMap,
    "hdf5": Hdf5,
    "shards": Shards,
    "memory": InMemory,
}


def loader_of(storage: str, batch_size: int = 32) -> DataLoader[Any]:
    """A DataLoader of that storage, in the order of the files, the only order of shards."""
    if storage not in STORAGES:
        raise GpulabError(f"There is no storage {storage!r}: {', '.join(STORAGES)}.")
    return DataLoader(STORAGES[storage](), batch_size=batch_size)


def same_samples(*storages: str) -> Table:
    """Whether each storage gives the same pictures and labels as the files, number for number."""
    lines = []
    loaders = {storage: loader_of(storage) for storage in storages}
    with waiting("comparing every picture with its file"):
        for storage, loader in loaders.items():
            pairs = zip(loader_of("files"), loader, strict=True)
            same = all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in pairs)
            lines.append(f"{storage}: {'the same' if same else 'NOT the same'} as decoding each file")
    return Table(tuple(lines))


# -- cold and warm -----------------------------------------------------------------------------------------------------


def forget(paths: list[Path]) -> bool:
    """Ask the system to drop these files from its page cache; False if it cannot be asked."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def cold_and_warm() -> Table:
    """Where the time of a picture goes: reading its bytes cold and warm, decoding it, and reading the decoded row.

    Cold: the page cache was asked to drop the files before. For a folder in memory, cold and warm are the same.
    """
    mapped, paths = MemoryMap(), PictureFiles().paths
    with waiting("reading cold and warm"):
        can_forget = forget(paths)
        cold_s = _read_all(paths) if can_forget else None
        warm_s = min(_read_all(paths) for _ in range(3))
        whole_s = seconds_of(lambda: [decoded(path) for path in paths])()
        row_s = seconds_of(lambda: [mapped[i] for i in range(len(mapped))])()

    def each(seconds: float | None) -> str:
        return "not measurable here" if seconds is None else f"{duration(1e6 * seconds / len(paths)):>9} per picture"

    return Table(
        (
            f"fetch, cold cache      {each(cold_s)}",
            f"fetch, warm cache      {each(warm_s)}",
            f"decode and make small  {each(max(whole_s - warm_s, 0.0))}",
            f"row of the memory map  {each(row_s)}",
        )
    )


def _read_all(paths: list[Path]) -> float:
    began = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.read(READ_BYTES):
                pass
    return time.perf_counter() - began


# -- three runs of a training ------------------------------------------------------------------------------------------

FETCH_COLOUR = "#CC79A7"  # as in the headspace report for files read from the disk


@notes
def draw_split() -> Figure:
    """The three runs of the latest `%gpulab headspace` as bars, each with the parts of its step.

    A part that the runs leave open is hatched; a run that is not possible here has its reason in place of its bar.
    """
    if not headspaces:
        raise NotMeasured("There are no three runs yet: run the cell with %gpulab headspace first.")
    test = headspaces[-1].result
    if test.ideal_us is None or test.step_us is None:
        why = test.reasons.get("ideal", "no pair of blocks was measured")
        raise NotMeasured(f"The three runs have no figures: {why}.")
    legend: dict[str, str] = {}
    parts: list[Bar] = []
    rows = []
    for name, run, part, us, step_us, colour in (
        ("data on the device", "", "computing", test.ideal_us, test.ideal_us, BLUE),
        ("files, warm cache", "ideal", "preparation", test.preparation_us, test.step_us, ORANGE),
        ("files, cold cache", "cold", "fetch", test.fetch_us, test.cold_us, FETCH_COLOUR),
    ):
        certain = not run or run in test.certain
        start = parts[-1].start + parts[-1].length if parts else 0.0
        parts.append(Bar(start, (us or 0.0) / 1e3, colour, hatch="" if certain else "////"))
        if step_us is None:
            why = f"not measurable here: {test.reasons.get(run, '')}"
            rows.append(Row(name, (), textwrap.fill(why, 80)))
            continue
        nothing = is_decided(test.verdicts.get(run, "undecided"))
        open_words = "" if certain else ": nothing measurable" if nothing else ": undecided"
        legend[part + open_words] = colour
        rows.append(Row(name, tuple(parts), duration(step_us)))
    title = "what a step of each run consists of, measured"
    return draw_rows(rows, title, "ms, by the median of the blocks", legend=legend, size=9)


# -- on the device -----------------------------------------------------------------------------------------------------


def normalized(images: Tensor) -> Tensor:
    """Float32 [..., 3, 32, 32] between 0 and 1 → mean 0.3 and spread 0.4 taken out, mirrored: a cheap transform."""
    return ((images - 0.3) / 0.4).flip(-1)


class Transformed(InMemory):
    """The decoded pictures, transformed one by one as they are loaded."""

    def __getitem__(self, index: int) -> Sample:
        image, label = super().__getitem__(index)
        return normalized(image), label

    def __getitems__(self, indices: list[int]) -> list[Sample]:
        return [self[index] for index in indices]


# -- the exercise ------------------------------------------------------------------------------------------------------


@exercise(BEGIN.replace("function", "class"))
def check_dataset(MyDataset: Any) -> Checked:
    """Whether `MyDataset(root)` serves the decoded pictures of `root` without decoding, and faster."""
    root = lesson_folder()
    try:
        _prepared(root, (IMAGES, LABELS))
    except UsageError as why:
        return unanswered(str(why))
    expected = PictureFiles()
    samples = {index: expected[index] for index in (0, 3, len(expected) - 1)}
    with patch.object(Image, "open", wraps=Image.open) as opened:
        mine = MyDataset(root)
        if hint := _mistake(mine, samples, len(expected)):
            return wrong(hint)
    if opened.call_count:
        return wrong(
            f"It decodes pictures: {opened.call_count} times while a few samples were taken. Read the rows of "
            "images.npy, which are decoded already."
        )
    indices = list(range(0, len(expected), 6))
    good = "The same samples, and nothing is decoded."
    arrays = [v for v in getattr(mine, "__dict__", {}).values() if isinstance(v, (np.ndarray, Tensor)) and v.ndim == 4]
    if arrays and not any(isinstance(v, np.memmap) for v in arrays):
        good += " All pictures are in memory: mmap_mode='r' reads only what is used."
    before, after = (lambda: [expected[i] for i in indices]), (lambda: [mine[i] for i in indices])
    return check_speed(before, after, LEAST_SPEEDUP, good=good, hint="What else does it do?", pairs=5)


def _mistake(mine: Any, samples: Mapping[int, Sample], expected_count: int) -> str:
    try:
        count = len(mine)
    except (TypeError, AttributeError):
        if getattr(type(mine), "__len__", "") is None:
            raise NoAnswer from None
        return "It has no length: write __len__."
    if not hasattr(mine, "__getitem__"):
        raise NoAnswer
    if count != expected_count:
        return f"It has {count} samples, and there are {expected_count}."
    for index, (right_image, right_label) in samples.items():
        sample = mine[index]
        if sample is None:
            raise NoAnswer
        if not isinstance(sample, tuple) or len(sample) != 2:
            return f"Sample {index} is a {type(sample).__name__}; expected a pair (image, label)."
        image, label = sample
        if not isinstance(image, Tensor):
            return f"The image is a {type(image).__name__}: torch.from_numpy makes a tensor of an array."
        if image.shape != right_image.shape:
            return f"The image has the shape {list(image.shape)} instead of {list(right_image.shape)}."
        if not torch.equal(image.float(), right_image):
            return f"The image of sample {index} is not the one that decoding its file gives."
        if int(label) != int(right_label):
            return f"The label of sample {index} is {int(label)} instead of {int(right_label)}."
    return ""


@exercise("Put the set of names in place of the dots, then run that cell and this one again.")
def check_still_random(still_random: object) -> Checked:
    """Which transforms may be done once, offline, without changing the training."""
    if not isinstance(still_random, (set, frozenset, list, tuple)):
        return wrong(f"That is a {type(still_random).__name__}; expected a set of names, such as {{'decode'}}.")
    names, expected = {str(name) for name in still_random}, {"random crop", "random flip"}
    if unknown := names - {"decode", "resize", "normalize", *expected}:
        return wrong(f"{sorted(unknown)[0]!r} is none of the five.")
    if missing := expected - names:
        return wrong(
            f"{sorted(missing)[0]!r} done once would be the same in every epoch: the network sees fewer different "
            "pictures."
        )
    if more := names - expected:
        return wrong(f"{sorted(more)[0]!r} gives the same result each time, so it can be done once, offline.")
    return right("Random transforms stay in the loader, or go to the device; everything else is done once.")


QUESTIONS: Mapping[str, Question] = {
    "memmap": times(
        "What speedup do decoded pictures from a memory map give?",
        "storage",
        "with a memory map",
    ),
}
