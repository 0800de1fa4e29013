"""Rule about the optimizer: parameters updated or gradients zeroed one by one, in many small operations."""

from __future__ import annotations

from gpulab.analysis.optimizer_work import OptimizerWork
from gpulab.diagnosis.finding import Evidence, Finding, FindingKind, RuleContext, Undetermined, pairs, record_again
from gpulab.diagnosis.idle_gpu import idle_us
from gpulab.formatting import duration, number, percent

_GROUPED = (
    "Adadelta",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
)  # of torch.optim, in groups or one by one


def unfused_optimizer(context: RuleContext) -> Finding | Undetermined | None:
    """The update runs operator by operator, or gradients are set to zero instead of being dropped."""
    work = context.facts.optimizer
    if work is None:
        return None
    why = context.withheld("idle_causes") if context.on_gpu else None
    if why is not None:
        return _withheld(context, work, why)
    updating, zeroing = _on_gpu(context, work) if context.on_gpu else _on_cpu(context, work)
    saved = updating + zeroing
    if saved < context.thresholds.silence * (context.step_us or 0.0) or not saved:
        return None
    one_by_one = updating >= zeroing
    share = saved / (context.step_us or saved)
    times = work.step_times if one_by_one else work.zero_times
    return Finding(
        "unfused_optimizer",
        _summary(work, one_by_one, share),
        tuple(_evidence(context, work, updating, zeroing)),
        saved,
        "likely",
        parts=("optimizer", "compute/optimizer", "launch/optimizer") if context.on_gpu else ("compute", "optimizer"),
        settings=(("fused_optimizer", "True"),) if updating and work.update_bytes is not None else (),
        cure=_cure(work, updating > 0, zeroing > 0),
        source_line=context.line_at(times),
    )


def _withheld(context: RuleContext, work: OptimizerWork, why: str) -> Undetermined | None:
    """Without the GPU's idle time; told where that could hide enough of the program's time in the optimizer."""
    host_us = work.zero_host_us if work.zeroing else 0.0
    host_us += work.host_us if work.style in ("for-loop", "foreach") else 0.0
    if min(host_us, idle_us(context)) < context.thresholds.silence * (context.step_us or 0.0) or not host_us:
        return None
    what = "What the GPU loses in an unfused optimizer"
    return record_again("unfused_optimizer", what, why)


def _on_gpu(context: RuleContext, work: OptimizerWork) -> tuple[float, float]:
    """What fusing the update and dropping the gradients would save at most: idle time, and bytes that need not move."""
    updating = 0.0
    if work.style in ("for-loop", "foreach"):
        updating = work.idle_us + work.device_us * (1 - _kept_fraction(work))
    zeroing = work.zero_idle_us + work.zero_device_us if work.zeroing else 0.0
    return updating, zeroing


def _on_cpu(context: RuleContext, work: OptimizerWork) -> tuple[float, float]:
    """The same: the update from unprofiled steps, zeroing from profiled ones.

    What PyTorch can fuse on a CPU saves passes over memory; any other, updated tensor by tensor, saves the calls.
    """
    zeroing = work.zero_host_us if work.zeroing else 0.0
    took, step = context.facts.optimizer_us, context.facts.step_us
    if took is None or step is None or work.style in (None, "fused"):
        return 0.0, zeroing
    if work.update_bytes is not None:
        updating = took.median * (1 - _kept_fraction(work))
        return updating if took.median >= context.thresholds.optimizer_cpu_notice * step.median else 0.0, zeroing
    if work.style != "for-loop":
        return 0.0, zeroing
    updating = took.median * work.calling_share
    return updating if updating >= context.thresholds.optimizer_cpu_notice * step.median else 0.0, zeroing


def _kept_fraction(work: OptimizerWork) -> float:
    """Of the bytes that the update moves, what it moves fused; all of them where PyTorch cannot fuse it."""
    moved = work.update_bytes
    return 1.0 if moved is None else moved.fused_fraction


def _summary(work: OptimizerWork, one_by_one: bool, share: float) -> str:
    if one_by_one:
        return (
            f"Unfused optimizer: up to {percent(share)} of each step could be saved by updating all parameters in one "
            "kernel."
        )
    return f"Zeroing gradients one by one takes up to {percent(share)} of each step; set them to None instead."


def _evidence(context: RuleContext, work: OptimizerWork, updating: float, zeroing: float) -> list[Evidence]:
    evidence = []
    if zeroing:
        idle = f"; the GPU idles for {duration(work.zero_idle_us)} of this time" if context.on_gpu else ""
        evidence.append(
            Evidence(
                f"{number(work.zeroing)} calls per step zero gradients and take {duration(work.zero_host_us)}{idle}",
                next(iter(pairs(work.zero_times)), None),
            )
        )
    if updating:
        took = context.facts.optimizer_us
        host = took.median if took is not None and not context.on_gpu else work.host_us
        style = "group by group" if work.style == "foreach" else "one by one"
        evidence.append(
            Evidence(
                f"{work.name}.step updates the parameters {style}: {number(work.operators)} operators and "
                f"{duration(host)} per step",
                next(iter(pairs(work.step_times)), None),
            )
        )
        if context.on_gpu:
            evidence.append(
                Evidence(
                    f"in the update the GPU works for {duration(work.device_us)} and idles for {duration(work.idle_us)}"
                )
            )
            if work.update_bytes is not None:
                evidence.append(Evidence(f"a fused {work.name} moves {percent(_kept_fraction(work))} of the bytes"))
    return evidence


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
