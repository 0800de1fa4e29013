"""What kind of work a kernel does: by its name and, where that says nothing, by the operator that launched it."""

from __future__ import annotations

import re

import numpy as np

from gpulab.run import Timeline
from gpulab.timeline import spans
from gpulab.timeline.kernel_names import reading

CLASSES = (
    "matrix",
    "attention",  # fused: softmax and both products in one kernel
    "normalization",  # batch, layer and group norm, softmax
    "pointwise",
    "reduction",
    "layout",  # from one order of the axes of images to the other
    "optimizer",
    "copy",
    "communication",
    "other",
)

# Operators whose kernels without a telling name are of that class.
_BY_OPERATOR: tuple[tuple[str, str], ...] = (
    ("attention", r"^aten::_?(scaled_dot_product_)?(flash|efficient|cudnn|mem_eff)\w*attention"),
    ("matrix", r"^aten::(mm|addmm|bmm|baddbmm|matmul|linear|addbmm|dot|mv|_scaled_mm|_addmm_activation)$"),
    ("matrix", r"^aten::(\w*convolution\w*|conv\d?d|cudnn_conv\w*|miopen_conv\w*|mkldnn_conv\w*|mkldnn_linear)$"),
    ("normalization", r"^aten::\w*(softmax|batch_norm|layer_norm|group_norm|instance_norm)\w*$"),
    ("reduction", r"^aten::(sum|mean|max|min|argmax|norm|linalg_vector_norm|var\w*|std\w*|nll_loss\w*)$"),
)
_OPERATOR = tuple((kind, re.compile(pattern)) for kind, pattern in _BY_OPERATOR)

POINTWISE_OPERATORS = re.compile(
    r"^aten::(add|sub|mul|div|rsub|neg|abs|sign|exp|expm1|log|log1p|sqrt|rsqrt|pow|tanh|sigmoid|relu|gelu|silu|"
    r"leaky_relu|hardtanh|gt|ge|lt|le|eq|ne|logical_and|logical_or|logical_not|bitwise_and|bitwise_or|bitwise_not|"
    r"hardswish|elu|clamp|clamp_min|clamp_max|where|masked_fill|addcmul|addcdiv|lerp|erf|sin|cos|maximum|minimum|"
    r"threshold|threshold_backward|gelu_backward|silu_backward|tanh_backward|sigmoid_backward|native_dropout|"
    r"native_dropout_backward|reciprocal|square|softplus|mish|fill)_?$"
)


def class_of(kernel: str, operator: str = "") -> str:
    """One of `CLASSES`, for a kernel's name and that of the innermost operator that launched it ("" unknown)."""
    kind = reading(kernel).kind
    if kind is None and operator:
        kind = next((kind for kind, pattern in _OPERATOR if pattern.search(operator)), None)
    return kind or "other"


def names_tell(timeline: Timeline) -> bool:
    """Whether kernel names tell number formats and matrix units: only where CUDA's own calls show that the GPU is
    NVIDIA's. AMD's libraries name only some of their matrix kernels."""
    calls = timeline.name_id[spans.runtime_calls(timeline)]
    return any(timeline.names[i].startswith("cu") for i in np.unique(calls).tolist())
