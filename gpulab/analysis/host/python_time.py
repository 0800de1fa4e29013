"""Time of a step in which PyTorch computes next to nothing, at lines of one function of the user's: metrics, games.

Most of the looks at a function's lines must lie in such time: a line that calls PyTorch itself is seen in its
operators, too.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gpulab.analysis.breakdown import Breakdown, layers
from gpulab.analysis.host.hot_line import hot_place
from gpulab.analysis.host.source_lines import LineShare, SourceLine, lines_beside_cost, lines_of, looks_within
from gpulab.intervals import (
    Intervals,
    intersect,
    joined,
    measure,
    median_share,
    subtract,
    union,
)
from gpulab.run import Int64, Place, Run, StackSamples

LEAST_LOOKS, LEAST_NS = 4, 20_000_000  # ours: with fewer looks, at less time, chance speaks
LEAST_SHARE = 0.5  # of such time: below it no single function is to blame
MOSTLY = 0.6  # of the looks at a function; ours: a line that also runs operators is found in them more often


class OwnCode(Struct, frozen=True):
    """`place`: the line that takes most; None where none surely does. `function` that it is in, empty for a cell.

    `times` within the profiled steps, [n, 2] in ns, each up to a look: of the last of them before PyTorch runs again,
    the rest is missing. `share` of a typical step, without that gap where looks are draws: of them, those at these
    lines. `source`: the lines around, each with its share of the time in which PyTorch runs nothing.
    """

    place: Place | None
    function: str
    times: Intervals
    share: float
    source: tuple[SourceLine, ...] = ()


def own_code(run: Run, account: Breakdown) -> OwnCode | None:
    """Where PyTorch runs nothing. None without looks at the stack, and where no function of the user's surely takes
    most of such time."""
    windows = _windows(run, account)
    return None if windows is None else _mostly_at(run, windows, _bare(run, account, windows))


def _bare(run: Run, account: Breakdown, windows: Intervals) -> Intervals:
    """The time of the steps in which PyTorch runs nothing, and no pause is known."""
    assert run.timeline is not None
    claims = layers(run.timeline, account)
    return subtract(union(windows[:, 0], windows[:, 1]), joined(*claims.values()))


def _windows(run: Run, account: Breakdown) -> Intervals | None:
    """The accounted steps; None where they or looks at the stack are missing."""
    stack = run.stack
    if run.timeline is None or stack is None:
        return None
    if not len(stack.t_ns) or len(stack.calls_users) != len(stack.t_ns):
        return None
    return account.step_host_windows


def _mostly_at(run: Run, windows: Intervals, bare: Intervals) -> OwnCode | None:
    """The function that takes most of this time, if most of the looks at it lie there."""
    stack = run.stack
    assert stack is not None
    passing = {run.places[p] for p in np.unique(stack.place[_holds_others(stack)]).tolist() if p >= 0}
    lines = [line for line in lines_of(run, bare) if line.place not in passing]
    if not lines:
        return None
    mine = [line for line in lines if _function(line) == _function(lines[0])]
    share = sum(line.share for line in mine)
    places = {line.place for line in mine}
    anywhere = sum(line.share for line in lines_of(run, windows) if _function(line) == _function(lines[0]))
    if share < LEAST_SHARE or share * measure(bare) < MOSTLY * anywhere * measure(windows):
        return None
    rows = np.isin(stack.place, [i for i, place in enumerate(run.places) if place in places])
    looks = sum(line.looks for line in mine)
    since_ns = stack.since_ns if looks >= LEAST_LOOKS else _within_its_step(stack, windows)
    times = intersect(union(since_ns[rows], stack.t_ns[rows]), bare)
    if looks < LEAST_LOOKS and measure(times) < LEAST_NS:
        return None
    place = lines[0].place
    if not stack.exact:
        return OwnCode(None, "", times, median_share(windows, times))
    total = looks_within(stack, bare)
    hot = hot_place(mine, total)
    source = lines_beside_cost(run, hot, lines, total) if hot is not None else ()
    return OwnCode(hot, place.function, times, share * median_share(windows, bare), source)


def _holds_others(stack: StackSamples) -> npt.NDArray[np.bool_]:
    """Looks at a line that was seen calling other lines of the user's, or that holds the steps."""
    calls: npt.NDArray[np.bool_] = stack.calls_users == 1
    return np.logical_or(calls, stack.throughout == 1) if len(stack.throughout) == len(calls) else calls


def _within_its_step(stack: StackSamples, windows: Intervals) -> Int64:
    """From when on each look stands for the time of the step it falls into.

    Where steps passed between two looks, no call held the lock: the thread that looks had no core.
    """
    step = np.maximum(np.searchsorted(windows[:, 0], stack.t_ns, side="right") - 1, 0)
    begun_ns: Int64 = np.minimum(np.maximum(stack.since_ns, windows[step, 0]), stack.t_ns)
    return begun_ns


def _function(line: LineShare) -> tuple[str, str, int]:
    """One line alone where its function has no name: the lines of a cell are not one function."""
    place = line.place
    return place.file, place.function, 0 if place.function else place.line
