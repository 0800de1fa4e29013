"""The data of the lessons: scikit-learn's handwritten digits, from memory or from files that arrive slowly.

The datasets are in a module, not in a cell, so that DataLoader workers can import them however they are started.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from gpulab.demo.digits import PIXEL_MEAN, PIXEL_STD, SAMPLE_PIXELS, DigitsFolder
from gpulab.errors import GpulabError
from gpulab.views.waiting import waiting

if TYPE_CHECKING:
    from PIL.Image import Image

Batch: TypeAlias = tuple[Tensor, Tensor]
Augment = Literal["none", "shift", "turn"]

COPIES = 9  # of the 1797 digits: an epoch has several steps even with large batches
NOISE = 0.1
EVERY = 3  # every third file: a short epoch fills a cache soon
MISSING_EVERY = 150
TRAINED_ON = 1440  # of 1797 digits; the others are for validation
ENLARGED_PIXELS = {"heavy": 384, "turn": 192}


def whole_batch(batch: Batch) -> Batch:
    """A collate_fn for a dataset that already returns whole batches."""
    return batch


def load_digits() -> Any:
    """The digits of scikit-learn: images [1797, 8, 8] from 0 to 16. Raises GpulabError without scikit-learn."""
    try:
        with waiting("reading the digits"):
            from sklearn import datasets

            return datasets.load_digits()
    except ImportError as e:
        raise GpulabError("The lesson needs scikit-learn: pip install scikit-learn") from e


# -- in memory ---------------------------------------------------------------------------------------------------------


class DigitsInMemory(Dataset[Batch]):
    """16,173 handwritten digits of 64 pixels, scikit-learn's 1797 with some noise, all in memory.

    `whole`: a batch is indexed at once; pass `collate_fn=whole_batch` to the DataLoader. `copies` of the 1797 digits.
    Raises GpulabError without scikit-learn.
    """

    def __init__(self, copies: int = COPIES, *, whole: bool = True) -> None:
        digits = load_digits()
        pixels = torch.tensor(digits.data, dtype=torch.float32).repeat(copies, 1) / 16
        noise = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0))
        self.pixels = pixels + NOISE * noise
        self.labels = torch.tensor(digits.target).repeat(copies)
        if not whole:
            self.__getitems__ = None  # type: ignore[method-assign, assignment]  # a DataLoader then asks for items

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return self.pixels[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> Batch:
        rows = torch.tensor(indices)
        return self.pixels[rows], self.labels[rows]


class LateDigits(DigitsInMemory):
    """The digits in memory, whose batches are ready only after `late_ms`, as if another machine sent them.

    `waiting`: "sleep" frees the core meanwhile, "poll" checks again and again for the batch, "none" does not wait.
    Raises ValueError for another word.
    """

    def __init__(self, waiting: str, late_ms: float = 10.0) -> None:
        if waiting not in ("sleep", "poll", "none"):
            raise ValueError(f'waiting is "sleep", "poll" or "none", not {waiting!r}')
        super().__init__()
        self.waiting, self.late_s = waiting, late_ms / 1e3

    def __getitems__(self, indices: list[int]) -> Batch:
        ready_s = time.perf_counter() + self.late_s
        if self.waiting == "sleep":
            time.sleep(self.late_s)
        elif self.waiting == "poll":
            while time.perf_counter() < ready_s:
                pass
        return super().__getitems__(indices)


def split_digits(*, training: bool) -> Batch:
    """The digits to train on, or the 357 others: images [n, 1, 8, 8] from 0 to 1, and labels.

    The digits are reordered, so that both parts have all writers.
    """
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    rows = order[:TRAINED_ON] if training else order[TRAINED_ON:]
    images = torch.tensor(digits.images[rows], dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(digits.target[rows])


class SearchDigits(Dataset[tuple[Tensor, int]]):
    """1440 of the digits, 8 x 8 pixels, in memory, with a random augmentation per image.

    "shift" moves an image by at most one pixel; "turn" enlarges it, turns it by up to 12 degrees and makes it small
    again, which takes a processor core for a while. Raises GpulabError without scikit-learn.
    """

    def __init__(self, augment: Augment = "none") -> None:
        self.images, self.labels = split_digits(training=True)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        if self.augment == "shift":
            down, across = (torch.randint(3, (2,)) - 1).tolist()
            image = torch.roll(image, (down, across), (1, 2))
        elif self.augment == "turn":
            image = _turned(image, degrees=float(torch.rand(()) * 24 - 12))
        return image, int(self.labels[index])


def _turned(image: Tensor, degrees: float) -> Tensor:
    from PIL import Image

    side, large, ways = image.shape[-1], ENLARGED_PIXELS["turn"], Image.Resampling
    enlarged = Image.fromarray((image[0] * 255).byte().numpy()).resize((large, large), ways.BICUBIC)
    small = enlarged.rotate(degrees, ways.BICUBIC).resize((side, side), ways.BOX)
    return torch.from_numpy(np.asarray(small, dtype=np.float32) / 255).unsqueeze(0)


# -- from files --------------------------------------------------------------------------------------------------------


class DistantDigits(DigitsFolder):
    """Handwritten digits from PNG files on remote storage: each file takes `fetch_ms` to arrive.

    The time is a wait, as for a network, so that several workers can wait at once even with few cores. The same file
    gives the same sample each time. Raises GpulabError if the files cannot be written on first use.
    """

    def __init__(self, fetch_ms: float = 3.0, root: Path | str | None = None) -> None:
        super().__init__(root)
        self.fetch_ms = fetch_ms
        self.paths, self.labels = self.paths[::EVERY], self.labels[::EVERY]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self.fetch_ms / 1e3)
        return self.image(index), self.labels[index]

    def image(self, index: int) -> Tensor:
        """The model's input from a file, without the wait: float32 [1, 32, 32]."""
        from PIL import Image

        with Image.open(self.paths[index]) as file:
            return _as_sample(file.convert("L"))


