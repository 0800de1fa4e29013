"""Who waits for whom: at each collective the ranks that came early wait for the one that came last.

In synchronous training all ranks' steps take equally long, so a straggler does not show by its step time: it shows by
who waits.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from msgspec import Struct

from gpulab.run import Int64


class Arrived(Struct, frozen=True):
    """One rank's arrivals, [n] each: at which collective of which group, and when (ns, on a clock that all share)."""

    group: Int64
    sequence: Int64
    time_ns: Int64


class RankWaits(Struct, frozen=True):
    """Of one rank, as shares of the time that the matched collectives span: it `waits` for others; it `delays` them,
    summed over the collectives at which it came last, by what the others waited on average."""

    waits: float
    delays: float


def rank_waits(ranks: Mapping[int, Arrived]) -> dict[int, RankWaits]:
    """By rank, from the collectives that all of them came to; empty where there are fewer than two of these."""
    times_ns, numbers = _matched(ranks)
    if times_ns.shape[1] < 2:
        return {}
    last_ns = times_ns.max(axis=0)
    span_ns = max(1, int(last_ns.max() - last_ns.min()))
    wait_ns = last_ns - times_ns
    latest = times_ns.argmax(axis=0)
    delay_ns = wait_ns.sum(axis=0) / (len(numbers) - 1)
    return {
        number: RankWaits(
            waits=min(1.0, float(wait_ns[row, 1:].sum()) / span_ns),
            delays=min(1.0, float(delay_ns[1:][latest[1:] == row].sum()) / span_ns),
        )
        for row, number in enumerate(numbers)
    }


def straggler(waits: Mapping[int, RankWaits], least: float) -> int | None:
    """The rank that delays the others most, where that is at least this share; None where none does."""
    if not waits:
        return None
    worst = max(waits, key=lambda rank: waits[rank].delays)
    return worst if waits[worst].delays >= least else None


def _matched(ranks: Mapping[int, Arrived]) -> tuple[Int64, list[int]]:
    """Arrivals [ranks, collectives] at those to which all came, in order of time, and the ranks' numbers."""
    numbers = sorted(ranks)
    if len(numbers) < 2:
        return np.empty((len(numbers), 0), np.int64), numbers
    seen: dict[tuple[int, int], list[int]] = {}
    for place, number in enumerate(numbers):
        rank = ranks[number]
        for group, sequence, ns in zip(rank.group.tolist(), rank.sequence.tolist(), rank.time_ns.tolist(), strict=True):
            times = seen.setdefault((group, sequence), [])
            if len(times) == place:
                times.append(ns)
    full = sorted((times for times in seen.values() if len(times) == len(numbers)), key=max)
    return np.array(full, np.int64).reshape(-1, len(numbers)).T, numbers
