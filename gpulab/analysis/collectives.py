"""Computes what the collectives between ranks carry, how often they run, their bandwidth, and which rank is late.

The bus bandwidth is that of NVIDIA's nccl-tests, "Performance reported by NCCL tests": the larger of input and output
size, divided by the time, times the fraction that each link carries (`LINK_SHARE`). It can be compared with the rated
bandwidth of the link for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from msgspec import Struct

from gpulab.run import Collective, Float64, Int64, Timeline

# Kind → fraction of the message's bytes that crosses each link, from the number of ranks. Gather and scatter have none:
# a rank other than the root sees only its own part of the message.
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

    `message_bytes` and `time_us` are means per exchange. `bus_bytes_per_s` is the bus bandwidth as in nccl-tests; None
    if a size is unknown, the group has only one rank, or the kind is gather or scatter.
    """

    kind: str
    process_group: int | None
    group_size: int | None
    count_per_step: float
    message_bytes: float | None
    time_us: float
    bus_bytes_per_s: float | None


def collective_facts(timeline: Timeline, rows: Int64, time_ns: Int64, steps: int) -> tuple[CollectiveFacts, ...]:
    """The exchanges in these rows of a timeline, the costliest kind first; empty if the trace does not name their kind.

    `time_ns`: for each row, how long it moves data, or its whole duration if that is unknown.
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
    """One rank's arrivals at collectives, columns of [n]: group, number in the group, time (ns, on a shared clock)."""

    group: Int64
    sequence: Int64
    time_ns: Int64


class RankWaits(Struct, frozen=True):
    """Waits of one rank, as shares of the time from the first to the last matched collective.

    `waits`: how long it waits for others. `delays`: how long the others wait on average, summed over the collectives at
    which this rank arrives last.
    """

    waits: float
    delays: float


def rank_waits(ranks: Mapping[int, Arrived]) -> dict[int, RankWaits]:
    """Waits by rank, from the collectives at which all ranks arrived; empty with fewer than two such collectives."""
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
    """The rank that delays the others most; None if no rank delays them by at least the share `least`."""
    if not waits:
        return None
    worst = max(waits, key=lambda rank: waits[rank].delays)
    return worst if waits[worst].delays >= least else None


def _matched(ranks: Mapping[int, Arrived]) -> tuple[Int64, list[int]]:
    """Arrival times [ranks, collectives] at the collectives that all ranks reached, by time; and the ranks' numbers."""
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
