"""How data come: more or fewer workers, workers that stay or start anew with each epoch, a dataset kept in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec.structs import replace

from gpulab.formatting import duration, number
from gpulab.intervals import clip, measure, union_of
from gpulab.prediction.baseline import Baseline, Making, Refused, at_least, hand_off_us, is_on
from gpulab.prediction.calibration import (
    BASE_US,
    CACHE_SD,
    EACH_US,
    RESTART_SD,
    SHORT_EPOCH,
    SMALL_WAIT,
    SPAWNED_US,
    STARTING,
    WORKERS_SD,
)
from gpulab.prediction.prediction import PriorEvidence
from gpulab.prediction.step import Projection
from gpulab.run import Run, StepFlag

CROWDED = 0.05  # ours, of a batch's time without a core: what is told of it is then not what it took


def workers(projection: Projection, value: str, evidence: PriorEvidence) -> Projection:
    """Worker processes: step = max(computing + hand-off, making / workers, CPU time / cores)."""
    count, today = at_least(0, value), projection.today
    _require_loader(projection)
    if count == today.workers:
        return projection.as_it_is(f"the DataLoader already has {_workers(count)}")
    if projection.making is None:
        raise Refused(
            "training hardly waits for data, so more workers do not help; the time to load a batch, which fewer "
            "workers would need, was not measured"
        )
    making = replace(projection, workers=count, remade=True, **_restarting(projection, count))
    cores = today.run.environment.usable_cores
    bound = f" on {number(cores)} cores" if cores and count > cores else ""
    making_us, step_us = projection.making.batch_us, today.compute_us
    inside = today.facts.loading
    crowded = inside is not None and (inside.core_wait_fraction or 0.0) >= CROWDED
    alone = " on a free core" if crowded else ""
    words = f"loading a batch takes {duration(making_us)}{alone}, a step without data wait {duration(step_us)}; " + (
        f"{_workers(count)}{bound} load in parallel with training" if count else "without workers they run in turn"
    )
    return making.doubted(WORKERS_SD if cores else 2 * WORKERS_SD, words)


def _restarting(projection: Projection, workers: int) -> dict[str, Any]:
    """Of a projection without workers so far: what each epoch's start adds to a step.

    Its first batch is made before anything can go on beside that; and workers that do not stay are started. In long
    epochs a typical step, which is what comparisons measure, knows nothing of it: there it is only a doubt.
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
    """Workers that stay save the start of each epoch: what its first step takes longer than the others."""
    run = projection.today.run
    if not projection.workers:
        raise Refused("there are no workers to keep")
    if not is_on(value):
        raise Refused("the cost of restarting workers each epoch is not known")
    if run.loader is not None and run.loader.remade:
        raise Refused("the loop creates a new DataLoader each epoch, so workers cannot persist")
    if projection.starting_us or projection.at_most_us:  # of workers that another setting brings
        return replace(projection, starting_us=0.0, at_most_us=0.0)
    seen, length = seen_us(run), run.loader.length if run.loader is not None else None
    if seen is None or not length:
        raise Refused("the run has no second epoch, so the cost of starting workers was not measured")
    extra_us, sd_us = seen
    steps = max(1.0, length / projection.today.batches)
    whole_us = epoch_us(projection.today, steps) + extra_us
    first_us = first_batch_us(projection)
    words = f"each epoch starts {duration(extra_us)} late, every {number(steps)} steps"
    if first_us is None:
        ratio = 1 - extra_us / whole_us
        return replace(
            projection.doubted(0.01, words).reached(2 * ratio / (1 + ratio), 2 / (1 + ratio)),
            only_sign=True,
            pure_factor=projection.pure_factor * (1 + ratio) / 2,
        )
    saved_us = max(0.0, extra_us - first_us)
    ratio = 1 - saved_us / whole_us
    words += f"; its first batch still has to be loaded ({duration(first_us)})"
    doubted = projection.doubted(float(np.hypot(RESTART_SD, sd_us / whole_us / ratio)), words)
    return replace(doubted, pure_factor=projection.pure_factor * ratio)


def cache(projection: Projection, value: str, evidence: PriorEvidence) -> Projection:
    """Items kept as they leave the dataset: reading and transforming fall away, putting them together stays."""
    if not is_on(value):
        return projection.as_it_is("there is no cache")
    today = projection.today
    inside = today.facts.loading
    _require_loader(projection)
    if today.run.loader is None or today.run.loader.own_collate is not False:
        raise Refused("try it: your collate_fn gets a copy of each item, and the cost of that was not measured")
    if inside is not None:
        left = inside.collate_us
        words = f"of {duration(inside.batch_us)} to load a batch, only collate ({duration(left)}) remains"
        loader, setup_s = today.run.loader, None
        if loader.dataset_length and loader.batch_size:
            setup_s = (inside.batch_us - left) / loader.batch_size * loader.dataset_length / 1e6
            words += f"; filling takes about {duration(setup_s * 1e6)} once"
        return replace(projection, making=Making(left, 0.0), remade=True, setup_s=setup_s).doubted(CACHE_SD, words)
    if today.wait_us >= SMALL_WAIT * today.step.median:
        raise Refused("try it: reading items is saved, but its part of the data wait was not measured")
    return projection.doubted(CACHE_SD, "training hardly waits for data")


def _require_loader(projection: Projection) -> None:
    """Raises Refused. A trace has no record of its loader, but may show its wait."""
    if projection.today.run.loader is None and projection.today.facts.data_wait_us is None:
        raise Refused("no DataLoader fed the steps")
    if projection.today.workers is None:
        raise Refused("the number of workers is not known")


def _workers(count: int) -> str:
    return "no workers" if count == 0 else "one worker" if count == 1 else f"{count} workers"


def start_us(run: Run, workers: int) -> float:
    """An estimate of what starting and ending so many workers takes, in µs."""
    if not _forks(run):
        return SPAWNED_US * max(1.0, workers / (run.environment.usable_cores or workers))
    return BASE_US + workers * EACH_US


def _forks(run: Run) -> bool:
    """Whether Python starts processes by copying this one: on Linux, before Python 3.14."""
    version = tuple(int(n) for n in run.environment.python.split(".")[:2] if n.isdigit())
    return run.environment.platform.startswith("Linux") and version < (3, 14)


def seen_us(run: Run) -> tuple[float, float] | None:
    """What an epoch's first step and the time before it take beyond a usual step, and its deviation; in µs.

    Pauses that are told by themselves (evaluation, saving) are no part of it. None without a second epoch.
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
    """What the loop waits for an epoch's first batch although its workers are there; None where it is not known."""
    if projection.making is None or projection.today.facts.loading is None:
        return None
    return projection.making.batch_us + hand_off_us(projection.today)


def epoch_us(today: Baseline, steps: float) -> float:
    """So many steps with all that lies between them but the start of an epoch."""
    run, rows = today.run, today.facts.selection.rows
    followed = rows[rows + 1 < len(run.steps)]
    followed = followed[(run.steps.flags[followed + 1] & StepFlag.EPOCH_START) == 0]
    if not len(followed):
        return steps * today.step.median
    return steps * float(np.mean(run.steps.start_ns[followed + 1] - run.steps.start_ns[followed])) / 1e3
