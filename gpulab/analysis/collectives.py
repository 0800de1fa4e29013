"""What each kind of exchange between ranks carries, how often, and how fast it moves.

Source of the bandwidth: NVIDIA's nccl-tests, "Performance reported by NCCL tests": the bytes of the larger of what goes
in and what comes out over the time, times what of them each link has to carry (`LINK_SHARE`). So it can be held against
what the link is sold with, however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from msgspec import Struct

from gpulab.run import Collective, Float64, Int64, Timeline

# Kind → of the message's bytes, those that cross each link, from the number of ranks. A rank that is not the root of a
# gather or scatter sees its own part alone, so these have none.
LINK_SHARE: Mapping[Collective, Callable[[int], float]] = {
    Collective.ALL_REDUCE: lambda ranks: 2 * (ranks - 1) / ranks,
    Collective.REDUCE_SCATTER: lambda ranks: (ranks - 1) / ranks,
    Collective.ALL_GATHER: lambda ranks: (ranks - 1) / ranks,
    Collective.ALL_TO_ALL: lambda ranks: (ranks - 1) / ranks,
    Collective.BROADCAST: lambda ranks: 1.0,
    Collective.REDUCE: lambda ranks: 1.0,
    Collective.SEND: lambda ranks: 1.0,
    Collective.RECEIVE: lambda ranks: 1.0,
}


class CollectiveFacts(Struct, frozen=True):
    """All exchanges of one kind ("all-reduce", "reduce-scatter", …) in one process group.

    `message_bytes` and `time_us` are means of one of them. `bus_bytes_per_s` is the bus bandwidth as nccl-tests have
    it, None where a size is not known, the group is one rank alone, or the kind is gather or scatter.
    """

    kind: str
    process_group: int | None
    group_size: int | None
    count_per_step: float
    message_bytes: float | None
    time_us: float
    bus_bytes_per_s: float | None


def collective_facts(timeline: Timeline, rows: Int64, time_ns: Int64, steps: int) -> tuple[CollectiveFacts, ...]:
    """Of these rows of a timeline, the costliest kind first; empty where the trace does not say what they carry.

    `time_ns`: of each row, how long it moves data; where that is not known apart, how long it takes.
    """
    kinds = _column(timeline, "collective", rows)
    has_kind = np.isfinite(kinds)
    rows, time_ns, kinds = rows[has_kind], time_ns[has_kind], kinds[has_kind]
    groups, sizes = (_column(timeline, name, rows) for name in ("process_group", "group_size"))
    keys = np.nan_to_num(np.stack((kinds, groups, sizes), axis=1), nan=-1.0)
    facts = []
    for key in np.unique(keys, axis=0):
        mine = (keys == key).all(axis=1)
        facts.append(_facts_of(timeline, rows[mine], time_ns[mine], steps, key))
    return tuple(sorted(facts, key=lambda one: -one.time_us * one.count_per_step))


def _facts_of(timeline: Timeline, rows: Int64, time_ns: Int64, steps: int, key: Float64) -> CollectiveFacts:
    kind, group, size = Collective(int(key[0])), *(int(k) if k >= 0 else None for k in key[1:])
    carried = _column(timeline, "message_bytes", rows)
    has_bytes = bool(np.isfinite(carried).all())
    bandwidth = None
    if has_bytes and size is not None and size > 1 and time_ns.sum() > 0 and kind in LINK_SHARE:
        bandwidth = float(carried.sum()) * LINK_SHARE[kind](size) / (float(time_ns.sum()) / 1e9)
    return CollectiveFacts(
        kind.name.lower().replace("_", "-"),
        group,
        size,
        len(rows) / steps,
        float(carried.mean()) if has_bytes else None,
        float(time_ns.mean()) / 1e3,
        bandwidth,
    )


def _column(timeline: Timeline, name: str, rows: Int64) -> Float64:
    column = timeline.extra.get(name)
    return np.full(len(rows), np.nan) if column is None else column[rows]


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
    by_exchange: dict[tuple[int, int], list[int]] = {}
    for place, number in enumerate(numbers):
        rank = ranks[number]
        for group, sequence, ns in zip(rank.group.tolist(), rank.sequence.tolist(), rank.time_ns.tolist(), strict=True):
            times = by_exchange.setdefault((group, sequence), [])
            if len(times) == place:
                times.append(ns)
    full = sorted((times for times in by_exchange.values() if len(times) == len(numbers)), key=max)
    return np.array(full, np.int64).reshape(-1, len(numbers)).T, numbers
