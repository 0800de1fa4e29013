"""Rules about what a step does that does not train: after the update, or in Python code of the user's own."""

from __future__ import annotations

from gpulab.analysis.breakdown import DEVICE_PARTS, PARTS
from gpulab.analysis.host.after_update import Afterwards, after_update
from gpulab.analysis.host.python_time import OwnCode, own_calls, own_code
from gpulab.analysis.host.source_lines import line_of
from gpulab.diagnosis.context import RuleContext
from gpulab.diagnosis.finding import Evidence, Finding
from gpulab.formatting import duration, percent
from gpulab.intervals import joined, subtract

_WAITS = ("data_wait", "sync_wait")
_CURE = (
    "Do it every hundredth step, or on the whole at once: one call on the list of all tensors (torch._foreach_norm, "
    "torch.stack) and one .tolist() in place of many .item()."
)

_OWN = (
    "Where that measures or logs: do it every hundredth step, or once per epoch. Where it makes the next batch: let a "
    "DataLoader with workers make it beside the training. Where training needs it: do it with PyTorch's operations on "
    "whole tensors."
)

_NUMBERS = (
    "Do it with PyTorch's operations on whole tensors in place of a loop over their numbers. Where it measures or "
    "logs: every hundredth step, or once per epoch."
)

_MAYBE = (
    "Where that measures, logs or copies: do it every hundredth step. Where it makes the next batch: let a DataLoader "
    "with workers make it beside the training."
)


def following_update(context: RuleContext) -> Finding | None:
    """After each update of the parameters a part of the step goes to something that does not train."""
    account, optimizer = context.facts.breakdown, context.facts.optimizer
    if account is None or optimizer is None or not context.step_us or context.withheld("idle_causes") is not None:
        return None
    found = after_update(context.facts.run, account, optimizer)
    share = _share(context, found) - _short_pauses(context)
    if share < context.thresholds.idle_notice:
        return None
    line = line_of(context.facts.run, found.times)
    where = "at lines below the optimizer's step" if found.looked else "between the optimizer's step and the next batch"
    return Finding(
        "logging_or_eval",
        f"{percent(share)} of {context.unit} goes to what the loop does after it has updated the parameters"
        f"{'' if found.looked else ', before the next batch: metrics, logs or copies, perhaps'}.",
        (
            Evidence(
                f"{duration(share * context.step_us)} of {duration(context.step_us)} are spent {where}",
                (int(found.times[0, 0]), int(found.times[0, 1])),
            ),
        ),
        share * context.step_us,
        "likely",
        parts=tuple(p for p in PARTS if p not in _WAITS and not (context.on_gpu and p in DEVICE_PARTS)),
        cure=_MAYBE if found.looked else _CURE,
        source_line="" if line is None else str(line),
        gone=tuple((start, end) for start, end in found.times.tolist()),
    )


def in_own_code(context: RuleContext) -> Finding | None:
    """A part of each step goes to Python code of the user's in which PyTorch runs nothing, or hardly more."""
    account = context.facts.breakdown
    if account is None or not context.step_us or context.withheld("idle_causes") is not None:
        return None
    least = context.thresholds.idle_notice
    found = own_code(context.facts.run, account) if account.typical_share("unknown") >= least else None
    if found is not None and found.share >= least:
        told = "goes to Python code of yours in which PyTorch computes nothing."
        return _of_own(context, found, told, _OWN)
    found = calls_of_own(context)
    if found is None or found.share < least:
        return None
    told = "goes to Python code of yours that calls PyTorch for hardly more than single numbers, one after the other."
    return _of_own(context, found, told, _NUMBERS)


def calls_of_own(context: RuleContext) -> OwnCode | None:
    """Code of the user's that calls operators in which hardly anything is computed, and which no gradient needs."""
    account = context.facts.breakdown
    return own_calls(context.facts.run, account) if account is not None and not context.on_gpu else None


def _of_own(context: RuleContext, found: OwnCode, told: str, cure: str) -> Finding:
    step_us = context.step_us or 0.0
    return Finding(
        "logging_or_eval",
        f"{percent(found.share)} of {context.unit} {told}",
        (
            Evidence(
                f"{duration(found.share * step_us)} of {duration(step_us)}, most of it at one line",
                (int(found.times[0, 0]), int(found.times[0, 1])),
            ),
        ),
        found.share * step_us,
        "likely",
        parts=("unknown",) if cure == _OWN else ("unknown", "compute"),
        cure=cure,
        source_line=str(found.place),
        gone=tuple((start, end) for start, end in found.times.tolist()),
    )


def _short_pauses(context: RuleContext) -> float:
    """Pauses that are known by name, but were too short to be kept one by one: other findings tell them."""
    run, step_us = context.facts.run, context.step_us or 1.0
    total_ns = sum(p.total_ns for p in run.more_pauses)
    return total_ns / max(1, len(run.steps)) / 1e3 / step_us


def _share(context: RuleContext, found: Afterwards) -> float:
    """Of a profiled step; on a GPU what of it leaves the GPU idle without waiting for it."""
    if not len(found.times):
        return 0.0
    if not context.on_gpu:
        return found.share()
    work = context.facts.work
    waits = joined(*(b.times for b in context.facts.blocking))
    return 0.0 if work is None else found.share(subtract(work.idle, waits))


__all__ = ["calls_of_own", "following_update", "in_own_code"]
