"""Rules about memory: requested from the driver in every step, nearly full, or hardly used.

Rules about a GPU that cannot give all it has: other programs use it, or heat and power hold its clock down.
"""

from __future__ import annotations

import re

import numpy as np

from gpulab.analysis.device_peaks import exact_memory_fraction, memory_fraction, slowed_fraction
from gpulab.diagnosis.finding import Evidence, Finding, FindingKind, RuleContext, Undetermined, record_again
from gpulab.diagnosis.idle_gpu import how_to_know_memory, idle_us, starves
from gpulab.formatting import duration, number, percent, plural, size
from gpulab.run import THROTTLE_NAMES
from gpulab.timeline.labels import What


def allocator_thrash(context: RuleContext) -> Finding | Undetermined | None:
    """Steps ask the driver for memory again and again, which makes the GPU wait."""
    account, work = context.facts.breakdown, context.facts.work
    if account is None or work is None or not context.on_gpu or account.whole_window:
        return None
    t = work.timeline
    calls = t.rows(What.ALLOCATION)
    calls_before = np.searchsorted(t.start_ns[calls], work.host_windows)
    per_step = float(np.median(calls_before[:, 1] - calls_before[:, 0])) if len(calls_before) else 0.0
    least = context.thresholds.silence * (context.step_us or 0.0)
    if not per_step:
        return None
    why = context.withheld("idle_causes")
    if why is not None:
        what = "Whether the GPU waits for cudaMalloc and cudaFree in each step"
        return record_again("allocator_thrash", what, why) if idle_us(context) >= least else None
    lost = context.part_us("allocator")
    if lost < least:
        return None
    names = sorted({t.names[i] for i in np.unique(t.name_id[calls]).tolist()})
    costliest = int(calls[np.argmax(t.duration_ns[calls])])
    return Finding(
        "allocator_thrash",
        "Allocator thrash: each step calls cudaMalloc and cudaFree, and the GPU waits.",
        (
            Evidence(
                f"{number(per_step)} calls per step ({', '.join(names[:3])}); "
                f"the GPU idles for {duration(lost)} during these calls",
                (int(t.start_ns[costliest]), int(t.end_ns[costliest])),
            ),
        ),
        lost,
        "measured",
        parts=("allocator",),
        cure="Drop torch.cuda.empty_cache() from the loop, pad batches to few sizes, or set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; a smaller batch where memory is full.",
    )


def memory_pressure(context: RuleContext) -> Finding | Undetermined | None:
    """Memory is nearly full, of the GPU or of the machine: a hint, unless something shows that it was too little."""
    run, full = context.facts.run, context.thresholds.memory_full
    fraction = memory_fraction(context.facts.run) if context.on_gpu else None
    total = run.memory.total_bytes or run.device.memory_total_bytes
    short = _too_little(context)
    if fraction is not None and fraction >= full and total:
        return _full("GPU memory", fraction, total, short, _GPU_CURE)
    rss, host = run.memory.peak_rss_bytes, run.environment.memory_total_bytes
    if context.host_memory_full and rss and host:
        return _full("Host memory", rss / host, host, _ran_out(context), _HOST_CURE)
    if short and context.on_gpu and fraction is None:
        return Undetermined("memory_pressure", "Whether GPU memory is full", how_to_know_memory(context))
    return None


def memory_underused(context: RuleContext) -> Finding | Undetermined | None:
    """Half of the memory is free, and the operations do not fill the GPU: a hint, never while it waits for data."""
    fraction, filled = exact_memory_fraction(context.facts.run), _filled(context)
    if not context.on_gpu or filled is None or filled[0] >= context.thresholds.sm_active_low or starves(context):
        return None
    working = 1 - idle_us(context) / (context.step_us or 1.0)
    if working <= context.thresholds.utilization_low:  # then `small_batch` says it
        return None
    if fraction is None:
        what = "Whether a larger batch would fit into the GPU's memory: its operations fill only a part of the GPU"
        return Undetermined("memory_underused", what, how_to_know_memory(context))
    if fraction > context.thresholds.memory_underused:
        return None
    return Finding(
        "memory_underused",
        f"Only {percent(fraction)} of GPU memory is used, and kernels fill only part of the GPU: a larger batch may "
        "cost little time.",
        (Evidence(f"{filled[1]}: {percent(filled[0])}"),),
        None,
        "possible",
        cure="Try a larger batch and judge by time per sample.",
    )


def _full(what: str, fraction: float, total: int, short: str, cure: str) -> Finding:
    """`short`: what shows that it was too little. Memory that is filled on purpose is put to good use."""
    used = Evidence(f"{size(fraction * total)} of {size(total)}")
    return Finding(
        "memory_pressure",
        f"{what} is nearly full: {percent(fraction)} at the peak.",
        (used, Evidence(short)) if short else (used,),
        None,
        "measured" if short else "possible",
        cure=cure if short else f"Nothing, as long as it fits. {cure}",
    )


def _too_little(context: RuleContext) -> str:
    """What shows that the GPU's memory was too little, as a sentence without a full stop; empty where nothing does."""
    ran_out = _ran_out(context)
    if ran_out or not isinstance(allocator_thrash(context), Finding):
        return ran_out
    return "each step calls cudaMalloc again, as when the cache is exhausted"


