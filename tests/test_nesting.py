"""The call tree of a lane, against a dumber search through all earlier spans."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpulab.analysis.nesting import parents

Span = tuple[int, int]


def columns(spans: list[Span]) -> tuple[np.ndarray, np.ndarray]:
    ordered = sorted(((s, s + d) for s, d in spans), key=lambda span: (span[0], -span[1]))
    return (
        tuple(np.array(c, dtype=np.int64) for c in zip(*ordered, strict=True))
        if ordered
        else (np.empty(0, np.int64),) * 2
    )


def slow_parents(start: np.ndarray, end: np.ndarray) -> list[int]:
    """The latest earlier span that is still open at the start and holds the end."""
    found = []
    for i in range(len(start)):
        holding = [j for j in range(i) if end[j] > start[i] and end[j] >= end[i]]
        found.append(max(holding, default=-1))
    return found


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), max_size=25))
def test_parents_of_any_spans(spans: list[Span]) -> None:
    start, end = columns(spans)
    assert parents(start, end).tolist() == slow_parents(start, end)


@st.composite
def trees(draw: st.DrawFn) -> list[Span]:
    """Properly nested spans: each is cut from a gap of the one above it."""
    spans: list[Span] = []

    def fill(begin: int, end: int, depth: int) -> None:
        cuts = sorted(draw(st.lists(st.integers(begin, end), max_size=6)))
        for left, right in zip(cuts[::2], cuts[1::2], strict=False):
            if right > left:
                spans.append((left, right - left))
                if depth:
                    fill(left, right, depth - 1)

    fill(0, 60, 4)
    return spans


@given(trees())
def test_parents_of_a_tree(spans: list[Span]) -> None:
    start, end = columns(spans)
    assert parents(start, end).tolist() == slow_parents(start, end)


def test_twins_nest_in_their_order() -> None:
    start, end = columns([(0, 5), (0, 5), (0, 5)])
    assert parents(start, end).tolist() == [-1, 0, 1]
