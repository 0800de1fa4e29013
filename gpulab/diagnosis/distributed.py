"""Rules about several ranks: communication that no compute overlaps, and the rank that the others wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from msgspec.structs import replace

from gpulab.analysis.ranks import RankComparison, RankFacts
from gpulab.diagnosis.finding import Finding, FindingKind, RuleContext, evidence
from gpulab.formatting import duration, percent
from gpulab.thresholds import Thresholds

_OVERLAP = (
    "Overlap communication with the backward pass: DistributedDataParallel with gradient_as_bucket_view=True and "
    "another bucket_cap_mb, gradient accumulation under no_sync(), or bf16_compress_hook."
)
_PIPELINE = (
    "The ranks work in turn, as the stages of a pipeline do. Split each batch into more micro-batches, and give the "
    "stages equal work."
)


def exposed_communication(context: RuleContext) -> Finding | None:
    """Data is exchanged with other ranks while nothing is computed, seen in the trace of one rank."""
    share = context.share("communication")
    if share <= context.thresholds.exposed_notice:
        return None
    lost = context.part_us("communication")
    does = "the GPU exchanges data with other GPUs" if context.on_gpu else "this rank exchanges data with others"
    nothing = f"{'the GPU' if context.on_gpu else 'the CPU'} computes nothing meanwhile"
    return Finding(
        "exposed_communication",
        f"For {percent(share)} of {context.unit} {does} and computes nothing.",
        evidence(
            f"{duration(lost)} of {duration(context.step_us)} are communication, and {nothing}",
            "part of it may be waiting for a slower rank: compare the traces of all ranks",
        ),
        lost,
        "measured",
        parts=("communication",),
        cure=_OVERLAP,
        level="bad" if share > context.thresholds.exposed_bad else "notice",
    )


# -- of all ranks together ---------------------------------------------------------------------------------------------


def typical(ranks: Iterable[RankFacts], figure: Callable[[RankFacts], float]) -> float:
    """The median over the ranks."""
    return float(np.median([figure(rank) for rank in ranks]))


def straggler(ranks: RankComparison, late_rank: int, own: Finding | None, with_line: Finding | None = None) -> Finding:
    """The others wait for `late_rank`. `own`: its first finding, which explains why; `with_line`: one with a line."""
    with_line = with_line or own
    others = [r for r in ranks.ranks if r.rank != late_rank]
    slowest = next(r for r in ranks.ranks if r.rank == late_rank)
    wait_us = ranks.more_work_us or typical(others, lambda r: r.waiting_us or 0)
    who, most, later, partial = f"Rank {late_rank}", "", "", "transfer" in ranks.integrity.withheld
    if partial:
        who, most = f"Of the {len(ranks.ranks)} ranks that are here, rank {late_rank}", " at most"
        later = ": a rank that is missing may arrive later still"
    each = f"{duration(wait_us)} per step"
    moving = f"moving the data takes{most} {duration(slowest.transfer_us or 0)}{later}"
    computing = percent(typical(others, lambda r: r.computing_share))
    share = wait_us / typical(ranks.ranks, lambda r: r.step_us)
    return Finding(
        "straggler",
        f"{who} arrives last: the others wait for it for {percent(share)} of their step.",
        evidence(
            f"It works {each} longer than they do (median), waits for cores and for others left out"
            if ranks.more_work_us
            else f"They wait {each} (median); {moving}",
            f"rank {late_rank} computes for {percent(slowest.computing_share)} of its step, the others for {computing} "
            "(median)",
            f"of rank {late_rank} by itself: {own.summary.rstrip('.')}" if own is not None else "",
        ),
        wait_us,
        "likely" if partial else "measured",
        parts=("communication/waiting",),
        cure=f"Find out what slows rank {late_rank}. Give each rank the same amount of work (samples, tokens, table "
        "rows), then check that rank's GPU, data and machine.",
        level="bad",
        source_line=with_line.source_line if with_line is not None else "",
        source=with_line.source if with_line is not None else (),
    )


def waiting_for_pauses(late_rank: int, own: Finding, more_us: float) -> Finding:
    """The others wait while `late_rank` pauses, judged by all its steps: the traced steps may contain no pause."""
    return replace(
        own,
        key="straggler",
        summary=f"The others wait for rank {late_rank}, which pauses. {own.summary}",
        recoverable_us_per_step=more_us,
        confidence="likely",
        parts=("communication/waiting",),
        only_after=(),
        shares_with=(),
        between_us_per_step=0.0,
        after="",
        title="",
    )


def uneven_data(ranks: RankComparison, late: Finding, late_rank: int, thresholds: Thresholds) -> Finding | None:
    """The others wait for `late_rank`, which has more samples per step. `late`: the finding about that rank."""
    samples = {r.rank: r.samples_per_step for r in ranks.ranks}
    own, others = samples[late_rank], [s for rank, s in samples.items() if rank != late_rank and s is not None]
    if own is None or len(others) + 1 < len(samples):
        return None
    usual = float(np.median(others))
    if own < usual * (1 + thresholds.uneven_samples):
        return None
    more = f"{own / usual:.3g}×"
    if ranks.counts_values:
        sentence = f"Its model gets {more} as many input values per step as theirs."
        figures = f"the model of rank {late_rank} gets {own:.4g} input values per step, those of the others {usual:.4g}"
    else:
        sentence = f"It has {more} their samples per step."
        figures = f"rank {late_rank} has {own:.4g} samples per step, the others {usual:.4g}"
    return replace(
        late,
        key="uneven_data",
        summary=f"{late.summary.rstrip('.')}. {sentence}",
        evidence=(*evidence(f"{figures} (median)"), *late.evidence),
        cure="Give each rank the same number of samples: DistributedSampler with drop_last=True and the same batch "
        "size on all ranks. Where samples differ in length, make batches of the same number of tokens.",
    )


def small_collectives(ranks: RankComparison, thresholds: Thresholds, exposed: Finding) -> Finding | None:
    """Communication is many small collectives, each as slow as a large one. `exposed`: the finding about all."""
    counts = [r.collectives_per_step for r in ranks.ranks]
    on_gpu = any(r.breakdown.device_index is not None for r in ranks.ranks)
    most_us = thresholds.small_collective_gpu_us if on_gpu else thresholds.small_collective_cpu_us
    times = [r.transfer_us_of_each for r in ranks.ranks if r.transfer_us_of_each is not None]
    if len(times) < len(counts) or min(counts) < thresholds.small_collectives or float(np.median(times)) > most_us:
        return None
    count = float(np.median(counts))
    each = f"{duration(float(np.median(times)))} each without waiting (medians)"
    each_takes = f"{count:.0f} collectives in each step, {each}"
    return replace(
        exposed,
        key="small_collectives",
        summary=f"{exposed.summary.rstrip('.')}: in {count:.0f} small collectives.",
        evidence=(*evidence(f"{each_takes}: most of that is latency, not bandwidth"), *exposed.evidence),
        cure="Use fewer, larger collectives. Gradients: DistributedDataParallel with larger buckets (PyTorch's own: "
        "bucket_cap_mb=25), or one all_reduce of a flattened tensor. Figures for a log: put them into one tensor, and "
        "reduce that every few steps.",
        settings=(("bucket_cap_mb", "25"),),
    )


def exposed_between_ranks(ranks: RankComparison, thresholds: Thresholds, waited_us: float) -> Finding | None:
    """Communication that no compute overlaps, without `waited_us`, the wait for the straggler, which has its own
    finding.

    Ranks that wait for a CPU core arrive late at each exchange: a share up to that wait is not reported.
    """
    core_wait = typical(ranks.ranks, lambda r: r.core_wait_share)
    share = typical(ranks.ranks, lambda r: r.exposed_us / r.step_us)
    time_us = max(0.0, typical(ranks.ranks, lambda r: r.exposed_us) - waited_us)
    step_us = typical(ranks.ranks, lambda r: r.step_us)
    if share <= max(thresholds.exposed_notice, core_wait) or time_us < thresholds.silence * step_us:
        return None
    hidden = typical(ranks.ranks, lambda r: r.overlapped_us)
    alone = len(ranks.ranks) == 1
    if alone:
        who, s = f"Rank {ranks.ranks[0].rank}", "s"
        over = "A part of it may be waiting for another rank, which one rank alone cannot show"
    else:
        who, s, over = "The ranks", "", f"Median over {len(ranks.ranks)} ranks"
    does = f"send{s} data, or wait{s} for some," if ranks.only_messages else f"exchange{s} data"
    return Finding(
        "exposed_communication",
        f"{who} {does} for {percent(share)} of each step and compute{s} nothing meanwhile.",
        evidence(f"{over}; {duration(hidden)} per step of communication are hidden behind compute"),
        time_us,
        "measured",
        parts=("communication",),
        cure=_PIPELINE
        if ranks.only_messages
        else "Communicate less, or overlap it with the backward pass: DistributedDataParallel with another bucket size "
        "(bucket_cap_mb), no_sync() while gradients are accumulated, gradients compressed to 16 bits.",
        level="bad" if share > thresholds.exposed_bad else "notice",
        shares_with=("straggler",) if waited_us else (),
    )


FINDINGS = (
    FindingKind("exposed_communication", "exposed communication", exposed_communication, of_job=True),
    FindingKind("straggler", "waiting for the slowest rank", of_job=True),
    FindingKind("uneven_data", "waiting for the rank with more data", of_job=True),
    FindingKind("small_collectives", "many small collectives", of_job=True),
)
