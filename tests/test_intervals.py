"""Interval arithmetic against sets of integers."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from gpulab import intervals as iv

pairs = st.lists(st.tuples(st.integers(-40, 60), st.integers(-5, 25)), max_size=12)


def made(raw: list[tuple[int, int]]) -> iv.Intervals:
    start = np.array([s for s, _ in raw], dtype=np.int64)
    return iv.union(start, start + np.array([d for _, d in raw], dtype=np.int64))


def points(raw: list[tuple[int, int]]) -> set[int]:
    return {p for s, d in raw for p in range(s, s + d)}


def covered(a: iv.Intervals) -> set[int]:
    return {p for s, e in a.tolist() for p in range(s, e)}


def assert_proper(a: iv.Intervals) -> None:
    assert (a[:, 1] > a[:, 0]).all()
    assert (a[1:, 0] > a[:-1, 1]).all(), "neighbours touch or overlap"


@given(pairs)
def test_union_covers_the_same_points(raw: list[tuple[int, int]]) -> None:
    a = made(raw)
    assert_proper(a)
    assert covered(a) == points(raw)
    assert iv.measure(a) == len(points(raw))


@given(pairs)
def test_union_of_pairs_is_that_of_their_columns(raw: list[tuple[int, int]]) -> None:
    a = iv.union_of((s, s + d) for s, d in raw)
    assert a.shape[1] == 2 and covered(a) == points(raw)


@given(pairs, pairs)
def test_intersect_and_subtract(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    a, b = made(left), made(right)
    both, only = iv.intersect(a, b), iv.subtract(a, b)
    assert_proper(both)
    assert_proper(only)
    assert covered(both) == points(left) & points(right)
    assert covered(only) == points(left) - points(right)


@given(pairs, st.integers(-50, 50), st.integers(0, 60))
def test_clip(raw: list[tuple[int, int]], start: int, length: int) -> None:
    assert covered(iv.clip(made(raw), start, start + length)) == points(raw) & set(range(start, start + length))


@given(pairs, st.lists(st.integers(-60, 60), max_size=20))
def test_covers(raw: list[tuple[int, int]], at: list[int]) -> None:
    inside = iv.covers(made(raw), np.array(at, dtype=np.int64))
    assert inside.tolist() == [p in points(raw) for p in at]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20)), max_size=4), st.lists(pairs, max_size=4))
def test_paint_gives_each_point_to_the_first_layer(
    gaps: list[tuple[int, int]], raw_layers: list[list[tuple[int, int]]]
) -> None:
    windows, at = [], 0
    for gap, length in gaps:
        windows.append((at + gap, at + gap + length))
        at += gap + length
    array = np.array(windows, dtype=np.int64).reshape(-1, 2)
    totals = iv.paint(array, [made(raw) for raw in raw_layers])
    for (start, end), row in zip(windows, totals.tolist(), strict=True):
        bare = set(range(start, end))
        for raw, painted in zip(raw_layers, row[:-1], strict=True):
            mine = bare & points(raw)
            assert painted == len(mine)
            bare -= mine
        assert row[-1] == len(bare)
        assert sum(row) == end - start


@given(pairs, st.integers(0, 8))
@example([(0, 2), (5, 7)], 3)  # a gap of the very length
def test_closed_fills_the_short_gaps(raw: list[tuple[int, int]], gap: int) -> None:
    a = made(raw)
    filled = covered(a)
    for (_, end), (start, _) in zip(a.tolist(), a.tolist()[1:], strict=False):
        if start - end <= gap:
            filled |= set(range(end, start))
    closed = iv.closed(a, gap)
    assert_proper(closed)
    assert covered(closed) == filled


def test_paint_gives_an_empty_window_nothing() -> None:
    windows = np.array([(0, 4), (4, 4), (6, 9), (9, 9)], dtype=np.int64)
    assert iv.paint(windows, [made([(2, 5)])]).tolist() == [[2, 2], [0, 0], [1, 2], [0, 0]]
    assert iv.paint(windows[1:2], []).tolist() == [[0]]
