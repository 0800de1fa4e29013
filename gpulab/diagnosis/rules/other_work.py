"""Work beside training that no pause names: after the update, and in the user's own code."""

from __future__ import annotations

from gpulab.analysis.breakdown import DEVICE_PARTS, PARTS, Breakdown
from gpulab.analysis.host.after_update import Afterwards, after_update
from gpulab.analysis.host.python_time import OwnCode, library_time, own_code
from gpulab.diagnosis.context import RuleContext
from gpulab.diagnosis.finding import Evidence, Finding, pairs
from gpulab.formatting import duration, percent
from gpulab.intervals import joined, subtract

_WAITS = ("data_wait", "sync_wait")
_CURE = (
    "Do it every hundredth step, or on the whole at once: one call on the list of all tensors (torch._foreach_norm, "
    "torch.stack) and one .tolist() in place of many .item()."
)

_AT_LINES = "{share} of {unit} goes to what the loop does after it has updated the parameters."
_BEFORE_NEXT_BATCH = (
    "{share} of {unit} goes to what the loop does after it has updated the parameters, before the next batch: metrics, "
    "logs or copies, perhaps."
)

_OWN = (
    "Where that measures or logs: do it every hundredth step, or once per epoch. Where it makes the next batch: let a "
    "DataLoader with workers make it beside the training. Where training needs it: do it with PyTorch's operations on "
    "whole tensors."
)

_LIBRARY = (
    "It is not a line of yours: {library} does this once per step, whatever the batch. Give it larger batches, and "
    "switch off the callbacks, progress bars and logs that you do not need."
)

_MAYBE = (
    "Where that measures, logs or copies: do it every hundredth step. Where it makes the next batch: let a DataLoader "
    "with workers make it beside the training."
)


def following_update(context: RuleContext, key: str) -> Finding | None:
    """After each update of the parameters a part of the step goes to something that does not train."""
    account, optimizer = context.facts.breakdown, context.facts.optimizer
    if account is None or optimizer is None or not context.step_us or context.withheld("idle_causes") is not None:
        return None
    afterwards = after_update(context.facts.run, account, optimizer)
    share = _share(context, afterwards)
    if share < context.thresholds.idle_notice:
        return None
    where = (
        "at lines below the optimizer's step"
        if afterwards.looked
        else "between the optimizer's step and the next batch"
    )
    return Finding(
        key,
        (_AT_LINES if afterwards.looked else _BEFORE_NEXT_BATCH).format(share=percent(share), unit=context.unit),
        (
            Evidence(
                f"{duration(share * context.step_us)} of {duration(context.step_us)} are spent {where}",
                pairs(afterwards.times)[0],
            ),
        ),
        share * context.step_us,
        "likely",
        parts=tuple(p for p in PARTS if p not in _WAITS and not (context.on_gpu and p in DEVICE_PARTS)),
        cure=_MAYBE if afterwards.looked else _CURE,
        source_line=context.python_line_at(afterwards.times),
        removed_ns=pairs(afterwards.times),
        title="work after the update of the parameters",
    )


def in_own_code(context: RuleContext, key: str) -> Finding | None:
    """A part of each step goes to Python code of the user's in which PyTorch runs nothing."""
    account, step_us = context.facts.breakdown, context.step_us
    if account is None or not step_us or context.withheld("idle_causes") is not None:
        return None
    least = context.thresholds.idle_notice
    library = _in_a_library(context, key, account, step_us)
    if library is not None:
        return library
    own = own_code(context.facts.run, account) if account.typical_share("unknown") >= least else None
    if own is None or own.share < least:
        return None
    return Finding(
        key,
        f"{percent(own.share)} of {context.unit} goes to Python code of yours in which PyTorch computes nothing.",
        (
            Evidence(
                f"{duration(own.share * step_us)} of {duration(step_us)}, most of it {_where(own)}",
                pairs(own.times)[0],
            ),
        ),
        own.share * step_us,
        "likely",
        parts=("unknown",),
        cure=_OWN,
        source_line=str(own.place) if own.place is not None else "",
        source=own.source,
        removed_ns=pairs(own.times),
        title="your own Python code",
        lesson="02_profile_first",
    )


def _where(own: OwnCode) -> str:
    if own.place is not None:
        return "at one line" if not own.place.units else "at one line or loop"
    return f"in {own.function}" if own.function else "at a few lines"


def _in_a_library(context: RuleContext, key: str, account: Breakdown, step_us: float) -> Finding | None:
    """The loop is a library's, and its own Python takes a part of each step."""
    least = context.thresholds.idle_notice
    own = library_time(context.facts.run, account) if account.typical_share("unknown") >= least else None
    if own is None or own.share < least:
        return None
    took = f"{duration(own.share * step_us)} of {duration(step_us)}, in which PyTorch computes nothing"
    return Finding(
        key,
        f"{own.library} spends {percent(own.share)} of {context.unit} in its own Python.",
        (Evidence(took, pairs(own.times)[0]),),
        own.share * step_us,
        "likely",
        parts=("unknown",),
        cure=_LIBRARY.format(library=own.library),
        removed_ns=pairs(own.times),
        title=f"Python code of {own.library}",
    )


def _share(context: RuleContext, afterwards: Afterwards) -> float:
    """Of a profiled step; on a GPU what of it leaves the GPU idle without waiting for it."""
    if not len(afterwards.times):
        return 0.0
    if not context.on_gpu:
        return afterwards.share()
    work = context.facts.work
    waits = joined(*(b.times for b in context.facts.blocking))
    return 0.0 if work is None else afterwards.share(subtract(work.idle, waits))
