"""Compares the ranks of a distributed job: how much communication is hidden, what it costs, and which rank is late.

A collective ends on all ranks at about the same time but begins on each rank when that rank arrives. The rank that
arrives last runs the shortest kernel, whose duration is the transfer. On the other ranks, the extra time of the same
collective is waiting for that rank. Only durations are compared, so the clocks of the machines need not agree. Messages
from one rank to another (send and receive, as in a pipeline) do not end together: they count as communication but are
not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from gpulab.analysis.breakdown import Breakdown
from gpulab.analysis.collectives import CollectiveFacts, collective_facts
from gpulab.analysis.facts import Facts
from gpulab.analysis.integrity import Check, Integrity, State, check_of_count
from gpulab.analysis.step_shares import StepShares
from gpulab.intervals import Intervals, clip, intersect, joined, measure
from gpulab.run import TRACE_DROPPED, Int64, Missing, Timeline
from gpulab.timeline.labels import COLLECTIVES, Labels, Mask, What, labels

# If all ranks wait for cores, each is sometimes late by that wait, and further slowed by shared caches and
# hyper-threads: two equal ranks on two busy cores made each other wait for 5 to 17 % of their step, while one waited
# for a core for 14 % of it and the other for 8 %. Only additional core wait of the late rank explains its delay.
LATE_PER_CORE_WAIT = 2.5
MUCH_MORE_WORK = 1.5  # ours: times the other ranks' own time; for two equal ranks on two busy cores up to 1.25


class RankFacts(Struct, frozen=True):
    """One rank; times are µs per step, on its own clock.

    `communication_us` is the time in which a communication kernel ran, or on a CPU a collective ran or the training
    thread was in a call for one; `exposed_us` is the part without a concurrent compute kernel, `overlapped_us` the
    rest. `waiting_us` is the part of the communication kernels' time spent waiting for the slowest rank, `transfer_us`
    the rest; both are None if the ranks' collectives do not match.

    The time of concurrent collectives counts once. `collectives_per_step` counts each of them; `samples_per_step` is
    None if unknown.
    """

    rank: int
    step_us: float
    breakdown: Breakdown
    communication_us: float
    exposed_us: float
    overlapped_us: float
    waiting_us: float | None
    transfer_us: float | None
    collectives_per_step: float = 0.0
    samples_per_step: float | None = None
    computing_share: float = 0.0  # share of the typical step

    @property
    def core_wait_share(self) -> float:
        """Share of the step in which the training thread was ready to run but had no core (CPU device)."""
        return self.breakdown.share.get("core_wait", 0.0)

    @property
    def own_us(self) -> float:
        """Time in which the rank itself works: without exchanging data and waiting for cores."""
        return self.step_us * (1 - self.breakdown.share.get("communication", 0.0) - self.core_wait_share)

    @property
    def transfer_us_of_each(self) -> float | None:
        """Time of one collective, without waiting."""
        if self.transfer_us is None or not self.collectives_per_step:
            return None
        return self.transfer_us / self.collectives_per_step


class RankComparison(Struct, frozen=True):
    """Every rank that was read, in order. `straggler` is the rank that the others wait for, None if none stands out.

    `collectives` is the number of matched communication kernels per rank; if they do not match, it is None and
    `mismatch` says why. `only_messages`: the ranks exchange only messages from one rank to another. `exchanges`: what
    the collectives carry, if the traces say it; their times are those of moving data if `mismatch` is None.
    """

    ranks: tuple[RankFacts, ...]
    straggler: int | None
    collectives: int | None
    mismatch: str | None
    integrity: Integrity = field(default_factory=lambda: Integrity(()))
    only_messages: bool = False
    exchanges: tuple[CollectiveFacts, ...] = ()
    counts_values: bool = False  # `samples_per_step` are values of the model's inputs
    more_work_us: float | None = None  # how much longer the straggler works per step, if waits cannot show it


# What may be wrong with a folder of traces → state, what it withholds, what it means.
_PROBLEMS: dict[str, tuple[State, tuple[str, ...], str]] = {
    "stranger": ("unusable", ("straggler", "comparison"), "these traces are not of one job"),
    "unnumbered_rank": ("degraded", (), "which trace is of which rank is not known"),
    "absent_rank": ("degraded", ("transfer",), "ranks are missing: the last to arrive may be one of them"),
    "duplicate_rank": ("degraded", (), "a rank is there more than once; the first trace of it counts"),
    TRACE_DROPPED: ("degraded", ("straggler", "transfer"), ""),
    "unreadable_file": ("degraded", ("transfer",), "files cannot be read"),
    "cut_short": ("degraded", ("transfer",), "files are cut short"),
    "interrupted_rank": ("degraded", (), "ranks were interrupted"),
    "failed_rank": ("degraded", (), "ranks have failed"),
}


def job_integrity(problems: Sequence[Missing]) -> Integrity:
    """What is wrong with the traces of a job as a whole, from what their reader found."""
    checks: list[Check] = []
    for name, (state, withholds, meaning) in _PROBLEMS.items():
        these = [p for p in problems if p.key == name]
        meaning = these[0].reason if these and name == TRACE_DROPPED else meaning
        checks.append(check_of_count(name, len(these), state, meaning, withholds))
    return Integrity(tuple(checks))


def compare_ranks(
    facts: Mapping[int, Facts], problems: Sequence[Missing] = (), *, skew_notice: float
) -> RankComparison:
    """Split the communication of each rank into waiting and transfer.

    A rank is the straggler if the others wait for it for at least the share `skew_notice` of their step. On a machine
    without free cores, the share must also exceed what the wait for cores explains.

    Ranks whose trace allows no step accounting are left out, and so are ranks without GPU work if others have some.
    """
    accounts = {rank: b for rank, f in sorted(facts.items()) if (b := f.breakdown)}
    if any(b.device_index is not None for b in accounts.values()):
        accounts = {rank: b for rank, b in accounts.items() if b.device_index is not None}
    timelines = {rank: labels(timeline) for rank in accounts if (timeline := facts[rank].run.timeline) is not None}
    unmatched = {rank: _collectives(timelines[rank], accounts[rank]) for rank in timelines}
    kernels = _matched(unmatched)
    has_traces = all(problem.key != TRACE_DROPPED for problem in problems)
    alone = not any(own.rows for own in kernels.values()) and any(t.of(What.MESSAGE).any() for t in timelines.values())
    mismatch = _mismatch(kernels, only_messages=alone) if has_traces else "some ranks keep no trace"
    transfer = _shortest(kernels) if mismatch is None else {}
    counts, of_rows = _counts_per_step(facts[rank] for rank in timelines)
    ranks = tuple(
        _rank(
            rank,
            timelines[rank],
            accounts[rank],
            kernels[rank].durations_ns,
            unmatched[rank].durations_ns,
            transfer if mismatch is None else None,
            samples,
            facts[rank].shares,
        )
        for rank, samples in zip(timelines, counts, strict=True)
    )
    first = next(iter(kernels.values()), None)
    count = 0 if first is None else sum(len(rows) for rows in first.rows.values())
    trust = job_integrity(problems)
    straggler, more_us = (None, None) if "straggler" in trust.withheld else _straggler(ranks, skew_notice)
    return RankComparison(
        ranks,
        straggler,
        count if mismatch is None else None,
        mismatch,
        trust,
        alone,
        ()
        if first is None
        else _exchanges(next(iter(unmatched.values())), first, transfer, accounts[next(iter(timelines))]),
        of_rows,
        more_us,
    )


Durations = dict[str, Int64]  # kernel name → durations in ns, in order


class _Collectives(Struct, frozen=True):
    """The collectives of one rank: kernel name → rows of its timeline, in the order in which they are compared."""

    timeline: Timeline
    rows: dict[str, Int64]

    @property
    def durations_ns(self) -> Durations:
        return {name: self.timeline.duration_ns[rows] for name, rows in self.rows.items()}

    def sequence(self, name: str) -> list[tuple[float, float]] | None:
        """Process group and sequence number of each row; None if the trace lacks them or has one twice."""
        columns = [self.timeline.extra.get(column) for column in ("process_group", "collective_sequence")]
        figures = [column[self.rows[name]] for column in columns if column is not None]
        if len(figures) < len(columns) or not all(np.isfinite(column).all() for column in figures):
            return None
        numbers = list(zip(*(column.tolist() for column in figures), strict=True))
        return numbers if len(set(numbers)) == len(numbers) else None

    def only(self, name: str, numbers: Sequence[tuple[float, float]]) -> Int64:
        """The kernel's rows with these sequence numbers, in that order."""
        own = dict(zip(self.sequence(name) or (), self.rows[name].tolist(), strict=True))
        return np.array([own[number] for number in numbers], dtype=np.int64)


