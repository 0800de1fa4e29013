"""The diagnosis of a distributed job as a whole: which rank the others wait for, and what communication costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from gpulab.analysis.ranks import LATE_PER_CORE_WAIT, RankComparison
from gpulab.diagnosis.catalogue import kind_of, title_for
from gpulab.diagnosis.distributed import (
    exposed_between_ranks,
    small_collectives,
    straggler,
    typical,
    uneven_data,
    waiting_for_pauses,
)
from gpulab.diagnosis.finding import Diagnosis, Finding, evidence
from gpulab.diagnosis.no_cause import all_is_well, cannot_tell_because
from gpulab.formatting import decapitalized, percent
from gpulab.run import TRACE_DROPPED
from gpulab.thresholds import DEFAULT, Thresholds

MOSTLY, HARDLY_ANY = 0.5, 0.1  # ours: shares of communication that are hidden


def diagnose_ranks(
    comparison: RankComparison, each: Mapping[int, Diagnosis] | None = None, thresholds: Thresholds = DEFAULT
) -> Diagnosis:
    """Findings about the slowest rank that the others wait for, exposed communication, and what most ranks have in
    common, the costliest first; without such findings, a verdict.

    `each` has the diagnosis of each rank by itself, which explains why the slowest rank is late. Times are medians over
    the ranks, per step.
    """
    each, late = each or {}, comparison.straggler
    verdict = _missing_traces(comparison) or _incomparable(comparison, each)
    if verdict is not None:
        return Diagnosis((verdict,))
    step_us = typical(comparison.ranks, lambda r: r.step_us)
    slowest = None
    if late is not None:
        slowest = straggler(comparison, late, _own(late, each), _with_line(late, each))
        slowest = uneven_data(comparison, slowest, late, thresholds) or slowest
    exposed = exposed_between_ranks(comparison, thresholds, slowest.cost_us if slowest else 0.0)
    if exposed is not None:
        exposed = replace(exposed, shares_with=(slowest.key,) if exposed.shares_with and slowest else ())
        exposed = small_collectives(comparison, thresholds, exposed) or exposed
    if slowest is None:  # none in the traced steps; others may pause
        slowest = _paused_alone(each, (thresholds.skew_notice + thresholds.pause_notice) * step_us)
    findings = [f for f in (slowest, exposed, _common(comparison, each)) if f is not None]
    causes = _with_sequels(sorted(findings, key=lambda f: -f.cost_us))
    return Diagnosis(causes or (_in_step(comparison, each, thresholds),), (), step_us, step_us)


def _missing_traces(comparison: RankComparison) -> Finding | None:
    """Some ranks have no trace: the others do not show which rank waits for which, nor the cost of communication."""
    check = next((c for c in comparison.integrity.checks if c.name == TRACE_DROPPED and c.state != "ok"), None)
    if check is None:
        return None
    return cannot_tell_because(
        "Only some of these ranks keep their trace, so they cannot be compared now.",
        f"The other traces are {check.meaning}",
    )


def _incomparable(comparison: RankComparison, each: Mapping[int, Diagnosis]) -> Finding | None:
    if not comparison.ranks:
        own = {d.first.summary: d.first for d in each.values() if kind_of(d.first.key).is_verdict}
        if len(own) == 1 and len(each) > 1:  # all ranks lack the same data
            return next(iter(own.values()))
        if any(check.name == "failed_rank" and check.count for check in comparison.integrity.checks):
            return cannot_tell_because(
                "The ranks failed before a step was traced, so there is no step breakdown.",
                "What each rank raised stands below; steps that went well before it have their times there",
            )
        return cannot_tell_because(
            "No rank has usable traced steps, so the ranks cannot be compared.",
            "Profile a few steps on every rank, on GPUs with ProfilerActivity.CUDA",
        )
    if comparison.integrity.reason("comparison") is not None:
        return cannot_tell_because(
            "These traces are not of one job, so they are not compared.",
            "Put the traces of each job into a folder of its own; the table below shows which do not belong together",
        )
    if not any(r.communication_us for r in comparison.ranks):
        return cannot_tell_because(
            "No communication between these ranks in their traced steps, so nothing can be compared.",
            "No communication was recorded: each rank may train by itself. gpulab report RUN shows one of them",
        )
    return None


def _own(rank: int, each: Mapping[int, Diagnosis]) -> Finding | None:
    """The first finding of the rank by itself, unless it concerns the job."""
    own = each[rank].first if rank in each else None
    return None if own is None or _says_nothing_of_one(own) else own


def _with_line(rank: int, each: Mapping[int, Diagnosis]) -> Finding | None:
    """The costliest finding of the rank by itself that names a line; a finding without a line may cost more."""
    findings = each[rank].findings if rank in each else ()
    return next((f for f in findings if f.source_line and not _says_nothing_of_one(f)), None)


def _paused_alone(each: Mapping[int, Diagnosis], least_us: float) -> Finding | None:
    """The finding about pauses of the one rank that pauses longer than all others."""
    pauses = {
        rank: next((f for f in d.findings if kind_of(f.key).removal == "pauses"), None) for rank, d in each.items()
    }
    ranked = sorted((0.0 if f is None else f.cost_us, rank) for rank, f in pauses.items())
    if len(ranked) < 2:
        return None
    (others_us, _), (own_us, rank) = ranked[-2:]
    own = pauses[rank]
    return None if own is None or own_us - others_us < least_us else waiting_for_pauses(rank, own, own_us - others_us)


def _says_nothing_of_one(finding: Finding) -> bool:
    """Whether the finding concerns the whole job, or is a verdict."""
    kind = kind_of(finding.key)
    return kind.of_job or kind.is_verdict


def _common(comparison: RankComparison, each: Mapping[int, Diagnosis]) -> Finding | None:
    """The finding that is first on most ranks by themselves, with the figures of the median rank."""
    first = {rank: d.first for rank, d in each.items() if not _says_nothing_of_one(d.first)}
    keys = Counter(f.key for f in first.values() if f.recoverable_us_per_step)
    if not keys or 2 * keys.most_common(1)[0][1] <= len(comparison.ranks):
        return None
    key, count = keys.most_common(1)[0]
    ranked = sorted((f.cost_us, rank) for rank, f in first.items() if f.key == key)
    time_us, rank = ranked[len(ranked) // 2]
    own, alone = first[rank], len(comparison.ranks) == 1
    where = "all ranks" if count == len(comparison.ranks) else f"{count} of the {len(comparison.ranks)} ranks"
    whose = (
        f"this is rank {rank}, the only one with traced steps"
        if alone
        else f"the figures are those of rank {rank}, in the middle of them"
    )
    return replace(
        own,
        summary=f"Rank {rank}: {decapitalized(own.summary)}" if alone else f"{own.summary} It is so on {where}.",
        evidence=(*evidence(whose), *own.evidence),
        recoverable_us_per_step=time_us,
        only_after=(),
        shares_with=(),
        after="",
    )


def _with_sequels(causes: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings, each with the next one; for a job, the gain of the next finding is unknown."""
    following = [f"Then {title_for(f)}." for f in causes[1:]]
    return tuple(replace(f, after=after) for f, after in zip(causes, [*following, ""], strict=True)) if causes else ()


