"""Predictions for settings of the batches: number of workers, persistent workers, cached items, batch size.

Batch size: T(B) = max(h, a + b·B) and M(B) = m0 + m1·B, fitted to short runs; one run alone allows only a range.

On a CPU whose step is mostly calls of operators, one run also gives a: calls cost the same for any batch size, and so
does the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from gpulab.formatting import duration, number, percent
from gpulab.intervals import clip, measure, union_of
from gpulab.prediction.prediction import PriorEvidence
from gpulab.prediction.step import (
    HAND_OFF_US,
    STARTING,
    WAITS,
    Z_975,
    Baseline,
    Making,
    NoPrediction,
    Projection,
    at_least,
    hand_off_us,
    is_on,
)
from gpulab.run import Run, StepFlag

# Share of a step: a shorter wait for data can hardly be saved or measured. Ours.
SMALL_WAIT = 0.03
# Of max(computing, loading), which ignores how the two slow each other down. Ours.
WORKERS_SD = 0.05
CACHE_SD = 0.04  # ours
# µs to start and end workers: fixed, and per worker. With an empty dataset: 67 and 39 ms for one, 95 and 46 for two,
# 154 and 76 for four, on two machines of two cores each, 2026; the constants lie between the machines.
BASE_US, EACH_US = 28_000.0, 16_000.0
# µs if a worker is a new Python process that imports torch. Ours, for two cores.
SPAWNED_US = 2_000_000.0
# Steps: with shorter epochs, the short runs of a comparison contain the start of an epoch. Ours.
SHORT_EPOCH = 32
# Of the remaining time: the processes may still exit during the training. Ours.
RESTART_SD = 0.04
FIT_SD = 0.03  # of a short run's median step; ours
# Extra time for each doubling beyond the measured sizes, on top of the uncertainty of the slope: caches. Ours.
BEYOND_SD = 0.05
# Times the time of the line: a wider range carries no information. Ours.
MOST_OFF = 20.0
# Highest over lowest: the middle of a wider range is not an estimate. Ours.
ONLY_A_RANGE = 3.0
# Share of a step in operator calls from which on they dominate; below it, growth with the batch is unknown. Ours.
MOSTLY_CALLS = 0.5

_CROWDED = 0.05  # ours: share of a batch's time without a core from which on the text says "on a free core"


def workers(projection: Projection, value: str, evidence: PriorEvidence) -> Projection:
    """Worker processes: step = max(computing + hand-off, making / workers, CPU time / cores)."""
    count, today = at_least(0, value), projection.today
    _require_loader(projection)
    if count == today.workers:
        return projection.as_it_is(f"the DataLoader already has {_workers(count)}")
    if projection.making is None:
        raise NoPrediction(
            "training hardly waits for data, so more workers do not help; the time to load a batch, which fewer "
            "workers would need, was not measured"
        )
    making = replace(projection, workers=count, remade=True, **_restarting(projection, count))
    cores = today.run.environment.usable_cores
    bound = f" on {number(cores)} cores" if cores and count > cores else ""
    making_us, step_us = projection.making.batch_us, today.compute_us
    inside = today.facts.loading
    crowded = inside is not None and (inside.core_wait_fraction or 0.0) >= _CROWDED
    alone = " on a free core" if crowded else ""
    words = f"loading a batch takes {duration(making_us)}{alone}, a step without data wait {duration(step_us)}; " + (
        f"{_workers(count)}{bound} load in parallel with training" if count else "without workers they run in turn"
    )
    return making.doubted(WORKERS_SD if cores else 2 * WORKERS_SD, words)


def _restarting(projection: Projection, workers: int) -> dict[str, Any]:
    """What the start of each epoch adds to a step, for a projection without workers so far.

    Training waits for the first batch, and workers that are not persistent are started. In long epochs a typical step,
    as comparisons measure it, does not contain this time: then it only widens the range.
    """
    loader = projection.today.run.loader
    if projection.today.workers or not workers or loader is None or not loader.length:
        return {}
    assert projection.making is not None
    per_step = projection.today.batches / loader.length
    starting_us = 0.0 if loader.persistent_workers else start_us(projection.today.run, workers) * per_step
    first_us = projection.making.batch_us * per_step
    if loader.length < SHORT_EPOCH * projection.today.batches:
        return {"starting_us": starting_us, "first_us": first_us}
    return {"at_most_us": STARTING[1] * starting_us + first_us}


def persistent_workers(projection: Projection, value: str, evidence: PriorEvidence) -> Projection:
    """Persistent workers save the extra time of the first step of each epoch."""
    run = projection.today.run
    if not projection.workers:
        raise NoPrediction("there are no workers to keep")
    if not is_on(value):
        raise NoPrediction("the cost of restarting workers each epoch is not known")
    if run.loader is not None and run.loader.remade:
        raise NoPrediction("the loop creates a new DataLoader each epoch, so workers cannot persist")
    if projection.starting_us or projection.at_most_us:  # another setting adds workers
        return replace(projection, starting_us=0.0, at_most_us=0.0)
    start, length = epoch_start_us(run), run.loader.length if run.loader is not None else None
    if start is None or not length:
        raise NoPrediction("the run has no second epoch, so the cost of starting workers was not measured")
    extra_us, sd_us = start
    steps = max(1.0, length / projection.today.batches)
    whole_us = epoch_us(projection.today, steps) + extra_us
    first_us = first_batch_us(projection)
    words = f"each epoch starts {duration(extra_us)} late, every {number(steps)} steps"
    if first_us is None:
        ratio = 1 - extra_us / whole_us
        return projection.scaled((1 + ratio) / 2, ratio, 1.0, 0.01, words)
    saved_us = max(0.0, extra_us - first_us)
    ratio = 1 - saved_us / whole_us
    words += f"; its first batch still has to be loaded ({duration(first_us)})"
    sd = float(np.hypot(RESTART_SD, sd_us / whole_us / ratio))
    return projection.scaled(ratio, ratio, ratio, sd, words, only_sign=False)


def cache(projection: Projection, value: str, evidence: PriorEvidence) -> Projection:
    """Items are cached as they leave the dataset: reading and transforming are saved, collating remains."""
    if not is_on(value):
        return projection.as_it_is("there is no cache")
    today = projection.today
    inside = today.facts.loading
    _require_loader(projection)
    if today.run.loader is None or today.run.loader.own_collate is not False:
        raise NoPrediction("try it: your collate_fn gets a copy of each item, and the cost of that was not measured")
    if inside is not None:
        rest = inside.collate_us
        words = f"of {duration(inside.batch_us)} to load a batch, only collate ({duration(rest)}) remains"
        loader, setup_s = today.run.loader, None
        if loader.dataset_length and loader.batch_size:
            setup_s = (inside.batch_us - rest) / loader.batch_size * loader.dataset_length / 1e6
            words += f"; filling takes about {duration(setup_s * 1e6)} once"
        return replace(projection, making=Making(rest, 0.0), remade=True, setup_s=setup_s).doubted(CACHE_SD, words)
    if today.wait_us >= SMALL_WAIT * today.step.median:
        raise NoPrediction("try it: reading items is saved, but its part of the data wait was not measured")
    return projection.doubted(CACHE_SD, "training hardly waits for data")


def _require_loader(projection: Projection) -> None:
    """Raises NoPrediction without a loader. A trace does not record the loader, but may show the wait for it."""
    if projection.today.run.loader is None and projection.today.facts.data_wait_us is None:
        raise NoPrediction("no DataLoader fed the steps")
    if projection.today.workers is None:
        raise NoPrediction("the number of workers is not known")


def _workers(count: int) -> str:
    return "no workers" if count == 0 else "one worker" if count == 1 else f"{count} workers"


def start_us(run: Run, workers: int) -> float:
    """Estimated time to start and end so many workers, in µs."""
    if not _forks(run):
        return SPAWNED_US * max(1.0, workers / (run.environment.usable_cores or workers))
    return BASE_US + workers * EACH_US


def _forks(run: Run) -> bool:
    """Whether Python starts processes by forking: on Linux, before Python 3.14."""
    version = tuple(int(n) for n in run.environment.python.split(".")[:2] if n.isdigit())
    return run.environment.platform.startswith("Linux") and version < (3, 14)


def epoch_start_us(run: Run) -> tuple[float, float] | None:
    """The extra time of an epoch's first step and the time before it over a usual step, and its standard error, in µs.

    Excludes pauses that have their own findings (evaluation, saving). None without a second epoch.
    """
    steps = run.steps
    first = np.flatnonzero((steps.flags & StepFlag.EPOCH_START) != 0)
    first = first[first > 0]
    if not len(first):
        return None
    paused = union_of((p.start_ns, p.end_ns) for p in run.pauses)
    begin, end = steps.end_ns[first - 1], steps.end_ns[first]
    took = [e - b - measure(clip(paused, b, e)) for b, e in zip(begin.tolist(), end.tolist(), strict=True)]
    extra_us = np.maximum(0.0, (np.array(took) - float(np.median(steps.wall_ns))) / 1e3)
    return float(np.median(extra_us)), float(np.std(extra_us) / np.sqrt(len(extra_us)))


def first_batch_us(projection: Projection) -> float | None:
    """How long the loop waits for an epoch's first batch with workers already running, in µs; None if unknown."""
    if projection.making is None or projection.today.facts.loading is None:
        return None
    return projection.making.batch_us + hand_off_us(projection.today)


