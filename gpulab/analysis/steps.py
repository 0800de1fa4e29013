"""Which steps count for a throughput figure, and the typical step they give."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpulab.run import Int64, Loader, Phase, Run, StepFlag


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and the 10th and 90th percentile of a column, in the unit of its name; `count` values went in."""

    median: float
    p10: float
    p90: float
    count: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """Steps left out of the throughput figure."""

    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class Selection:
    """Row indices (into `run.steps`) that count as unprofiled throughput, and why others do not."""

    rows: Int64
    dropped: tuple[Dropped, ...]


def spread(values: Int64) -> Spread | None:
    """Median and spread of a column of nanoseconds, in microseconds; None for an empty column."""
    if len(values) == 0:
        return None
    p10, median, p90 = np.percentile(values / 1e3, [10, 50, 90])
    return Spread(float(median), float(p10), float(p90), len(values))


def select(run: Run) -> Selection:
    """The unprofiled steps after warm-up, fresh epochs' first steps and profiler edges taken out.

    With loader workers the first `workers * prefetch + 2` batches come from a filling buffer and are dropped too,
    where enough steps remain (definitions.md, Formulas: feeding).
    """
    steps = run.steps
    keep = np.ones(len(steps), dtype=bool)
    dropped: list[Dropped] = []

    def drop(mask: np.ndarray, reason: str) -> None:
        nonlocal keep
        fresh = keep & mask
        if fresh.any():
            dropped.append(Dropped(int(fresh.sum()), reason))
            keep = keep & ~mask

    flags = steps.flags
    drop((flags & StepFlag.PARTIAL) != 0, "cut off before their end")
    drop(steps.phase == Phase.TRACED, "ran with the profiler")
    if run.device.kind == "cuda":
        after = np.maximum.accumulate(steps.phase == Phase.TRACED) if len(steps) else keep
        before = keep & ~after & (steps.phase != Phase.WARMUP)
        if before.sum() >= 3:
            drop(after, "after the profiler, which slows CUDA calls as long as the process lives")
    drop((flags & StepFlag.PROFILER_EDGE) != 0, "the profiler started or stopped there")
    drop(steps.phase == Phase.WARMUP, "warm-up")
    drop((flags & StepFlag.COMPILE) != 0, "something was compiled in them")
    buffered = 0 if run.loader is None else loaded_ahead(run.loader)
    if buffered:
        rank = np.cumsum(steps.batch_count) - steps.batch_count
        starts = [0, *rank[(flags & StepFlag.PROFILER_EDGE) != 0].tolist()]
        mask = np.any([(rank >= start) & (rank < start + buffered) for start in starts], axis=0)
        if (keep & ~mask).sum() >= 3:
            drop(mask, f"fed from batches loaded ahead, at the start or while the profiler worked ({buffered} batches)")
    epoch = (flags & StepFlag.EPOCH_START) != 0
    if (keep & ~epoch).sum() >= 3:
        drop(epoch, "first of an epoch: the loader starts anew")
    return Selection(np.flatnonzero(keep), tuple(dropped))


def loaded_ahead(loader: Loader) -> int:
    """How many batches may be ready when a step begins that the workers had time for, and two steps' margin."""
    if loader.num_workers == 0:
        return 0
    return loader.num_workers * (loader.prefetch_factor or 2) + 2
