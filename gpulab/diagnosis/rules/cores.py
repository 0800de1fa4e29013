"""Rule about the processor: more threads that compute than there are cores for them."""

from __future__ import annotations

import math

import numpy as np

from gpulab.diagnosis.context import RuleContext
from gpulab.diagnosis.finding import Evidence, Finding
from gpulab.diagnosis.kind import FindingKind
from gpulab.formatting import percent, plural


def cpu_oversubscribed(context: RuleContext) -> Finding | None:
    """Each operator is split among more threads than there are cores: they take turns, and wait for one another."""
    run, cores = context.facts.run, context.facts.run.environment.usable_cores
    threads = run.environment.compute_threads
    if cores is None or threads is None or context.on_gpu or run.source == "trace":
        return None
    most = max(1, math.ceil(cores))
    if threads <= most:
        return None
    load, usable = _load(context), plural(cores, "usable processor core")
    busy = f", which {'is' if cores == 1 else 'are'} {percent(load)} busy during the steps (mean)" if load else ""
    return Finding(
        "cpu_oversubscribed",
        f"PyTorch splits each operation among {threads} threads, but this process may use only {usable}: "
        "threads that outnumber the cores wait for one another.",
        (
            Evidence(f"{threads} compute threads on {usable}{busy}"),
            Evidence("what that costs cannot be read off one run: try it with fewer"),
        ),
        None,
        "likely",
        parts=("compute/threads",),
        settings=(("compute_threads", str(most)),),
        cure=f"torch.set_num_threads({most}) before the training, or the environment variable OMP_NUM_THREADS={most}.",
    )


def _load(context: RuleContext) -> float | None:
    """Mean load of the usable cores during the steps, 1 where all are busy; None where it was not measured."""
    run = context.facts.run
    curve = run.samples.get("cpu_pct")
    if curve is None or not len(run.steps):
        return None
    inside = (curve.t_ns >= run.steps.start_ns[0]) & (curve.t_ns < run.steps.end_ns[-1])
    return float(np.mean(curve.value[inside])) / 100 if inside.sum() >= 2 else None


FINDINGS = (FindingKind("cpu_oversubscribed", "more threads than processor cores", cpu_oversubscribed),)
