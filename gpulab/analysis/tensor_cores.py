"""Which kernels use matrix units, told by their names, because no trace says it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from gpulab.run import Category, Timeline


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A part of a kernel's name (a regular expression, lower case), and where the reading comes from."""

    pattern: str
    source: str


_PYPROF = "NVIDIA PyProf, prof/tc.py; torch-tb-profiler, tensor_core.py"
_CUTLASS = "CUTLASS, operator names of its generator (tools/library)"
_CUBLAS = "cuBLAS and cuDNN kernel names of real traces (H100, B200)"

TENSOR_CORE = (
    NamePattern("hmma", _PYPROF),
    NamePattern("h884|s884", _PYPROF),
    NamePattern("h1688|s1688", _PYPROF),
    NamePattern("16816|i8816", _PYPROF),
    NamePattern("161616", _CUTLASS),  # the shape of WMMA instructions
    NamePattern("tensorop|wmma", _CUTLASS),
    NamePattern("gmma", _CUTLASS),  # and wgmma: Hopper's warp group instructions
    NamePattern("cutlass3|sm100_mma", _CUTLASS),  # CUTLASS 3: Hopper and Blackwell, whose collectives are all MMA
    NamePattern("xmma", _PYPROF),
    NamePattern("sm(80|90|100)[^ ]*gemm", _CUBLAS),
    NamePattern("nvjet", _CUBLAS),  # cuBLAS for Hopper and Blackwell
    NamePattern("bmm_[^ ]*sm100", "TensorRT-LLM batched products for Blackwell, trace b200_moe"),
    NamePattern("flash(?!infer)", "FlashAttention, csrc/flash_attn"),
    NamePattern("flashinfer::[^ ]*prefill", "FlashInfer: its other kernels are not all matrix products"),
    NamePattern("fmha", "CUTLASS and TensorRT-LLM fused attention"),
)

NOT_TENSOR_CORE = (
    NamePattern("simt|ffma|sgemm|dgemm", _CUTLASS + ": plain floating-point units"),
    NamePattern("reshape_and_cache|paged_kv|copy_", "vLLM: moves the attention's cache"),
    NamePattern("splitkv_combine|bwd_dot_do_o|bwd_convert_dq|bwd_preprocess", "FlashAttention: its own small kernels"),
    NamePattern("fmha_cutlass[fb]_f32_[^ ]*sm(50|60|70|75)", "xFormers: fp32 before Ampere has no matrix instruction"),
    NamePattern("fmha_cutlass[fb]_[^ ]*sm(50|60)", "xFormers: before Volta there are no tensor cores"),
)

_YES = re.compile("|".join(p.pattern for p in TENSOR_CORE))
_NO = re.compile("|".join(p.pattern for p in NOT_TENSOR_CORE))


def uses_tensor_cores(name: str) -> bool:
    """Whether a kernel of an NVIDIA GPU of that name computes on tensor cores."""
    lowered = name.lower()
    return bool(_YES.search(lowered)) and not _NO.search(lowered)


def names_tell(timeline: Timeline) -> bool:
    """Whether kernel names tell it here: only where CUDA's own calls show that the GPU is NVIDIA's.

    AMD's libraries name only some of their matrix kernels.
    """
    calls = np.isin(timeline.category, [int(Category.CUDA_RUNTIME), int(Category.CUDA_DRIVER)])
    return any(timeline.names[i].startswith("cu") for i in np.unique(timeline.name_id[calls]).tolist())


__all__ = ["NOT_TENSOR_CORE", "TENSOR_CORE", "NamePattern", "names_tell", "uses_tensor_cores"]
