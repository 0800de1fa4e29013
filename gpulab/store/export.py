"""Runs written for other programs, one after another: what was written, what was left out and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

from gpulab.errors import StoreError
from gpulab.run import Run
from gpulab.store import tables, tensorboard
from gpulab.store.tables import Cell


class Exported(Struct, frozen=True):
    """What an export wrote: `count` runs into `path`; `skipped` says which it left out and why, `notes` the rest."""

    path: Path
    count: int
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Figures(Struct, frozen=True):
    """How a run becomes one row of a table: the columns with their types, and the function that fills them."""

    columns: Mapping[str, type]
    row: Callable[[Run], Mapping[str, Cell]]


Loaders = Mapping[str, Callable[[], Run]]  # by id; one raises StoreError where its run cannot be read
FindLoaders = Callable[[], Loaders]  # called when all else was checked; raises StoreError where there is no run


def to_table(find_runs: FindLoaders, file: Path, figures: Figures) -> Exported:
    """As one table. Raises UsageError and StoreError; then no file is written."""
    tables.check_path(file)
    cells: list[Mapping[str, Cell]] = []
    skipped = _each(find_runs(), lambda run: cells.append(figures.row(run)))
    tables.write_table(file, cells, figures.columns)
    return Exported(file, len(cells), skipped)


def to_tensorboard(find_runs: FindLoaders, folder: Path) -> Exported:
    """As TensorBoard scalars. Raises UsageError and StoreError."""
    tensorboard.require()
    notes: dict[str, str] = {}

    def write(run: Run) -> None:
        every = max((curve.thinned for curve in tensorboard.export(run, folder)), default=1)
        if every > 1:
            notes[run.id] = f"{run.id}: long curves are thinned, down to one point in {every}"

    chosen = find_runs()
    skipped = _each(chosen, write)
    return Exported(folder, len(chosen) - len(skipped), skipped, tuple(notes.values()))


def _each(loaders: Loaders, write: Callable[[Run], object]) -> tuple[str, ...]:
    """Write all runs that can be read; returns why others were not. Raises StoreError where none could."""
    skipped: list[str] = []
    for id_, load in loaders.items():
        try:
            run = load()
        except StoreError as e:
            skipped.append(f"{id_}: {e}")
        else:
            write(run)
    if len(skipped) == len(loaders):
        raise StoreError(f"There is nothing to export: {skipped[0]}")
    return tuple(skipped)
