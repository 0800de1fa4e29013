"""Rules about CPU cores: taken by other programs or a quota, shared by too many threads, or idle."""

from __future__ import annotations

import math

from gpulab.analysis.cores import LEAST_OTHERS, CoreLoss, CoreShare, core_loss_of, is_own_doing
from gpulab.analysis.operators import DIVISIBLE_NS, divisible_share
from gpulab.diagnosis.finding import Finding, FindingKind, RuleContext, evidence
from gpulab.formatting import duration, number, percent, plural

_THROTTLED = 0.05  # ours: a quota that runs out in 1 of 20 periods is used up
_FULL = 0.75  # ours, share of cores in use: below it, waits come from the program's own threads taking turns
_LEVEL_BAD = 0.3  # ours, share of a step
_FREE = 0.5  # ours, in cores: less is taken by brief activity of other programs


def cpu_shared(context: RuleContext) -> Finding | None:
    """Other programs use the same cores, or a quota throttles this one."""
    cores, loss = context.facts.cores, core_loss(context)
    if cores is None or loss is None or not is_long(context, loss):
        return None
    summary, cure = _by_quota(cores) or _by_others(context, cores) or ("", "")
    if not summary:
        return None
    threads = context.run.environment.compute_threads or 1
    fewer = threads > 1 and loss.pool_us > 0 and not context.on_gpu
    if fewer:
        cure += f" Meanwhile use one compute thread: each operator is split across {threads} and waits for the slowest."
    return Finding(
        "cpu_shared",
        summary,
        evidence(*_figures(context, cores, loss)),
        loss.total_us,
        "measured",
        settings=(("compute_threads", "1"),) if fewer else (),
        cure=cure,
        otherwise=cure,
        level="bad" if loss.total_us >= _LEVEL_BAD * context.step_us else "notice",
    )


def core_loss(context: RuleContext) -> CoreLoss | None:
    """The time that a typical step loses waiting for cores; None if the system does not report it or without a step."""
    return core_loss_of(context.facts, context.step_us, context.thresholds.core_wait_notice)


def is_long(context: RuleContext, loss: CoreLoss) -> bool:
    """Whether the loss is long enough to report."""
    return loss.total_us >= context.thresholds.core_wait_notice * context.step_us


def _by_quota(cores: CoreShare) -> tuple[str, str] | None:
    throttled = cores.throttled_fraction
    if cores.quota_cores is None or throttled is None or throttled < _THROTTLED:
        return None
    quota = f"this container's quota of {plural(cores.quota_cores, 'core')}"
    return (
        f"CPU-throttled: {quota} ran out in {percent(throttled)} of its periods.",
        "Give the container more CPU (docker run --cpus, a Kubernetes limit, a larger machine), or start fewer threads "
        "and workers.",
    )


def _by_others(context: RuleContext, cores: CoreShare) -> tuple[str, str] | None:
    count, others = cores.cores or 0, cores.others_cores
    if is_own_doing(cores):
        return None
    busy = (cores.got_cores or 0.0) + (others or 0.0)
    if others is not None and count and (others < LEAST_OTHERS * count or busy < _FULL * count):
        return None
    threads = context.run.environment.compute_threads or 1
    if others is None and threads + (context.facts.worker_count or 0) > count:
        return None  # other programs are unknown, and the program's own threads explain the wait
    got = "a part" if cores.got_cores is None else _mean(cores.got_cores)
    usable = cores.cores if cores.quota_cores is None or cores.cores is None else min(cores.cores, cores.quota_cores)
    return (
        f"CPU contention: this process got only {got} of {'its cores' if usable is None else plural(usable, 'core')}.",
        "Wait until the machine is idle (top shows who uses it), then run it again: timings are unreliable until then. "
        "If it never is, reserve cores or use another machine.",
    )


def _figures(context: RuleContext, cores: CoreShare, loss: CoreLoss) -> list[str]:
    """How long a step waits for a core, in which of its parts, and which programs used the cores."""
    parts = {"waiting for a core": loss.thread_us, "compute threads": loss.pool_us, "loading": loss.loading_us}
    split = ", ".join(f"{where} {duration(us)}" for where, us in parts.items() if us > 0)
    rows = [f"no free core for {duration(loss.total_us)} of {context.whole}: {split}"]
    if cores.thread_cpu_fraction is not None:
        rows.append(f"the main thread was on a core for {percent(cores.thread_cpu_fraction)} of the time")
    if cores.others_cores is not None:
        host = cores.stolen_cores or 0.0
        whose = f", {_cores(host)} of them the host of this virtual machine" if host >= LEAST_OTHERS else ""
        rows.append(f"other programs used {_cores(cores.others_cores)} on average{whose}")
    if loss.pool_us > 0 and cores.pool_waiting is not None:
        rows.append(f"{number(round(cores.pool_waiting, 2))} more threads waited for a CPU core (mean)")
    return rows


