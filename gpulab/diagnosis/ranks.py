"""What is found about a distributed job as a whole: who lets the others wait, and what communication costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from gpulab.analysis.ranks import RankComparison, RankFacts
from gpulab.diagnosis.finding import Diagnosis, Evidence, Finding
from gpulab.diagnosis.names import name_of
from gpulab.diagnosis.ranking import VERDICTS
from gpulab.formatting import duration, percent
from gpulab.thresholds import DEFAULT, Thresholds

_OF_THE_JOB = ("straggler", "exposed_communication", *VERDICTS)


def diagnose_ranks(
    found: RankComparison, each: Mapping[int, Diagnosis] | None = None, thresholds: Thresholds = DEFAULT
) -> Diagnosis:
    """The slowest rank where the others wait for it, exposed communication, what most ranks have in common; the
    costliest first, else that all is well.

    `each` holds what was found about each rank by itself: it says why the slowest one is late. Times are medians over
    the ranks, per step.
    """
    verdict = _incomparable(found)
    if verdict is not None:
        return Diagnosis((verdict,))
    step_us = float(np.median([r.step_us for r in found.ranks]))
    straggler = _straggler(found, found.straggler, each or {}) if found.straggler is not None else None
    exposed = _exposed(found, thresholds, straggler.recoverable_us_per_step or 0.0 if straggler else 0.0)
    told = [f for f in (straggler, exposed, _common(found, each or {})) if f is not None]
    causes = _with_sequels(sorted(told, key=lambda f: -(f.recoverable_us_per_step or 0.0)))
    return Diagnosis(causes or (_in_step(found, each or {}),), (), step_us, step_us)


def _incomparable(found: RankComparison) -> Finding | None:
    if not found.ranks:
        return _unknown(
            "None of these traces holds work of a GPU, so the ranks cannot be compared.",
            "Record them with ProfilerActivity.CUDA",
        )
    if found.integrity.reason("comparison") is not None:
        return _unknown(
            "These traces are not of one job, so they are not compared.",
            "Put the traces of each job into a folder of its own; the table below tells which do not belong together",
        )
    if not any(r.communication_us for r in found.ranks):
        return _unknown(
            "None of these ranks exchanges data with another in its profiled steps, so nothing can be compared.",
            "No communication kernel was found: look at each trace by itself with gpulab report FILE",
        )
    return None


def _straggler(found: RankComparison, straggler: int, each: Mapping[int, Diagnosis]) -> Finding:
    others = [r for r in found.ranks if r.rank != straggler]
    slowest = next(r for r in found.ranks if r.rank == straggler)
    wait = float(np.median([r.waiting_us or 0 for r in others]))
    share = float(np.median([_waiting_share(r) for r in others]))
    partial = "transfer" in found.integrity.withheld
    later = ": a rank that is missing may arrive later still" if partial else ""
    who = f"Of the {len(found.ranks)} ranks that are here, rank {straggler}" if partial else f"Rank {straggler}"
    most = " at most" if partial else ""
    computing = float(np.median([r.breakdown.share["compute"] for r in others]))
    evidence = [
        Evidence(
            f"They wait {duration(wait)} per step (median); moving the data takes{most} "
            f"{duration(slowest.transfer_us or 0)}{later}"
        ),
        Evidence(
            f"rank {straggler} computes for {percent(slowest.breakdown.share['compute'])} of its step, the others for "
            f"{percent(computing)} (median)"
        ),
    ]
    own = each[straggler].first if straggler in each else None
    if own is not None and own.key not in _OF_THE_JOB:
        evidence.append(Evidence(f"of rank {straggler} by itself: {own.summary.rstrip('.')}"))
    return Finding(
        "straggler",
        f"{who} arrives last: the other GPUs wait for it for {percent(share)} of their step.",
        tuple(evidence),
        wait,
        "likely" if partial else "measured",
        parts=("communication/waiting",),
        cure=f"Find out what rank {straggler} does longer: give each rank the same amount of work (samples, tokens, "
        "table rows), and look at its GPU, its data and its machine.",
        level="bad",
    )


def _exposed(found: RankComparison, thresholds: Thresholds, waited_us: float) -> Finding | None:
    """Exchange that nothing hides; what of it is waiting for the straggler is the straggler's."""
    share = float(np.median([r.exposed_us / r.step_us for r in found.ranks]))
    time_us = max(0.0, float(np.median([r.exposed_us for r in found.ranks])) - waited_us)
    step_us = float(np.median([r.step_us for r in found.ranks]))
    if share <= thresholds.exposed_notice or time_us < thresholds.silence * step_us:
        return None
    hidden = float(np.median([r.overlapped_us for r in found.ranks]))
    return Finding(
        "exposed_communication",
        f"The GPUs exchange data for {percent(share)} of each step while nothing else runs on them.",
        (
            Evidence(
                f"Median over {len(found.ranks)} ranks; {duration(hidden)} per step of communication are hidden behind "
                "compute"
            ),
        ),
        time_us,
        "measured",
        parts=("communication",),
        cure="Exchange less, or beside the backward pass: DistributedDataParallel with larger buckets "
        "(bucket_cap_mb), no_sync() while gradients are accumulated, gradients compressed to 16 bits.",
        level="bad" if share > thresholds.exposed_bad else "notice",
        shares_with=("straggler",) if waited_us else (),
    )