def epoch_us(today: Baseline, steps: float) -> float:
    """The time of so many steps with the time between them, except the start of an epoch, in µs."""
    run, rows = today.run, today.facts.selection.rows
    followed = rows[rows + 1 < len(run.steps)]
    followed = followed[(run.steps.flags[followed + 1] & StepFlag.EPOCH_START) == 0]
    if not len(followed):
        return steps * today.step.median
    return steps * float(np.mean(run.steps.start_ns[followed + 1] - run.steps.start_ns[followed])) / 1e3


class Line(Struct, frozen=True):
    """a + b·B, but at least `floor`, the host's own time, which does not depend on the batch."""

    a: float
    b: float
    floor: float

    def at(self, size: float) -> float:
        """The predicted time of a step at this batch size, in the unit of `a`."""
        return max(self.floor, self.a + self.b * size)


def fitted(times: Mapping[int, float]) -> Line:
    """The line through at least two sizes. If the smallest size lies above the line of the others, it sets `floor`.

    Relative errors are minimized, so a small batch counts as much as a large one. A step never shrinks with its batch.
    """
    sizes = sorted(times)
    line = _through({size: times[size] for size in sizes})
    if len(sizes) > 2:
        upper = _through({size: times[size] for size in sizes[1:]})
        smallest = times[sizes[0]]
        if smallest > 1.05 * (upper.a + upper.b * sizes[0]) and upper.b > 0:
            return Line(upper.a, upper.b, min(smallest, times[sizes[1]]))
    return line


