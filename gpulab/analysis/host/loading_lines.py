"""Which line takes the time to make batches, from looks at those who make them."""

from __future__ import annotations

import numpy as np

from gpulab.analysis.host.hot_line import LineCount, hot_place
from gpulab.run import Place, Run


def loading_lines(run: Run, *, collating: bool = False) -> tuple[tuple[LineCount, ...], int]:
    """The lines of the user's that were met, most looks first, and how many looks there were in all.

    `collating`: only within `collate_fn`.
    """
    looks = run.loading_looks
    if looks is None:
        return (), 0
    wanted = looks.collating == 1 if collating else np.ones(len(looks), bool)
    lines = [
        LineCount(run.places[place], int(looks.count[wanted & (looks.place == place)].sum()))
        for place in np.unique(looks.place[wanted]).tolist()
        if place >= 0
    ]
    return tuple(sorted(lines, key=lambda line: -line.looks)), int(looks.count[wanted].sum())


def hot_line_of_loading(run: Run, *, collating: bool = False) -> Place | None:
    """The line, or the loop, that surely takes at least half of that time; None where none does."""
    return hot_place(*loading_lines(run, collating=collating))
