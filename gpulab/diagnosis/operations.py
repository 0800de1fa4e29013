"""Rules about what is computed: operations that could be one, and numbers that lie in memory as kernels dislike.

Rules about the format of numbers: matrix products in full precision on a GPU with units for shorter numbers.
"""

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
from gpulab.diagnosis.finding import Evidence, Finding, FindingKind, RuleContext, Undetermined, record_again
from gpulab.diagnosis.idle_gpu import is_replayed
from gpulab.diagnosis.own_code import leading_part, with_part
from gpulab.formatting import duration, factor, number, percent
from gpulab.intervals import Intervals
from gpulab.run import Timeline
from gpulab.timeline.labels import differentiates_twice

_Chains = TypeVar("_Chains")

_TOLD_ENOUGH = 0.5  # ours, of the products' time: where so much has sizes, none of them odd, no question is open
_BEYOND_CACHES_US = 500.0  # ours, on a CPU: what takes less per attention stays in its caches, fused or not
_SLOWER = 0.5  # ours: a product whose sizes do not fit takes about twice as long (NVIDIA shows 2 to 4 times)


def unfused_attention(context: RuleContext) -> Finding | None:
    """Attention that writes the matrix of all pairs of positions to memory, takes its softmax and reads it again."""
    chains = _chains(context, attention_chains, attention_on_cpu)
    if chains is None or (not context.on_gpu and chains.share < context.thresholds.attention_cpu_notice):
        return None
    time_us, flash = _time_us(context, chains.share), "flash" if context.on_gpu else "auto"
    worth = context.on_gpu or time_us >= _BEYOND_CACHES_US * chains.per_step
    by_hand = (
        "Use torch.nn.functional.scaled_dot_product_attention(q, k, v) instead of matmul, softmax, matmul "
        '(in a Hugging Face model: attn_implementation="sdpa").'
    )
    by_library = (
        "Let PyTorch choose fused attention: no sdpa_kernel(MATH), 16-bit dtypes, and is_causal=True instead of your "
        "own mask."
    )
    return Finding(
        "unfused_attention",
        f"Unfused attention: {percent(_share(context, chains.share))} of {_computing(context)} lies between its two "
        "matmuls.",
        (
            Evidence(
                f"{number(chains.per_step)}× per step a softmax stands between two batched matmuls",
                chains.span,
            ),
            Evidence(
                f"the matmuls take another {percent(_share(context, chains.product_share))}, partly memory traffic"
            ),
        ),
        time_us if worth else None,
        "likely" if worth else "possible",
        parts=("compute/attention",),
        settings=(("attention", flash),) if chains.by_library else (),
        cure=by_library if chains.by_library else by_hand,
        source_line=_line(context, chains.span),
    )


def memory_bound_ops(context: RuleContext) -> Finding | None:
    """Small operations in a row, each of which reads and writes all its numbers in memory."""
    chains = _chains(context, pointwise_chains, pointwise_on_cpu)
    if (
        chains is None
        or _is_compiled(context)
        or differentiates_twice(context.facts.run)
        or is_replayed(context)
        or (not context.on_gpu and chains.saved_share < context.thresholds.pointwise_cpu_notice)
    ):
        return None
    chains_finding = Finding(
        "memory_bound_ops",
        f"Memory-bound: chains of unfused pointwise operators take {percent(_share(context, chains.share))} of "
        f"{_computing(context)}.",
        (
            Evidence(
                f"{number(chains.kernels)} such operators per step; the longest chain has {chains.longest:,}",
                chains.span,
            ),
            Evidence(f"fused, they would move {percent(chains.saved_share / chains.share)} less data"),
        ),
        _time_us(context, chains.saved_share),
        "likely",
        parts=("compute/pointwise",),
        settings=(("compile", "default"),),
        cure="model = torch.compile(model), which fuses each chain.",
        source_line=_line(context, chains.span),
    )
    part = None if chains_finding.source_line else leading_part(context)
    beside = with_part(context, replace(chains_finding, evidence=()), part)  # whether the chains lie there is not known
    return replace(chains_finding, summary=beside.summary, evidence=(*chains_finding.evidence, *beside.evidence))