def _ran_out(context: RuleContext) -> str:
    run = context.facts.run
    return f"the run ended with {run.outcome_detail[:200]}" if _OUT_OF_MEMORY.search(run.outcome_detail) else ""


_GPU_CURE = (
    "Mixed precision, a smaller batch with gradient accumulation, or activation checkpointing "
    "(torch.utils.checkpoint) make room."
)
# As torch, the C library and Python say it.
_OUT_OF_MEMORY = re.compile(r"out of memory|allocate memory|not enough memory|OutOfMemoryError|MemoryError", re.I)
_HOST_CURE = "Fewer loader workers, a smaller prefetch_factor, or a data set that is read piece by piece make room."


def _filled(context: RuleContext) -> tuple[float, str] | None:
    """How much of the GPU works while it works at all, and by which figure: means over idle time too."""
    working = max(1e-9, 1 - (context.idle or 0.0))
    active = next((c.step_mean for c in context.facts.curves if c.name == "sm_active_fraction"), None)
    if active is not None:
        return min(1.0, active / working), "SMs active while the GPU works (NVML)"
    share = context.facts.trace.est_sm_efficiency if context.facts.trace is not None else None
    basis = "SMs active while the GPU works, estimated from the trace"
    return None if share is None else (min(1.0, share / working), basis)


_POWER_CAP = 0x004


def gpu_shared(context: RuleContext) -> Finding | Undetermined | None:
    """Programs other than this one have work on the GPU: every figure holds theirs too."""
    if not context.on_gpu:
        return None
    others = context.facts.run.samples.get("other_gpu_processes")
    if others is None or not len(others.value):
        return _unread(context, "gpu_shared", "Whether other programs used the GPU too", "other processes")
    busy = float((others.value > 0).mean())
    if busy < context.thresholds.readings_notice:
        return None
    most = int(others.value.max())
    seen = np.flatnonzero(others.value > 0)
    return Finding(
        "gpu_shared",
        f"{plural(most, 'other program')} used this GPU during the run: times and memory aren't yours alone.",
        (Evidence(f"seen in {percent(busy)} of the readings ({others.source})", _from_to(others.t_ns[seen])),),
        None,
        "measured",
        cure="Wait until the GPU is free (nvidia-smi lists who uses it), or take another one with "
        "CUDA_VISIBLE_DEVICES; don't trust timings until then.",
    )


def throttled(context: RuleContext) -> Finding | Undetermined | None:
    """Heat or the limit of power holds the GPU's clock down."""
    if not context.on_gpu:
        return None
    reasons = context.facts.run.samples.get("throttle_reasons")
    if reasons is None or not len(reasons.value):
        return _unread(context, "throttled", "Whether the GPU was throttled", "throttle")
    bits = reasons.value.astype(np.int64)
    often = {name: float(((bits & bit) != 0).mean()) for bit, name in THROTTLE_NAMES.items()}
    limits = {name: share for name, share in often.items() if share >= context.thresholds.readings_notice}
    slower = slowed_fraction(context.facts.run)
    if not limits or (
        set(limits) == {THROTTLE_NAMES[_POWER_CAP]} and (slower is None or slower < context.thresholds.slowed_notice)
    ):
        return None  # a GPU at its limit of power that keeps its clock does what it was bought for
    held = (bits & sum(bit for bit, name in THROTTLE_NAMES.items() if name in limits)) != 0
    evidence = [Evidence(f"{name}: {percent(share)} of the readings") for name, share in limits.items()]
    if slower is not None:
        evidence.append(Evidence(f"the clock was {percent(slower)} below its maximum, on average"))
    return Finding(
        "throttled",
        f"GPU throttled ({', '.join(limits)}): it ran below its clock.",
        (Evidence(evidence[0].words, _from_to(reasons.t_ns[held])), *evidence[1:]),
        None if slower is None else slower * context.part_us("compute"),
        "measured" if slower is None else "likely",  # not all kernels go by the clock: some wait for memory
        parts=("compute/clock",),
        cure="Better cooling, a higher power limit (nvidia-smi -pl, as administrator), or another GPU. No code change "
        "helps.",
    )


def _unread(context: RuleContext, key: str, what: str, label: str) -> Undetermined | None:
    if context.facts.run.source == "trace":
        return Undetermined(
            key, what, "Run the training under gpulab: a trace from another tool has no device readings"
        )
    why = next((m.reason for m in context.facts.run.missing if label in m.what), None)
    return Undetermined(key, what, f"Not read here: {why}") if why is not None else None


def _from_to(times: np.ndarray) -> tuple[int, int] | None:
    return (int(times[0]), int(times[-1])) if len(times) else None


FINDINGS = (
    FindingKind("allocator_thrash", "allocator thrash", allocator_thrash, lesson="06_memory"),
    FindingKind("memory_pressure", "nearly full memory", memory_pressure, lesson="06_memory"),
    FindingKind("memory_underused", "unused GPU memory", memory_underused, lesson="05_batch_size"),
    FindingKind("gpu_shared", "sharing the GPU with other programs", gpu_shared),
    FindingKind("throttled", "GPU throttling", throttled),
)