class HeavyDigits(DistantDigits):
    """The same digits, with an augmentation that takes a CPU core for some milliseconds per image.

    The image is enlarged, turned and smoothed before it is made small again. Not random: the same file gives the same
    sample each time.
    """

    def __init__(self, root: Path | str | None = None) -> None:
        super().__init__(0.0, root)

    def image(self, index: int) -> Tensor:
        from PIL import Image, ImageFilter

        size = (ENLARGED_PIXELS["heavy"],) * 2
        with Image.open(self.paths[index]) as file:
            large = file.convert("L").resize(size, Image.Resampling.BICUBIC)
        return _as_sample(large.rotate(7, Image.Resampling.BICUBIC).filter(ImageFilter.GaussianBlur(3)))


class SomeDistantDigits(Dataset[tuple[Tensor, int]]):
    """The digits in memory, like in a cache, except a few, each of which takes `fetch_ms` to arrive.

    The few are always the same: every 150th. Raises GpulabError if the files cannot be written.
    """

    def __init__(self, fetch_ms: float, root: Path | str | None = None) -> None:
        files = DistantDigits(0.0, root)
        with waiting("reading the images into memory"):
            self.images = [files.image(index) for index in range(len(files))]
        self.labels, self.fetch_ms = files.labels, fetch_ms

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index % MISSING_EVERY == 0:
            time.sleep(self.fetch_ms / 1e3)
        return self.images[index], self.labels[index]


def _as_sample(image: Image) -> Tensor:
    from PIL import Image as images

    small = image.resize((SAMPLE_PIXELS, SAMPLE_PIXELS), images.Resampling.BICUBIC)
    grey = np.asarray(small, dtype=np.float32) / 255
    return torch.from_numpy((grey - PIXEL_MEAN) / PIXEL_STD).unsqueeze(0)
