"""Arithmetic on time: sets of half-open intervals [start, end) of integer nanoseconds.

A set is an int64 array of shape [n, 2] whose rows are disjoint, non-empty and sorted. `union` makes one from anything.
All functions are exact (integers) and O(n log n).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Intervals = npt.NDArray[np.int64]

_Side = Literal["left", "right"]
EMPTY: Intervals = np.empty((0, 2), dtype=np.int64)


def union(start: npt.NDArray[np.int64], end: npt.NDArray[np.int64]) -> Intervals:
    """The points covered by at least one [start, end); empty and negative intervals cover nothing."""
    solid = end > start
    start, end = start[solid], end[solid]
    if len(start) == 0:
        return EMPTY
    if (start[1:] < start[:-1]).any():
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    return _merged(start, np.maximum.accumulate(end))


def union_of(pairs: Iterable[tuple[int, int]]) -> Intervals:
    """As `union`, from pairs (start, end) in any order and number."""
    start, end = np.array(list(pairs), dtype=np.int64).reshape(-1, 2).T
    return union(start, end)


def joined(*sets: Intervals) -> Intervals:
    """The points in at least one of the sets."""
    every = np.concatenate([EMPTY, *sets])
    return union(every[:, 0], every[:, 1])


def measure(a: Intervals) -> int:
    """Total length."""
    return int((a[:, 1] - a[:, 0]).sum())


def covers(a: Intervals, at: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """For each point, whether the set contains it."""
    return _within(a, at, "right", "right")


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """The points in both sets."""
    # the intersection begins where one set begins inside the other, and ends likewise; common edges count once
    start = (a[_within(b, a[:, 0], "right", "right"), 0], b[_within(a, b[:, 0], "left", "right"), 0])
    end = (a[_within(b, a[:, 1], "left", "left"), 1], b[_within(a, b[:, 1], "left", "right"), 1])
    return _merged(np.sort(np.concatenate(start), kind="stable"), np.sort(np.concatenate(end), kind="stable"))


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """The points in `a` that are not in `b`."""
    ends = np.iinfo(np.int64)
    gaps = np.stack((np.append(ends.min, b[:, 1]), np.append(b[:, 0], ends.max)), axis=1)
    return intersect(a, gaps[gaps[:, 1] > gaps[:, 0]])


def closed(a: Intervals, gap: int) -> Intervals:
    """The set with every gap of at most `gap` between two of its intervals filled."""
    return _merged(a[:, 0], a[:, 1], gap)


def clip(a: Intervals, start: int, end: int) -> Intervals:
    """The part of the set within [start, end)."""
    return union(np.clip(a[:, 0], start, end), np.clip(a[:, 1], start, end))


def paint(windows: Intervals, layers: Sequence[Intervals]) -> npt.NDArray[np.int64]:
    """Divide each window among the layers: every point belongs to the first layer that covers it.

    Returns int64 [len(windows), len(layers) + 1]: the time of each window per layer, the uncovered rest last.
    Each row sums to its window's length exactly.
    """
    totals = np.zeros((len(windows), len(layers) + 1), dtype=np.int64)
    solid = windows[:, 1] > windows[:, 0]
    if not solid.all():
        totals[solid] = paint(windows[solid], layers)
        return totals
    if len(windows) == 0:
        return totals
    edges = _edges(windows, *layers)
    bare, length = _between(edges, windows), np.diff(edges)
    window = np.searchsorted(edges[:-1], windows[:, 0])  # each window begins at an edge
    for i, layer in enumerate(layers):
        painted = bare & _between(edges, layer)
        totals[:, i] = _sums(np.where(painted, length, 0), window)
        bare &= ~painted
    totals[:, len(layers)] = _sums(np.where(bare, length, 0), window)
    return totals


def median_share(windows: Intervals, times: Intervals) -> float:
    """The median, over the windows, of the share of a window that `times` covers."""
    wall = np.maximum(1, windows[:, 1] - windows[:, 0])
    return float(np.median(paint(windows, [times])[:, 0] / wall))


def _merged(start: npt.NDArray[np.int64], end: npt.NDArray[np.int64], gap: int = 0) -> Intervals:
    """A set from intervals whose starts and ends are both sorted; gaps of at most `gap` are filled."""
    apart = np.ones(len(start) + 1, dtype=bool)
    apart[1:-1] = start[1:] - end[:-1] > gap
    return np.stack((start[apart[:-1]], end[apart[1:]]), axis=1)


def _within(a: Intervals, at: npt.NDArray[np.int64], begun: _Side, ended: _Side) -> npt.NDArray[np.bool_]:
    """For each point, whether more intervals have begun than ended; "right" includes the point itself."""
    within: npt.NDArray[np.bool_] = np.searchsorted(a[:, 0], at, begun) > np.searchsorted(a[:, 1], at, ended)
    return within


def _edges(*sets: Intervals) -> npt.NDArray[np.int64]:
    """Every start and end once, in order; a stable sort is fast on sorted parts."""
    edges = np.sort(np.concatenate([a.ravel() for a in sets]), kind="stable")
    return edges[np.concatenate(([True], edges[1:] > edges[:-1]))] if len(edges) else edges


def _between(edges: npt.NDArray[np.int64], a: Intervals) -> npt.NDArray[np.bool_]:
    """For each two neighbouring edges, whether `a` covers the space between; `edges` include all ends of `a`."""
    change = np.zeros(len(edges), dtype=np.int8)
    change[np.searchsorted(edges, a[:, 0])] = 1
    change[np.searchsorted(edges, a[:, 1])] -= 1
    return np.cumsum(change[:-1], dtype=np.int8).astype(bool)


def _sums(values: npt.NDArray[np.int64], first: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The sums of the groups of `values` that begin at the indices `first`."""
    sums: npt.NDArray[np.int64] = np.add.reduceat(values, first)
    return sums