def _through(times: Mapping[int, float]) -> Line:
    size = np.array(list(times), np.float64)
    time = np.array(list(times.values()), np.float64)
    weights = 1 / time
    b, a = np.polyfit(size, time, 1, w=weights)
    if b < 0:
        return Line(float(np.average(time, weights=weights)), 0.0, 0.0)
    if a < 0:
        return Line(0.0, float((time / size).mean()), 0.0)
    return Line(float(a), float(b), 0.0)


def batch_size(projection: Projection, value: str, evidence: PriorEvidence) -> Projection:
    """A different number of samples per step; the ratio compares time per sample."""
    size, before = at_least(1, value), size_before(projection, evidence)
    if size == before:
        return projection.as_it_is("the batch size is already that")
    scale = size / before
    if len(evidence.sizes) < 2:
        return _range(projection, scale)
    times_us = {b: us for b, (us, _) in evidence.sizes.items()}
    line = fitted(times_us)
    runs = ", ".join(f"batch {b} took {duration(us)}" for b, us in sorted(times_us.items()))
    beyond = max(0.0, float(np.log2(size / max(evidence.sizes))), float(np.log2(min(evidence.sizes) / size)))
    words = f"linear fit of step time over batch size in short runs: {runs}"
    changed, times = (
        replace(projection, memory_ratio=_memory_ratio(evidence, size, before)),
        line.at(size) / line.at(before),
    )
    sd = float(np.hypot(FIT_SD, max(abs(np.log(line.at(b) / us)) for b, us in times_us.items())))
    low, high = _slope_range(times_us, line, size, float(np.hypot(sd, projection.today.sampling_sd)))
    high *= float(np.exp(Z_975 * BEYOND_SD * beyond))
    is_range = high > ONLY_A_RANGE * low
    return changed.scaled(times, low * times, high * times, sd, words, samples=scale, only_sign=is_range)


