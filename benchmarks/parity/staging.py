"""A training as a user has it in a notebook: the script's text as the cell, its folder, its arguments."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.parity.catalogue import SCRIPTS, Training

CHECKOUTS = "GPULAB_PARITY_CHECKOUTS"


@dataclass(frozen=True, slots=True)
class Staged:
    """The cell and the names it runs among."""

    text: str
    namespace: dict[str, Any]


def missing(training: Training) -> str:
    """Why it cannot be run here; empty where it can."""
    if not training.repository:
        return ""
    checkouts = os.environ.get(CHECKOUTS, "")
    if not checkouts:
        return f"{CHECKOUTS} names no folder"
    entry = Path(checkouts) / training.checkout / training.folder / training.entry
    return "" if entry.is_file() else f"no {training.checkout}/{training.folder}/{training.entry} in {CHECKOUTS}"


@contextlib.contextmanager
def staged(training: Training, threads: int | None = None) -> Iterator[Staged]:
    """In a copy of its folder, so that nothing is written into the checkout; for this process, which is its own.

    Earlier predictions and runs of this machine have no say: gpulab's folder is a new one, too. PyTorch computes with
    as many `threads`, or with as many as there are cores, as it does where nobody says otherwise.
    """
    import torch

    from gpulab.devices.machine import usable_cores

    torch.set_num_threads(threads or int(usable_cores() or 1))
    os.environ.update(training.environment)
    before = Path.cwd(), sys.argv, list(sys.path)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        os.environ["GPULAB_DIR"] = str(Path(temporary, "gpulab"))
        folder = _copied(training, Path(temporary, "work"))
        training.prepare(folder)
        entry = folder / training.entry
        sys.argv = [training.entry, *_arguments(training, gpu=torch.cuda.is_available())]
        sys.path[:0] = list(dict.fromkeys((str(entry.parent), str(folder))))
        os.chdir(folder / training.runs_in)
        try:
            names: dict[str, Any] = {"__name__": "__main__", "__file__": str(entry)}
            yield Staged(entry.read_text(encoding="utf-8"), names)
        finally:
            os.chdir(before[0])
            sys.argv, sys.path[:] = before[1], before[2]


def _copied(training: Training, to: Path) -> Path:
    if not training.repository:
        to.mkdir()
        shutil.copy(SCRIPTS / training.entry, to)
        return to
    source = Path(os.environ[CHECKOUTS]) / training.checkout / training.folder
    shutil.copytree(source, to, ignore=shutil.ignore_patterns(".git"))
    return to


def _arguments(training: Training, *, gpu: bool) -> tuple[str, ...]:
    return (*training.arguments, *(training.gpu if gpu else training.cpu))
