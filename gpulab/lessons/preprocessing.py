"""Lesson 04, preprocessing and storage: the same pictures as files, as a memory map, in HDF5 and in shards."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gpulab.errors import GpulabError
from gpulab.formatting import duration, size
from gpulab.lessons.check import Checked, Table, is_unanswered, right, unanswered, wrong
from gpulab.lessons.guesses import Question, times
from gpulab.lessons.pairs import judge_speed, seconds_of, time_pairs
from gpulab.store.folders import default_root
from gpulab.views.running.waiting import waiting

Storage = Literal["files", "memmap", "hdf5", "shards", "memory"]
Sample = tuple[Tensor, Tensor]

COUNT = 600  # pictures
STORED_PIXELS, PIXELS = 160, 32  # sides: of a stored picture, and of what the model sees
SHARDS = 4
WANTED = 3.0  # times as fast: to decode a picture against to read a row
READ_BYTES = 1 << 16
BEGIN = "Write the body of the class in place of the dots, then run that cell and this one again."


def lesson_folder() -> Path:
    """Where the lesson keeps its pictures: `.gpulab/lesson04` of the working folder; `remove_files` takes it away."""
    return default_root().parent / "lesson04"


def remove_files() -> None:
    """Delete what the lesson has written."""
    shutil.rmtree(lesson_folder(), ignore_errors=True)


def picture_folder(folder: Path | None = None) -> Path:
    """A folder of JPEG files, "0000_3.jpg" with the label at the end; written on first use.

    scikit-learn's digits, enlarged and in colour. Raises GpulabError where they cannot be written.
    """
    root = (lesson_folder() if folder is None else folder) / "pictures"
    if len(list(root.glob("*.jpg"))) == COUNT:
        return root
    try:
        from sklearn.datasets import load_digits

        digits = load_digits()
        root.mkdir(parents=True, exist_ok=True)
        with waiting("writing the lesson's pictures"):
            for number in range(COUNT):
                grey = Image.fromarray((digits.images[number] * (255 / 16)).astype("uint8"))
                large = grey.resize((STORED_PIXELS, STORED_PIXELS), Image.Resampling.BICUBIC).convert("RGB")
                large.save(root / f"{number:04d}_{digits.target[number]}.jpg", quality=92)
    except ImportError as e:
        raise GpulabError("The lesson needs scikit-learn: pip install scikit-learn") from e
    except OSError as e:
        raise GpulabError(f"The lesson's pictures cannot be written to {str(root)!r}: {e.strerror or e}.") from e
    return root


def decoded(path: Path) -> Tensor:
    """What the model sees of a file: float32 [3, 32, 32], between 0 and 1."""
    with Image.open(path) as file:
        small = file.convert("RGB").resize((PIXELS, PIXELS), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.asarray(small, dtype=np.float32).transpose(2, 0, 1) / 255)


class PictureFiles(Dataset[Sample]):
    """The pictures as people store them: each is opened, decoded and made small whenever it is wanted."""

    def __init__(self, folder: Path | None = None) -> None:
        self.paths = sorted(picture_folder(folder).glob("*.jpg"))
        self.labels = torch.tensor([int(path.stem.rpartition("_")[2]) for path in self.paths])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Sample:
        return decoded(self.paths[index]), self.labels[index]


def prepare(folder: Path | None = None, kinds: tuple[str, ...] = ("memmap", "shards")) -> Table:
    """Do the work once: every picture is decoded and written into the fast formats that are asked for.

    Says how long it took and how large each became. Raises GpulabError where a format's package is missing.
    """
    root = lesson_folder() if folder is None else folder
    pictures = PictureFiles(folder)
    began = time.perf_counter()
    with waiting("decoding every picture once"):
        images = torch.stack([pictures[i][0] for i in range(len(pictures))]).numpy()
        np.save(root / "images.npy", images)
        np.save(root / "labels.npy", pictures.labels.numpy())
        if "shards" in kinds:
            _write_shards(root, images, pictures.labels.numpy())
        if "hdf5" in kinds:
            _write_hdf5(root, images, pictures.labels.numpy())
    lines = [f"decoded {len(pictures)} pictures once, in {time.perf_counter() - began:.1f} s"]
    files_bytes = sum(path.stat().st_size for path in pictures.paths)
    lines.append(f"{'JPEG files':12} {size(files_bytes):>10}  {len(pictures.paths)} files")
    lines.append(f"{'memory map':12} {size((root / 'images.npy').stat().st_size):>10}  1 file")
    if "shards" in kinds:
        shards = sorted(root.glob("shard-*.tar"))
        lines.append(f"{'shards':12} {size(sum(s.stat().st_size for s in shards)):>10}  {len(shards)} files")
    if "hdf5" in kinds:
        lines.append(f"{'HDF5':12} {size((root / 'pictures.h5').stat().st_size):>10}  1 file")
    return Table(tuple(lines))


def _write_shards(root: Path, images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> None:
    """Tar files, as webdataset has them: the numbers of a sample beside its label, one sample after the other."""
    for shard, rows in enumerate(np.array_split(np.arange(len(labels)), SHARDS)):
        with tarfile.open(root / f"shard-{shard}.tar", "w") as tar:
            for row in rows:
                _add(tar, f"{row:04d}.npy", images[row].tobytes())
                _add(tar, f"{row:04d}.json", json.dumps({"label": int(labels[row])}).encode())


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


def _write_hdf5(root: Path, images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> None:
    try:
        import h5py
    except ImportError as e:
        raise GpulabError("HDF5 needs h5py: pip install h5py") from e
    with h5py.File(root / "pictures.h5", "w") as file:
        file.create_dataset("images", data=images, chunks=(1, *images.shape[1:]))
        file.create_dataset("labels", data=labels)


class MemoryMap(Dataset[Sample]):
    """The decoded pictures in one file that the system maps into memory: only the pages in use are read."""

    def __init__(self, folder: Path | None = None) -> None:
        root = lesson_folder() if folder is None else folder
        self.images = np.load(root / "images.npy", mmap_mode="r")
        self.labels = torch.from_numpy(np.load(root / "labels.npy"))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        return torch.from_numpy(np.array(self.images[index])), self.labels[index]

    def __getitems__(self, indices: list[int]) -> list[Sample]:
        return list(zip(torch.from_numpy(self.images[indices]), self.labels[indices], strict=True))


class Hdf5(Dataset[Sample]):
    """The same in HDF5, one chunk per picture; each worker opens the file for itself."""

    def __init__(self, folder: Path | None = None) -> None:
        self.path = (lesson_folder() if folder is None else folder) / "pictures.h5"
        self.labels = torch.from_numpy(np.load(self.path.parent / "labels.npy"))
        self._file: Any = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        if self._file is None:
            import h5py

            self._file = h5py.File(self.path, "r")
        return torch.from_numpy(self._file["images"][index]), self.labels[index]


class Shards(IterableDataset[Sample]):
    """The same from tar files, read from beginning to end: what storage far away is best at. Not shuffled."""

    def __init__(self, folder: Path | None = None) -> None:
        self.paths = sorted((lesson_folder() if folder is None else folder).glob("shard-*.tar"))

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


class InMemory(Dataset[Sample]):
    """All decoded pictures in memory: what a cache comes to."""

    def __init__(self, folder: Path | None = None) -> None:
        root = lesson_folder() if folder is None else folder
        self.images = torch.from_numpy(np.load(root / "images.npy"))
        self.labels = torch.from_numpy(np.load(root / "labels.npy"))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        return self.images[index], self.labels[index]


def loader_of(storage: str, batch_size: int = 32) -> DataLoader[Any]:
    """A DataLoader of that storage, in the order of the files; shards know no other."""
    kinds: Mapping[str, Callable[[], Any]] = {
        "files": PictureFiles,
        "memmap": MemoryMap,
        "hdf5": Hdf5,
        "shards": Shards,
        "memory": InMemory,
    }
    if storage not in kinds:
        raise GpulabError(f"There is no storage {storage!r}: {', '.join(kinds)}.")
    return DataLoader(kinds[storage](), batch_size=batch_size)


def same_samples(*storages: str) -> Table:
    """Whether each storage gives the same pictures and labels as the files, number for number."""
    lines = []
    for storage in storages:
        pairs = zip(loader_of("files"), loader_of(storage), strict=True)
        same = all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in pairs)
        lines.append(f"{storage}: {'the same' if same else 'NOT the same'} as decoding each file")
    return Table(tuple(lines))


# -- cold and warm -----------------------------------------------------------------------------------------------------


def forget(paths: list[Path]) -> bool:
    """Ask the system to drop these files from its page cache; False where it cannot be asked."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def cold_and_warm(folder: Path | None = None) -> Table:
    """Where the time of a picture goes: reading its bytes cold and warm, decoding it, and reading the decoded row.

    Cold: the page cache was asked to forget the files before. A folder that lies in memory has no cold cache, and then
    both are alike.
    """
    paths = PictureFiles(folder).paths
    mapped = MemoryMap(folder)
    can_forget = forget(paths)
    with waiting("reading cold and warm"):
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


