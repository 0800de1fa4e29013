"""All planted cells, read from the headers of their files, and which result file each of them belongs to."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal

from benchmarks.planted.planted import FOLDER, Planted, header_and_code

Part = Literal["tuned", "aside"]
_EDITS = ("cure", "second_cure")


def read(path: Path) -> Planted:
    """The cell in that file. Raises ValueError with the file and what is wrong with its header."""
    try:
        header = tomllib.loads(header_and_code(path.read_text(encoding="utf-8"))[0])
        return Planted(path.stem, **{key: _field(key, value) for key, value in header.items()})
    except (ValueError, TypeError, KeyError) as e:
        raise ValueError(f"{path}: {e}") from e


def _field(key: str, value: Any) -> Any:
    if key in _EDITS:
        return tuple((edit["old"], edit["new"]) for edit in value)
    return tuple(value) if isinstance(value, list) else value


def part_of(planted: Planted) -> Part:
    """The one result file of a cell: `tuned` where rules were built with a look at the cell, else `aside`."""
    return "tuned" if planted.looked_at else "aside"


def cells_of(part: Part) -> list[Planted]:
    """The cells of that result file."""
    return [planted for planted in CELLS if part_of(planted) == part]


CELLS: tuple[Planted, ...] = tuple(read(path) for path in sorted(FOLDER.glob("*/*.py")))
