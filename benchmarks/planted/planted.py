"""A case with a planted cause: a cell as a user would write it, or a trace, and what is true of it beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

from msgspec import Struct, field

FOLDER = Path(__file__).parent / "cells"
HEADER = ("# /// cell\n", "# ///\n")  # the lines above and below what a cell's file says of itself, in TOML
HEALTHY = "healthy"
MARK = "# %% the training cell\n"  # parts what earlier cells of the notebook hold from the cell that is profiled

Framework = Literal["torch", "lightning", "transformers", "accelerate"]


class Planted(Struct, frozen=True):
    """A training cell, `cells/CAUSE/NAME.py`, and what is true of it: what the header of its file says.

    `causes` are the keys of its planted causes, the costliest first; none: healthy, and every finding is a false
    alarm. `also` are keys that are as true of it as the first cause: of two names for the same time either is right.
    `cure` are edits (text as written, text cured) that take out the first cause, `second_cure` those that take out the
    second besides; each text as written is in the file exactly once. `batch` and `cured_batch` are samples per
    optimizer step, in so many `rounds` as gradients are accumulated from. Timed are `steps` optimizer steps after
    `warmup` more: as many as make whole epochs where starting workers anew may matter, and whole periods where
    something happens every few steps. `by_hand`: the update is written without `torch.optim`, so that each backward
    pass counts as a step. `profiled` steps are run under the profiler. `fresh`: each timed run begins with
    the notebook's first line (a compiled model is compiled anew, the number of threads is set again). `tries`: knobs
    that a healthy cell must not gain from. `cohort`: the cells that were written together, and run first together.
    `looked_at`: rules were built or mended with a look at this cell; a cell without it is kept aside.
    """

    name: str
    causes: tuple[str, ...]
    because: str
    cure: tuple[tuple[str, str], ...] = ()
    second_cure: tuple[tuple[str, str], ...] = ()
    also: tuple[str, ...] = ()
    framework: Framework = "torch"
    batch: int = 1
    cured_batch: int | None = None
    rounds: int = 1
    steps: int = 30
    warmup: int = 5
    profiled: int = 60
    fresh: bool = False
    by_hand: bool = False
    gpu: bool = False
    needs: tuple[str, ...] = ()  # modules
    tries: Mapping[str, str] = field(default_factory=dict)
    cohort: str = ""
    looked_at: bool = False

    @property
    def accepted(self) -> tuple[str, ...]:
        """Keys of a right headline."""
        return (*self.causes[:1], *self.also) if self.causes else (HEALTHY,)

    @property
    def path(self) -> Path:
        """The file of the cell, in the folder of its first cause."""
        return FOLDER / (*self.causes, HEALTHY)[0] / f"{self.name}.py"

    @property
    def text(self) -> tuple[str, str]:
        """The earlier cells, and the training cell, as written."""
        return parted(_code(self.path))

    def edited(self, edits: tuple[tuple[str, str], ...]) -> tuple[str, str]:
        """The same with these edits. Raises ValueError where one does not fit exactly once."""
        text = _code(self.path)
        for old, new in edits:
            if text.count(old) != 1:
                raise ValueError(f"{self.name}: {old!r} is there {text.count(old)} times")
            text = text.replace(old, new)
        return parted(text)


class PlantedTrace(Struct, frozen=True):
    """A trace recorded elsewhere, by its path below GPULAB_TRACES, and what a diagnosis of it must and must not say.

    `headline`: keys of a right one; none where only `never` counts. `found`: keys that must be among the findings.
    `never`: keys that must not be. `never_settings`: knobs that no finding may advise. `recoverable_us`: the range of
    the first finding's time.
    """

    name: str
    path: str
    because: str
    headline: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    never_settings: tuple[str, ...] = ()
    recoverable_us: tuple[float, float] | None = None


def parted(text: str) -> tuple[str, str]:
    """At the mark, which a cell's file has once. Raises ValueError."""
    before, cell = text.split(MARK)
    return before, cell


def header_and_code(text: str) -> tuple[str, str]:
    """A cell's file as the TOML of its header and the code below. Raises ValueError where it has no header."""
    opening, closing = HEADER
    header, end, code = text.removeprefix(opening).partition(closing)
    if not text.startswith(opening) or not end:
        raise ValueError(f"a planted cell begins with a header, {opening.strip()!r} to {closing.strip()!r}")
    return "".join(line[2:] or "\n" for line in header.splitlines(keepends=True)), code


@cache
def _code(path: Path) -> str:
    return header_and_code(path.read_text(encoding="utf-8"))[1]
