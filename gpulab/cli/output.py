"""What every command writes: to the terminal, or whole into a file."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import gpulab
from gpulab.errors import StoreError

if TYPE_CHECKING:
    from gpulab.views.comparison import Compared
    from gpulab.views.report.ranks import RankedReport
    from gpulab.views.report.report import Report

USAGE_STATUS = 2


def write(text: str) -> None:
    """To the terminal, also to one that has no "µ"."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    sys.stdout.write(text)
    sys.stdout.flush()


def print_version(options: argparse.Namespace) -> int:
    """Do `gpulab --version`."""
    write(f"gpulab {gpulab.__version__}\n")
    return 0


def write_whole(path: Path, content: str) -> None:
    """Write a text file whole or not at all. Raises StoreError with the reason."""
    if not path.name or path.is_dir():
        raise StoreError(f"{str(path)!r} is a folder: name a file in it.")
    unfinished = path.with_name(f".{path.name}-{os.urandom(3).hex()}")
    try:
        unfinished.write_text(content, encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as e:
        raise StoreError(f"{str(path)!r} cannot be written: {e.strerror or e}.") from e
    finally:
        unfinished.unlink(missing_ok=True)


def as_json(document: Report | RankedReport | Compared) -> str:
    """The figures as a text."""
    return json.dumps(document.json(), indent=2, allow_nan=False) + "\n"


def complain(text: str) -> None:
    """One line about what cannot be done."""
    from gpulab.views.wording import plain  # with the record and NumPy: only where something went wrong

    print(f"gpulab: {plain(text)}", file=sys.stderr)