def _matched(kernels: Mapping[int, _Collectives]) -> dict[int, _Collectives]:
    """The collectives that all ranks have, by group and sequence number if the traces hold both, else unchanged."""
    names = set.intersection(*(set(own.rows) for own in kernels.values())) if kernels else set()
    common: dict[str, list[tuple[float, float]]] = {}
    for name in names:
        sequences = [own.sequence(name) for own in kernels.values()]
        if all(numbers is not None for numbers in sequences):
            shared = set.intersection(*(set(numbers or ()) for numbers in sequences))
            if 2 * len(shared) >= max(len(numbers or ()) for numbers in sequences):
                common[name] = sorted(shared)
    return {
        rank: replace(own, rows={n: own.only(n, common[n]) if n in common else rows for n, rows in own.rows.items()})
        for rank, own in kernels.items()
    }


def _exchanges(
    every: _Collectives, own: _Collectives, transfer: Durations, account: Breakdown
) -> tuple[CollectiveFacts, ...]:
    """Facts from the first rank's trace. `transfer`: how long each of `own`, which all ranks have, moves data.

    Collectives that only this rank has move data for the same fraction of their time. `transfer` is empty if unknown.
    """
    if not every.rows:
        return ()
    rows = np.concatenate(list(every.rows.values()))
    time_ns = every.timeline.duration_ns[rows].astype(np.float64)
    if transfer:
        spent = sum(int(d.sum()) for d in own.durations_ns.values())
        time_ns *= sum(int(d.sum()) for d in transfer.values()) / spent if spent else 1.0
        at = {row: i for i, row in enumerate(rows.tolist())}
        for name, moved in transfer.items():
            time_ns[[at[row] for row in own.rows[name].tolist()]] = moved
    return collective_facts(every.timeline, rows, np.rint(time_ns).astype(np.int64), len(account.steps))


