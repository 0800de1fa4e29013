"""Rules about where the model computes: on the CPU although a GPU is there, wholly or in part."""

from __future__ import annotations

import numpy as np

from gpulab.diagnosis.context import FindingKind, RuleContext
from gpulab.diagnosis.finding import Evidence, Finding, pairs
from gpulab.formatting import duration, percent, plural
from gpulab.intervals import Intervals, clip, measure, subtract, union
from gpulab.run import DEVICE_CATEGORIES, Category, Timeline
from gpulab.timeline import spans

# What a model spends its time in: one of these that starts nothing on the GPU computes on the CPU.
_HEAVY = (
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mkldnn_convolution", "aten::_convolution",
    "aten::convolution_backward", "aten::mkldnn_linear", "aten::native_batch_norm", "aten::native_layer_norm",
    "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::embedding_dense_backward", "aten::_softmax",
)  # fmt: skip


def wrong_device(context: RuleContext) -> Finding | None:
    """A GPU is there, and the model or a part of it computes on the CPU; as a hint: further GPUs have nothing to do."""
    chosen = next((c for c in context.facts.run.choices if c.what == "device" and c.value == "CPU"), None)
    if chosen is not None:
        return _unused(context, chosen.reason)
    if not context.on_gpu or context.facts.breakdown is None:
        return None
    return _partly(context) or _one_of_several(context)


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
    on_cpu, costliest = _on_cpu(timeline)
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


def _one_of_several(context: RuleContext) -> Finding | None:
    """Of the GPUs that a trace lists one worked, and nothing tells of other processes of this job on the others.

    Only where that one is kept busy: what keeps it waiting would keep more of them waiting.
    """
    timeline, origin = context.facts.run.timeline, context.facts.run.origin
    if timeline is None or origin is None or len(spans.devices(timeline)) != 1:
        return None
    if context.idle is None or context.idle >= context.thresholds.idle_notice:
        return None
    further = len({d.id for d in origin.device_properties}) - 1
    shared = origin.rank is not None or origin.backend is not None or (origin.world_size or 1) > 1
    if further < 1 or shared or any(_of_a_job(name) for name in timeline.names):
        return None
    others = plural(further, "further GPU")
    return Finding(
        "wrong_device",
        f"One GPU did all the work; PyTorch could see {others}.",
        (Evidence(f"the trace lists {further + 1} GPUs, and only one of them ran anything"),),
        None,
        "possible",
        cure="If they are yours to use: torch.nn.parallel.DistributedDataParallel with one process per GPU, "
        "started by torchrun.",
    )


def _of_a_job(name: str) -> bool:
    return spans.is_communication(name) or name.startswith(("nccl:", "gloo:", "DistributedDataParallel"))


def _on_cpu(timeline: Timeline) -> tuple[Intervals, str]:
    """When the training computes on the CPU while no GPU works, and the operator that takes most of it."""
    heavy = spans.in_category(timeline, Category.CPU_OP) & spans.on_training_threads(timeline)
    rows = np.flatnonzero(heavy & spans.named(timeline, spans.among(*_HEAVY)))
    calls = np.sort(timeline.start_ns[spans.runtime_calls(timeline)])
    started = np.searchsorted(calls, timeline.end_ns[rows]) - np.searchsorted(calls, timeline.start_ns[rows])
    rows = rows[started == 0]
    if not len(rows):
        return np.empty((0, 2), np.int64), ""
    loading = spans.covered(timeline, spans.named(timeline, spans.is_loader))
    busy = spans.covered(timeline, spans.in_category(timeline, *DEVICE_CATEGORIES))
    computing = union(timeline.start_ns[rows], timeline.end_ns[rows])
    totals = np.bincount(timeline.name_id[rows], weights=timeline.duration_ns[rows], minlength=len(timeline.names))
    return subtract(subtract(computing, loading), busy), timeline.names[int(totals.argmax())]


FINDINGS = (FindingKind("wrong_device", "running on the CPU although there is a GPU", wrong_device),)
