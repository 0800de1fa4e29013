"""Runs that gpulab recorded on real GPUs: they open like any run, and name machine, date and cell."""

from __future__ import annotations

import difflib
from pathlib import Path

from gpulab.errors import StoreError
from gpulab.run import Run
from gpulab.store import folders

DATA = Path(__file__).resolve().parent / "data"  # MACHINE/NAME, each the folder of a stored run


def names(root: Path = DATA) -> list[str]:
    """Every recording, as "h100/workers-0"."""
    return sorted(
        f"{path.parent.parent.name}/{path.parent.name}" for path in root.glob(f"[!.]*/[!.]*/{folders.DOCUMENT}")
    )


def machine_with(*recordings: str, root: Path = DATA) -> str | None:
    """The first machine that has all of these recordings; None if there is none."""
    every = set(names(root))
    machines = sorted({name.partition("/")[0] for name in every})
    return next((m for m in machines if all(f"{m}/{name}" in every for name in recordings)), None)


def open(name: str, root: Path = DATA) -> Run:
    """The run that was recorded under that name. Raises StoreError naming the nearest match."""
    every = names(root)
    if name not in every:
        raise StoreError(f"There is no recording {name!r}. {_nearest(str(name), every)}")
    return folders.read(root / name)


def _nearest(name: str, every: list[str]) -> str:
    if not every:
        return "This gpulab comes without recordings; on a machine with an NVIDIA GPU, make record-gpu makes them."
    near = difflib.get_close_matches(name, every, n=1, cutoff=0.3)
    return f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(every)}."