def layout(context: RuleContext) -> Finding | None:
    """Convolutions that want their images channel by channel last, and reorder them before and after each call."""
    work = context.facts.work
    if not context.on_gpu:
        return _layout_on_cpu(context)
    if work is None:
        return None
    share = work.share(work.of("layout"))
    saved = share * context.part_us("compute")
    if saved < context.thresholds.silence * (context.step_us or 0.0) or not saved:
        return None
    count = int(work.of("layout").sum()) / work.steps
    return Finding(
        "layout",
        f"Layout conversions around convolutions take {percent(share)} of the GPU's compute time.",
        (
            Evidence(
                f"{number(count)} kernels per step only change the memory layout and take "
                f"{duration(work.us(work.of('layout')))}"
            ),
        ),
        saved,
        "likely",
        parts=("compute/layout",),
        settings=(("channels_last", "True"),),
        cure="model = model.to(memory_format=torch.channels_last), and the same for each batch of images.",
    )


def _layout_on_cpu(context: RuleContext) -> Finding | None:
    host = context.facts.host
    if host is None or host.rearranging_share < context.thresholds.rearranging_notice:
        return None
    return Finding(
        "layout",
        f"Copies that only change a tensor's memory layout take {percent(_share(context, host.rearranging_share))} of "
        f"{context.unit}.",
        (Evidence(f"{number(host.rearranging_count)} such copies per step", host.span),),
        _time_us(context, host.rearranging_share),
        "likely",
        parts=("compute/layout",),
        cure="Keep one memory layout through the model (for images: torch.channels_last), and drop .contiguous() where "
        "the next layer doesn't need it.",
        source_line=_line(context, host.span),
    )


def odd_shapes(context: RuleContext) -> Finding | Undetermined | None:
    """Matrix products whose sizes are no multiples of 8, so that the matrix units work on padded or split pieces."""
    work = context.facts.work
    if work is None or not context.on_gpu or context.withheld("tensor_core_fraction") is not None:
        return None
    products = alignment(work)
    if products is None or products.on_units < context.thresholds.matrix_material:
        return None
    if products.odd < context.thresholds.silence:
        if products.judged >= _TOLD_ENOUGH * products.on_units:
            return None
        return Undetermined(
            "odd_shapes",
            "Whether matmul sizes fit the tensor cores",
            "Record the trace with record_shapes=True",
        )
    sizes = tuple(Evidence(f"for example {example}") for example in products.examples)
    return Finding(
        "odd_shapes",
        f"{percent(products.odd)} of the compute time is matmuls whose sizes don't fit tensor cores (multiples of 8).",
        (Evidence(f"{products.how}: {products.costliest}"), *sizes),
        products.odd * _SLOWER * context.part_us("compute"),
        "possible" if not sizes else "likely",
        parts=("compute/matrix",),
        cure="Pad to multiples of 8: layer widths, the number of positions; the vocabulary to a multiple of 64.",
    )


def _chains(
    context: RuleContext,
    on_gpu: Callable[[DeviceWork], _Chains | None],
    on_cpu: Callable[[Timeline, Intervals], _Chains | None],
) -> _Chains | None:
    """As the device shows them; None where it was not traced, or on a CPU no step was found."""
    timeline, account, work = context.facts.run.timeline, context.facts.breakdown, context.facts.work
    if context.on_gpu:
        return on_gpu(work) if work is not None else None
    if timeline is None or account is None or account.step_host_windows is None:
        return None
    return on_cpu(timeline, account.step_host_windows)


def _is_compiled(context: RuleContext) -> bool:
    timeline = context.facts.run.timeline
    marks = ("triton_", "Torch-Compiled Region", "CompiledFunction", "## Call CompiledFxGraph")
    return timeline is not None and any(n.startswith(marks) for n in timeline.names)


def _computing(context: RuleContext) -> str:
    return "the GPU's compute time" if context.on_gpu else context.unit


def _share(context: RuleContext, share: float) -> float:
    """Of the GPU's computing time as it is; on a CPU what is a share of the profiled steps, of the typical one."""
    return share if context.on_gpu else context.of_typical(share, "compute")


