"""Runs as offline runs of Weights & Biases under one folder, to be uploaded by the user's own `wandb sync`, or never.

An active run of the user's stays active ("create_new", since wandb 0.19.10). Its service process is ended again where
wandb was not in use before.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from gpulab.errors import GpulabError, StoreError, UsageError
from gpulab.run import Run
from gpulab.store.atomic_write import make_folder
from gpulab.store.optional_packages import environment, first_line, installed
from gpulab.store.scalars import scalars
from gpulab.store.tables import Cell

PROJECT = "gpulab"

_NOTHING_ELSE = {  # than what is logged: no console, code, repository, machine
    "silent": True,
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "x_disable_stats": True,
    "x_disable_meta": True,
}
_SILENT = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}


def require() -> None:
    """Raises UsageError naming the package where wandb is not there."""
    if not installed("wandb"):
        raise UsageError("A Weights & Biases export needs wandb: pip install wandb.")


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Exporter]:
    """An exporter into a folder. Raises UsageError without wandb, StoreError where it cannot write."""
    require()
    make_folder(folder)
    used_before = "wandb" in sys.modules
    try:
        with environment(_SILENT):
            wandb = import_module("wandb")
            try:
                yield Exporter(wandb, folder.absolute())
            finally:
                if not used_before:
                    wandb.teardown()
    except GpulabError:
        raise
    except Exception as e:  # wandb.Error and pydantic's
        raise StoreError(f"Weights & Biases could not write in {str(folder)!r}: {first_line(e)}") from e


class Exporter:
    """Writes runs into `FOLDER/wandb/offline-run-*`; one that is there already is left as it is."""

    def __init__(self, wandb: ModuleType, folder: Path) -> None:
        self._wandb, self._folder = wandb, folder

    def add(self, run: Run, row: Mapping[str, Cell]) -> bool:
        """Write a run: figures in its summary, settings in its config, curves as history. False where it was there."""
        if any(self._folder.glob(f"wandb/offline-run-*-{run.id}")):
            return False
        made = self._wandb.init(
            project=PROJECT,
            id=run.id,
            name=run.name[:128],
            config={name: cell for name, cell in row.items() if isinstance(cell, str | bool)},
            dir=str(self._folder),
            mode="offline",
            reinit="create_new",
            settings=self._wandb.Settings(**_NOTHING_ELSE),
        )
        try:
            _log(made, run, row)
        except BaseException:  # half a run must not count as one that is there
            made.finish(exit_code=1)
            shutil.rmtree(Path(made.dir).parent, ignore_errors=True)
            raise
        made.finish(exit_code=1 if run.outcome == "failed" else 0)
        return True


def _log(made: Any, run: Run, row: Mapping[str, Cell]) -> None:
    made.define_metric("step/*", step_metric="step/number")
    made.define_metric("curve/*", step_metric="curve/time_ms")
    for line in _history(run):
        made.log(line)
    made.summary.update({name: cell for name, cell in row.items() if type(cell) in (int, float)})


def _history(run: Run) -> Iterator[dict[str, float]]:
    """One line for all that has the same place on the same axis."""
    for family, axis in (("step/", "step/number"), ("curve/", "curve/time_ms")):
        lines: dict[int, dict[str, float]] = {}
        for curve in scalars(run):
            if curve.name.startswith(family):
                for number, value in zip(curve.number.tolist(), curve.value.tolist(), strict=True):
                    lines.setdefault(number, {axis: number})[curve.name] = value
        yield from (lines[number] for number in sorted(lines))
