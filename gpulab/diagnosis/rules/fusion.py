"""Rules about operations that could be one: attention in several steps, pointwise operations one after the other."""

from __future__ import annotations

import numpy as np

from gpulab.analysis.gpu.chains import (
    AttentionChains,
    PointwiseChains,
    attention_chains,
    attention_on_cpu,
    pointwise_chains,
    pointwise_on_cpu,
)
from gpulab.analysis.host.source_lines import line_of
from gpulab.diagnosis.context import RuleContext
from gpulab.diagnosis.finding import Evidence, Finding
from gpulab.formatting import number, percent
from gpulab.intervals import Intervals


def unfused_attention(context: RuleContext) -> Finding | None:
    """Attention that writes the matrix of all pairs of positions to memory, takes its softmax and reads it again."""
    found = _attention(context)
    if found is None or (not context.on_gpu and found.share < context.thresholds.attention_cpu_notice):
        return None
    computing = context.part_us("compute") if context.on_gpu else (context.step_us or 0.0)
    flash = "flash" if context.on_gpu else "auto"
    by_hand = (
        "Call torch.nn.functional.scaled_dot_product_attention(q, k, v) in place of the two products and the softmax "
        '(in a Hugging Face model: attn_implementation="sdpa").'
    )
    by_library = (
        "Let PyTorch choose its fused attention: no sdpa_kernel(MATH) around it, 16-bit numbers, and is_causal=True in "
        "place of a mask of your own."
    )
    return Finding(
        "unfused_attention",
        f"Attention is computed in several steps that write the matrix of all pairs to memory: {percent(found.share)} "
        f"of {_computing(context)} lies between its two matrix products.",
        (
            Evidence(
                f"{number(found.per_step)} times per step a softmax stands between two batched products",
                found.span,
            ),
            Evidence(
                f"the products themselves take another {percent(found.product_share)}, part of it for that memory"
            ),
        ),
        found.share * computing,
        "likely",
        parts=("compute/attention",),
        settings=(("attention", flash),) if found.by_library else (),
        cure=by_library if found.by_library else by_hand,
        source_line=_line(context, found.span),
    )


def memory_bound_ops(context: RuleContext) -> Finding | None:
    """Small operations in a row, each of which reads and writes all its numbers in memory."""
    found = _pointwise(context)
    if (
        found is None
        or _is_compiled(context)
        or (not context.on_gpu and found.saved_share < context.thresholds.pointwise_cpu_notice)
    ):
        return None
    computing = context.part_us("compute") if context.on_gpu else (context.step_us or 0.0)
    return Finding(
        "memory_bound_ops",
        f"Simple operations (add, multiply, activation) follow one another, and each reads and writes its data in "
        f"memory: {percent(found.share)} of {_computing(context)}.",
        (
            Evidence(
                f"{number(found.kernels)} such operations per step in {number(found.chains)} chains, "
                f"up to {found.longest} in a row",
                found.span,
            ),
            Evidence(f"as one operation per chain they would move {percent(found.saved_share / found.share)} less"),
        ),
        found.saved_share * computing,
        "likely",
        parts=("compute/pointwise",),
        settings=(("compile", "default"),),
        cure="model = torch.compile(model), which makes one operation of each chain.",
        source_line=_line(context, found.span),
    )


def _attention(context: RuleContext) -> AttentionChains | None:
    if context.on_gpu:
        return attention_chains(context.facts.work) if context.facts.work is not None else None
    windows = _windows(context)
    timeline = context.facts.run.timeline
    return attention_on_cpu(timeline, windows) if timeline is not None and windows is not None else None


def _pointwise(context: RuleContext) -> PointwiseChains | None:
    if context.on_gpu:
        return pointwise_chains(context.facts.work) if context.facts.work is not None else None
    windows = _windows(context)
    timeline = context.facts.run.timeline
    return pointwise_on_cpu(timeline, windows) if timeline is not None and windows is not None else None


def _windows(context: RuleContext) -> Intervals | None:
    account = context.facts.breakdown
    return account.step_host_windows if account is not None else None


def _is_compiled(context: RuleContext) -> bool:
    timeline = context.facts.run.timeline
    marks = ("triton_", "Torch-Compiled Region", "CompiledFunction", "## Call CompiledFxGraph")
    return timeline is not None and any(n.startswith(marks) for n in timeline.names)


def _computing(context: RuleContext) -> str:
    return "the GPU's computing time" if context.on_gpu else context.unit


def _line(context: RuleContext, span: tuple[int, int] | None) -> str:
    place = line_of(context.facts.run, np.array([span], dtype=np.int64)) if span is not None else None
    return "" if place is None else str(place)


__all__ = ["memory_bound_ops", "unfused_attention"]