def _time_us(context: RuleContext, share: float) -> float:
    return _share(context, share) * (context.part_us("compute") if context.on_gpu else context.step_us or 0.0)


def _line(context: RuleContext, span: tuple[int, int] | None) -> str:
    return context.line_at(np.array([span], dtype=np.int64)) if span is not None else ""


_MOVING_TOLD = 0.01  # ours, of computing: below it half the bytes bring next to nothing
_SCALED = ', and torch.amp.GradScaler("cuda") for the backward pass'
_MOST = 0.5  # ours, of the step: what takes less has other causes beside it
_MATERIAL = 0.1  # ours: of the time of all products; below it their gain is not told on its own


def no_mixed_precision(context: RuleContext) -> Finding | Undetermined | None:
    """Much of the computing time goes to matrix products in full precision or TF32; 16 bits would be faster."""
    use = _use(context)
    if isinstance(use, Undetermined) or use is None or use.fp32 + use.tf32 < context.thresholds.matrix_material:
        return _unknown_formats(context, use) if isinstance(use, PrecisionUse) else use
    device = context.facts.run.device
    ratio, tf32 = narrow_ratio(device), tf32_ratio(device)
    if ratio is None:
        return _unknown_units(context)
    from_tf32 = max(1.0, ratio / tf32) if ratio and tf32 else 1.0
    saved = use.fp32 * (1 - 1 / ratio) + use.tf32 * (1 - 1 / from_tf32)
    able = compute_capability(device) or (0, 0)
    kind = "bf16" if able >= BF16_SINCE else "fp16"
    full = use.fp32 >= use.tf32
    what, faster = ("in fp32", "several times faster") if full else ("in TF32", "up to 2× faster")
    return Finding(
        "no_mixed_precision",
        f"{percent(use.fp32 + use.tf32)} of the compute time is matmuls {what}; this GPU's tensor cores do 16-bit "
        f"{faster}.",
        (*_costliest(use, tf32=not full), _faster(context, use, ratio, from_tf32), *_moving(use)),
        saved * context.part_us("compute"),
        "likely",
        parts=("compute/matrix",),
        settings=(("amp", kind),),
        cure=_autocast(kind),
    )


def no_tf32(context: RuleContext) -> Finding | Undetermined | None:
    """Matrix products of full precision where the GPU could use TF32: one line, and no other change."""
    use = _use(context)
    if isinstance(use, Undetermined) or use is None or use.fp32 < context.thresholds.matrix_material:
        return None  # what is not known is told once, by the rule above
    ratio = tf32_ratio(context.facts.run.device)
    if ratio is None or ratio <= 1:
        return None
    return Finding(
        "no_tf32",
        f"{percent(use.fp32)} of the compute time is matmuls in fp32 that could use TF32 (less precision, no other "
        "change).",
        (
            *_costliest(use),
            Evidence(f"TF32 matmuls are up to {factor(ratio)}× faster on a {context.facts.run.device.name}"),
        ),
        use.fp32 * (1 - 1 / ratio) * context.part_us("compute"),
        "likely",
        parts=("compute/matrix",),
        settings=(("tf32", "True"),),
        cure='torch.set_float32_matmul_precision("high") and torch.backends.cudnn.allow_tf32 = True, before the model '
        "runs.",
    )


def own_kernel(context: RuleContext) -> Finding | None:
    """Most of the step goes to matrix products of a kernel that no setting of PyTorch reaches."""
    use = _use(context)
    if not isinstance(use, PrecisionUse) or use.own * context.share("compute") < _MOST:
        return None
    return Finding(
        "own_kernel",
        f"{percent(use.own * context.share('compute'))} of {context.unit} is a matmul kernel of your own without "
        f"tensor cores: {use.costliest_own}.",
        (Evidence("no PyTorch operator starts it: neither autocast nor TF32 changes it"),),
        None,
        "likely",
        parts=("compute/matrix",),
        cure="Let torch.matmul or cuBLAS do the product where it fits; else profile the kernel with Nsight Compute.",
    )


