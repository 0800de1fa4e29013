"""Rules about a GPU that cannot give all it has: other programs use it, or heat and power hold its clock down."""

from __future__ import annotations

import numpy as np

from gpulab.analysis.device_peaks import slowed_fraction
from gpulab.diagnosis.context import FindingKind, RuleContext, Undetermined
from gpulab.diagnosis.finding import Evidence, Finding
from gpulab.formatting import percent, plural
from gpulab.run import THROTTLE_NAMES

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
    FindingKind("gpu_shared", "sharing the GPU with other programs", gpu_shared),
    FindingKind("throttled", "GPU throttling", throttled),
)
