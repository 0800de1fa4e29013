"""Rules about the processor: more processes that compute than there are cores for them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from gpulab.diagnosis.context import RuleContext, Undetermined
from gpulab.diagnosis.finding import Evidence, Finding
from gpulab.diagnosis.kind import FindingKind
from gpulab.diagnosis.rules.dataloader import LESSON, starving_for, waiting_for_cores
from gpulab.formatting import number, percent, plural


def cpu_oversubscribed(context: RuleContext) -> Finding | Undetermined | None:
    """The processes of this run keep all usable cores busy, and its loader's workers wait for one.

    Where that is most of the time that a step waits for data it is the cause; else, with more workers than cores, what
    fewer of them would give back cannot be told from a run.
    """
    run, cores = context.facts.run, context.facts.run.environment.usable_cores
    workers = run.loader.num_workers if run.loader is not None else 0
    if cores is not None and not workers:
        return _too_many_threads(context, cores)
    if cores is None:
        return _without_cores(context, workers)
    crowded = _threads_of_workers(context, workers, cores)
    if crowded is not None:
        return crowded
    fewer, cause = max(1, math.floor(cores)), waiting_for_cores(context)
    if cause is None and workers <= fewer:
        return _threads_beside_workers(context, workers, cores)
    load = _load(context)
    if load is None:
        return Undetermined(
            "cpu_oversubscribed",
            f"Whether {workers} workers on {number(cores)} usable processor cores hold each other up",
            "Install psutil, which measures the load of the processor, and run the cell again",
        )
    if load < context.thresholds.cpu_full:
        return None  # or another program takes the cores
    busy = Evidence(f"{_workers(workers)} on {_cores(cores)}, which are {percent(load)} busy during the steps (mean)")
    settings = (("workers", str(fewer)),) if workers > fewer else ()
    cure = (
        f"Load with no more workers than there are cores (num_workers={fewer}), each with one thread: "
        "torch.set_num_threads(1) and cv2.setNumThreads(0) in worker_init_fn."
    )
    if cause is not None:
        return replace(
            cause, evidence=(*cause.evidence, busy), settings=settings, cure=cure, otherwise="", lesson=LESSON
        )
    waits = _waits(context)
    if not waits:
        return None
    return Finding(
        "cpu_oversubscribed",
        f"{_workers(workers)} share {_cores(cores)} with the training, and take time from each other.",
        (busy, Evidence(waits)),
        None,
        "likely",
        parts=("data_wait",),
        settings=settings,
        cure=cure,
        lesson=LESSON,
    )


def _without_cores(context: RuleContext, workers: int) -> Undetermined | None:
    """How many cores there are is asked only where workers are slower than the training."""
    if not workers or not _waits(context):
        return None
    return Undetermined(
        "cpu_oversubscribed",
        f"Whether {_workers(workers)} have too few processor cores, and hold each other up",
        "Run it where the system tells how many cores this process may use (os.cpu_count() is unknown here)",
    )


def _threads_beside_workers(context: RuleContext, workers: int, cores: float) -> Finding | None:
    """On a CPU an operator's threads share the cores with workers that are at work, and wait for their slowest."""
    threads, inside, step_us = context.facts.run.environment.compute_threads, context.facts.loading, context.step_us
    if context.on_gpu or threads is None or threads <= 1 or threads + workers <= cores or inside is None or not step_us:
        return None
    load, waited = _load(context), inside.core_wait_fraction or 0.0
    working = inside.batch_us * (1 - max(inside.read_waited_fraction or 0.0, inside.transform_waited_fraction or 0.0))
    if load is None or load < context.thresholds.cpu_full or waited < context.thresholds.idle_notice:
        return None
    if working < context.thresholds.idle_bad * step_us:
        return None
    left = max(1, math.floor(cores) - workers)
    return Finding(
        "cpu_oversubscribed",
        f"{threads} compute threads and {_workers(workers)} share {_cores(cores)}, and take time from each other.",
        (
            Evidence(f"the cores are {percent(load)} busy during the steps (mean)"),
            Evidence(f"the workers wait for a free core for {percent(waited)} of the time they load"),
            Evidence("what that costs cannot be read off one run: try it with fewer"),
        ),
        None,
        "likely",
        parts=("compute/threads",),
        settings=(("compute_threads", str(left)),) if left < threads else (),
        cure=f"torch.set_num_threads({left}) before the training: an operator waits for the slowest of its threads.",
        lesson=LESSON,
    )


