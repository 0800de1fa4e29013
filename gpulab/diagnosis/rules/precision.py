"""Rules about the format of numbers: matrix products in full precision on a GPU with units for shorter numbers."""

from __future__ import annotations

from gpulab.analysis.device_peaks import (
    BF16_SINCE,
    PrecisionUse,
    compute_capability,
    has_units,
    narrow_ratio,
    precision_use,
    tf32_ratio,
)
from gpulab.diagnosis.context import FindingKind, RuleContext, Undetermined, record_again
from gpulab.diagnosis.finding import Evidence, Finding
from gpulab.formatting import factor, percent

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


_LESSON = "07_mixed_precision"
FINDINGS = (
    FindingKind("own_kernel", "a kernel of your own without tensor cores", own_kernel),
    FindingKind("no_mixed_precision", "fp32 instead of mixed precision", no_mixed_precision, lesson=_LESSON),
    FindingKind("no_tf32", "matmuls without TF32", no_tf32, lesson=_LESSON),
)