def _collectives(timeline: Labels, account: Breakdown) -> _Collectives:
    rows = np.flatnonzero(_communicating(timeline, account) & ~timeline.of(What.MESSAGE))
    start, end = account.span_ns
    rows = rows[(timeline.start_ns[rows] >= start) & (timeline.start_ns[rows] < end)]
    by_name: dict[str, Int64] = {}
    for name_id in np.unique(timeline.name_id[rows]).tolist():
        of_name = rows[timeline.name_id[rows] == name_id]
        name = timeline.names[name_id].partition("(")[0]
        by_name[name] = np.concatenate((by_name.get(name, np.empty(0, np.int64)), of_name))
    return _Collectives(timeline, by_name)


def _computing(timeline: Labels, account: Breakdown) -> Intervals:
    """Compute kernels; on a CPU the operators of the training thread."""
    if account.device_index is None:
        return timeline.computing
    return timeline.times(timeline.on_device(account.device_index, What.KERNEL))


def _communicating(timeline: Labels, account: Breakdown) -> Mask:
    """Kernels of communication; on a CPU the collectives of gloo or MPI."""
    if account.device_index is None:
        return timeline.of(*COLLECTIVES)
    return timeline.on_device(account.device_index, What.COMMUNICATION)


def _mismatch(kernels: Mapping[int, _Collectives], *, only_messages: bool) -> str | None:
    """Why the ranks' collectives cannot be compared; None if they can."""
    if len(kernels) < 2:
        return "one rank alone cannot show who waits for whom"
    if only_messages:
        return "the ranks send each other messages and have no collective, which all of them would end together"
    counts = {rank: {name: len(rows) for name, rows in own.rows.items()} for rank, own in kernels.items()}
    first_rank, first = next(iter(counts.items()))
    if not first:
        return f"rank {first_rank} has no communication kernel in its steps"
    other = next((rank for rank, count in counts.items() if count != first), None)
    if other is None:
        return None
    return (
        f"ranks {first_rank} and {other} did not run the same communication kernels "
        f"({sum(first.values())} and {sum(counts[other].values())} in their steps)"
    )


