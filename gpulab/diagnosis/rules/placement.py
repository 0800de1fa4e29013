"""Rules about where the model computes: on the CPU although a GPU is there, wholly or in part."""

from __future__ import annotations

from gpulab.analysis.blocking_calls import computing_on_cpu
from gpulab.diagnosis.context import FindingKind, RuleContext
from gpulab.diagnosis.finding import Evidence, Finding, pairs
from gpulab.formatting import duration, percent
from gpulab.intervals import clip, measure


def wrong_device(context: RuleContext) -> Finding | None:
    """A GPU is there, and the model or a part of it computes on the CPU."""
    chosen = next((c for c in context.facts.run.choices if c.what == "device" and c.value == "CPU"), None)
    if chosen is not None:
        return _unused(context, chosen.reason)
    return _partly(context) if context.on_gpu else None


def _unused(context: RuleContext, reason: str) -> Finding:
    computing = context.part_us("compute", "optimizer")
    return Finding(
        "wrong_device",
        "GPU unused: the model runs on the CPU.",
        (
            Evidence(f"{reason}, though PyTorch sees a GPU"),
            Evidence(f"{duration(computing)} of each step is CPU compute; the GPU's time for it was not measured"),
        ),
        computing or None,
        "likely",  # what the GPU takes for it is not known
        parts=("compute", "optimizer"),
        cure='Move the model and each batch to it: model.to("cuda") before the optimizer is made, and '
        'batch.to("cuda", non_blocking=True) in the loop.',
        level="bad",
    )


def _partly(context: RuleContext) -> Finding | None:
    timeline, account = context.facts.run.timeline, context.facts.breakdown
    if timeline is None or account is None or context.withheld("idle_causes"):
        return None
    on_cpu, costliest = computing_on_cpu(timeline)
    time_ns = measure(clip(on_cpu, *account.span_ns))
    share = time_ns / max(1, account.wall_ns)
    if not costliest or share < context.thresholds.on_cpu_notice:
        return None
    longest = max(pairs(on_cpu), key=lambda span: span[1] - span[0])
    return Finding(
        "wrong_device",
        f"Part of the model runs on the CPU: the GPU idles for {percent(share)} of {context.unit} because of it.",
        (
            Evidence(
                f"{costliest} ran on the CPU while the GPU idled, {duration(share * (context.step_us or 0))} per step",
                longest,
            ),
        ),
        share * (context.step_us or 0.0),
        "measured",
        parts=("launch", "unknown"),
        cure='Move the whole model to the GPU with model.to("cuda"), including tensors made in forward, '
        "and keep its inputs there.",
        level="bad",
    )


FINDINGS = (FindingKind("wrong_device", "running on the CPU although there is a GPU", wrong_device),)
