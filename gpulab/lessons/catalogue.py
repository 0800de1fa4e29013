"""Every guided lesson: the name of its notebook, its title, how long it takes, and the module with its exercises."""

from __future__ import annotations

import difflib

from msgspec import Struct

from gpulab.errors import UsageError


class Entry(Struct, frozen=True):
    """One lesson. `minutes` for a learner, including guesses, reading and the exercise."""

    name: str  # file name of the notebook, without its ending
    title: str
    minutes: int
    module: str  # in gpulab.lessons
    exercises: tuple[str, ...] = ()  # as in the module: the board imports no lesson, and so no torch

    @property
    def number(self) -> str:
        """ "03"."""
        return self.name.partition("_")[0]


LESSONS: tuple[Entry, ...] = (
    Entry("00_quick_start", "Quick start: where does a training step's time go?", 5, "quick_start"),
    Entry("01_utilization", 'What "utilization" means', 25, "utilization", ("statements", "ladder", "mfu")),
    Entry("02_profile_first", "Profile before you optimize", 25, "profile_first", ("costliest", "rewrite")),
    Entry(
        "03_starving_gpu",
        "The starving GPU: when training waits for data",
        30,
        "starving",
        ("enough-workers", "loader"),
    ),
    Entry(
        "04_preprocessing",
        "Preprocessing and storage: do the work once",
        30,
        "preprocessing",
        ("dataset", "still-random"),
    ),
    Entry("05_batch_size", "The batch size: how much work in one step", 30, "batch_size", ("enough-batch", "one-step")),
    Entry("06_memory", "Memory: what fills it, and what it costs to save some", 30, "memory", ("free", "largest")),
    Entry("07_mixed_precision", "Mixed precision: fewer bits, the same loss", 25, "mixed_precision", ("amp-step",)),
    Entry("08_fused_kernels", "Fused kernels: one swap, how much faster?", 30, "fused_kernels", ("attention",)),
    Entry("09_host", "Waiting for the host: many small operations", 30, "host", ("distances", "loop")),
    Entry("10_search", "Search with the meter running", 30, "search", ("pareto", "choice", "should-stop")),
    Entry(
        "11_data_parallel",
        "Data parallel: several ranks, one model",
        35,
        "data_parallel",
        ("all-reduce", "local-sgd", "shard"),
    ),
    Entry(
        "12_split_model",
        "Splitting a model: when one GPU is too small",
        30,
        "split_model",
        ("micro-batches", "schedule", "tensor-parallel"),
    ),
    Entry(
        "13_sharing",
        "Sharing a GPU: who wastes it, and who can share it",
        30,
        "sharing",
        ("worst", "hours", "together"),
    ),
    Entry("14_cost", "What idle time costs", 25, "cost", ("cost", "step", "cheaper")),
    Entry("15_capstone", "From 15 % to 90 %: everything at once", 60, "capstone", ("order", "train")),
)


def find_lesson(name: str | int) -> Entry:
    """The lesson of a number ("03", 3), or a notebook's name or its part. Raises UsageError naming the nearest."""
    word = f"{name:02d}" if isinstance(name, int) else str(name).strip().removesuffix(".ipynb")
    for entry in LESSONS:
        if word in (entry.number, entry.name, entry.module) or (word.isdecimal() and int(word) == int(entry.number)):
            return entry
    names = [entry.name for entry in LESSONS]
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.4) or [n for n in names if word and word in n]
    hint = f" Did you mean {near[0]}?" if near else f" There are: {', '.join(entry.number for entry in LESSONS)}."
    raise UsageError(f"There is no lesson {name!r}.{hint}")
