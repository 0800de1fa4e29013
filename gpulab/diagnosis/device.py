"""Rules about the GPU's state: memory that is full or unused, other programs on it, a throttled clock."""

from __future__ import annotations

import re

import numpy as np

from gpulab.analysis.device_peaks import exact_memory_fraction, memory_fraction, slowed_fraction
from gpulab.diagnosis.finding import Evidence, Finding, FindingKind, RuleContext, Undetermined, evidence
from gpulab.diagnosis.idle_gpu import how_to_know_memory
from gpulab.formatting import duration, number, percent, plural, size
from gpulab.run import THROTTLE_NAMES
from gpulab.timeline.labels import What, distinct

# -- memory ------------------------------------------------------------------------------------------------------------

_GPU_CURE = (
    "Mixed precision, a smaller batch with gradient accumulation, or activation checkpointing "
    "(torch.utils.checkpoint) make room."
)
_HOST_CURE = "Fewer loader workers, a smaller prefetch_factor, or a data set that is read piece by piece make room."
# The messages of torch, the C library and Python.
_OUT_OF_MEMORY = re.compile(r"out of memory|allocate memory|not enough memory|OutOfMemoryError|MemoryError", re.I)


def allocator_thrash(context: RuleContext) -> Finding | Undetermined | None:
    """Steps ask the driver for memory again and again, which makes the GPU wait."""
    work = context.work
    if context.breakdown is None or work is None or not context.by_step:
        return None
    t = work.timeline
    calls = t.rows(What.ALLOCATION)
    calls_before = np.searchsorted(t.start_ns[calls], work.host_windows)
    per_step = float(np.median(calls_before[:, 1] - calls_before[:, 0])) if len(calls_before) else 0.0
    if not per_step:
        return None
    least_us, lost_us = context.thresholds.silence * context.step_us, context.part_us("allocator")
    what = "Whether the GPU waits for cudaMalloc and cudaFree in each step"
    if unclear := context.undetermined("allocator_thrash", what, "idle_causes"):
        return unclear if context.idle_us >= least_us else None
    if lost_us < least_us:
        return None
    names = sorted({t.names[i] for i in distinct(t.name_id[calls])})
    costliest = int(calls[np.argmax(t.duration_ns[calls])])
    idle = f"the GPU idles for {duration(lost_us)} during these calls"
    return Finding(
        "allocator_thrash",
        "Allocator thrash: each step calls cudaMalloc and cudaFree, and the GPU waits.",
        (
            Evidence(
                f"{number(per_step)} calls per step ({', '.join(names[:3])}); {idle}",
                (int(t.start_ns[costliest]), int(t.end_ns[costliest])),
            ),
        ),
        lost_us,
        "measured",
        parts=("allocator",),
        cure="Drop torch.cuda.empty_cache() from the loop, pad batches to few sizes, or set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; a smaller batch where memory is full.",
    )


def memory_pressure(context: RuleContext) -> Finding | Undetermined | None:
    """The memory of the GPU or the machine is nearly full: only a hint, unless there is evidence that it ran out."""
    run, short = context.run, _too_little(context)
    fraction = memory_fraction(run) if context.on_gpu else None
    total = run.memory.total_bytes or run.device.memory_total_bytes
    if fraction is not None and fraction >= context.thresholds.memory_full and total:
        return _full("GPU memory", fraction, total, short, _GPU_CURE)
    rss, host = run.memory.peak_rss_bytes, run.environment.memory_total_bytes
    if context.host_memory_full and rss and host:
        return _full("Host memory", rss / host, host, _ran_out(context), _HOST_CURE)
    if short and context.on_gpu and fraction is None:
        return Undetermined("memory_pressure", "Whether GPU memory is full", how_to_know_memory(context))
    return None


def _full(what: str, fraction: float, total: int, short: str, cure: str) -> Finding:
    """`short`: the evidence that memory was too small. Without such evidence, full memory is just well used."""
    return Finding(
        "memory_pressure",
        f"{what} is nearly full: {percent(fraction)} at the peak.",
        evidence(f"{size(fraction * total)} of {size(total)}", short),
        None,
        "measured" if short else "possible",
        cure=cure if short else f"Nothing, as long as it fits. {cure}",
    )


def _too_little(context: RuleContext) -> str:
    """The evidence that the GPU's memory was too small, as a sentence without a full stop; empty without evidence."""
    ran_out = _ran_out(context)
    if ran_out or not isinstance(allocator_thrash(context), Finding):
        return ran_out
    return "each step calls cudaMalloc again, as when the cache is exhausted"


def _ran_out(context: RuleContext) -> str:
    detail = context.run.outcome_detail
    return f"the run ended with {detail[:200]}" if _OUT_OF_MEMORY.search(detail) else ""