def _slope_range(times_us: Mapping[int, float], line: Line, size: int, sd: float) -> tuple[float, float]:
    """Factors on the line's time at `size` for the uncertainty of the slope, if each time has deviation `sd`.

    Least squares with weights 1 / time. A step with a larger batch takes no less than that of the largest measured
    size, a step with a smaller batch no more than that of the smallest.
    """
    at = line.at(size)
    sizes = np.array(list(times_us), np.float64)
    rows = np.stack((np.ones(len(sizes)), sizes), axis=1) / np.array(list(times_us.values()), np.float64)[:, None]
    covariance = np.linalg.inv(rows.T @ rows) * sd**2
    here = np.array([1.0, float(size)])
    off_us = Z_975 * float(np.sqrt(here @ covariance @ here))
    largest, smallest = max(times_us), min(times_us)
    least_us = min(at, times_us[largest] * float(np.exp(-Z_975 * sd))) if size > largest else 0.0
    most_us = max(at, times_us[smallest] * float(np.exp(Z_975 * sd))) if size < smallest else np.inf
    low_us, high_us = max(at - off_us, least_us, at / MOST_OFF), min(at + off_us, most_us, at * MOST_OFF)
    return min(1.0, low_us / at), max(1.0, high_us / at)


def size_before(projection: Projection, evidence: PriorEvidence) -> int:
    """The batch size in the code. Raises NoPrediction if unknown."""
    loader = projection.today.run.loader
    before = evidence.values_before.get("batch_size", "")
    if before.isdigit() and int(before):
        return int(before)
    if loader is None or not loader.batch_size:
        raise NoPrediction("the current batch size is not known")
    return loader.batch_size


def _memory_ratio(evidence: PriorEvidence, size: int, before: int) -> float | None:
    peaks = {b: float(m) for b, (_, m) in evidence.sizes.items() if m}
    if len(peaks) < 2:
        return None
    line = _through(peaks)
    return line.at(size) / line.at(before)


def _range(projection: Projection, scale: float) -> Projection:
    """A range: time per sample is unchanged, time per step is shared by more samples; at best, all except loading."""
    today = projection.today
    calls = _calls_share(today)
    if calls is not None and calls >= MOSTLY_CALLS:
        return _of_calls(projection, scale, calls)
    loads = today.workers == 0 or today.wait_us > HAND_OFF_US * WAITS * today.batches
    fixed = (today.wait_us if loads else 0.0) / today.step.median
    account = today.facts.breakdown
    idle = 1.0
    if account is not None and account.busy_fraction is not None:
        idle = max(0.0, 1 - account.typical_share("compute", "memcpy", "memset", "communication"))
    best = fixed + (1 - fixed) / scale
    worst = 1 - idle * (1 - 1 / scale) if scale < 1 else 1.0
    low, high = sorted((scale * best, scale * worst))
    words = "one run does not show how step time grows with batch size"
    return projection.scaled((low + high) / 2, low, high, 0.02, words, samples=scale)


def _calls_share(today: Baseline) -> float | None:
    """Share of operator calls and the optimizer in a profiled step on a CPU; None if no trace shows it."""
    host, updating = today.facts.host, today.facts.optimizer_us
    if host is None:
        return None
    calls = float(np.clip(host.fixed_share, 0.0, 1.0))
    if updating is None:
        return calls
    work = today.facts.optimizer
    times = work.per_parameter if work is not None else 1.0
    return calls + (1 - calls) * min(1.0, times * updating.median / today.step.median)


def _of_calls(projection: Projection, scale: float, calls: float) -> Projection:
    """Operator calls are shared by more samples; the rest grows with the samples, the more so the larger it is."""
    fixed = 1 - (1 - calls) ** 2
    likely, *ends = (f + (1 - f) * scale for f in (fixed, 1.0, calls))
    words = f"{percent(calls)} of a step is operator calls and optimizer, which do not grow with the batch"
    return projection.scaled(likely, min(ends), max(ends), FIT_SD, words, samples=scale, only_sign=False)
