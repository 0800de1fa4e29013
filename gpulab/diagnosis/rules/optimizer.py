"""Rule about the optimizer: parameters updated or gradients zeroed one by one, in many small operations."""

from __future__ import annotations

from gpulab.analysis.host.optimizer_bytes import FUSED_ADAM_BYTES
from gpulab.analysis.host.optimizer_work import OptimizerWork
from gpulab.analysis.host.source_lines import line_of
from gpulab.diagnosis.context import RuleContext, Undetermined
from gpulab.diagnosis.finding import Evidence, Finding
from gpulab.diagnosis.kind import FindingKind
from gpulab.diagnosis.rules.launches import idle_us
from gpulab.formatting import duration, number, percent
from gpulab.intervals import Intervals

_PASS_BYTES = 10  # of a parameter by one operator, on average: some read one number and write one, some read two
_FUSED_PASSES = FUSED_ADAM_BYTES / _PASS_BYTES
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
    found = context.facts.optimizer
    if found is None:
        return None
    why = context.withheld("idle_causes") if context.on_gpu else None
    if why is not None:
        return _withheld(context, found, why)
    updating, zeroing = _on_gpu(context, found) if context.on_gpu else _on_cpu(context, found)
    saved = updating + zeroing
    if saved < context.thresholds.silence * (context.step_us or 0.0) or not saved:
        return None
    one_by_one = updating >= zeroing
    share = saved / (context.step_us or saved)
    times = found.step_times if one_by_one else found.zero_times
    return Finding(
        "unfused_optimizer",
        _summary(found, one_by_one, share),
        tuple(_evidence(context, found, updating, zeroing)),
        saved,
        "likely",
        parts=("optimizer", "compute/optimizer", "launch/optimizer") if context.on_gpu else ("compute", "optimizer"),
        settings=(("fused_optimizer", "True"),) if updating and found.update_bytes is not None else (),
        cure=_cure(found, updating > 0, zeroing > 0),
        source_line=_line(context, times),
    )


def _withheld(context: RuleContext, found: OptimizerWork, why: str) -> Undetermined | None:
    """Without the GPU's idle time; told where that could hide enough of the program's time in the optimizer."""
    host_us = found.zero_host_us if found.zeroing else 0.0
    host_us += found.host_us if found.style in ("for-loop", "foreach") else 0.0
    if min(host_us, idle_us(context)) < context.thresholds.silence * (context.step_us or 0.0) or not host_us:
        return None
    what = "What the GPU loses while the optimizer works in many small operations"
    return Undetermined("unfused_optimizer", what, f"{why}; record the trace again")


def _on_gpu(context: RuleContext, found: OptimizerWork) -> tuple[float, float]:
    """What fusing the update and dropping the gradients would save at most: idle time, and bytes that need not move."""
    updating = 0.0
    if found.style in ("for-loop", "foreach"):
        updating = found.idle_us + found.device_us * (1 - _kept_fraction(found))
    zeroing = found.zero_idle_us + found.zero_device_us if found.zeroing else 0.0
    return updating, zeroing


def _on_cpu(context: RuleContext, found: OptimizerWork) -> tuple[float, float]:
    """The same: the update from unprofiled steps, zeroing from profiled ones.

    What PyTorch can fuse on a CPU saves passes over memory; of any other, updated tensor by tensor, the calls, and of
    what computes all but as many passes as a fused update needs.
    """
    zeroing = found.zero_host_us if found.zeroing else 0.0
    took, step = context.facts.optimizer_us, context.facts.step_us
    if took is None or step is None or found.style in (None, "fused"):
        return 0.0, zeroing
    if found.update_bytes is not None:
        updating = took.median * (1 - _kept_fraction(found))
        return updating if took.median >= context.thresholds.optimizer_cpu_notice * step.median else 0.0, zeroing
    if found.style != "for-loop":
        return 0.0, zeroing
    kept = (1 - found.calling_share) * min(1.0, _FUSED_PASSES / found.passes if found.passes else 1.0)
    updating = took.median * (1 - kept)
    return updating if updating >= context.thresholds.optimizer_cpu_notice * step.median else 0.0, zeroing


def _kept_fraction(found: OptimizerWork) -> float:
    """Of the bytes that the update moves, what it moves fused; all of them where PyTorch cannot fuse it."""
    moved = found.update_bytes
    return 1.0 if moved is None else moved.fused_fraction


def _summary(found: OptimizerWork, one_by_one: bool, share: float) -> str:
    if one_by_one:
        return (
            f"The optimizer updates the parameters in many small operations: up to {percent(share)} of each step could "
            "be saved with one operation for all."
        )
    return (
        f"The gradients are set to zero one by one, which takes up to {percent(share)} of each step; they could be "
        "dropped instead."
    )


def _evidence(context: RuleContext, found: OptimizerWork, updating: float, zeroing: float) -> list[Evidence]:
    told = []
    if zeroing:
        idle = f"; the GPU idles for {duration(found.zero_idle_us)} of it" if context.on_gpu else ""
        told.append(
            Evidence(
                f"{number(found.zeroing)} calls per step set gradients to zero and take "
                f"{duration(found.zero_host_us)}{idle}",
                _first(found.zero_times),
            )
        )
    if updating:
        took = context.facts.optimizer_us
        host = took.median if took is not None and not context.on_gpu else found.host_us
        style = "group by group" if found.style == "foreach" else "one by one"
        told.append(
            Evidence(
                f"{found.name}.step updates the parameters {style}: {number(found.operators)} operators and "
                f"{duration(host)} per step",
                _first(found.step_times),
            )
        )
        if context.on_gpu:
            told.append(
                Evidence(f"the GPU works {duration(found.device_us)} on it and idles for {duration(found.idle_us)}")
            )
            if found.update_bytes is not None:
                told.append(Evidence(f"a fused {found.name} moves {percent(_kept_fraction(found))} of the bytes"))
    return told


def _cure(found: OptimizerWork, updating: bool, zeroing: bool) -> str:
    parts = []
    if zeroing:
        parts.append("optimizer.zero_grad(set_to_none=True), the default since PyTorch 2.0")
    if updating and found.update_bytes is not None:
        parts.append(f"torch.optim.{found.name}(…, fused=True)")
    elif updating:
        whole = f"{found.name}(…, foreach=True)"
        own = f"torch._foreach_ operators on the lists of all tensors in {found.name}.step, or torch.compile on it"
        parts.append(f"{whole if found.name in _GROUPED else own}, or one that PyTorch can fuse (Adam, AdamW, SGD)")
    return f"{' and '.join(parts)}."


def _first(times: Intervals) -> tuple[int, int] | None:
    return (int(times[0, 0]), int(times[0, 1])) if len(times) else None


def _line(context: RuleContext, times: Intervals) -> str:
    place = line_of(context.facts.run, times)
    return "" if place is None else str(place)


FINDINGS = (
    FindingKind(
        "unfused_optimizer",
        "an optimizer of many small operations",
        unfused_optimizer,
    ),
)

__all__ = ["FINDINGS", "unfused_optimizer"]
