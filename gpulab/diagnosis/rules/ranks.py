"""Rules about several GPUs: data exchanged while nothing computes, and a rank that the others wait for."""

from __future__ import annotations

import numpy as np

from gpulab.analysis.ranks import RankComparison, RankFacts
from gpulab.diagnosis.case import Case
from gpulab.diagnosis.finding import Evidence, Finding
from gpulab.diagnosis.headline import ms, percent
from gpulab.diagnosis.thresholds import DEFAULT, Thresholds

_OVERLAP = (
    "Let communication run beside the backward pass: DistributedDataParallel with gradient_as_bucket_view=True and a "
    "larger bucket_cap_mb, gradient accumulation under no_sync(), or gradients compressed to 16 bits "
    "(bf16_compress_hook)."
)
_EVEN = "Give each rank the same work: equal batch and sequence lengths, an even split of tables, no extra work on it."


def exposed_communication(case: Case) -> Finding | None:
    """The GPU exchanges data with others and computes nothing meanwhile, as one rank's trace shows it."""
    share = case.share("communication")
    if not case.on_gpu or share <= case.thresholds.exposed_notice:
        return None
    lost = case.part_us("communication")
    return Finding(
        "exposed_communication",
        f"For {percent(share)} of {case.unit} the GPU exchanges data with other GPUs and computes nothing.",
        (
            Evidence(f"{ms(lost)} of {ms(case.step_us or 0.0)} are communication that no computing hides"),
            Evidence("a part of it may be waiting for a slower rank: the traces of all ranks together tell"),
        ),
        lost,
        "measured",
        parts=("communication",),
        cure=_OVERLAP,
        level="bad" if share > case.thresholds.exposed_bad else "notice",
    )


def rank_findings(found: RankComparison, thresholds: Thresholds = DEFAULT) -> tuple[Finding, ...]:
    """The findings of a whole job, the costliest first; empty where nothing stands out or nothing can be compared.

    Times are µs per step. Waiting for the straggler is a part of the exposed communication, and is not counted twice.
    """
    if not found.ranks or found.integrity.reason("comparison") is not None:
        return ()
    waiting = _straggler(found)
    exposed = _exposed(found, thresholds, waiting.recoverable_us_per_step if waiting is not None else None)
    told = [f for f in (waiting, exposed) if f is not None]
    return tuple(sorted(told, key=lambda f: -(f.recoverable_us_per_step or 0.0)))


def _straggler(found: RankComparison) -> Finding | None:
    if found.straggler is None:
        return None
    others = [r for r in found.ranks if r.rank != found.straggler]
    slowest = next(r for r in found.ranks if r.rank == found.straggler)
    wait = float(np.median([r.waiting_us or 0.0 for r in others]))
    share = float(np.median([(r.waiting_us or 0.0) / r.step_us for r in others]))
    partial = "transfer" in found.integrity.withheld
    return Finding(
        "straggler",
        f"Rank {found.straggler} arrives last: the other GPUs wait for it for {percent(share)} of their step.",
        (
            Evidence(f"the others wait {ms(wait)} per step (median of {len(others)} ranks)"),
            Evidence(f"that is most of the communication that nothing hides, {ms(_exposed_us(others))} per step")
            if wait > _exposed_us(others) / 2
            else Evidence(f"communication that nothing hides takes {ms(_exposed_us(others))} per step"),
            Evidence(f"moving the data itself takes {ms(slowest.transfer_us or 0.0)} of each step"),
            *((Evidence("ranks are missing: one of them may arrive later still"),) if partial else ()),
        ),
        wait,
        "likely" if partial else "measured",
        parts=("communication",),
        cure=_EVEN,
        level="bad",
    )


def _exposed_us(found: list[RankFacts]) -> float:
    return float(np.median([r.exposed_us for r in found]))


def _exposed(found: RankComparison, thresholds: Thresholds, waited_us: float | None) -> Finding | None:
    share = float(np.median([r.exposed_us / r.step_us for r in found.ranks]))
    if share <= thresholds.exposed_notice:
        return None
    exposed = float(np.median([r.exposed_us for r in found.ranks]))
    hidden = float(np.median([r.overlapped_us for r in found.ranks]))
    left = max(0.0, exposed - (waited_us or 0.0))
    step = float(np.median([r.step_us for r in found.ranks]))
    if left < thresholds.silence * step:
        return None
    return Finding(
        "exposed_communication",
        f"The GPUs exchange data for {percent(share)} of each step while nothing else runs on them.",
        (
            Evidence(f"{ms(exposed)} of {ms(step)} per step (median over {len(found.ranks)} ranks)"),
            Evidence(f"{ms(hidden)} per step of communication are hidden behind computing"),
            *(
                (Evidence(f"{ms(waited_us)} of it is waiting for the slowest rank, counted there"),)
                if waited_us
                else ()
            ),
        ),
        left,
        "measured",
        parts=("communication",),
        cure=_OVERLAP,
        level="bad" if share > thresholds.exposed_bad else "notice",
    )


__all__ = ["exposed_communication", "rank_findings"]
