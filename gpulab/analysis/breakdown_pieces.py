"""Where in a step its parts lie: the accounting once more, as pieces in time, for views that draw it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gpulab.analysis.breakdown import PARTS, Breakdown, layers
from gpulab.intervals import Intervals, covers
from gpulab.run import Int64, Timeline


@dataclass(frozen=True, slots=True)
class Pieces:
    """Columns by time: disjoint pieces that fill the accounted steps, none of them empty."""

    start_ns: Int64
    end_ns: Int64
    part: Int64  # index into PARTS


def placed(timeline: Timeline, account: Breakdown) -> Pieces | None:
    """The pieces of every accounted step; None where they do not sum to the account's own parts.

    Whether the account knows the causes of idle time is found by comparing.
    """
    windows = account.windows
    totals = np.array([[step.parts_ns[part] for part in PARTS] for step in account.steps], dtype=np.int64)
    for idle_causes in (True, False):
        claims = layers(timeline, account.device_index, idle_causes=idle_causes, pauses_ns=account.pauses_ns)
        pieces = _painted(claims, windows)
        if np.array_equal(_summed(pieces, windows), totals):
            return pieces
    return None


def _painted(claims: Mapping[str, Intervals], windows: Int64) -> Pieces:
    edges = np.unique(np.concatenate([windows.ravel(), *(claim.ravel() for claim in claims.values())]))
    left, right = edges[:-1], edges[1:]
    inside = covers(windows[windows[:, 1] > windows[:, 0]], left)
    left, right = left[inside], right[inside]
    part = np.full(len(left), PARTS.index("unknown"), dtype=np.int64)
    bare = np.ones(len(left), dtype=bool)
    for name, claim in claims.items():
        taken = bare & covers(claim, left)
        part[taken] = PARTS.index(name)
        bare &= ~taken
    return _joined(left, right, part, windows)


def _joined(left: Int64, right: Int64, part: Int64, windows: Int64) -> Pieces:
    """Neighbours of the same part as one piece, but for two steps."""
    if not len(left):
        return Pieces(left, right, part)
    fresh = np.ones(len(left), dtype=bool)
    fresh[1:] = (part[1:] != part[:-1]) | (left[1:] != right[:-1]) | np.isin(left[1:], windows[:, 0])
    first = np.flatnonzero(fresh)
    last = np.concatenate((first[1:], [len(left)])) - 1
    return Pieces(left[first], right[last], part[first])


def _summed(pieces: Pieces, windows: Int64) -> Int64:
    """The time of each window given to each part."""
    totals = np.zeros((len(windows), len(PARTS)), dtype=np.int64)
    window = np.searchsorted(windows[:, 0], pieces.start_ns, side="right") - 1
    np.add.at(totals, (window, pieces.part), pieces.end_ns - pieces.start_ns)
    return totals