# -- on the device -----------------------------------------------------------------------------------------------------


def normalized(images: Tensor) -> Tensor:
    """Float32 [..., 3, 32, 32] between 0 and 1 → mean 0.3 and spread 0.4 taken out, mirrored: a cheap transform."""
    return ((images - 0.3) / 0.4).flip(-1)


class Transformed(Dataset[Sample]):
    """Another dataset whose pictures are transformed one by one, as they are loaded."""

    def __init__(self, dataset: Dataset[Sample]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Sample:
        image, label = self.dataset[index]
        return normalized(image), label


# -- the exercise ------------------------------------------------------------------------------------------------------


def check_dataset(MyDataset: Any) -> Checked:
    """Whether `MyDataset(root)` serves the decoded pictures of `root` without decoding, and faster."""
    if is_unanswered(MyDataset):
        return unanswered(BEGIN)
    root = lesson_folder()
    if not (root / "images.npy").exists():
        return unanswered("The cell prepare writes the memory map that this needs: run it first.")
    wanted = PictureFiles()
    samples = {index: wanted[index] for index in (0, 3, len(wanted) - 1)}
    with _decoding_counted() as decodings:
        mine = MyDataset(root)
        hint = _mistake(mine, samples, len(wanted))
        if hint == BEGIN:
            return unanswered(BEGIN)
        if hint:
            return wrong(hint)
    if decodings:
        return wrong(
            f"It decodes pictures: {len(decodings)} times while a few samples were taken. Read the rows of images.npy, "
            "which are decoded already."
        )
    indices = list(range(0, len(wanted), 6))
    speed = time_pairs(
        seconds_of(lambda: [wanted[i] for i in indices]), seconds_of(lambda: [mine[i] for i in indices]), pairs=5
    )
    good = "The same samples, and nothing is decoded."
    if _whole_array_in_memory(mine):
        good += " All pictures are in memory: mmap_mode='r' reads only what is used."
    return judge_speed(speed, WANTED, good=good, hint="What else does it do?")


def _mistake(mine: Any, samples: Mapping[int, Sample], wanted_count: int) -> str:
    try:
        count = len(mine)
    except TypeError:
        return BEGIN if type(mine).__len__ is None else "It has no length: write __len__."
    except AttributeError:
        return "It has no length: write __len__."
    if count is None or not hasattr(mine, "__getitem__"):
        return BEGIN
    if count != wanted_count:
        return f"It has {count} samples, and there are {wanted_count}."
    for index, (right_image, right_label) in samples.items():
        sample = mine[index]
        if sample is None:
            return BEGIN
        if not isinstance(sample, tuple) or len(sample) != 2:
            return f"Sample {index} is a {type(sample).__name__}, and a pair (image, label) is wanted."
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


def _whole_array_in_memory(mine: Any) -> bool:
    values = vars(mine).values() if hasattr(mine, "__dict__") else ()
    arrays = [v for v in values if isinstance(v, (np.ndarray, Tensor)) and v.ndim == 4]
    return bool(arrays) and not any(isinstance(v, np.memmap) for v in arrays)


@contextmanager
def _decoding_counted() -> Iterator[list[str]]:
    """Inside, each picture file that is opened is noted; put back afterwards."""
    opened: list[str] = []
    original = Image.open

    def noted(*arguments: Any, **options: Any) -> Any:
        opened.append(str(arguments[0]) if arguments else "")
        return original(*arguments, **options)

    Image.open = noted
    try:
        yield opened
    finally:
        Image.open = original


def check_random(still_random: object) -> Checked:
    """Which transforms may be done once, offline, without changing the training."""
    if is_unanswered(still_random):
        return unanswered("Put the set of names in place of the dots, then run that cell and this one again.")
    if not isinstance(still_random, (set, frozenset, list, tuple)):
        return wrong(f"That is a {type(still_random).__name__}, and a set of names is wanted, such as {{'decode'}}.")
    names, wanted = {str(name) for name in still_random}, {"random crop", "random flip"}
    if unknown := names - {"decode", "resize", "normalize", *wanted}:
        return wrong(f"{sorted(unknown)[0]!r} is none of the five.")
    if missing := wanted - names:
        return wrong(
            f"{sorted(missing)[0]!r} done once would be the same in every epoch: the network sees fewer different "
            "pictures."
        )
    if more := names - wanted:
        return wrong(f"{sorted(more)[0]!r} gives the same result each time, so it can be done once, offline.")
    return right("Random transforms stay in the loader, or go to the device; everything else is done once.")


QUESTIONS: Mapping[str, Question] = {
    "memmap": times(
        "How many times as fast is the step when decoded pictures come from a memory map?",
        "storage",
        "with a memory map",
    ),
}
EXERCISES: Mapping[str, Callable[..., Checked]] = {"dataset": check_dataset, "still-random": check_random}
