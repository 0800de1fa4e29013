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
from gpulab.diagnosis.context import Case
from gpulab.diagnosis.finding import Evidence, Finding
from gpulab.formatting import number, percent
from gpulab.intervals import Intervals


def unfused_attention(case: Case) -> Finding | None:
    """Attention that writes the matrix of all pairs of positions to memory, takes its softmax and reads it again."""
    found = _attention(case)
    if found is None or (not case.on_gpu and found.share < case.thresholds.attention_cpu_notice):
        return None
    computing = case.part_us("compute") if case.on_gpu else (case.step_us or 0.0)
    flash = "flash" if case.on_gpu else "auto"
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
        f"of {_computing(case)} lies between its two matrix products.",
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
        source_line=_line(case, found.span),
    )


def memory_bound_ops(case: Case) -> Finding | None:
    """Small operations in a row, each of which reads and writes all its numbers in memory."""
    found = _pointwise(case)
    if (
        found is None
        or _is_compiled(case)
        or (not case.on_gpu and found.saved_share < case.thresholds.pointwise_cpu_notice)
    ):
        return None
    computing = case.part_us("compute") if case.on_gpu else (case.step_us or 0.0)
    return Finding(
        "memory_bound_ops",
        f"Simple operations (add, multiply, activation) follow one another, and each reads and writes its data in "
        f"memory: {percent(found.share)} of {_computing(case)}.",
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
        source_line=_line(case, found.span),
    )


def _attention(case: Case) -> AttentionChains | None:
    if case.on_gpu:
        return attention_chains(case.facts.work) if case.facts.work is not None else None
    windows = _windows(case)
    timeline = case.facts.run.timeline
    return attention_on_cpu(timeline, windows) if timeline is not None and windows is not None else None


def _pointwise(case: Case) -> PointwiseChains | None:
    if case.on_gpu:
        return pointwise_chains(case.facts.work) if case.facts.work is not None else None
    windows = _windows(case)
    timeline = case.facts.run.timeline
    return pointwise_on_cpu(timeline, windows) if timeline is not None and windows is not None else None


def _windows(case: Case) -> Intervals | None:
    account = case.facts.breakdown
    return account.step_host_windows if account is not None else None


def _is_compiled(case: Case) -> bool:
    timeline = case.facts.run.timeline
    marks = ("triton_", "Torch-Compiled Region", "CompiledFunction", "## Call CompiledFxGraph")
    return timeline is not None and any(n.startswith(marks) for n in timeline.names)


def _computing(case: Case) -> str:
    return "the GPU's computing time" if case.on_gpu else case.unit


def _line(case: Case, span: tuple[int, int] | None) -> str:
    place = line_of(case.facts.run, np.array([span], dtype=np.int64)) if span is not None else None
    return "" if place is None else str(place)


__all__ = ["memory_bound_ops", "unfused_attention"]
