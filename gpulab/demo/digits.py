"""Digits as image files on disk, and a Dataset that reads them the way image folders are read in practice.

The Dataset lives in the package, not in a cell, so that DataLoader workers can import it however they are started.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import Dataset

from gpulab.errors import GpulabError
from gpulab.views.waiting import waiting

if TYPE_CHECKING:
    import PIL.Image

IMAGE_COUNT = 1797  # all of scikit-learn's digits
STORED_PIXELS = 128  # side of a file's image
SAMPLE_PIXELS = 32  # side of the image the model sees
MAX_ROTATION_DEG = 15.0
MAX_SHIFT_PIXELS = 6.0
PIXEL_MEAN, PIXEL_STD = 0.305, 0.376  # of the 1797 originals, white = 1

_NEEDS = "The demo needs scikit-learn and Pillow: pip install scikit-learn pillow"


def default_root() -> Path:
    """The folder of the image files: `$GPULAB_DEMO_DATA`, else a folder in the user's cache directory."""
    chosen, home = os.environ.get("GPULAB_DEMO_DATA"), Path.home()
    if chosen:
        return Path(chosen)
    if sys.platform == "darwin":
        cache = home / "Library" / "Caches"
    elif os.name == "nt":
        cache = Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local"))
    else:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return cache / "gpulab" / f"digits-{STORED_PIXELS}px"


def write_digits(root: Path) -> None:
    """Write the digits as `root/<class>/<number>.png`, all or nothing. Does nothing if they already exist.

    Raises GpulabError if scikit-learn or Pillow is missing, or `root` cannot be written or holds something else.
    """
    if root.exists():
        _check_complete(root)
        return
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{root.name}-", dir=root.parent))
    except OSError as e:
        raise GpulabError(f"The demo's images cannot be written to {root}: {e}. Set GPULAB_DEMO_DATA.") from e
    try:
        with waiting("writing the images to read"):
            _write_images(unfinished)
        unfinished.chmod(0o755)  # mkdtemp made it private
        try:
            unfinished.rename(root)
        except OSError:
            if not root.exists():
                raise
            _check_complete(root)  # another process was first: its files are the same
    except OSError as e:
        raise GpulabError(f"The demo's images cannot be written to {root}: {e}. Set GPULAB_DEMO_DATA.") from e
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_images(folder: Path) -> None:
    try:
        from PIL import Image
        from sklearn.datasets import load_digits
    except ImportError as e:
        raise GpulabError(_NEEDS) from e
    digits = load_digits()
    for label in range(10):
        (folder / str(label)).mkdir()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        image = Image.fromarray((pixels * (255 / 16)).astype("uint8"))
        enlarged = image.resize((STORED_PIXELS, STORED_PIXELS), Image.Resampling.BICUBIC)
        enlarged.save(folder / str(label) / f"{number:04d}.png")


def _check_complete(root: Path) -> None:
    count = len(_image_paths(root))
    if count != IMAGE_COUNT:
        raise GpulabError(f"{root} holds {count} digit images instead of {IMAGE_COUNT}: delete that folder and retry.")


def _image_paths(root: Path) -> list[Path]:
    return sorted(root.glob("[0-9]/*.png"))


class DigitsFolder(Dataset[tuple[torch.Tensor, int]]):
    """Handwritten digits read from PNG files: each sample is opened, decoded, augmented and normalised on demand.

    `slow_ms` adds that many milliseconds of busy work to each sample, to make the loader slower by a known amount.
    `arrive_ms` is a sleep before each file is available, as on a network disk. Raises GpulabError if the files cannot
    be written on first use.
    """

    def __init__(self, root: Path | str | None = None, *, slow_ms: float = 0.0, arrive_ms: float = 0.0) -> None:
        self.root = default_root() if root is None else Path(root)
        self.slow_ms, self.arrive_ms = slow_ms, arrive_ms
        write_digits(self.root)
        self.paths = _image_paths(self.root)
        self.labels = [int(path.parent.name) for path in self.paths]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.arrive_ms > 0:
            time.sleep(self.arrive_ms / 1000)
        image = _augmented(self.paths[index])
        grey = torch.from_numpy(np.asarray(image, dtype=np.float32) / 255)
        sample = ((grey - PIXEL_MEAN) / PIXEL_STD).unsqueeze(0)
        if self.slow_ms > 0:
            # spin like slow Python instead of sleeping: the wait then ends on time to the microsecond
            end = time.perf_counter() + self.slow_ms / 1000
            while time.perf_counter() < end:
                pass
        return sample, self.labels[index]


def _augmented(path: Path) -> PIL.Image.Image:
    """The file's image in grey, rotated and shifted at random, at the size the model sees."""
    from PIL import Image

    turn, right, down = (2 * torch.rand(3) - 1).tolist()
    with Image.open(path) as file:
        image = file.convert("L").rotate(
            turn * MAX_ROTATION_DEG,
            resample=Image.Resampling.BICUBIC,
            translate=(round(right * MAX_SHIFT_PIXELS), round(down * MAX_SHIFT_PIXELS)),
        )
    return image.resize((SAMPLE_PIXELS, SAMPLE_PIXELS), Image.Resampling.BICUBIC)
