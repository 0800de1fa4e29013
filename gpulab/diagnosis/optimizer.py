"""Rule about the optimizer: parameters updated or gradients zeroed one by one, in many small operations."""

from __future__ import annotations

from gpulab.analysis.optimizer_work import OptimizerWork
from gpulab.diagnosis.finding import Evidence, Finding, FindingKind, RuleContext, Undetermined, evidence, pairs
from gpulab.formatting import duration, number, percent

_FUSIBLE = ("for-loop", "foreach")  # styles of an update that one kernel could replace
_GROUPED = ("Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")  # of torch.optim, also grouped


def unfused_optimizer(context: RuleContext) -> Finding | Undetermined | None:
    """The update runs operator by operator, or gradients are zeroed instead of dropped."""
    work = context.facts.optimizer
    if work is None:
        return None
    if context.on_gpu and context.withheld("idle_causes") is not None:
        return _withheld(context, work)
    updating_us, zeroing_us = _on_gpu(work) if context.on_gpu else _on_cpu(context, work)
    saved_us = updating_us + zeroing_us
    if saved_us < context.thresholds.silence * context.step_us or not saved_us:
        return None
    share = percent(saved_us / (context.step_us or saved_us))
    if updating_us >= zeroing_us:
        every = "by updating all parameters in one kernel"
        summary, times = f"Unfused optimizer: up to {share} of each step could be saved {every}.", work.step_times
    else:
        none = "set them to None instead"
        summary, times = f"Zeroing gradients one by one takes up to {share} of each step; {none}.", work.zero_times
    return Finding(
        "unfused_optimizer",
        summary,
        (
            *(_zeroing(context, work) if zeroing_us else ()),
            *(_updating(context, work) if updating_us else ()),
        ),
        saved_us,
        "likely",
        parts=("optimizer", "compute/optimizer", "launch/optimizer") if context.on_gpu else ("compute", "optimizer"),
        settings=(("fused_optimizer", "True"),) if updating_us and work.update_bytes is not None else (),
        cure=_cure(work, updating_us > 0, zeroing_us > 0),
        source_line=context.line_at(times),
    )


def _withheld(context: RuleContext, work: OptimizerWork) -> Undetermined | None:
    """The question left open without the GPU's idle time, if the optimizer may hold enough of it."""
    host_us = work.zero_host_us if work.zeroing else 0.0
    host_us += work.host_us if work.style in _FUSIBLE else 0.0
    if min(host_us, context.idle_us) < context.thresholds.silence * context.step_us or not host_us:
        return None
    return context.undetermined("unfused_optimizer", "What the GPU loses in an unfused optimizer", "idle_causes")


def _on_gpu(work: OptimizerWork) -> tuple[float, float]:
    """The most that fusing the update and dropping the gradients would save on a GPU: idle time, and memory traffic."""
    fusible = work.style in _FUSIBLE
    updating_us = work.idle_us + work.device_us * (1 - _remaining_fraction(work)) if fusible else 0.0
    return updating_us, work.zero_idle_us + work.zero_device_us if work.zeroing else 0.0


def _on_cpu(context: RuleContext, work: OptimizerWork) -> tuple[float, float]:
    """The same on a CPU: the update from untraced steps, zeroing from traced steps.

    If PyTorch can fuse the update on a CPU, passes over memory are saved; for one-by-one updates of others, calls.
    """
    zeroing_us = work.zero_host_us if work.zeroing else 0.0
    took, step = context.facts.optimizer_us, context.facts.step_us
    if took is None or step is None:
        return 0.0, zeroing_us
    least_us = context.thresholds.optimizer_cpu_notice * step.median
    if work.update_bytes is not None and work.style in _FUSIBLE:
        saved_us = took.median * (1 - _remaining_fraction(work))
        return saved_us if took.median >= least_us else 0.0, zeroing_us
    saved_us = took.median * work.calling_share if work.style == "for-loop" else 0.0
    return saved_us if saved_us >= least_us else 0.0, zeroing_us


def _remaining_fraction(work: OptimizerWork) -> float:
    """The share of the update's bytes that a fused update moves; 1 if PyTorch cannot fuse it."""
    return 1.0 if work.update_bytes is None else work.update_bytes.fused_fraction


def _zeroing(context: RuleContext, work: OptimizerWork) -> tuple[Evidence, ...]:
    idle = f"; the GPU idles for {duration(work.zero_idle_us)} of this time" if context.on_gpu else ""
    words = f"{number(work.zeroing)} calls per step zero gradients and take {duration(work.zero_host_us)}{idle}"
    return (Evidence(words, next(iter(pairs(work.zero_times)), None)),)


def _updating(context: RuleContext, work: OptimizerWork) -> tuple[Evidence, ...]:
    took = context.facts.optimizer_us
    host_us = took.median if took is not None and not context.on_gpu else work.host_us
    style = "group by group" if work.style == "foreach" else "one by one"
    operators = f"{number(work.operators)} operators and {duration(host_us)} per step"
    words = f"{work.name}.step updates the parameters {style}: {operators}"
    first = Evidence(words, next(iter(pairs(work.step_times)), None))
    if not context.on_gpu:
        return (first,)
    fused = f"a fused {work.name} moves {percent(_remaining_fraction(work))} of the bytes"
    return first, *evidence(
        f"in the update the GPU works for {duration(work.device_us)} and idles for {duration(work.idle_us)}",
        fused if work.update_bytes is not None else "",
    )


def _cure(work: OptimizerWork, updating: bool, zeroing: bool) -> str:
    parts = []
    if zeroing:
        parts.append("optimizer.zero_grad(set_to_none=True), the default since PyTorch 2.0")
    if updating and work.update_bytes is not None:
        parts.append(f"torch.optim.{work.name}(…, fused=True)")
    elif updating:
        whole = f"{work.name}(…, foreach=True)"
        own = f"torch._foreach_ operators on the lists of all tensors in {work.name}.step, or torch.compile on it"
        parts.append(f"{whole if work.name in _GROUPED else own}, or one that PyTorch can fuse (Adam, AdamW, SGD)")
    return f"{' and '.join(parts)}."


FINDINGS = (
    FindingKind("unfused_optimizer", "unfused optimizer", unfused_optimizer, lesson="08_fused_kernels", is_bound=True),
)