def memory_underused(context: RuleContext) -> Finding | Undetermined | None:
    """Half of the memory is free, and the operations do not fill the GPU: a hint, never if the GPU waits for data."""
    fraction, (filled, source), limits = exact_memory_fraction(context.run), _filled(context), context.thresholds
    if not context.on_gpu or filled is None or filled >= limits.sm_active_low or context.starves:
        return None
    if 1 - context.idle_us / (context.step_us or 1.0) <= limits.utilization_low:  # then `small_batch` reports it
        return None
    if fraction is None:
        what = "Whether a larger batch would fit into the GPU's memory: its operations fill only a part of the GPU"
        return Undetermined("memory_underused", what, how_to_know_memory(context))
    if fraction > limits.memory_underused:
        return None
    return Finding(
        "memory_underused",
        f"Only {percent(fraction)} of GPU memory is used, and kernels fill only part of the GPU: a larger batch may "
        "cost little time.",
        evidence(f"{source}: {percent(filled)}"),
        None,
        "possible",
        cure="Try a larger batch and judge by time per sample.",
    )


def _filled(context: RuleContext) -> tuple[float | None, str]:
    """The share of the GPU that works while it is busy, and the figure's source, whose mean includes idle time."""
    trace, source = context.facts.trace, "SMs active while the GPU works (NVML)"
    share = next((c.step_mean for c in context.facts.curves if c.name == "sm_active_fraction"), None)
    if share is None:
        share = trace.est_sm_efficiency if trace is not None else None
        source = "SMs active while the GPU works, estimated from the trace"
    working = max(1e-9, 1 - (context.idle or 0.0))
    return None if share is None else min(1.0, share / working), source


# -- other programs, heat and power ------------------------------------------------------------------------------------

_POWER_CAP = 0x004


def gpu_shared(context: RuleContext) -> Finding | Undetermined | None:
    """Other programs use the GPU, so all figures include their work."""
    if not context.on_gpu:
        return None
    others = context.run.samples.get("other_gpu_processes")
    if others is None or not len(others.value):
        return _unread(context, "gpu_shared", "Whether other programs used the GPU too", "other processes")
    there = others.value > 0
    busy = float(there.mean())
    if busy < context.thresholds.readings_notice:
        return None
    most = plural(int(others.value.max()), "other program")
    return Finding(
        "gpu_shared",
        f"{most} used this GPU during the run: times and memory aren't yours alone.",
        (Evidence(f"seen in {percent(busy)} of the readings ({others.source})", _from_to(others.t_ns[there])),),
        None,
        "measured",
        cure="Wait until the GPU is free (nvidia-smi lists who uses it), or take another one with "
        "CUDA_VISIBLE_DEVICES; don't trust timings until then.",
    )


def throttled(context: RuleContext) -> Finding | Undetermined | None:
    """Heat or the power limit throttles the GPU's clock."""
    if not context.on_gpu:
        return None
    reasons = context.run.samples.get("throttle_reasons")
    if reasons is None or not len(reasons.value):
        return _unread(context, "throttled", "Whether the GPU was throttled", "throttle")
    bits = reasons.value.astype(np.int64)
    often = {bit: float(((bits & bit) != 0).mean()) for bit in THROTTLE_NAMES}
    limits = {bit: share for bit, share in often.items() if share >= context.thresholds.readings_notice}
    slower = slowed_fraction(context.run)
    at_speed = slower is None or slower < context.thresholds.slowed_notice
    if not limits or (set(limits) == {_POWER_CAP} and at_speed):
        return None  # at its power limit with an unchanged clock, a GPU works as it should
    names = [THROTTLE_NAMES[bit] for bit in limits]
    shares = [f"{name}: {percent(share)} of the readings" for name, share in zip(names, limits.values(), strict=True)]
    below = "" if slower is None else f"the clock was {percent(slower)} below its maximum, on average"
    return Finding(
        "throttled",
        f"GPU throttled ({', '.join(names)}): it ran below its clock.",
        (Evidence(shares[0], _from_to(reasons.t_ns[(bits & sum(limits)) != 0])), *evidence(*shares[1:], below)),
        None if slower is None else slower * context.part_us("compute"),
        "measured" if slower is None else "likely",  # not all kernels scale with the clock: some wait for memory
        parts=("compute/clock",),
        cure="Better cooling, a higher power limit (nvidia-smi -pl, as administrator), or another GPU. No code change "
        "helps.",
    )


def _unread(context: RuleContext, key: str, what: str, label: str) -> Undetermined | None:
    if context.run.source == "trace":
        from_elsewhere = "Run the training under gpulab: a trace from another tool has no device readings"
        return Undetermined(key, what, from_elsewhere)
    why = next((m.reason for m in context.run.missing if label in m.what), None)
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
