"""Rule about the processor: more threads that compute than there are cores for them."""

from __future__ import annotations

import math

from gpulab.analysis.cores import is_own_doing
from gpulab.diagnosis.context import FindingKind, RuleContext
from gpulab.diagnosis.finding import Evidence, Finding
from gpulab.diagnosis.rules.core_wait import core_loss
from gpulab.formatting import duration, number, percent, plural


def cpu_oversubscribed(context: RuleContext) -> Finding | None:
    """Each operator is split among more threads than there are cores: they take turns, and wait for one another."""
    run, cores = context.facts.run, context.facts.run.environment.usable_cores
    threads = run.environment.compute_threads
    if cores is None or threads is None or context.on_gpu or run.source == "trace":
        return None
    most = max(1, math.ceil(cores))
    if threads <= most:
        return _by_own_processes(context, threads)
    busy = next((c.step_mean for c in context.facts.curves if c.name == "cpu_pct"), None)
    load = "" if busy is None else f"; the cores are {percent(busy / 100)} busy (mean)"
    return Finding(
        "cpu_oversubscribed",
        f"CPU oversubscription: {threads} compute threads on {plural(cores, 'CPU core')}.",
        (Evidence(f"one run doesn't show the cost: try fewer threads{load}"),),
        None,
        "likely",
        parts=("compute/threads",),
        settings=(("compute_threads", str(most)),),
        cure=f"torch.set_num_threads({most}) before the training, or the environment variable OMP_NUM_THREADS={most}.",
    )


def _by_own_processes(context: RuleContext, threads: int) -> Finding | None:
    """No operator has more threads than cores, but workers and their threads take turns with the training."""
    share, loss = context.facts.cores, core_loss(context)
    if share is None or loss is None or not is_own_doing(share):
        return None
    if loss.total_us < context.thresholds.core_wait_notice * (context.step_us or 0.0):
        return None
    count = number(round(share.ready_threads, 1))
    fewer = "one compute thread (torch.set_num_threads(1))" if threads > 1 else "fewer workers"
    return Finding(
        "cpu_oversubscribed",
        f"CPU oversubscription: {count} runnable threads on average, on {plural(share.cores or 1, 'CPU core')}.",
        (
            Evidence(f"threads wait {duration(loss.total_us)} per step for a core; other programs use little"),
            Evidence(f"{plural(threads, 'compute thread')} and {plural(context.facts.worker_count or 0, 'worker')}"),
        ),
        loss.total_us,
        "likely",
        parts=("core_wait", "compute/threads", "data_wait/cores"),
        settings=(("compute_threads", "1"),) if threads > 1 else (),
        cure=f"Use {fewer}, and one thread per worker (torch.set_num_threads in worker_init_fn).",
    )


FINDINGS = (FindingKind("cpu_oversubscribed", "CPU oversubscription", cpu_oversubscribed),)
