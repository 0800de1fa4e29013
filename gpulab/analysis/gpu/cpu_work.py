"""What a training computes on the CPU while its GPU has nothing to do."""

from __future__ import annotations

import numpy as np

from gpulab.intervals import Intervals, subtract, union
from gpulab.run import DEVICE_CATEGORIES, Category, Timeline
from gpulab.timeline import spans

# What a model spends its time in: one of these that starts nothing on the GPU computes on the CPU.
_HEAVY = (
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mkldnn_convolution", "aten::_convolution",
    "aten::convolution_backward", "aten::mkldnn_linear", "aten::native_batch_norm", "aten::native_layer_norm",
    "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::embedding_dense_backward", "aten::_softmax",
)  # fmt: skip


def computing_on_cpu(timeline: Timeline) -> tuple[Intervals, str]:
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
