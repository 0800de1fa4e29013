"""A training script for several ranks with a planted cause, and what is true of it beforehand."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from benchmarks.planted.planted import HEALTHY, header_and_code

FOLDER = Path(__file__).parent / "cells"
CAUSES = ("straggler", "uneven_data", "exposed_communication", "small_collectives", HEALTHY)
CLEAR = 0.25  # a planted cause takes at least this share of a step
STILL_HEALTHY = 0.05  # and of a healthy cell the exchange takes at most this


class PlantedRanks(Struct, frozen=True):
    """A script, `cells/CAUSE/NAME.py`, and what is true of it: what the header of its file says.

    `without` are edits (text as written, text without) that take out the cause, of a healthy cell the exchange between
    the ranks; each text as written is in the file exactly once. `written_ms` and `without_ms` are the time of a step
    as written and with these edits, by a clock that is not gpulab's: `steps`, the stopwatch beside this file, which
    times `steps` steps after `warmup` more; `exchange alone`, the same time as written, less the median time of the
    all-reduce by itself once the ranks have met; `processor`, the processor time of a step of the slower rank, alone.
    The last two are for scripts whose stopwatch a busy machine disturbs. `cohort` and `looked_at` mean what they mean
    in `benchmarks.planted`.
    """

    name: str
    cause: str
    because: str
    cohort: str
    without: tuple[tuple[str, str], ...]
    written_ms: float
    without_ms: float
    clock: Literal["steps", "exchange alone", "processor"] = "steps"
    ranks: int = 2
    steps: int = 40
    warmup: int = 8
    looked_at: bool = False

    @property
    def causes(self) -> tuple[str, ...]:
        """As `benchmarks.planted` has them: none where it is healthy."""
        return () if self.cause == HEALTHY else (self.cause,)

    @property
    def share(self) -> float:
        """Of a step: what the cause takes, or the exchange of a healthy cell."""
        return 1 - self.without_ms / self.written_ms

    @property
    def path(self) -> Path:
        """The file of the script."""
        return FOLDER / self.cause / f"{self.name}.py"

    def text(self, *, without: bool = False) -> str:
        """The script, as written or without its cause. Raises ValueError where an edit does not fit exactly once."""
        text = header_and_code(self.path.read_text(encoding="utf-8"))[1]
        for old, new in self.without if without else ():
            if text.count(old) != 1:
                raise ValueError(f"{self.name}: {old!r} is there {text.count(old)} times")
            text = text.replace(old, new)
        return text


def read(path: Path) -> PlantedRanks:
    """The script in that file. Raises ValueError with the file and what is wrong with its header."""
    try:
        header: dict[str, Any] = tomllib.loads(header_and_code(path.read_text(encoding="utf-8"))[0])
        header["without"] = tuple((edit["old"], edit["new"]) for edit in header["without"])
        planted = PlantedRanks(path.stem, **header)
        if planted.cause not in CAUSES:
            raise ValueError(f"cause {planted.cause!r} is none of {', '.join(CAUSES)}")
        return planted
    except (ValueError, TypeError, KeyError) as e:
        raise ValueError(f"{path}: {e}") from e


def all_cells() -> tuple[PlantedRanks, ...]:
    """All scripts, cause by cause."""
    return tuple(read(path) for cause in CAUSES for path in sorted((FOLDER / cause).glob("*.py")))