def _use(context: RuleContext) -> PrecisionUse | Undetermined | None:
    work = context.facts.work
    if not context.on_gpu:
        return None
    why = context.withheld("kernels") or context.withheld("tensor_core_fraction")
    if why is not None and has_units(context.facts.run.device):
        what = "Whether matmuls use more precision than needed"
        return record_again("no_mixed_precision", what, why)
    return precision_use(work) if work is not None and why is None else None


def _unknown_formats(context: RuleContext, use: PrecisionUse) -> Undetermined | None:
    """Matrix products of kernels whose names say no format, as Triton's, or that no setting of PyTorch reaches."""
    share = use.fp32 + use.tf32 + use.unknown
    if share < context.thresholds.matrix_material or not has_units(context.facts.run.device):
        return None
    return Undetermined(
        "no_mixed_precision",
        f"Which number format the matmuls use ({percent(use.unknown)} of the compute time)",
        "The kernels' names don't show it: check the dtype of the parameters, and autocast",
    )


def _unknown_units(context: RuleContext) -> Undetermined | None:
    """A GPU whose peaks are not known; one that is known to have no such units is no reason for a word."""
    device = context.facts.run.device
    units = has_units(device)
    if units is False:
        return None
    kind = "bf16" if (compute_capability(device) or (0, 0)) >= BF16_SINCE else "fp16"
    what = f"How much faster 16-bit matmuls are on a {device.name}{'' if units else ', if at all'}"
    how = f"Its peaks are not known here; compare it: --ab amp={kind}"
    if device.name.startswith("GPU ("):
        what = "Whether 16-bit matmuls are faster on this GPU"
        how = "Run it under gpulab, or record the trace with a PyTorch that writes deviceProperties (1.10 or newer)"
    return Undetermined("no_mixed_precision", what, how)


def _moving(use: PrecisionUse) -> tuple[Evidence, ...]:
    """What half the bytes would bring to the rest; not told where it is next to nothing."""
    if use.half_able < _MOVING_TOLD:
        return ()
    words = f"another {percent(use.half_able)} of the compute time is memory-bound: at best half of that comes on top"
    return (Evidence(words),)


def _costliest(use: PrecisionUse, *, tf32: bool = False) -> tuple[Evidence, ...]:
    name, how = (use.costliest_tf32, "in TF32") if tf32 else (use.costliest, "which uses no tensor core")
    return (Evidence(f"the top one is {name}, {how}"),) if name else ()


def _faster(context: RuleContext, use: PrecisionUse, ratio: float, from_tf32: float) -> Evidence:
    """By the peaks, against each format that has a share worth a word in the products."""
    formats = (("fp32", use.fp32, ratio), ("TF32", use.tf32, from_tf32))
    material = _MATERIAL * (use.fp32 + use.tf32)
    ratios = [f"{factor(times)}× faster than {what}" for what, share, times in formats if share >= material]
    return Evidence(f"on a {context.facts.run.device.name} 16-bit matmuls are up to {' and '.join(ratios)}")


def _autocast(kind: str) -> str:
    dtype, scaled = ("bfloat16", "") if kind == "bf16" else ("float16", _SCALED)
    return f'with torch.autocast("cuda", dtype=torch.{dtype}): around the forward pass and the loss{scaled}.'


FINDINGS = (
    FindingKind("unfused_attention", "unfused attention", unfused_attention, lesson="08_fused_kernels", is_bound=True),
    FindingKind(
        "memory_bound_ops",
        "unfused pointwise operators",
        memory_bound_ops,
        lesson="08_fused_kernels",
        is_bound=True,
    ),
    FindingKind("layout", "layout conversions", layout, lesson="08_fused_kernels", is_bound=True),
    FindingKind("odd_shapes", "matmul sizes that don't fit tensor cores", odd_shapes),
    FindingKind("own_kernel", "a kernel of your own without tensor cores", own_kernel),
    FindingKind(
        "no_mixed_precision", "fp32 instead of mixed precision", no_mixed_precision, lesson="07_mixed_precision"
    ),
    FindingKind("no_tf32", "matmuls without TF32", no_tf32, lesson="07_mixed_precision"),
)
