"""Rules about how numbers lie in memory: images in an order that kernels change, sizes that units cannot take whole."""

from __future__ import annotations

import numpy as np

from gpulab.analysis.gpu.alignment import alignment
from gpulab.analysis.host.source_lines import line_of
from gpulab.diagnosis.context import RuleContext, Undetermined
from gpulab.diagnosis.finding import Evidence, Finding
from gpulab.formatting import duration, number, percent

_TOLD_ENOUGH = 0.5  # ours, of the products' time: where so much has sizes, none of them odd, no question is open
_SLOWER = 0.5  # ours: a product whose sizes do not fit takes about twice as long (NVIDIA shows 2 to 4 times)


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
        f"Images are rearranged in memory before and after convolutions: {percent(share)} of the GPU's computing time.",
        (
            Evidence(
                f"{number(count)} operations per step only change the order of the axes, "
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
    place = line_of(context.facts.run, np.array([host.span], dtype=np.int64)) if host.span is not None else None
    return Finding(
        "layout",
        f"Tensors are copied only to change the order of their axes in memory: {percent(host.rearranging_share)} of "
        f"{context.unit}.",
        (Evidence(f"{number(host.rearranging_count)} such copies per step", host.span),),
        host.rearranging_share * (context.step_us or 0.0),
        "likely",
        parts=("compute/layout",),
        cure="Keep one order of axes through the model (for images: torch.channels_last), and leave out .contiguous() "
        "where the next layer does not need it.",
        source_line="" if place is None else str(place),
    )


def odd_shapes(context: RuleContext) -> Finding | Undetermined | None:
    """Matrix products whose sizes are no multiples of 8, so that the matrix units work on padded or split pieces."""
    work = context.facts.work
    if work is None or not context.on_gpu or context.withheld("tensor_core_fraction") is not None:
        return None
    found = alignment(work)
    if found is None or found.on_units < context.thresholds.matrix_material:
        return None
    if found.odd < context.thresholds.silence:
        if found.told >= _TOLD_ENOUGH * found.on_units:
            return None
        return Undetermined(
            "odd_shapes",
            "Whether the sizes of matrix products fit the GPU's matrix units",
            "Record the trace with record_shapes=True",
        )
    sizes = tuple(Evidence(f"for example {example}") for example in found.examples)
    return Finding(
        "odd_shapes",
        f"{percent(found.odd)} of the computing time goes to matrix products whose sizes do not fit the GPU's matrix "
        "units (multiples of 8).",
        (Evidence(f"{found.how}: {found.costliest}"), *sizes),
        found.odd * _SLOWER * context.part_us("compute"),
        "possible" if not sizes else "likely",
        parts=("compute/matrix",),
        cure="Pad to multiples of 8: layer widths, the number of positions; the vocabulary to a multiple of 64.",
    )


__all__ = ["layout", "odd_shapes"]
