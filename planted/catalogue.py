"""The planted cases, read from their files: a TOML header says what is true of the code below it.

The code is what a user would write, so nothing here is linted, typed or tested but that it parses and its edits fit.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from msgspec import Struct, convert, field

FOLDER = Path(__file__).parent
HEADER = ("# /// cell\n", "# ///\n")  # the lines above and below what a file says of itself
HEALTHY = "healthy"
MARK = "# %% the training cell\n"  # parts what earlier cells of the notebook hold from the cell that is profiled
RANK_CAUSES = ("straggler", "uneven_data", "exposed_communication", "small_collectives", HEALTHY)

Edits = tuple[tuple[str, str], ...]  # text as written, text instead; each as written is in the file exactly once
Framework = Literal["torch", "lightning", "transformers", "accelerate"]
Part = Literal["tuned", "aside"]
Truth = Literal["faster", "slower", "no measurable difference"]
_Kind = TypeVar("_Kind", bound=Struct)


class Planted(Struct, frozen=True, forbid_unknown_fields=True):
    """A training cell, `cells/CAUSE/NAME.py`, and what is true of it.

    `causes` are the keys of its planted causes, the costliest first; none: healthy, and every finding is a false
    alarm. `also` are keys that are as true of it as the first cause: of two names for the same time either is right.
    `cure` takes out the first cause, `second_cure` the second besides. `batch` and `cured_batch` are samples per
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
    cure: Edits = ()
    second_cure: Edits = ()
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
        """Keys of the findings that are right as a headline."""
        return (*self.causes[:1], *self.also) if self.causes else (HEALTHY,)

    @property
    def part(self) -> Part:
        """The result file to which the cell belongs."""
        return "tuned" if self.looked_at else "aside"

    @property
    def path(self) -> Path:
        """The file of the cell, in the folder of its first cause."""
        return FOLDER / "cells" / (*self.causes, HEALTHY)[0] / f"{self.name}.py"

    @property
    def text(self) -> tuple[str, str]:
        """The earlier cells, and the training cell, as written."""
        return split_at_mark(code_of(self.path))

    def edited(self, edits: Edits) -> tuple[str, str]:
        """The case with these edits. Raises ValueError where one does not fit exactly once."""
        return split_at_mark(edited(code_of(self.path), edits, self.name))


class PlantedRanks(Struct, frozen=True, forbid_unknown_fields=True):
    """A training script for several ranks, `ranks/CAUSE/NAME.py`, and what is true of it.

    `without` takes out the cause, of a healthy script the exchange between the ranks. `written_ms` and `without_ms` are
    the time of a step as written and with these edits, by a clock that is not gpulab's: `steps`, the stopwatch of
    `benchmarks.planted_ranks`, which times `steps` steps after `warmup` more; `exchange alone`, the same time as
    written, less the median time of the all-reduce by itself once the ranks have met; `processor`, the processor time
    of a step of the slower rank, alone. The last two are for scripts whose stopwatch a busy machine disturbs.
    """

    name: str
    cause: str
    because: str
    cohort: str
    without: Edits
    written_ms: float
    without_ms: float
    clock: Literal["steps", "exchange alone", "processor"] = "steps"
    ranks: int = 2
    steps: int = 40
    warmup: int = 8
    looked_at: bool = False

    @property
    def causes(self) -> tuple[str, ...]:
        """The planted causes; none where it is healthy."""
        return () if self.cause == HEALTHY else (self.cause,)

    @property
    def share(self) -> float:
        """The share of a step that the cause takes; of a healthy script, its exchange between the ranks."""
        return 1 - self.without_ms / self.written_ms

    @property
    def path(self) -> Path:
        """The file of the script."""
        return FOLDER / "ranks" / self.cause / f"{self.name}.py"

    def text(self, *, without: bool = False) -> str:
        """The script, as written or without its cause. Raises ValueError where an edit does not fit exactly once."""
        return edited(code_of(self.path), self.without if without else (), self.name)


class PlantedKnob(Struct, frozen=True, forbid_unknown_fields=True):
    """A training cell, `knobs/KNOB/NAME.py`, in which it is certain what one knob does.

    `steps` counted in a block and `pairs` of blocks bound its time; None leaves the steps to gpulab.
    """

    file: str
    knob: str
    value: bool | int | str
    truth: Truth
    because: str
    steps: int | None = None
    pairs: int = 10

    @property
    def name(self) -> str:
        """The name in the table and in tests."""
        return f"{self.knob}={self.value}, {self.truth}"

    @property
    def text(self) -> tuple[str, str]:
        """The earlier cells, and the training cell."""
        return split_at_mark(code_of(FOLDER / "knobs" / self.knob / f"{self.file}.py"))

    def namespace(self) -> dict[str, Any]:
        """The live names of the notebook before the cell runs."""
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(self.text[0], names)
        return names


class PlantedTrace(Struct, frozen=True, forbid_unknown_fields=True):
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


def split_at_mark(text: str) -> tuple[str, str]:
    """The earlier cells and the training cell: split at the mark. Raises ValueError where it does not occur once."""
    before, cell = text.split(MARK)
    return before, cell


def edited(text: str, edits: Sequence[tuple[str, str]], name: str) -> str:
    """The text with these edits. Raises ValueError where one does not fit exactly once."""
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"{name}: {old!r} is there {text.count(old)} times")
        text = text.replace(old, new)
    return text


def header_and_code(text: str) -> tuple[str, str]:
    """A file as the TOML of its header and the code below. Raises ValueError where it has no header."""
    opening, closing = HEADER
    header, end, code = text.removeprefix(opening).partition(closing)
    if not text.startswith(opening) or not end:
        raise ValueError(f"a planted cell begins with a header, {opening.strip()!r} to {closing.strip()!r}")
    return "".join(line[2:] or "\n" for line in header.splitlines(keepends=True)), code


@cache
def code_of(path: Path) -> str:
    """The code below the header."""
    return header_and_code(path.read_text(encoding="utf-8"))[1]


def read(path: Path, kind: type[_Kind]) -> _Kind:
    """The case of that file. Raises ValueError, which names the file and what is wrong with its header."""
    try:
        header = tomllib.loads(header_and_code(path.read_text(encoding="utf-8"))[0])
        for key in ("cure", "second_cure", "without"):
            if key in header:
                header[key] = [(edit["old"], edit["new"]) for edit in header[key]]
        name = "file" if kind is PlantedKnob else "name"
        return convert({name: path.stem, **header}, kind)
    except (ValueError, TypeError, KeyError) as e:
        raise ValueError(f"{path}: {e}") from e


def cells_of(part: Part) -> list[Planted]:
    """The cells of that result file."""
    return [planted for planted in CELLS if planted.part == part]


def named(name: str) -> Planted:
    """The cell of that name. Raises KeyError."""
    return {planted.name: planted for planted in CELLS}[name]


def _traces() -> tuple[PlantedTrace, ...]:
    table = tomllib.loads((FOLDER / "traces.toml").read_text(encoding="utf-8"))
    return tuple(convert({"name": name, **row}, PlantedTrace) for name, row in table.items())


CELLS = tuple(read(path, Planted) for path in sorted((FOLDER / "cells").glob("*/*.py")))
RANKS = tuple(
    read(path, PlantedRanks) for cause in RANK_CAUSES for path in sorted((FOLDER / "ranks" / cause).glob("*.py"))
)
KNOBS = tuple(read(path, PlantedKnob) for path in sorted((FOLDER / "knobs").glob("*/*.py")))
TRACES = _traces()
