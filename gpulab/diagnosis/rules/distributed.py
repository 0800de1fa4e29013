"""Rules about several GPUs: exchange that no computing hides, and the rank for which the others wait."""

from __future__ import annotations

import numpy as np

from gpulab.analysis.ranks import RankComparison, RankFacts
from gpulab.diagnosis.context import RuleContext
from gpulab.diagnosis.finding import Evidence, Finding
from gpulab.diagnosis.kind import FindingKind
from gpulab.formatting import duration, percent
from gpulab.thresholds import Thresholds

_OVERLAP = (
    "Let communication run beside the backward pass: DistributedDataParallel with gradient_as_bucket_view=True and a "
    "larger bucket_cap_mb, gradient accumulation under no_sync(), or gradients compressed to 16 bits "
    "(bf16_compress_hook)."
)
_PIPELINE = (
    "The ranks work in turn, as the stages of a pipeline do. Split each batch into more micro-batches, and give the "
    "stages equal work."
)


def exposed_communication(context: RuleContext) -> Finding | None:
    """Data are exchanged with other ranks and nothing is computed meanwhile, as one rank's trace shows it."""
    share = context.share("communication")
    if share <= context.thresholds.exposed_notice:
        return None
    lost = context.part_us("communication")
    does = "the GPU exchanges data with other GPUs" if context.on_gpu else "this rank exchanges data with others"
    who = "the GPU" if context.on_gpu else "the CPU"
    return Finding(
        "exposed_communication",
        f"For {percent(share)} of {context.unit} {does} and computes nothing.",
        (
            Evidence(
                f"{duration(lost)} of {duration(context.step_us or 0.0)} are communication, and {who} computes nothing "
                "meanwhile"
            ),
            Evidence("a part of it may be waiting for a slower rank: the traces of all ranks together tell"),
        ),
        lost,
        "measured",
        parts=("communication",),
        cure=_OVERLAP,
        level="bad" if share > context.thresholds.exposed_bad else "notice",
    )


# -- of all ranks together ---------------------------------------------------------------------------------------------


def straggler(ranks: RankComparison, late_rank: int, own: Finding | None) -> Finding:
    """The others wait for that rank. `own`: what it has by itself, which says why."""
    others = [r for r in ranks.ranks if r.rank != late_rank]
    slowest = next(r for r in ranks.ranks if r.rank == late_rank)
    wait = float(np.median([r.waiting_us or 0 for r in others]))
    share = float(np.median([_waiting_share(r) for r in others]))
    partial = "transfer" in ranks.integrity.withheld
    later = ": a rank that is missing may arrive later still" if partial else ""
    who = f"Of the {len(ranks.ranks)} ranks that are here, rank {late_rank}" if partial else f"Rank {late_rank}"
    most = " at most" if partial else ""
    computing = float(np.median([r.breakdown.share["compute"] for r in others]))
    evidence = [
        Evidence(
            f"They wait {duration(wait)} per step (median); moving the data takes{most} "
            f"{duration(slowest.transfer_us or 0)}{later}"
        ),
        Evidence(
            f"rank {late_rank} computes for {percent(slowest.breakdown.share['compute'])} of its step, the others "
            f"for {percent(computing)} (median)"
        ),
    ]
    if own is not None:
        evidence.append(Evidence(f"of rank {late_rank} by itself: {own.summary.rstrip('.')}"))
    return Finding(
        "straggler",
        f"{who} arrives last: the others wait for it for {percent(share)} of their step.",
        tuple(evidence),
        wait,
        "likely" if partial else "measured",
        parts=("communication/waiting",),
        cure=f"Find out what rank {late_rank} does longer: give each rank the same amount of work (samples, "
        "tokens, table rows), and look at its GPU, its data and its machine.",
        level="bad",
        source_line=own.source_line if own is not None else "",
        source=own.source if own is not None else (),
    )


def exposed_between_ranks(ranks: RankComparison, thresholds: Thresholds, waited_us: float) -> Finding | None:
    """Exchange that nothing hides; what of it is waiting for the straggler is the straggler's."""
    share = float(np.median([r.exposed_us / r.step_us for r in ranks.ranks]))
    time_us = max(0.0, float(np.median([r.exposed_us for r in ranks.ranks])) - waited_us)
    step_us = float(np.median([r.step_us for r in ranks.ranks]))
    if share <= thresholds.exposed_notice or time_us < thresholds.silence * step_us:
        return None
    hidden = float(np.median([r.overlapped_us for r in ranks.ranks]))
    does = "send data, or wait for some," if ranks.only_messages else "exchange data"
    return Finding(
        "exposed_communication",
        f"The ranks {does} for {percent(share)} of each step and compute nothing meanwhile.",
        (
            Evidence(
                f"Median over {len(ranks.ranks)} ranks; {duration(hidden)} per step of communication are hidden behind "
                "compute"
            ),
        ),
        time_us,
        "measured",
        parts=("communication",),
        cure=_PIPELINE
        if ranks.only_messages
        else "Exchange less, or beside the backward pass: DistributedDataParallel with larger buckets "
        "(bucket_cap_mb), no_sync() while gradients are accumulated, gradients compressed to 16 bits.",
        level="bad" if share > thresholds.exposed_bad else "notice",
        shares_with=("straggler",) if waited_us else (),
    )


def _waiting_share(rank: RankFacts) -> float:
    return (rank.waiting_us or 0) / rank.step_us


FINDINGS = (
    FindingKind("exposed_communication", "exchanging data with other ranks", exposed_communication, of_job=True),
    FindingKind("straggler", "waiting for the slowest rank", of_job=True),
)
