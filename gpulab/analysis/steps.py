"""Selects the steps that count for throughput, computes the typical step, and compares it with a baseline run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from gpulab.run import Int64, Loader, Phase, Run, StepFlag, Steps


class Spread(Struct, frozen=True):
    """Median and the 10th and 90th percentile of a column, in the unit of its name; `count` values went in."""

    median: float
    p10: float
    p90: float
    count: int


FEWEST_ROUNDS = 3  # ours: rounds that a median needs
LEAST_SETUP_S = 0.1  # ours: a smaller difference does not matter
BUNCHED = 0.05  # ours, of a step: by this much the waits of a typical step and a typical round differ


class Dropped(Struct, frozen=True):
    count: int
    reason: str


class Selection(Struct, frozen=True):
    """Row indices (into `run.steps`) that count as unprofiled throughput, and why others do not."""

    rows: Int64
    dropped: tuple[Dropped, ...]


def spread(values: np.ndarray, count: int | None = None) -> Spread | None:
    """Median and spread of a column of nanoseconds, in microseconds, of `count` values; None for an empty column."""
    if len(values) == 0:
        return None
    p10, median, p90 = np.percentile(values / 1e3, [10, 50, 90])
    return Spread(float(median), float(p10), float(p90), len(values) if count is None else count)


def spread_of_rounds(values: Int64, rows: Int64, round_steps: int) -> Spread | None:
    """The same for a column of steps (`rows` of the run, one value each) if `round_steps` of them make a round.

    The spread is then over means of so many consecutive steps or, if there are none, over single steps.
    """
    means = _means(values, rows, round_steps)
    return spread(means if len(means) else values, len(values))


def spread_of_window(values: Int64) -> Spread | None:
    """The mean as median, for steps that together are one round; the percentiles are those of single steps."""
    each = spread(values)
    return None if each is None else replace(each, median=float(np.mean(values)) / 1e3)


def spread_of_steps(run: Run, values: Int64, rows: Int64, round_steps: int) -> Spread | None:
    """The typical value of these rows of the run, one value each; `round_steps` is from `steps_per_round`."""
    if round_steps > 1 and (run.loader is None or len(values) <= round_steps):
        return spread_of_window(values)
    return spread_of_rounds(values, rows, round_steps)


def steps_per_round(run: Run, rows: Int64) -> int:
    """How many steps make a round; 1 if all steps are alike.

    Workers that are equally fast deliver their batches at the same time: one step waits long and the next ones not at
    all. If steps wait unequally but too few rounds were measured, or the number of workers is unknown (a trace from
    another tool), all steps are one round.
    """
    if not len(rows):
        return 1
    steps = run.steps
    all_steps = len(rows) if _waits_in_bursts(steps.data_wait_ns[rows], steps.time_ns[rows]) else 1
    if run.loader is None:
        return all_steps
    round_steps = int(np.ceil(run.loader.num_workers / max(1.0, float(np.median(steps.batch_count[rows])))))
    if round_steps < 2:
        return 1
    waits, walls = (_means(values[rows], rows, round_steps) for values in (steps.data_wait_ns, steps.time_ns))
    if len(waits) < FEWEST_ROUNDS:
        return all_steps
    apart_ns = abs(float(np.median(waits)) - float(np.median(steps.data_wait_ns[rows])))
    return round_steps if apart_ns > BUNCHED * float(np.median(walls)) else 1


def _waits_in_bursts(waits_ns: Int64, walls_ns: Int64) -> bool:
    """Whether the wait of the median step differs from the mean wait."""
    apart_ns = abs(float(np.mean(waits_ns)) - float(np.median(waits_ns)))
    return apart_ns > BUNCHED * float(np.mean(walls_ns))


def _means(values: Int64, rows: Int64, round_steps: int) -> np.ndarray:
    """The mean of every `round_steps` consecutive values whose rows are consecutive, too."""
    if len(values) < round_steps:
        return np.empty(0)
    sums = np.concatenate(([0], np.cumsum(values)))
    means = (sums[round_steps:] - sums[:-round_steps]) / round_steps
    return np.asarray(means[rows[round_steps - 1 :] - rows[: len(rows) - round_steps + 1] == round_steps - 1])


def setup_ns(steps: Steps, rows: Int64, began_ns: int = 0) -> int | None:
    """One-time cost before the steps (definitions.md, "One-time cost"); None if the profiler ran before these rows.

    Time from `began_ns` to the first of these rows, minus the steps before that row at the mean time of these rows.
    """
    profiled = (steps.phase == Phase.TRACED) | ((steps.flags & StepFlag.PROFILER_EDGE) != 0)
    if not len(rows) or profiled[: rows[0]].any():
        return None
    return int(steps.start_ns[rows[0]] - began_ns - rows[0] * steps.time_ns[rows].mean())


def select(run: Run) -> Selection:
    """The unprofiled steps after warm-up, without the first step of each epoch and without profiler edges.

    With loader workers the first `workers * prefetch + 2` batches come from a filling buffer and are dropped too, if
    enough steps remain (definitions.md, "Feeding").
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
    if run.device.kind == "cuda" and run.observer.profiler_stays:
        after = np.maximum.accumulate(steps.phase == Phase.TRACED) if len(steps) else keep
        before = keep & ~after & (steps.phase != Phase.WARMUP)
        if before.sum() >= 3:
            drop(after, "after the profiler, which slows CUDA calls as long as the process lives")
    drop((flags & StepFlag.PROFILER_EDGE) != 0, "the profiler started or stopped there")
    drop(steps.phase == Phase.WARMUP, "warm-up")
    compiled = keep & ((flags & StepFlag.COMPILE) != 0)
    if (keep & ~compiled).sum() >= min(3, compiled.sum()):  # else compiling is typical of this run
        drop(compiled, "something was compiled in them")
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
    """How many batches the workers may have ready when a step begins, plus a margin of two."""
    if loader.num_workers == 0:
        return 0
    return loader.num_workers * (loader.prefetch_factor or 2) + 2


