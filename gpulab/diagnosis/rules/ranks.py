"""The rule about several GPUs as one rank shows it: data is exchanged while nothing computes."""

from __future__ import annotations

from gpulab.diagnosis.context import RuleContext
from gpulab.diagnosis.finding import Evidence, Finding
from gpulab.formatting import duration, percent

_OVERLAP = (
    "Let communication run beside the backward pass: DistributedDataParallel with gradient_as_bucket_view=True and a "
    "larger bucket_cap_mb, gradient accumulation under no_sync(), or gradients compressed to 16 bits "
    "(bf16_compress_hook)."
)


def exposed_communication(context: RuleContext) -> Finding | None:
    """The GPU exchanges data with others and computes nothing meanwhile, as one rank's trace shows it."""
    share = context.share("communication")
    if not context.on_gpu or share <= context.thresholds.exposed_notice:
        return None
    lost = context.part_us("communication")
    return Finding(
        "exposed_communication",
        f"For {percent(share)} of {context.unit} the GPU exchanges data with other GPUs and computes nothing.",
        (
            Evidence(
                f"{duration(lost)} of {duration(context.step_us or 0.0)} are communication that no computing hides"
            ),
            Evidence("a part of it may be waiting for a slower rank: the traces of all ranks together tell"),
        ),
        lost,
        "measured",
        parts=("communication",),
        cure=_OVERLAP,
        level="bad" if share > context.thresholds.exposed_bad else "notice",
    )


__all__ = ["exposed_communication"]