def _threads_of_workers(context: RuleContext, workers: int, cores: float) -> Finding | None:
    """Each worker splits its operators among several threads: more of them than there are cores, and one would do."""
    loader, load = context.facts.run.loader, _load(context)
    each, inside = loader.worker_threads if loader is not None else None, context.facts.loading
    if each is None or each <= 1 or each * workers <= cores:
        return None
    waited = (inside.core_wait_fraction if inside is not None else None) or 0.0
    if (load is None or load < context.thresholds.cpu_full) and waited < context.thresholds.idle_notice:
        return None
    why = f"{_workers(workers)} split each operation among {each} threads, and {each * workers} threads share"
    finding = starving_for(context, "cpu_oversubscribed", f"{why} {_cores(cores)}") or Finding(
        "cpu_oversubscribed",
        f"{why} {_cores(cores)} with the training: they take time from each other.",
        (Evidence("what that costs cannot be read off one run: try it with one thread each"),),
        None,
        "likely",
        parts=("data_wait",),
        lesson=LESSON,
    )
    busy = () if load is None else (Evidence(f"the cores are {percent(load)} busy during the steps (mean)"),)
    waits = Evidence(f"the workers wait for a free core for {percent(waited)} of the time they load")
    return replace(
        finding,
        evidence=(*finding.evidence, *busy, *([waits] if waited else [])),
        settings=(),
        otherwise="",
        lesson=LESSON,
        cure="Leave each worker its one thread, as PyTorch does: no torch.set_num_threads above 1 in worker_init_fn or "
        "in the dataset.",
    )


def _too_many_threads(context: RuleContext, cores: float) -> Finding | None:
    """Each operator is split among more threads than there are cores: they take turns, and wait for one another."""
    threads = context.facts.run.environment.compute_threads
    most = max(1, math.ceil(cores))
    if threads is None or threads <= most or context.on_gpu or context.facts.run.source == "trace":
        return None
    load = _load(context)
    busy = f", which {'is' if cores == 1 else 'are'} {percent(load)} busy during the steps (mean)" if load else ""
    return Finding(
        "cpu_oversubscribed",
        f"PyTorch splits each operation among {threads} threads, but this process may use only {_cores(cores)}: "
        "threads that outnumber the cores wait for one another.",
        (
            Evidence(f"{threads} compute threads on {_cores(cores)}{busy}"),
            Evidence("what that costs cannot be read off one run: try it with fewer"),
        ),
        None,
        "likely",
        parts=("compute/threads",),
        settings=(("compute_threads", str(most)),),
        cure=f"torch.set_num_threads({most}) before the training, or the environment variable OMP_NUM_THREADS={most}.",
    )


def _workers(count: int) -> str:
    return plural(count, "loader worker")


def _cores(count: float) -> str:
    return plural(count, "usable processor core")


def _load(context: RuleContext) -> float | None:
    """Mean load of the usable cores during the steps, 1 where all are busy; None where it was not measured."""
    run = context.facts.run
    curve = run.samples.get("cpu_pct")
    if curve is None or not len(run.steps):
        return None
    inside = (curve.t_ns >= run.steps.start_ns[0]) & (curve.t_ns < run.steps.end_ns[-1])
    return float(np.mean(curve.value[inside])) / 100 if inside.sum() >= 2 else None


def _waits(context: RuleContext) -> str:
    """What shows that it costs: empty where nothing does."""
    inside = context.facts.loading
    waited = inside.core_wait_fraction if inside is not None else None
    if waited is not None:
        enough = waited >= context.thresholds.idle_notice
        return f"the workers wait for a free core for {percent(waited)} of the time they load" if enough else ""
    share = context.share("data_wait") if context.idle is not None else context.facts.data_wait_fraction or 0.0
    if share >= context.thresholds.data_wait_notice:
        return f"each step still waits {percent(share)} of its time for data"
    return ""


FINDINGS = (
    FindingKind(
        "cpu_oversubscribed",
        "more processes or threads than processor cores",
        cpu_oversubscribed,
        # that the workers need the processor does not help: they do not get it
        explains=("data_starved", "cpu_preprocessing", "slow_collate"),
        is_feeding=True,
    ),
)