_SAME_BATCH = 0.01  # as in a comparison: an epoch's shorter last batch is not another batch size


class StepChange(Struct, frozen=True):
    """µs per `unit` without the profiler, now and in the baseline. The runs were not interleaved: no verdict."""

    now_us: float
    before_us: float
    unit: str  # "step", or "sample" if the batch differs
    setup_s: float | None = None  # how much longer this run took before its steps; None: hardly, or unknown


def step_change(run: Run, earlier: Sequence[Run]) -> StepChange | None:
    """The change from the latest baseline run of the same code; None for a baseline, and without a time to compare."""
    if not run.settings.knobs or not run.code.strip():
        return None
    words = run.code.split()
    same = [
        other
        for other in earlier
        if other.id != run.id
        and not other.settings.knobs
        and other.code.split() == words
        and other.device.kind == run.device.kind
        and (other.job.rank if other.job else None) == (run.job.rank if run.job else None)
    ]
    now = _step(run)
    before = next((step for step in map(_step, reversed(same)) if step is not None), None)
    if now is None or before is None:
        return None
    (now_us, now_samples, now_ns), (before_us, before_samples, before_ns) = now, before
    setup_s = (now_ns - before_ns) / 1e9 if now_ns is not None and before_ns is not None else 0.0
    change = StepChange(now_us, before_us, "step", setup_s if setup_s >= LEAST_SETUP_S else None)
    if now_samples == before_samples:
        return change
    if now_samples is None or before_samples is None:
        return None
    if abs(now_samples / before_samples - 1) <= _SAME_BATCH:
        return change
    return replace(change, now_us=now_us / now_samples, before_us=before_us / before_samples, unit="sample")


def _step(run: Run) -> tuple[float, float | None, int | None] | None:
    """The typical step, its samples if known, and the one-time cost before the steps."""
    rows = select(run).rows
    step: Spread | None = spread_of_steps(run, run.steps.time_ns[rows], rows, steps_per_round(run, rows))
    if step is None:
        return None
    samples = run.steps.sample_count[rows]
    return step.median, float(np.median(samples)) if (samples > 0).all() else None, setup_ns(run.steps, rows)