def _common(found: RankComparison, each: Mapping[int, Diagnosis]) -> Finding | None:
    """What comes first on most ranks, each looked at by itself; told by the one in the middle of them."""
    first = {rank: d.first for rank, d in each.items() if d.first.key not in _OF_THE_JOB}
    keys = Counter(f.key for f in first.values() if f.recoverable_us_per_step)
    if not keys or 2 * keys.most_common(1)[0][1] <= len(found.ranks):
        return None
    key, count = keys.most_common(1)[0]
    ranked = sorted((f.recoverable_us_per_step or 0.0, rank) for rank, f in first.items() if f.key == key)
    time_us, rank = ranked[len(ranked) // 2]
    who = "On all ranks" if count == len(found.ranks) else f"On {count} of the {len(found.ranks)} ranks"
    own = first[rank]
    return replace(
        own,
        summary=f"{who}: {own.summary[:1].lower()}{own.summary[1:]}",
        evidence=(Evidence(f"the figures are those of rank {rank}, in the middle of them"), *own.evidence),
        recoverable_us_per_step=time_us,
        only_after=(),
        shares_with=(),
        after="",
    )


def _with_sequels(causes: Sequence[Finding]) -> tuple[Finding, ...]:
    """Each says what comes next; how much that would bring then is not known of a job."""
    following = [f"Next comes {name_of(f.key)}." for f in causes[1:]]
    return tuple(replace(f, after=after) for f, after in zip(causes, [*following, ""], strict=True)) if causes else ()


def _in_step(found: RankComparison, each: Mapping[int, Diagnosis]) -> Finding:
    exposed = float(np.median([r.exposed_us / r.step_us for r in found.ranks]))
    alone = {rank: d.first for rank, d in each.items() if d.first.key not in _OF_THE_JOB}
    return Finding(
        "healthy",
        "The ranks keep in step, and communication is hidden behind compute.",
        (
            Evidence(f"Exposed communication: {percent(exposed)} of each step, median over {len(found.ranks)} ranks"),
            *(Evidence(f"Rank {rank} by itself: {f.summary.rstrip('.')}") for rank, f in sorted(alone.items())[:3]),
        ),
        None,
        "measured",
        level="good",
    )


def _unknown(summary: str, evidence: str) -> Finding:
    return Finding("cannot_tell", summary, (Evidence(evidence),), None, "measured", level="unknown")


def _waiting_share(rank: RankFacts) -> float:
    return (rank.waiting_us or 0) / rank.step_us


__all__ = ["diagnose_ranks"]
