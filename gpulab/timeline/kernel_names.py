"""What a kernel's name shows: its class, its number format and whether it uses tensor cores. One table for all.

No trace records these three facts. The names are those of NVIDIA's and AMD's libraries, of Triton and of PyTorch.
"""

from __future__ import annotations

import functools
import re

from msgspec import Struct

PRODUCTS = ("matrix", "attention")  # the classes that can use tensor cores


class NamedKernels(Struct, frozen=True):
    """Kernels of one class, found by a part of their names (a regular expression, lower case).

    `numbers` ("": no products) and `tensor_cores` hold for all of these kernels; None: the rest of the name decides.
    `typed` is False if the name shows neither, as for Triton: then both are unknown.
    """

    kind: str
    pattern: str
    numbers: str | None = None
    tensor_cores: bool | None = None
    typed: bool = True


class Reading(Struct, frozen=True):
    """The facts in a name. `kind` None: no class.

    `numbers`: "fp32", "tf32", "narrow" (16 bits or fewer); "": unknown, or double. `tensor_cores` None:
    unknown.
    """

    kind: str | None
    numbers: str
    tensor_cores: bool | None


# The first match decides. Inductor's kernels come first, because their names repeat those of the operators that they
# fuse: `triton_poi_fused_all_gather_mm_0` is neither (torch/_inductor/codegen/triton.py, prefixes of kernels).
KERNELS: tuple[NamedKernels, ...] = (
    NamedKernels("attention", r"^triton_tem_\w*flex_(attention|decoding)", typed=False),
    NamedKernels("matrix", r"^triton_tem_\w*(scaled_(grouped_)?mm|int_mm)", "narrow", tensor_cores=True),
    NamedKernels("matrix", r"^triton_(tem|mm|bmm)", typed=False),
    NamedKernels("normalization", r"^triton_(poi|red|per|mix|for)\w*(softmax|(batch|layer|group|rms|instance)_?norm)"),
    NamedKernels("reduction", r"^triton_(red|per|mix|spl)"),
    NamedKernels("pointwise", r"^triton_(poi|for)"),
    NamedKernels("communication", r"^(void )?(nccl|rccl|msccl)"),
    NamedKernels("communication", r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|cross_device_reduce"),
    # Symmetric memory, NVSHMEM, TensorRT-LLM's and Transformer Engine's own.
    NamedKernels("communication", r"multimem_|symmetric_memory::|nvshmem|moea2a|userbuffers"),
    # DeepEP and its like, whatever their name space: tokens go to experts on other GPUs and come back.
    NamedKernels("communication", r"(deep_ep|low_latency|int(er|ra)node(_ll)?)::|(dispatch|combine)_?int(er|ra)node"),
    NamedKernels("layout", r"nchwtonhwc|nhwctonchw|nchw2nhwc|nhwc2nchw|batched_transpose|tensortransformgeneric"),
    NamedKernels("other", r"conv_depthwise|reshape_and_cache|moe::dev::|init_device_workspace"),
    # The small kernels around a fused attention: of cuDNN (cudnn::fusion::…), FlashAttention and TensorRT-LLM.
    NamedKernels("attention", r"dot_do_o|convert_?dq|clear_dkvaccum|fmha_?reduc", "", tensor_cores=False),
    NamedKernels("attention", r"flash\w*(combine|preprocess|postprocess)", "", tensor_cores=False),
    NamedKernels("attention", r"fmha_cutlass[fb]_f32_[^ ]*sm80", "tf32", tensor_cores=True),  # xFormers: three products
    NamedKernels("attention", r"_sdpa_|flash_?(fwd|bwd|fprop|bprop|attn|attention|mla)|fmha|flashinfer::[^ ]*prefill"),
    NamedKernels("attention", r"(efficient|paged|unified|sparse)_attention|mem_eff|attn_(fwd|bwd)"),
    NamedKernels(
        "optimizer", r"multi_tensor_apply|fused_?(adam|sgd|adagrad|lamb|lion)|lamb_|k(precondition)?optimizer"
    ),
    NamedKernels("normalization", r"softmax|(batch|layer|group|instance|rms)_?norm|::bn_|^bn_|rowwisemoments"),
    NamedKernels("normalization", r"gammabetabackward|miopen.*norm"),
    NamedKernels("matrix", r"splitkreduce", tensor_cores=False),
    NamedKernels("matrix", r"nvjet_(sm\d+_)?[sd]{2,}_(?!tf32)", typed=False),  # from 32 bits: the name does not say how
    NamedKernels("matrix", r"(?<!fb)gemm|gemv|winograd|dgrad|wgrad|fprop|[sh]cudnn|convolve|xmma|nvjet"),
    NamedKernels("matrix", r"(?<!kernel_)cutlass_|cutlass::(device_)?kernel|convfwd|wgmma|tcgen05|utcmma|sm1\d\d_mma"),
    NamedKernels("matrix", r"^bmm_|matmul|scaled_mm|marlin|fft2d_|xdlops|cijk_|miopen.*conv|implicit_conv"),
    NamedKernels("copy", r"^mem(cpy|set)|direct_copy_kernel|catarraybatched|fillfunctor|copy_device|subtensoropwith"),
    NamedKernels("pointwise", r"elementwise|dropout|pointwise|threshold_kernel|clamp_scalar|act_and_mul"),
    NamedKernels("reduction", r"reduce_kernel|segmentedreduce|devicereduce|nll_loss|cunn_spatialclass|cross_entropy"),
)

_PYPROF = "NVIDIA PyProf, prof/tc.py; torch-tb-profiler, tensor_core.py"
_CUTLASS = "CUTLASS, operator names of its generator (tools/library)"
_CUBLAS = "cuBLAS and cuDNN kernel names of real traces (H100, B200)"

# A part of a kernel's name (a regular expression, lower case), and the source of its meaning.
TENSOR_CORE = (
    ("hmma", _PYPROF),
    ("h884|s884", _PYPROF),
    ("h1688|s1688", _PYPROF),
    ("16816|i8816", _PYPROF),
    ("161616", _CUTLASS),  # the shape of WMMA instructions
    ("tensorop_|wmma", _CUTLASS),
    ("gmma", _CUTLASS),  # and wgmma: Hopper's warp group instructions
    ("tcgen05|utcmma", "Blackwell's matrix instruction, in PTX and in machine code"),
    ("cutlass3|sm1[0-9][0-9]_mma", _CUTLASS),  # CUTLASS 3, whose collectives are all MMA
    (r"cute::sm[0-9]+_[0-9]+x[0-9]+x[0-9]+", "CUTLASS 3, cute/arch: a matrix instruction"),
    ("xmma", _PYPROF),
    ("sm(8[0-9]|90|1[0-2][0-9])[^ ]*gemm", _CUBLAS),
    ("nvjet", _CUBLAS),  # cuBLAS for Hopper and Blackwell
    ("bmm_[^ ]*sm1[0-9][0-9]", "TensorRT-LLM batched products for Blackwell, trace b200_moe"),
    ("flash(?!infer)", "FlashAttention, csrc/flash_attn; cuDNN's attention, …native_sdpa_sm90_flash_fprop_…"),
    ("flashinfer::[^ ]*prefill", "FlashInfer: its other kernels are not all matrix products"),
    ("fmha", "CUTLASS and TensorRT-LLM fused attention"),
    ("marlin", "Marlin, products of 16 bits by 4"),
)

NOT_TENSOR_CORE = (
    ("simt|ffma|sgemm|dgemm", _CUTLASS + ": plain floating-point units"),
    ("paged_kv|copy_", "vLLM: moves the attention's cache"),
    ("fmha_cutlass[fb]_f32_[^ ]*sm(50|60|70|75)", "xFormers: fp32 before Ampere has no matrix instruction"),
    ("fmha_cutlass[fb]_[^ ]*sm(50|60)", "xFormers: before Volta there are no tensor cores"),
)

_WIDE = re.compile(r"f64|double|dgemm|d884|complex<double")
_NARROW = re.compile(
    r"half|bf16|bfloat16|fp16|f16|hgemm|h884|h1688|hmma|hcudnn|i8816|imma|int8|fp[48]|float8|e[45]m[23]|e2m1|mxe|mxfp|"
    r"(?<![a-z0-9])[fsui]8(?![0-9])|marlin|cijk_a\w\w\w_b\w\w\w_([hb]|f8)"
)
_TF32 = re.compile(r"tf32|tensorop_s1688|[^h]s1688gemm_(?!bf16|fp16|f16)")
_SIXTEEN = re.compile(r"bf16|fp16|_f16|half")
_FROM_FP32 = re.compile(r"f32f32_f32f32|f32_f32")
_FP32 = re.compile(r"float|f32|fp32|[sc]gemm|scudnn|ffma|simt|cijk_a\w\w\w_b\w\w\w_s_?b")


@functools.lru_cache(maxsize=1 << 16)
def reading(name: str) -> Reading:
    lowered = name.lower()
    rule = next((rule for rule, pattern in _PATTERNS if pattern.search(lowered)), None)
    if rule is not None and not rule.typed:
        return Reading(rule.kind, "", None)
    if rule is None:
        units = _by_units(lowered)
        return Reading("matrix" if units else None, _numbers(lowered, units), units)
    if rule.kind not in PRODUCTS:
        return Reading(rule.kind, _numbers(lowered, False), False)
    units = rule.tensor_cores if rule.tensor_cores is not None else _by_units(lowered)
    numbers = rule.numbers if rule.numbers is not None else _numbers(lowered, units)
    says = units or numbers or rule.tensor_cores is not None or _WIDE.search(lowered)
    return Reading(rule.kind, numbers, units if says else None)


def is_communication(name: str) -> bool:
    """Whether a kernel exchanges data with other GPUs. Fast for the many names that are not kernels."""
    return _COMMUNICATION.search(name) is not None and reading(name).kind == "communication"


def _by_units(lowered: str) -> bool:
    return bool(_YES.search(lowered)) and not _NO.search(lowered)


def _numbers(lowered: str, units: bool) -> str:
    """Format by the types in the name; tensor-core kernels without a type in their name multiply 16 bits or fewer."""
    if _WIDE.search(lowered):
        return ""
    if _TF32.search(lowered) and not _SIXTEEN.search(lowered):
        return "tf32"
    if _NARROW.search(lowered):
        return "narrow"
    if units:
        return "tf32" if _FROM_FP32.search(lowered) else "narrow"
    return "fp32" if _FP32.search(lowered) else ""


_PATTERNS = tuple((rule, re.compile(rule.pattern)) for rule in KERNELS)
_OF_COMMUNICATION = "|".join(rule.pattern for rule in KERNELS if rule.kind == "communication")
_COMMUNICATION = re.compile(_OF_COMMUNICATION, re.IGNORECASE)
_YES = re.compile("|".join(pattern for pattern, _ in TENSOR_CORE))
_NO = re.compile("|".join(pattern for pattern, _ in NOT_TENSOR_CORE))
