"""Arithmetic on time: sets of half-open intervals [start, end) of integer nanoseconds.

A set is an int64 array of shape [n, 2] whose rows are disjoint, non-empty and sorted. `union` makes one from anything.
All functions are exact (integers) and O(n log n).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Intervals = npt.NDArray[np.int64]

EMPTY: Intervals = np.empty((0, 2), dtype=np.int64)


def union(start: npt.NDArray[np.int64], end: npt.NDArray[np.int64]) -> Intervals:
    """The points covered by at least one [start, end); empty and negative intervals cover nothing."""
    solid = end > start
    start, end = start[solid], end[solid]
    if len(start) == 0:
        return EMPTY
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    opens = np.concatenate(([True], start[1:] > end[:-1]))
    first = np.flatnonzero(opens)
    last = np.concatenate((first[1:] - 1, [len(start) - 1]))
    return np.stack((start[first], end[last]), axis=1)


def measure(a: Intervals) -> int:
    """Total length."""
    return int((a[:, 1] - a[:, 0]).sum())


def covers(a: Intervals, at: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """For each point, whether the set contains it."""
    begun = np.searchsorted(a[:, 0], at, side="right")
    ended = np.searchsorted(a[:, 1], at, side="right")
    return begun > ended


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """The points in both sets."""
    edges = np.unique(np.concatenate((a.ravel(), b.ravel())))
    inside = covers(a, edges[:-1]) & covers(b, edges[:-1])
    return union(edges[:-1][inside], edges[1:][inside])


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """The points in `a` that are not in `b`."""
    edges = np.unique(np.concatenate((a.ravel(), b.ravel())))
    inside = covers(a, edges[:-1]) & ~covers(b, edges[:-1])
    return union(edges[:-1][inside], edges[1:][inside])


def closed(a: Intervals, gap: int) -> Intervals:
    """The set with every gap of at most `gap` between two of its intervals filled."""
    if len(a) == 0:
        return a
    opens = np.concatenate(([True], a[1:, 0] - a[:-1, 1] > gap))
    first = np.flatnonzero(opens)
    last = np.concatenate((first[1:] - 1, [len(a) - 1]))
    return np.stack((a[first, 0], a[last, 1]), axis=1)


def clip(a: Intervals, start: int, end: int) -> Intervals:
    """The part of the set within [start, end)."""
    return union(np.clip(a[:, 0], start, end), np.clip(a[:, 1], start, end))


def paint(windows: Intervals, layers: Sequence[Intervals]) -> npt.NDArray[np.int64]:
    """Paint each window with the first layer that covers each of its points; later layers fill what is left bare.

    Returns int64 [len(windows), len(layers) + 1]: the time of each window given to each layer, the bare rest last.
    Each row sums to its window's length exactly.
    """
    totals = np.zeros((len(windows), len(layers) + 1), dtype=np.int64)
    if len(windows) == 0:
        return totals
    edges = np.unique(np.concatenate([windows.ravel(), *(layer.ravel() for layer in layers)]))
    left, length = edges[:-1], np.diff(edges)
    window = np.searchsorted(windows[:, 0], left, side="right") - 1
    inside = covers(windows, left)
    left, length, window = left[inside], length[inside], window[inside]
    label = np.full(len(left), len(layers), dtype=np.int64)
    bare = np.ones(len(left), dtype=bool)
    for i, layer in enumerate(layers):
        taken = bare & covers(layer, left)
        label[taken] = i
        bare &= ~taken
    np.add.at(totals, (window, label), length)
    return totals
