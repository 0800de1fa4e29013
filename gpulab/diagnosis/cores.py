"""Rule about the processor: more threads that compute than there are cores for them.

Rule about a process that does not get its cores: other programs have them, or its container's quota is used up.
"""

from __future__ import annotations

import math

from gpulab.analysis.cores import LEAST_OTHERS, CoreLoss, CoreShare, core_loss_of, is_own_doing
from gpulab.diagnosis.finding import Evidence, Finding, FindingKind, RuleContext
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


_THROTTLED = 0.05  # ours: a quota that runs out in one period of twenty is used up
_FULL = 0.75  # ours, of the cores in use: fewer are busy where waits are but short turns of a program's own threads
_LEVEL_BAD = 0.3  # ours, of a step


def cpu_shared(context: RuleContext) -> Finding | None:
    """Programs other than this one have work for the same cores, or a quota stops it."""
    cores, loss = context.facts.cores, core_loss(context)
    if cores is None or loss is None:
        return None
    if loss.total_us < context.thresholds.core_wait_notice * (context.step_us or 0.0):
        return None
    summary, cure = _by_quota(cores) or _by_others(context, cores) or ("", "")
    if not summary:
        return None
    threads = context.facts.run.environment.compute_threads or 1
    fewer = threads > 1 and loss.pool_us > 0 and not context.on_gpu
    if fewer:
        cure += f" Meanwhile use one compute thread: each operator is split across {threads} and waits for the slowest."
    share = loss.total_us / context.step_us if context.step_us else 0.0
    return Finding(
        "cpu_shared",
        summary,
        tuple(_evidence(context, cores, loss)),
        loss.total_us,
        "measured",
        settings=(("compute_threads", "1"),) if fewer else (),
        cure=cure,
        otherwise=cure,
        level="bad" if share >= _LEVEL_BAD else "notice",
    )


def core_loss(context: RuleContext) -> CoreLoss | None:
    """Of the typical step; None where the system does not tell, or there is no step."""
    return core_loss_of(context.facts, context.step_us, context.thresholds.core_wait_notice)


# -- whose doing it is -------------------------------------------------------------------------------------------------


def _by_quota(cores: CoreShare) -> tuple[str, str] | None:
    throttled = cores.throttled_fraction
    if cores.quota_cores is None or throttled is None or throttled < _THROTTLED:
        return None
    return (
        f"CPU-throttled: this container's quota of {plural(cores.quota_cores, 'core')} ran out in "
        f"{percent(throttled)} of its periods.",
        "Give the container more CPU (docker run --cpus, a Kubernetes limit, a larger machine), or start fewer threads "
        "and workers.",
    )


def _by_others(context: RuleContext, cores: CoreShare) -> tuple[str, str] | None:
    if is_own_doing(cores):
        return None
    count = cores.cores or 0
    busy = (cores.got_cores or 0.0) + (cores.others_cores or 0.0)
    if cores.others_cores is not None and count and (cores.others_cores < LEAST_OTHERS * count or busy < _FULL * count):
        return None
    threads = context.facts.run.environment.compute_threads or 1
    if cores.others_cores is None and threads + (context.facts.worker_count or 0) > count:
        return None  # nobody knows whether others were there, and the program's own threads suffice
    return (
        f"CPU contention: this process got only {_got(cores)}.",
        "Wait until the machine is idle (top shows who uses it), then run it again: timings are unreliable until then. "
        "If it never is, reserve cores or use another machine.",
    )


def _got(cores: CoreShare) -> str:
    got = number(round(cores.got_cores, 2 if cores.got_cores < 1 else 1)) if cores.got_cores is not None else "a part"
    usable = cores.cores if cores.quota_cores is None or cores.cores is None else min(cores.cores, cores.quota_cores)
    return f"{got} of its cores" if usable is None else f"{got} of {plural(usable, 'core')}"


# -- the figures -------------------------------------------------------------------------------------------------------


def _evidence(context: RuleContext, cores: CoreShare, loss: CoreLoss) -> list[Evidence]:
    rows = [Evidence(_lost(context, loss))]
    if cores.thread_cpu_fraction is not None:
        rows.append(Evidence(f"the main thread was on a core for {percent(cores.thread_cpu_fraction)} of the time"))
    if cores.others_cores is not None:
        host = cores.stolen_cores or 0.0
        whose = f", {_cores(host)} of them the host of this virtual machine" if host >= LEAST_OTHERS else ""
        rows.append(Evidence(f"other programs used {_cores(cores.others_cores)} on average{whose}"))
    if loss.pool_us > 0 and cores.pool_waiting is not None:
        rows.append(Evidence(f"{number(round(cores.pool_waiting, 2))} more threads waited for a CPU core (mean)"))
    return rows


def _lost(context: RuleContext, loss: CoreLoss) -> str:
    """How long a step is without a core, and in which of its parts: only the first is a part of its own."""
    parts = {"waiting for a core": loss.thread_us, "compute threads": loss.pool_us, "loading": loss.loading_us}
    split = ", ".join(f"{where} {duration(us)}" for where, us in parts.items() if us > 0)
    return f"no free core for {duration(loss.total_us)} of {context.whole}: {split}"


def _cores(count: float) -> str:
    return plural(round(count, 2 if count < 1 else 1), "core")


FINDINGS = (
    FindingKind("cpu_oversubscribed", "CPU oversubscription", cpu_oversubscribed),
    FindingKind("cpu_shared", "CPU contention", cpu_shared, role="context"),
)
