"""The one sentence about a distributed job: who lets the others wait, or what communication costs."""

from __future__ import annotations

import numpy as np

from gpulab.analysis.ranks import RankComparison, RankFacts
from gpulab.diagnosis.headline import Headline, ms, percent

EXPOSED_NOTICE = 0.05  # definitions.md, Thresholds: exposed communication > 5 %
EXPOSED_BAD = 0.15


def rank_headline(found: RankComparison) -> Headline:
    """The slowest rank where the others wait for it, else exposed communication, else that all is well."""
    if not found.ranks:
        return Headline(
            "cannot_tell",
            "None of these traces holds work of a GPU, so the ranks cannot be compared.",
            "Record them with ProfilerActivity.CUDA.",
            "unknown",
        )
    reason = found.integrity.reason("comparison")
    if reason is not None:
        return Headline(
            "cannot_tell",
            "These traces are not of one job, so they are not compared.",
            "Put the traces of each job into a folder of its own; the table below tells which do not belong together.",
            "unknown",
        )
    if not any(r.communication_us for r in found.ranks):
        return Headline(
            "cannot_tell",
            "None of these ranks exchanges data with another in its profiled steps, so nothing can be compared.",
            "No communication kernel was found: look at each trace by itself with gpulab report FILE.",
            "unknown",
        )
    if found.straggler is not None:
        return _straggler(found, found.straggler)
    exposed = float(np.median([r.exposed_us / r.step_us for r in found.ranks]))
    hidden = float(np.median([r.overlapped_us for r in found.ranks]))
    if exposed > EXPOSED_NOTICE:
        return Headline(
            "exposed_communication",
            f"The GPUs exchange data for {percent(exposed)} of each step while nothing else runs on them.",
            f"Median over {len(found.ranks)} ranks; {ms(hidden)} per step of communication are hidden behind compute.",
            "bad" if exposed > EXPOSED_BAD else "notice",
        )
    return Headline(
        "healthy",
        "The ranks keep in step, and communication is hidden behind compute.",
        f"Exposed communication: {percent(exposed)} of each step, median over {len(found.ranks)} ranks.",
        "good",
    )


def _straggler(found: RankComparison, straggler: int) -> Headline:
    others = [r for r in found.ranks if r.rank != straggler]
    slowest = next(r for r in found.ranks if r.rank == straggler)
    wait = float(np.median([r.waiting_us or 0 for r in others]))
    share = float(np.median([_waiting_share(r) for r in others]))
    partial = "transfer" in found.integrity.withheld
    who = f"Of the {len(found.ranks)} ranks that are here, rank {straggler}" if partial else f"Rank {straggler}"
    most = " at most" if partial else ""
    return Headline(
        "straggler",
        f"{who} arrives last: the other GPUs wait for it for {percent(share)} of their step.",
        f"They wait {ms(wait)} per step (median); moving the data takes{most} {ms(slowest.transfer_us or 0)}"
        f"{': a rank that is missing may arrive later still' if partial else ''}.",
        "bad",
    )


def _waiting_share(rank: RankFacts) -> float:
    return (rank.waiting_us or 0) / rank.step_us


__all__ = ["rank_headline"]
