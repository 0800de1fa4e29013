"""Lesson 03, the starving GPU: images that arrive slowly, and an exercise whose answer is a DataLoader."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from msgspec import Struct
from torch.utils.data import Dataset

from gpulab.analysis.cores import LEAST_OTHERS
from gpulab.analysis.facts import facts
from gpulab.capture.pilot import ShortRun
from gpulab.demo.digits import PIXEL_MEAN, PIXEL_STD, SAMPLE_PIXELS, DigitsFolder
from gpulab.formatting import factor, percent, plural
from gpulab.lessons.check import Checked, Note, Speed, is_unanswered, judge_speed, right, time_pairs, unanswered, wrong
from gpulab.lessons.guesses import Question, share, times
from gpulab.lessons.measured import check_enough, experiment_named, run_named, working_share
from gpulab.verdict import is_decided
from gpulab.views.waiting import waiting

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch.utils.data import DataLoader

    from gpulab.run import Run

EVERY = 3  # of the 1797 digits: an epoch is short, a cache soon filled
COUNTED = 8  # steps of a measurement: whole rounds of 1, 2, 4 or 8 workers
PAIRS, BUDGET_S = 5, 20.0
WANTED = 2.0  # speedup
CLAIMED = 0.9  # of a step the device works, where the pipeline is in order
CLOSE = 0.03  # one profiled run tells a share no better: nearer to the claimed one it decides nothing
USUAL_STEP_US, LONGEST_MS = 10_000.0, 250.0  # where no step was measured; on a busy machine
HARDLY_WAITS = 0.15  # of a step: then the loader is not what to improve

Train = Callable[[Any], object]


class DistantDigits(DigitsFolder):
    """Handwritten digits from PNG files on a storage far away: `fetch_ms` pass before a file is there.

    The time is spent waiting, as for a network, so that several workers can wait at once also where cores are few.
    The same file gives the same sample each time. Raises GpulabError where the files cannot be written on first use.
    """

    def __init__(self, fetch_ms: float = 3.0, root: Path | str | None = None) -> None:
        super().__init__(root)
        self.fetch_ms = fetch_ms
        self.paths, self.labels = self.paths[::EVERY], self.labels[::EVERY]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.fetch_ms / 1e3)
        return _read(self.paths[index]), self.labels[index]


class HeavyDigits(DigitsFolder):
    """The same digits, with an augmentation that takes a processor core for some milliseconds per image.

    The image is enlarged, turned and smoothed before it is made small again. Not random: the same file gives the same
    sample each time.
    """

    ENLARGED_PIXELS = 384

    def __init__(self, root: Path | str | None = None) -> None:
        super().__init__(root)
        self.paths, self.labels = self.paths[::EVERY], self.labels[::EVERY]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image, ImageFilter

        with Image.open(self.paths[index]) as file:
            size = (self.ENLARGED_PIXELS, self.ENLARGED_PIXELS)
            large = file.convert("L").resize(size, Image.Resampling.BICUBIC)
        smooth = large.rotate(7, Image.Resampling.BICUBIC).filter(ImageFilter.GaussianBlur(3))
        return _as_sample(smooth), self.labels[index]


class SomeDistantDigits(Dataset[tuple[torch.Tensor, int]]):
    """The digits in memory, as a cache would hold them, but for a few: `fetch_ms` pass before one of those is there.

    Which these are is the same each time: every 150th. Raises GpulabError where the files cannot be written.
    """

    MISSING_EVERY = 150

    def __init__(self, fetch_ms: float, root: Path | str | None = None) -> None:
        files = DistantDigits(0.0, root)
        with waiting("reading the images into memory"):
            self.images = [_read(path) for path in files.paths]
        self.labels, self.fetch_ms = files.labels, fetch_ms

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index % self.MISSING_EVERY == 0:
            time.sleep(self.fetch_ms / 1e3)
        return self.images[index], self.labels[index]


class ItemsInMemory(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The 1797 digits of scikit-learn, 8 x 8 pixels each, in memory. `whole`: a batch is picked at once."""

    def __init__(self, whole: bool = False) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        self.images = torch.tensor(digits.images, dtype=torch.float32) / 16
        self.labels = torch.tensor(digits.target)
        if whole:
            self.__getitems__ = self._batch  # a DataLoader uses it where a dataset has one

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.labels[index]

    def _batch(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[indices], self.labels[indices]


def pass_on(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A collate_fn for a dataset that gives whole batches."""
    return batch


def _read(path: Path) -> torch.Tensor:
    from PIL import Image

    with Image.open(path) as file:
        return _as_sample(file.convert("L"))


def _as_sample(image: Image) -> torch.Tensor:
    from PIL import Image as images

    small = image.resize((SAMPLE_PIXELS, SAMPLE_PIXELS), images.Resampling.BICUBIC)
    grey = np.asarray(small, dtype=np.float32) / 255
    return torch.from_numpy((grey - PIXEL_MEAN) / PIXEL_STD).unsqueeze(0)


def waiting_share(run: Run | None) -> float | None:
    """The share of a step that a run waited for data, as its report has it; None where that was not measured."""
    shares = facts(run).shares if run is not None else None
    return None if shares is None else shares.share["data_wait"]


def check_loader(my_loader: object, given_loader: DataLoader[Any], train: Train) -> Checked:
    """Whether `my_loader` feeds the batches of `given_loader` to `train(loader)` fast enough. Runs both, in turn."""
    from torch.utils.data import DataLoader

    if is_unanswered(my_loader):
        return unanswered("Put a DataLoader(…) in place of the dots, then run that cell and this one again.")
    if not isinstance(my_loader, DataLoader):
        return wrong(f"That is a {type(my_loader).__name__}; expected a DataLoader: DataLoader(digits, …).")
    other = _other_training(my_loader, given_loader)
    if other:
        return wrong(other)
    mine, given = Feeding(my_loader, train), Feeding(given_loader, train)
    speed = time_pairs(given.step_s, mine.step_s, pairs=PAIRS, budget_s=BUDGET_S)
    return _judged(my_loader.num_workers, speed, mine)


def _other_training(answer: DataLoader[Any], given: DataLoader[Any]) -> str:
    """What would make the training another one, not only a faster one."""
    if answer.dataset is not given.dataset:
        return "It reads another dataset than the loader you were given: the training would learn something else."
    if answer.batch_size != given.batch_size:
        return (
            f"Its batches have {answer.batch_size} samples instead of {given.batch_size}. That is another training, "
            "and it hides the wait instead of ending it: lesson 05 is about the batch size."
        )
    if type(answer.sampler) is not type(given.sampler):
        return "It takes the samples in another order (shuffle): keep shuffle=True, or the training learns less."
    if answer.drop_last != given.drop_last:
        return f"It treats the last, smaller batch differently: keep drop_last={given.drop_last}."
    return ""


class Feeding:
    """One loader in a training: each measurement runs some steps, and drops those that the workers' buffer feeds."""

    def __init__(self, loader: DataLoader[Any], train: Train) -> None:
        self._loader, self._train = loader, train
        self._steps_s: list[float] = []
        self._waits_s: list[float] = []

    def step_s(self) -> float:
        """The mean of the steps that count. What the training raises passes."""
        dropped = 2 + self._loader.num_workers * (self._loader.prefetch_factor or 0)
        run = ShortRun(dropped + COUNTED)
        with run:
            self._train(self._loader)
        wall_ns, wait_ns = run.steps.wall_ns[dropped:], run.steps.data_wait_ns[dropped:]
        if not len(wall_ns):
            raise ValueError(f"it ended after {len(run.steps)} steps, too early to measure")
        self._steps_s.append(float(wall_ns.mean()) / 1e9)
        self._waits_s.append(float(wait_ns.mean()) / 1e9)
        return self._steps_s[-1]

    @property
    def wait_s(self) -> float:
        """Of a typical step."""
        return float(np.median(self._waits_s))

    @property
    def wait_fraction(self) -> float:
        """Of a typical step."""
        return float(np.median(np.array(self._waits_s) / np.array(self._steps_s)))


def _judged(workers: int, speed: Speed, mine: Feeding) -> Checked:
    waits = f"It waits {percent(mine.wait_fraction)} of each step"
    who = plural(workers, "worker") if workers else "no worker"
    if mine.wait_fraction <= HARDLY_WAITS and speed.interval[0] > 1.1:
        return right(f"{speed.words} with {who}. {waits}: there is nothing left to gain here.")
    if not workers:
        hint = (
            "Images are still loaded one after the other, in the process that trains. Which option lets other "
            "processes load them?"
        )
    else:
        loading_s = speed.before_s - (speed.after_s - mine.wait_s)
        times_longer = max(loading_s / max(speed.after_s - mine.wait_s, 1e-6), 1.0)
        hint = (
            f"{waits}. Loading a batch takes {factor(times_longer)}× the time of training on it, so about "
            f"{min(math.ceil(times_longer), 8)} workers could keep up."
        )
    return judge_speed(speed, WANTED, good=f"That is with {who}. {waits}.", hint=hint)


# -- a claim, and a dataset in the rhythm of the training --------------------------------------------------------------


def judge_claim(*names: str) -> Note:
    """Whether the device works for more than `CLAIMED` of each step with the best loader of those experiments."""
    tried = [loader for name in names for loader in _loaders(name)]
    if not tried:
        return Note("Not measured.", "Run the experiments above first.")
    best = max(tried, key=lambda loader: loader.works)
    figures = f"The most is {percent(best.works)}, with {best.label}; the claim is above {percent(CLAIMED)}."
    if not best.is_decided:
        return Note("Undecided.", f"{figures} Its experiment did not decide whether that loader is faster.")
    if abs(best.works - CLAIMED) < CLOSE:
        return Note("Undecided.", f"{figures} That is too close for one traced run to decide.")
    if best.works > CLAIMED:
        return Note("It holds here.", figures)
    if any(loader.is_disturbed for loader in tried):
        return Note("Undecided.", f"{figures} But other programs took cores meanwhile: without them it may be more.")
    return Note("It does not hold here.", figures)


class _Loader(Struct, frozen=True):
    """A setting of an experiment: the share of its steps in which the device works, and how far that can be trusted."""

    label: str
    works: float
    is_decided: bool
    is_disturbed: bool


def _loaders(name: str) -> Iterator[_Loader]:
    measured = experiment_named(name)
    for one in measured.comparisons if measured is not None else ():
        figures = one.b.facts
        works = working_share(figures.run) if figures is not None else None
        if figures is None or works is None:
            continue
        others = figures.cores.others_fraction if figures.cores is not None else None
        yield _Loader(one.b.label, works, is_decided(one.verdict), others is not None and others >= LEAST_OTHERS)


def steps_ms(name: str, count: int) -> float:
    """How long so many steps of the last setting of that experiment take, within what a lesson has time for."""
    measured = experiment_named(name)
    step_us = measured.sides[-1].us_per_step if measured is not None else None
    return min(count * (step_us or USUAL_STEP_US) / 1e3, LONGEST_MS)


# -- what the notebook asks --------------------------------------------------------------------------------------------


def check_enough_workers(enough_workers: object) -> Checked:
    """Whether that is the smallest number of workers that is as good as the fastest of the sweep."""
    return check_enough(enough_workers, "how-many", "workers", as_written=0)


QUESTIONS: Mapping[str, Question] = {
    "waiting": share(
        "What share of each step waits for data?",
        lambda: waiting_share(run_named("starving")),
        "of each step waits for data",
    ),
    "workers": times("What speedup do two workers give?", "two-workers", "with two workers"),
    "limit": times("What speedup is there if loading costs nothing?", "no-loading", "with all data in memory"),
}
EXERCISES: Mapping[str, Callable[..., Checked]] = {"enough-workers": check_enough_workers, "loader": check_loader}
