"""Runs that gpulab recorded on real GPUs: they open as any run does, and name machine, date and cell."""

from __future__ import annotations

import difflib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gpulab.errors import StoreError, UsageError
from gpulab.run import Run
from gpulab.store import folders

if TYPE_CHECKING:
    from gpulab.recordings.feed import RecordedFeed
    from gpulab.views.running.display import Stage

DATA = Path(__file__).resolve().parent / "data"  # MACHINE/NAME, each the folder of a stored run
SPEED = 4.0
_POLL_S = 0.05


def names(root: Path = DATA) -> list[str]:
    """Every recording, as "h100/workers-0"."""
    return sorted(
        f"{path.parent.parent.name}/{path.parent.name}" for path in root.glob(f"[!.]*/[!.]*/{folders.DOCUMENT}")
    )


def machine_with(*recordings: str, root: Path = DATA) -> str | None:
    """The first machine that has all of these; None where there is none."""
    every = set(names(root))
    machines = sorted({name.partition("/")[0] for name in every})
    return next((m for m in machines if all(f"{m}/{name}" in every for name in recordings)), None)


def open(name: str, root: Path = DATA) -> Run:
    """The run that was recorded under that name. Raises StoreError naming the nearest."""
    every = names(root)
    if name not in every:
        raise StoreError(f"There is no recording {name!r}. {_nearest(str(name), every)}")
    return folders.read(root / name)


def replay(name: str, speed: float = SPEED, root: Path = DATA) -> None:
    """Show a recording in the live view as it was made, `speed` times as fast, then its report.

    The view's Stop ends the replay, and so does an interrupt of the kernel. Where there is no notebook, a sentence says
    how to see the report. Raises StoreError for a recording that does not exist, UsageError for a speed that is none.
    """
    if not isinstance(speed, int | float) or isinstance(speed, bool) or not 0 < speed < float("inf"):
        raise UsageError(f"speed={speed!r} is no speed: give a number above 0. 1 is as fast as it was, 4 four times.")
    run = open(name, root)
    from gpulab.views.running.display import Stage

    stage = Stage.open(live=True)
    if not stage.notebook:
        sys.stdout.write(
            f"A replay is a picture that moves, and needs a notebook. For the report of {name} write "
            f"print(gpulab.report(gpulab.recordings.open({name!r})).text()).\n"
        )
        return
    from gpulab.api.reading import report
    from gpulab.recordings.feed import RecordedFeed

    shown = report(run)  # before the replay: nothing keeps the reader waiting at its end
    _play(RecordedFeed(run, name, float(speed)), stage)
    stage.show(shown)


def _play(feed: RecordedFeed, stage: Stage) -> None:
    """Until it is over or somebody stops it."""
    if stage.watcher is None:  # the report says why there is no live view
        return
    stage.watcher.begin(feed)
    try:
        while not feed.is_over:
            time.sleep(_POLL_S)
    finally:
        stage.watcher.end()


def _nearest(name: str, every: list[str]) -> str:
    if not every:
        return "This gpulab comes without recordings; on a machine with an NVIDIA GPU, make record-gpu makes them."
    near = difflib.get_close_matches(name, every, n=1, cutoff=0.3)
    return f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(every)}."
