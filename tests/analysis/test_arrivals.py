"""Who waits for whom, against a dumber reckoning of the same arrivals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulab.analysis.collectives import Arrived, rank_waits, straggler


def arrived(times_ms: list[float], first: int = 0, group: int = 7) -> Arrived:
    count = len(times_ms)
    sequence = np.arange(first, first + count, dtype=np.int64)
    return Arrived(np.full(count, group, np.int64), sequence, (np.array(times_ms) * 1e6).astype(np.int64))


def test_the_rank_that_comes_last_delays_the_others() -> None:
    """Steps of 100 ms; rank 1 comes 20 ms after the others each time."""
    ends = [100.0 * i for i in range(1, 30)]
    waits = rank_waits({0: arrived([t - 20 for t in ends]), 1: arrived(ends), 2: arrived([t - 20 for t in ends])})
    assert waits[0].waits == pytest.approx(0.2) and waits[1].waits == 0 and waits[1].delays == pytest.approx(0.2)
    assert straggler(waits, 0.05) == 1 and straggler(waits, 0.3) is None


def test_only_collectives_to_which_all_came_count() -> None:
    """The buffers of two ranks hold different stretches, and another group has the same numbers."""
    a, b = arrived([1.0, 2.0, 3.0, 4.0]), arrived([2.5, 3.5, 4.5], first=1)
    other = arrived([9.0], group=8)
    mixed = Arrived(*(np.concatenate(pair) for pair in zip(_columns(b), _columns(other), strict=True)))
    waits = rank_waits({0: a, 1: mixed})
    assert waits[1].delays == pytest.approx(0.5, abs=1e-6) and waits[0].delays == 0


def _columns(of: Arrived) -> tuple[np.ndarray, ...]:
    return of.group, of.sequence, of.time_ns


@pytest.mark.parametrize(
    "ranks", [{}, {0: arrived([1.0, 2.0])}, {0: arrived([1.0]), 1: arrived([2.0])}, {0: arrived([]), 1: arrived([])}]
)
def test_too_little_says_nothing(ranks: dict[int, Arrived]) -> None:
    assert rank_waits(ranks) == {} and straggler(rank_waits(ranks), 0.0) is None


@given(st.lists(st.lists(st.integers(0, 1000), min_size=3, max_size=3), min_size=2, max_size=12))
def test_as_a_loop_over_collectives_reckons(offsets: list[list[int]]) -> None:
    times = [[1000 * i + offset for offset in row] for i, row in enumerate(offsets)]
    ranks = {r: arrived([row[r] for row in times]) for r in range(3)}
    order = sorted(times, key=max)
    span = max(max(map(max, order)) - max(order[0]), 1e-6)
    waits = rank_waits(ranks)
    for rank in range(3):
        assert waits[rank].waits == pytest.approx(
            min(1, sum(max(row) - row[rank] for row in order[1:]) / span), abs=1e-6
        )
    total = sum(sum(max(row) - t for t in row) / 2 for row in order[1:]) / span
    assert sum(w.delays for w in waits.values()) == pytest.approx(total, abs=1e-6) or total > 1