def _shortest(kernels: Mapping[int, _Collectives]) -> Durations:
    durations = [own.durations_ns for own in kernels.values()]
    return {name: np.min([of_rank[name] for of_rank in durations], axis=0) for name in durations[0]}


def _rank(
    rank: int,
    timeline: Labels,
    account: Breakdown,
    own: Durations,
    all_own: Durations,
    transfer: Durations | None,
    samples: float | None,
    shares: StepShares | None,
) -> RankFacts:
    """`own` are the durations of the collectives that all ranks have; the rest of `all_own` waits as much."""
    (start, end), steps = account.span_ns, len(account.steps)
    exchanging = timeline.times(_communicating(timeline, account))
    if account.device_index is None:
        exchanging = joined(exchanging, timeline.exchanging)
    communication = clip(exchanging, start, end)
    computing = clip(_computing(timeline, account), start, end)
    overlapped = measure(intersect(communication, computing))
    total = measure(communication)
    moved = None if transfer is None else sum(int(d.sum()) for d in transfer.values())
    spent, in_all = (sum(int(d.sum()) for d in of.values()) for of in (own, all_own))
    # The time of concurrent collectives counts once; those that only this rank has are taken to be like the others.
    once = min(1.0, total / in_all) * in_all / spent if spent else 1.0

    def per_step(time_ns: float) -> float:
        return time_ns / steps / 1e3

    return RankFacts(
        rank=rank,
        step_us=per_step(account.wall_ns),
        breakdown=account,
        communication_us=per_step(total),
        exposed_us=per_step(total - overlapped),
        overlapped_us=per_step(overlapped),
        waiting_us=None if moved is None else per_step((spent - moved) * once),
        transfer_us=None if moved is None else per_step(moved * once),
        collectives_per_step=sum(len(d) for d in all_own.values()) / steps,
        samples_per_step=samples,
        computing_share=shares.of("compute") if shares is not None else 0.0,
    )


def _counts_per_step(facts: Iterable[Facts]) -> tuple[list[float | None], bool]:
    """Input values of each rank's model per step if known for all ranks, else the samples loaded per step.

    The second result says whether these are values.
    """
    runs = [(f.run.steps, f.selection.rows if len(f.selection.rows) else f.run.traced_rows) for f in facts]
    figures = [_mean_count(steps.input_values, rows) for steps, rows in runs]
    if runs and all(count is not None for count in figures):
        return figures, True
    return [_mean_count(steps.sample_count, rows) for steps, rows in runs], False


def _mean_count(column: Int64, rows: Int64) -> float | None:
    """The mean of these rows; None if the count of a step is unknown."""
    counts = column[rows] if len(column) else column
    return float(counts.mean()) if len(counts) and (counts > 0).all() else None


def _straggler(ranks: tuple[RankFacts, ...], skew_notice: float) -> tuple[int | None, float | None]:
    """The rank that waits least, if the others wait for a relevant share of their step.

    If cores are short and waits show nothing: the rank whose own work takes much longer, and by how many µs.
    """
    waits = {r.rank: r.waiting_us for r in ranks if r.waiting_us is not None}
    if len(waits) < 2:
        return None, None
    last, crowd = min(waits, key=lambda rank: waits[rank]), min(r.core_wait_share for r in ranks)
    others = [r for r in ranks if r.rank != last and r.waiting_us is not None]
    share = float(np.median([((r.waiting_us or 0) - waits[last]) / r.step_us for r in others]))
    if share >= max(skew_notice, LATE_PER_CORE_WAIT * crowd):
        return last, None
    slow = max(ranks, key=lambda r: r.own_us)
    usual_us = float(np.median([r.own_us for r in ranks if r is not slow]))
    more_us = slow.own_us - usual_us
    much = slow.own_us >= MUCH_MORE_WORK * usual_us and more_us >= 2 * skew_notice * slow.step_us
    return (slow.rank, more_us) if much and crowd >= skew_notice else (None, None)