def _mean(count: float) -> str:
    return number(round(count, 2 if count < 1 else 1))


def _cores(count: float) -> str:
    return plural(round(count, 2 if count < 1 else 1), "core")


def cpu_oversubscribed(context: RuleContext) -> Finding | None:
    """Each operator is split among more threads than there are cores, so that threads wait for one another."""
    cores, threads = context.run.environment.usable_cores, context.run.environment.compute_threads
    if cores is None or threads is None or context.on_gpu or context.run.source == "trace":
        return None
    most = max(1, math.ceil(cores))
    if threads <= most:
        return _by_own_processes(context, threads)
    busy = next((c.step_mean for c in context.facts.curves if c.name == "cpu_pct"), None)
    load = "" if busy is None else f"; the cores are {percent(busy / 100)} busy (mean)"
    return Finding(
        "cpu_oversubscribed",
        f"CPU oversubscription: {threads} compute threads on {plural(cores, 'CPU core')}.",
        evidence(f"one run doesn't show the cost: try fewer threads{load}"),
        None,
        "likely",
        parts=("compute/threads",),
        settings=(("compute_threads", str(most)),),
        cure=f"torch.set_num_threads({most}) before the training, or the environment variable OMP_NUM_THREADS={most}.",
    )


def _by_own_processes(context: RuleContext, threads: int) -> Finding | None:
    """No operator has more threads than there are cores, but workers and their threads compete with the training."""
    share, loss = context.facts.cores, core_loss(context)
    if share is None or loss is None or not is_own_doing(share) or not is_long(context, loss):
        return None
    count, workers = number(round(share.ready_threads, 1)), plural(context.facts.worker_count or 0, "worker")
    fewer = "one compute thread (torch.set_num_threads(1))" if threads > 1 else "fewer workers"
    return Finding(
        "cpu_oversubscribed",
        f"CPU oversubscription: {count} runnable threads on average, on {plural(share.cores or 1, 'CPU core')}.",
        evidence(
            f"threads wait {duration(loss.total_us)} per step for a core; other programs use little",
            f"{plural(threads, 'compute thread')} and {workers}",
        ),
        loss.total_us,
        "likely",
        parts=("core_wait", "compute/threads", "data_wait/cores"),
        settings=(("compute_threads", "1"),) if threads > 1 else (),
        cure=f"Use {fewer}, and one thread per worker (torch.set_num_threads in worker_init_fn).",
    )


def idle_cores(context: RuleContext) -> Finding | None:
    """Long operators use few threads while cores are idle."""
    run, cores = context.run, context.facts.cores
    threads, free = run.environment.compute_threads, None if cores is None else cores.free_cores
    if context.on_gpu or run.job is not None or not threads or free is None:
        return None
    count = math.floor(run.environment.usable_cores or 1)
    more = min(free, count - threads)
    if more < _FREE:
        return None
    share = context.of_typical(divisible_share(run.timeline, context.breakdown), "compute", "optimizer")
    saved = share * more / (threads + more)
    if saved < context.thresholds.silence:
        return None
    most = min(count, threads + math.ceil(more))
    on_cores = f"{plural(threads, 'compute thread')} on {plural(count, 'core')}"
    return Finding(
        "idle_cores",
        f"{on_cores}: more threads save up to {percent(saved)} of each step.",
        evidence(
            f"{number(round(free, 1))} of {plural(count, 'core')} had nothing to do (mean)",
            f"operators that threads can share, {duration(DIVISIBLE_NS / 1e3)} or longer, take {percent(share)} of a "
            "step",
        ),
        saved * context.step_us,
        "likely",
        ("compute", "optimizer"),
        (("compute_threads", str(most)),),
        f"torch.set_num_threads({most}) before the training, or OMP_NUM_THREADS={most} in the environment.",
    )


FINDINGS = (
    FindingKind("cpu_shared", "CPU contention", cpu_shared, role="context"),
    FindingKind("cpu_oversubscribed", "CPU oversubscription", cpu_oversubscribed),
    FindingKind("idle_cores", "idle CPU cores", idle_cores),
)
