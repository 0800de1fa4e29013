"""Which span of a thread lies within which: the call tree as a column of parents."""

from __future__ import annotations

import numpy as np

from gpulab.run import Int64


def parents(start: Int64, end: Int64) -> Int64:
    """For each span of one lane the row of the innermost earlier span that holds it, -1 where there is none.

    Rows are sorted by start, longer first; each has a length of its own (end > start). Spans that overlap without one
    holding the other belong to nobody's tree but still hold what lies within them.
    """
    n = len(start)
    parent = np.full(n, -1, dtype=np.int64)
    if n == 0:
        return parent
    depth = np.arange(n) - np.searchsorted(np.sort(end), start, side="right")
    by_depth = np.argsort(depth, kind="stable")
    edges = np.searchsorted(depth[by_depth], np.arange(int(depth.max()) + 2))
    for level in range(1, len(edges) - 1):
        above, rows = by_depth[edges[level - 1] : edges[level]], by_depth[edges[level] : edges[level + 1]]
        parent[rows] = above[np.searchsorted(above, rows) - 1]
    nested = parent >= 0
    if (end[parent[nested]] < end[nested]).any():
        return _parents_of_tangled(start, end)
    return parent


def _parents_of_tangled(start: Int64, end: Int64) -> Int64:
    """The same where some spans overlap without one holding the other: row by row."""
    starts, ends = start.tolist(), end.tolist()
    parent = [-1] * len(starts)
    stack: list[int] = []
    for i, (begins, finishes) in enumerate(zip(starts, ends, strict=True)):
        while stack and ends[stack[-1]] <= begins:
            stack.pop()
        parent[i] = next((j for j in reversed(stack) if finishes <= ends[j]), -1)
        stack.append(i)
    return np.array(parent, dtype=np.int64)


__all__ = ["parents"]
