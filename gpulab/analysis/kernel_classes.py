"""What kind of work a kernel does, told by its name and, where that says nothing, by the operator that launched it."""

from __future__ import annotations

import re

from gpulab.analysis import spans
from gpulab.analysis.tensor_cores import uses_tensor_cores

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

# In order: the first that matches decides. Names as in the traces of V100, A100, H100, B200 and MI300X, cuDNN, CUTLASS,
# MIOpen, composable kernels and Triton's prefixes (torch/_inductor/codegen/triton.py: poi, red, per, tem, mm).
_BY_NAME: tuple[tuple[str, str], ...] = (
    ("communication", r"^(nccl|rccl)|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|nvshmem"),
    ("layout", r"nchwtonhwc|nhwctonchw|nchw2nhwc|nhwc2nchw|batched_transpose|tensortransformgeneric"),
    ("other", r"conv_depthwise|reshape_and_cache|moe::dev::"),
    ("attention", r"flash_?(fwd|bwd|attn|attention|mla)|fmha|efficient_attention|mem_eff|flashinfer::[^ ]*prefill"),
    ("optimizer", r"multi_tensor_apply|fusedadam|fused_adam|fused_sgd|fused_adagrad|lamb_"),
    (
        "normalization",
        r"softmax|batch_?norm|layer_?norm|group_?norm|rms_?norm|instance_?norm|::bn_|^bn_|rowwisemoments",
    ),
    ("normalization", r"batchnorm|miopen.*norm"),
    ("matrix", r"(?<!fb)gemm|gemv|winograd|dgrad|wgrad|fprop|[sh]cudnn|convolve|xmma|cutlass_|cutlass::kernel|nvjet"),
    ("matrix", r"^bmm_|matmul|splitkreduce|fft2d_|xdlops|cijk_|triton_(mm|tem|bmm)|miopen.*conv|implicit_conv"),
    ("copy", r"^memcpy|^memset|direct_copy_kernel|catarraybatched|fillfunctor|copy_device"),
    ("pointwise", r"triton_poi|elementwise|dropout|pointwise|threshold_kernel|clamp_scalar|act_and_mul"),
    (
        "reduction",
        r"reduce_kernel|triton_(red|per)|segmentedreduce|devicereduce|nll_loss|cunn_spatialclass|cross_entropy",
    ),
)
_NAME = tuple((kind, re.compile(pattern)) for kind, pattern in _BY_NAME)

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

_WIDE = re.compile(r"f64|double|dgemm|complex<double")
_NARROW = re.compile(r"half|bf16|bfloat16|fp16|f16|hgemm|h884|h1688|hmma|e4m3|e5m2|mxe|int8|i8816|s8|fp8|hcudnn")
_TF32 = re.compile(r"tf32|tensorop_s1688|[^h]s1688gemm_(?!bf16|fp16|f16)")


def class_of(kernel: str, operator: str = "") -> str:
    """One of `CLASSES`, for a kernel's name and that of the innermost operator that launched it ("" unknown)."""
    lowered = kernel.lower()
    if spans.is_communication(kernel):
        return "communication"
    found = next((kind for kind, pattern in _NAME if pattern.search(lowered)), None)
    if found is None and uses_tensor_cores(kernel):
        return "matrix"
    if found is None and operator:
        found = next((kind for kind, pattern in _OPERATOR if pattern.search(operator)), None)
    return found or "other"


def number_format(kernel: str, operator: str = "") -> str:
    """In which numbers a matrix kernel of an NVIDIA GPU multiplies: "fp32", "tf32", "narrow" (16 bits or fewer) or "".

    "": double precision, or the name does not tell. Kernels for float32 name no other type of number.
    """
    lowered = kernel.lower()
    if _WIDE.search(lowered):
        return ""
    if _TF32.search(lowered) and not re.search(r"bf16|fp16|_f16|half", lowered):
        return "tf32"
    if _NARROW.search(lowered):
        return "narrow"
    if uses_tensor_cores(kernel):
        return "narrow" if not re.search(r"f32f32_f32f32|f32_f32", lowered) else "tf32"
    return "fp32"


__all__ = ["CLASSES", "POINTWISE_OPERATORS", "class_of", "number_format"]
