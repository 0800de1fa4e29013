"""Rules about the computation: operations that could be fused, the memory layout of tensors, and number formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from msgspec.structs import replace

from gpulab.analysis.chains import attention_chains, attention_on_cpu, pointwise_chains, pointwise_on_cpu
from gpulab.analysis.device_peaks import (
    BF16_SINCE,
    PrecisionUse,
    alignment,
    compute_capability,
    has_units,
    narrow_ratio,
    precision_use,
    tf32_ratio,
)
from gpulab.analysis.kernels import DeviceWork
from gpulab.diagnosis.finding import Evidence, Finding, FindingKind, RuleContext, Undetermined, evidence
from gpulab.diagnosis.idle_gpu import is_replayed
from gpulab.diagnosis.own_code import leading_part, with_part
from gpulab.formatting import duration, factor, number, percent
from gpulab.intervals import Intervals
from gpulab.run import Timeline
from gpulab.timeline.labels import differentiates_twice

# -- operations that could be one --------------------------------------------------------------------------------------

_Chains = TypeVar("_Chains")

_BEYOND_CACHES_US = 500.0  # ours, on a CPU: a shorter attention stays in the caches, fused or not
_COMPILED = ("triton_", "Torch-Compiled Region", "CompiledFunction", "## Call CompiledFxGraph")


def unfused_attention(context: RuleContext) -> Finding | None:
    """Attention writes the matrix of all pairs of positions to memory, takes its softmax and reads the matrix again."""
    chains = _chains(context, attention_chains, attention_on_cpu)
    if chains is None or (not context.on_gpu and chains.share < context.thresholds.attention_cpu_notice):
        return None
    time_us, flash = _time_us(context, chains.share), "flash" if context.on_gpu else "auto"
    worth = context.on_gpu or time_us >= _BEYOND_CACHES_US * chains.per_step
    between = percent(_share(context, chains.share))
    products = percent(_share(context, chains.product_share))
    return Finding(
        "unfused_attention",
        f"Unfused attention: {between} of {_computing(context)} lies between its two matmuls.",
        (
            Evidence(f"{number(chains.per_step)}× per step a softmax stands between two batched matmuls", chains.span),
            Evidence(f"the matmuls take another {products}, partly memory traffic"),
        ),
        time_us if worth else None,
        "likely" if worth else "possible",
        parts=("compute/attention",),
        settings=(("attention", flash),) if chains.by_library else (),
        cure="Let PyTorch choose fused attention: no sdpa_kernel(MATH), 16-bit dtypes, and is_causal=True instead of "
        "your own mask."
        if chains.by_library
        else "Use torch.nn.functional.scaled_dot_product_attention(q, k, v) instead of matmul, softmax, matmul "
        '(in a Hugging Face model: attn_implementation="sdpa").',
        source_line=_line(context, chains.span),
    )


def memory_bound_ops(context: RuleContext) -> Finding | None:
    """Small operations in a row, each of which reads and writes all its numbers in memory."""
    chains = _chains(context, pointwise_chains, pointwise_on_cpu)
    if chains is None or (not context.on_gpu and chains.saved_share < context.thresholds.pointwise_cpu_notice):
        return None
    if _is_compiled(context) or differentiates_twice(context.run) or is_replayed(context):
        return None
    line, share = _line(context, chains.span), percent(_share(context, chains.share))
    finding = Finding(
        "memory_bound_ops",
        f"Memory-bound: chains of unfused pointwise operators take {share} of {_computing(context)}.",
        (),
        _time_us(context, chains.saved_share),
        "likely",
        parts=("compute/pointwise",),
        settings=(("compile", "default"),),
        cure="model = torch.compile(model), which fuses each chain.",
        source_line=line,
    )
    beside = with_part(context, finding, None if line else leading_part(context))
    longest = f"{number(chains.kernels)} such operators per step; the longest chain has {chains.longest:,}"
    less = f"fused, they would move {percent(chains.saved_share / chains.share)} less data"
    figures = (Evidence(longest, chains.span), Evidence(less), *beside.evidence)
    return replace(beside, evidence=figures, source_line=line)  # the chains may not lie in that part


def _is_compiled(context: RuleContext) -> bool:
    timeline = context.run.timeline
    return timeline is not None and any(n.startswith(_COMPILED) for n in timeline.names)


def _chains(
    context: RuleContext,
    on_gpu: Callable[[DeviceWork], _Chains | None],
    on_cpu: Callable[[Timeline, Intervals], _Chains | None],
) -> _Chains | None:
    """The chains on the device; None if it was not traced, or on a CPU without steps."""
    timeline, account = context.run.timeline, context.breakdown
    if context.on_gpu:
        return on_gpu(context.work) if context.work is not None else None
    if timeline is None or account is None or account.step_host_windows is None:
        return None
    return on_cpu(timeline, account.step_host_windows)


def _computing(context: RuleContext) -> str:
    return "the GPU's compute time" if context.on_gpu else context.unit


def _share(context: RuleContext, share: float) -> float:
    """On a GPU, `share` of computing time, unchanged; on a CPU, converted to a share of the typical step."""
    return share if context.on_gpu else context.of_typical(share, "compute")


def _time_us(context: RuleContext, share: float) -> float:
    return _share(context, share) * (context.part_us("compute") if context.on_gpu else context.step_us)


def _line(context: RuleContext, span: tuple[int, int] | None) -> str:
    return context.line_at(np.array([span], dtype=np.int64)) if span is not None else ""


# -- how numbers lie in memory -----------------------------------------------------------------------------------------

_ENOUGH_WITH_SIZES = 0.5  # ours, share of the products' time: if its sizes are known and none is odd, all is well
_SLOWER = 0.5  # ours: a product whose sizes do not fit takes about twice as long (NVIDIA shows 2 to 4 times)


def layout(context: RuleContext) -> Finding | None:
    """Convolutions need their images in channels_last and convert them before and after each call."""
    work = context.work
    if not context.on_gpu:
        return _layout_on_cpu(context)
    if work is None:
        return None
    rows = work.of("layout")
    share = work.share(rows)
    saved_us = share * context.part_us("compute")
    if saved_us < context.thresholds.silence * context.step_us or not saved_us:
        return None
    kernels = f"{number(int(rows.sum()) / work.steps)} kernels per step"
    return Finding(
        "layout",
        f"Layout conversions around convolutions take {percent(share)} of the GPU's compute time.",
        evidence(f"{kernels} only change the memory layout and take {duration(work.us(rows))}"),
        saved_us,
        "likely",
        parts=("compute/layout",),
        settings=(("channels_last", "True"),),
        cure="model = model.to(memory_format=torch.channels_last), and the same for each batch of images.",
    )


def _layout_on_cpu(context: RuleContext) -> Finding | None:
    host = context.facts.host
    if host is None or host.rearranging_share < context.thresholds.rearranging_notice:
        return None
    share = percent(_share(context, host.rearranging_share))
    return Finding(
        "layout",
        f"Copies that only change a tensor's memory layout take {share} of {context.unit}.",
        (Evidence(f"{number(host.rearranging_count)} such copies per step", host.span),),
        _time_us(context, host.rearranging_share),
        "likely",
        parts=("compute/layout",),
        cure="Keep one memory layout through the model (for images: torch.channels_last), and drop .contiguous() where "
        "the next layer doesn't need it.",
        source_line=_line(context, host.span),
    )


def odd_shapes(context: RuleContext) -> Finding | Undetermined | None:
    """Matrix products have sizes that are not multiples of 8, so the matrix units work on padded or split pieces."""
    if context.work is None or context.withheld("tensor_core_fraction") is not None:
        return None
    products = alignment(context.work)
    if products is None or products.on_units < context.thresholds.matrix_material:
        return None
    if products.odd < context.thresholds.silence:
        if products.judged >= _ENOUGH_WITH_SIZES * products.on_units:
            return None
        what = "Whether matmul sizes fit the tensor cores"
        return Undetermined("odd_shapes", what, "Record the trace with record_shapes=True")
    return Finding(
        "odd_shapes",
        f"{percent(products.odd)} of the compute time is matmuls whose sizes don't fit tensor cores (multiples of 8).",
        evidence(f"{products.how}: {products.costliest}", *(f"for example {each}" for each in products.examples)),
        products.odd * _SLOWER * context.part_us("compute"),
        "likely" if products.examples else "possible",
        parts=("compute/matrix",),
        cure="Pad to multiples of 8: layer widths, the number of positions; the vocabulary to a multiple of 64.",
    )


# -- the format of numbers ---------------------------------------------------------------------------------------------

_LEAST_MOVING = 0.01  # ours, share of computing: below it, halving the bytes gains next to nothing
_SCALED = ', and torch.amp.GradScaler("cuda") for the backward pass'
_MOST = 0.5  # ours, share of the step: below it, there are other causes as well
_MATERIAL = 0.1  # ours: share of the time of all products; below it, a format's gain is not listed


def no_mixed_precision(context: RuleContext) -> Finding | Undetermined | None:
    """Much of the computing time goes to matrix products in full precision or TF32; 16 bits would be faster."""
    use, device = _use(context), context.run.device
    if use is None or use.fp32 + use.tf32 < context.thresholds.matrix_material:
        return _unknown_formats(context, use)
    ratio, tf32 = narrow_ratio(device), tf32_ratio(device)
    if ratio is None:
        return _unknown_units(context)
    from_tf32 = max(1.0, ratio / tf32) if ratio and tf32 else 1.0
    saved = use.fp32 * (1 - 1 / ratio) + use.tf32 * (1 - 1 / from_tf32)
    if use.fp32 >= use.tf32:
        what, faster, costliest = "in fp32", "several times faster", _costliest(use)
    else:
        what, faster = "in TF32", "up to 2× faster"
        costliest = f"the top one is {use.costliest_tf32}, in TF32" if use.costliest_tf32 else ""
    # ratios of the peaks, for each format with a material share of the products
    formats = (("fp32", use.fp32, ratio), ("TF32", use.tf32, from_tf32))
    material = _MATERIAL * (use.fp32 + use.tf32)
    gains = " and ".join(f"{factor(times)}× faster than {name}" for name, share, times in formats if share >= material)
    moving = f"another {percent(use.half_able)} of the compute time is memory-bound"
    kind = _kind(context)
    dtype, scaled = ("bfloat16", "") if kind == "bf16" else ("float16", _SCALED)
    units = f"this GPU's tensor cores do 16-bit {faster}"
    return Finding(
        "no_mixed_precision",
        f"{percent(use.fp32 + use.tf32)} of the compute time is matmuls {what}; {units}.",
        evidence(
            costliest,
            f"on a {device.name} 16-bit matmuls are up to {gains}",
            f"{moving}: at best half of that comes on top" if use.half_able >= _LEAST_MOVING else "",
        ),
        saved * context.part_us("compute"),
        "likely",
        parts=("compute/matrix",),
        settings=(("amp", kind),),
        cure=f'with torch.autocast("cuda", dtype=torch.{dtype}): around the forward pass and the loss{scaled}.',
    )


def no_tf32(context: RuleContext) -> Finding | None:
    """Matrix products run in full precision although the GPU could use TF32, which takes one line.

    Unknown formats are reported once, by the rule about mixed precision.
    """
    use, device = _use(context), context.run.device
    ratio = tf32_ratio(device)
    if use is None or use.fp32 < context.thresholds.matrix_material or ratio is None or ratio <= 1:
        return None
    formats = "matmuls in fp32 that could use TF32 (less precision, no other change)"
    return Finding(
        "no_tf32",
        f"{percent(use.fp32)} of the compute time is {formats}.",
        evidence(_costliest(use), f"TF32 matmuls are up to {factor(ratio)}× faster on a {device.name}"),
        use.fp32 * (1 - 1 / ratio) * context.part_us("compute"),
        "likely",
        parts=("compute/matrix",),
        settings=(("tf32", "True"),),
        cure='torch.set_float32_matmul_precision("high") and torch.backends.cudnn.allow_tf32 = True, before the model '
        "runs.",
    )


def own_kernel(context: RuleContext) -> Finding | None:
    """Most of the step goes to matrix products in a kernel that no setting of PyTorch affects."""
    use = _use(context)
    share = 0.0 if use is None else use.own * context.share("compute")
    if use is None or share < _MOST:
        return None
    kernel = f"a matmul kernel of your own without tensor cores: {use.costliest_own}"
    return Finding(
        "own_kernel",
        f"{percent(share)} of {context.unit} is {kernel}.",
        evidence("no PyTorch operator starts it: neither autocast nor TF32 changes it"),
        None,
        "likely",
        parts=("compute/matrix",),
        cure="Let torch.matmul or cuBLAS do the product where it fits; else profile the kernel with Nsight Compute.",
    )


def _use(context: RuleContext) -> PrecisionUse | None:
    """The formats of the matrix products; None if the trace does not show them."""
    withheld = context.withheld("kernels") or context.withheld("tensor_core_fraction")
    return context.facts.of(precision_use) if context.work is not None and withheld is None else None


def _unknown_formats(context: RuleContext, use: PrecisionUse | None) -> Undetermined | None:
    """The question left open by a damaged trace, by kernels whose names show no format (e.g. Triton kernels), or by
    kernels that no setting of PyTorch changes.
    """
    if not context.on_gpu or not has_units(context.run.device):
        return None
    if use is None:
        what = "Whether matmuls use more precision than needed"
        return context.undetermined("no_mixed_precision", what, "kernels", "tensor_core_fraction")
    if use.fp32 + use.tf32 + use.unknown < context.thresholds.matrix_material:
        return None
    return Undetermined(
        "no_mixed_precision",
        f"Which number format the matmuls use ({percent(use.unknown)} of the compute time)",
        "The kernels' names don't show it: check the dtype of the parameters, and autocast",
    )


def _unknown_units(context: RuleContext) -> Undetermined | None:
    """The question left open for a GPU whose peaks are unknown; None for a GPU without tensor cores."""
    name, units = context.run.device.name, has_units(context.run.device)
    if units is False:
        return None
    what = f"How much faster 16-bit matmuls are on a {name}{'' if units else ', if at all'}"
    how = f"Its peaks are not known here; compare it: --ab amp={_kind(context)}"
    if name.startswith("GPU ("):
        what = "Whether 16-bit matmuls are faster on this GPU"
        how = "Run it under gpulab, or record the trace with a PyTorch that writes deviceProperties (1.10 or newer)"
    return Undetermined("no_mixed_precision", what, how)


def _kind(context: RuleContext) -> str:
    """The 16-bit format that the GPU computes fast."""
    return "bf16" if (compute_capability(context.run.device) or (0, 0)) >= BF16_SINCE else "fp16"


def _costliest(use: PrecisionUse) -> str:
    return f"the top one is {use.costliest}, which uses no tensor core" if use.costliest else ""


FINDINGS = (
    FindingKind("unfused_attention", "unfused attention", unfused_attention, "08_fused_kernels", is_bound=True),
    FindingKind("memory_bound_ops", "unfused pointwise operators", memory_bound_ops, "08_fused_kernels", is_bound=True),
    FindingKind("layout", "layout conversions", layout, "08_fused_kernels", is_bound=True),
    FindingKind("odd_shapes", "matmul sizes that don't fit tensor cores", odd_shapes),
    FindingKind("own_kernel", "a kernel of your own without tensor cores", own_kernel),
    FindingKind("no_mixed_precision", "fp32 instead of mixed precision", no_mixed_precision, "07_mixed_precision"),
    FindingKind("no_tf32", "matmuls without TF32", no_tf32, "07_mixed_precision"),
)
