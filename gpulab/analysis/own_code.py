"""Time of a step in which PyTorch runs nothing, at lines of one function of the user's own: metrics, games, logs.

Where the innermost line of the user's is that of a library's call which comes back to the user's code (`trainer.fit`),
the time is the library's. Of the looks at a function's lines most must lie in such time: a line that calls PyTorch
itself is seen in its operators, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpulab.analysis.breakdown import Breakdown, layers
from gpulab.analysis.places import LineShare, lines_of
from gpulab.intervals import Intervals, intersect, joined, measure, paint, subtract, union
from gpulab.run import Place, Run

LEAST_SHARE = 0.5  # of such time: below it no single function is to blame
MOSTLY = 0.6  # of the looks at a function; ours: a line that also runs operators is found in them more often


@dataclass(frozen=True, slots=True)
class OwnCode:
    """`place`: the line that takes most. `times` within the profiled steps, [n, 2] in ns. `share`: median of a step."""

    place: Place
    times: Intervals
    share: float


def own_code(run: Run, account: Breakdown) -> OwnCode | None:
    """None without looks at the stack, and where no function of the user's surely takes most of such time."""
    timeline, stack = run.timeline, run.stack
    if timeline is None or stack is None or account.whole_window or not account.steps:
        return None
    if not len(stack.t_ns) or len(stack.calls_users) != len(stack.t_ns):
        return None
    windows = np.array([(s.start_ns, s.end_ns) for s in account.steps], dtype=np.int64)
    claims = layers(timeline, account.device_index, pauses_ns=account.pauses_ns)
    bare = subtract(union(windows[:, 0], windows[:, 1]), joined(*claims.values()))
    passing = {run.places[p] for p in np.unique(stack.place[stack.calls_users == 1]).tolist() if p >= 0}
    found = [line for line in lines_of(run, bare) if line.place not in passing]
    if not found:
        return None
    mine = [line for line in found if _function(line) == _function(found[0])]
    share = sum(line.share for line in mine)
    places = {line.place for line in mine}
    anywhere = sum(line.share for line in lines_of(run, windows) if line.place in places)
    if share < LEAST_SHARE or share * measure(bare) < MOSTLY * anywhere * measure(windows):
        return None
    rows = np.isin(stack.place, [i for i, place in enumerate(run.places) if place in places])
    times = intersect(union(stack.since_ns[rows], stack.t_ns[rows]), bare)
    wall = np.maximum(1, windows[:, 1] - windows[:, 0])
    return OwnCode(found[0].place, times, float(np.median(paint(windows, [times])[:, 0] / wall)))


def _function(line: LineShare) -> tuple[str, str, int]:
    """One line alone where its function has no name: the lines of a cell are not one function."""
    place = line.place
    return place.file, place.function, 0 if place.function else place.line


__all__ = ["OwnCode", "own_code"]