def _in_step(comparison: RankComparison, each: Mapping[int, Diagnosis], thresholds: Thresholds) -> Finding:
    exposed = typical(comparison.ranks, lambda r: r.exposed_us / r.step_us)
    share = typical(comparison.ranks, lambda r: r.communication_us / r.step_us)
    hidden = float(np.median([r.overlapped_us / r.communication_us for r in comparison.ranks if r.communication_us]))
    partly = f"{percent(hidden)} of it is hidden" if hidden >= HARDLY_ANY else "hardly any of it is hidden"
    exchange = "is hidden behind compute" if hidden >= MOSTLY else f"takes {percent(share)} of each step; {partly}"
    alone = {rank: d.first for rank, d in each.items() if not _says_nothing_of_one(d.first)}
    crowded = min(r.core_wait_share for r in comparison.ranks)
    waiting = (
        f"All ranks wait for a CPU core for {percent(crowded)} of their step or more. A rank that makes the others "
        f"wait for less than {percent(LATE_PER_CORE_WAIT * crowded)} is lost in that noise"
    )
    figures = evidence(
        f"Exposed communication: {percent(exposed)} of each step, median over {len(comparison.ranks)} ranks",
        waiting if crowded >= DEFAULT.silence else "",
        *(f"Rank {rank} by itself: {f.summary.rstrip('.')}" for rank, f in sorted(alone.items())[:3]),
    )
    if exposed <= thresholds.exposed_notice:
        return all_is_well(f"No clear bottleneck: the ranks are in step, and communication {exchange}.", figures)
    why = f"The ranks are in step. Communication {exchange}. They wait as long for CPU cores: its own cost is unknown."
    return replace(cannot_tell_because(why, ""), evidence=figures)
