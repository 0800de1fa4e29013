"""How data come: more or fewer workers, workers that stay, fewer compute threads, a dataset kept in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from gpulab.formatting import duration, durations, number
from gpulab.prediction import restarts
from gpulab.prediction.baseline import Making, Refused, at_least, hand_off_us, is_on
from gpulab.prediction.evidence import Known
from gpulab.prediction.step import SHORT_EPOCH, STARTING, Plan

WORKERS_SD = 0.05  # of max(computing, loading): it leaves out how the two hinder each other
CACHE_SD = 0.04
COPY_US = (2.0, 400.0)  # of one item, by copy.deepcopy: measured 2 for text, 60 to 180 for small tensors, 390 for 3 MB
COPIED = "the cache hands a collate_fn of your own a copy of each item, whatever it holds, which takes"
RESTART_SD = 0.04  # of what is left: the processes' exit may go on beside the training
SMALL_WAIT = 0.03  # share of a step: less data wait than this can hardly be gained or told


def workers(plan: Plan, value: str, known: Known) -> Plan:
    """Worker processes: step = max(computing + hand-off, making / workers, CPU time / cores)."""
    count, today = at_least(0, value), plan.today
    _require_loader(plan)
    if count == today.workers:
        return plan.doubted(0.0, "it has as many workers already" if count else "it loads without workers already")
    if plan.making is None:
        raise Refused(
            "how long a batch takes to make was not measured, and training hardly waits for one: "
            "more workers bring nothing, and what fewer would cost is not known"
        )
    making = replace(plan, workers=count, remade=True, **_restarting(plan, count))
    cores = today.run.environment.usable_cores
    bound = f", at most {number(cores)} cores" if cores and count > cores else ""
    making_us, step_us = plan.making.batch_us, today.compute_us
    words = f"a batch takes {duration(making_us)} to make and a step {duration(step_us)} without waiting: " + (
        f"made in turn by {_workers(count)}{bound} beside it" if count else "one after the other without workers"
    )
    return making.doubted(WORKERS_SD if cores else 2 * WORKERS_SD, words)


def _restarting(plan: Plan, workers: int) -> dict[str, Any]:
    """Of a plan without workers so far: what each epoch's start adds to a step.

    Its first batch is made before anything can go on beside that; and workers that do not stay are started. In long
    epochs a typical step, which is what comparisons measure, knows nothing of it: there it is only a doubt.
    """
    loader = plan.today.run.loader
    if plan.today.workers or not workers or loader is None or not loader.length:
        return {}
    assert plan.making is not None
    per_step = plan.today.batches / loader.length
    starting_us = 0.0 if loader.persistent_workers else restarts.start_us(plan.today.run, workers) * per_step
    first_us = plan.making.batch_us * per_step
    if loader.length < SHORT_EPOCH * plan.today.batches:
        return {"starting_us": starting_us, "first_us": first_us}
    return {"at_most_us": STARTING[1] * starting_us + first_us}


def persistent_workers(plan: Plan, value: str, known: Known) -> Plan:
    """Workers that stay save the start of each epoch: what its first step takes longer than the others."""
    run = plan.today.run
    if not plan.workers:
        raise Refused("there are no workers that could stay")
    if not is_on(value):
        raise Refused("what ending the workers after each epoch would cost is not known")
    if run.loader is not None and run.loader.remade:
        raise Refused("the loop makes the DataLoader anew for each epoch, so its workers cannot stay")
    if plan.starting_us or plan.at_most_us:  # of workers that another setting brings
        return replace(plan, starting_us=0.0, at_most_us=0.0)
    seen, length = restarts.seen_us(run), run.loader.length if run.loader is not None else None
    if seen is None or not length:
        raise Refused("the run holds no second epoch, so what starting the workers costs was not seen")
    extra_us, sd_us = seen
    steps = max(1.0, length / plan.today.batches)
    whole_us = restarts.epoch_us(plan.today, steps) + extra_us
    first_us = restarts.first_batch_us(plan)
    words = f"an epoch begins {duration(extra_us)} late, once in {number(steps)} steps"
    if first_us is None:
        ratio = 1 - extra_us / whole_us
        return replace(
            plan.doubted(0.01, words).reached(2 * ratio / (1 + ratio), 2 / (1 + ratio)),
            only_sign=True,
            pure_factor=plan.pure_factor * (1 + ratio) / 2,
        )
    saved_us = max(0.0, extra_us - first_us)
    ratio = 1 - saved_us / whole_us
    words += f"; workers that stay still have to make its first batch ({duration(first_us)})"
    doubted = plan.doubted(float(np.hypot(RESTART_SD, sd_us / whole_us / ratio)), words)
    return replace(doubted, pure_factor=plan.pure_factor * ratio)


def compute_threads(plan: Plan, value: str, known: Known) -> Plan:
    """Fewer threads of each operator on a CPU: it takes as long as before at best, at worst as they become fewer."""
    count, today = at_least(1, value), plan.today
    before, cores = today.run.environment.compute_threads, today.run.environment.usable_cores
    if today.on_gpu:
        raise Refused("the GPU computes: how many threads the CPU's operators have hardly matters")
    if before is None or today.run.source == "trace":
        raise Refused("how many threads compute is not known")
    if count == before:
        return plan.doubted(0.0, "it has as many compute threads already")
    if count > before:
        raise Refused("how much faster more threads compute cannot be told from a run with fewer")
    if cores and before > cores:
        raise Refused("what threads cost that outnumber the cores cannot be told from one run")
    if today.workers and cores and before + today.workers > cores:
        raise Refused("what threads and workers that share the cores take from each other cannot be told from one run")
    words = f"computing takes as long with {count} thread{'s' if count > 1 else ''} at best, at worst as they are fewer"
    return replace(plan, threads=count).doubted(0.02, words)


def cache(plan: Plan, value: str, known: Known) -> Plan:
    """Items kept as they leave the dataset: reading and transforming fall away, putting them together stays.

    Where a collate_fn of the user's own puts them together, or it is not known whose, each item is copied before.
    """
    if not is_on(value):
        return plan.doubted(0.0, "it has no cache already")
    today = plan.today
    inside = today.facts.loading
    _require_loader(plan)
    copies_us = _copies_us(plan)
    if inside is not None:
        left = inside.collate_us
        words = f"of {duration(inside.batch_us)} to make a batch, putting it together ({duration(left)}) is left"
        made = replace(plan, making=Making(left, 0.0, copies_us), remade=True).doubted(CACHE_SD, words)
    elif today.wait_us < SMALL_WAIT * today.step.median:
        more = 0.0 if plan.workers else copies_us[1] * today.batches / today.step.median
        made = plan.doubted(CACHE_SD, "training hardly waits for data, whatever making them takes")
        made = made.reached(1.0, 1 + more)
    elif plan.making is None:
        raise Refused("how long a batch takes to make was not measured")
    else:
        least = today.compute_us + (hand_off_us(today) if plan.workers else 0.0)
        low = min(1.0, least / today.step.median)
        high = 1 + copies_us[1] * today.batches / max(1, plan.workers or 0) / today.step.median
        words = "reading items falls away, but how much of the wait that is was not measured"
        middle = (low + high) / 2
        ranged = replace(plan, pure_factor=plan.pure_factor * middle, only_sign=True)
        made = ranged.doubted(0.02, words).reached(low / middle, high / middle)
    if not any(copies_us):
        return made
    between = " to ".join(durations(*copies_us))
    return replace(made, only_sign=True).doubted(0.0, f"{COPIED} {between} for each batch")


def _copies_us(plan: Plan) -> tuple[float, float]:
    """Of a batch, at least and at most. Raises Refused where its items are not counted."""
    loader, inside = plan.today.run.loader, plan.today.facts.loading
    if loader is not None and loader.own_collate is False:
        return 0.0, 0.0
    items = inside.items_per_batch if inside is not None else None
    if items is None and loader is not None:
        items = loader.batch_size
    if items is None:
        raise Refused("how many items the cache would have to copy for each batch is not known")
    least, most = COPY_US
    return (least if loader is not None and loader.own_collate else 0.0) * items, most * items


def _require_loader(plan: Plan) -> None:
    """Raises Refused. A trace has no record of its loader, but may show its wait."""
    if plan.today.run.loader is None and plan.today.facts.data_wait_us is None:
        raise Refused("no DataLoader fed the steps")
    if plan.today.workers is None:
        raise Refused("how many workers load the data is not known")


def _workers(count: int) -> str:
    return "no workers" if count == 0 else "one worker" if count == 1 else f"{count} workers"
