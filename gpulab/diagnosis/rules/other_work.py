"""Work beside training that no pause names: after the update, in the user's own code, between the steps."""

from __future__ import annotations

import numpy as np

from gpulab.analysis.breakdown import DEVICE_PARTS, PARTS
from gpulab.analysis.host.after_update import Afterwards, after_update
from gpulab.analysis.host.python_time import OwnCode, own_calls, own_code
from gpulab.analysis.host.source_lines import line_of
from gpulab.diagnosis.context import RuleContext
from gpulab.diagnosis.finding import BETWEEN, Evidence, Finding, pairs
from gpulab.formatting import duration, percent
from gpulab.intervals import intersect, joined, measure, subtract, union, union_of
from gpulab.run import Category
from gpulab.timeline import spans

_NAMED = 3  # of other work, in the sentence: the longest
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

_NUMBERS = (
    "Do it with PyTorch's operations on whole tensors in place of a loop over their numbers. Where it measures or "
    "logs: every hundredth step, or once per epoch."
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
    share = _share(context, afterwards) - _short_pauses(context)
    if share < context.thresholds.idle_notice:
        return None
    line = line_of(context.facts.run, afterwards.times)
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
                (int(afterwards.times[0, 0]), int(afterwards.times[0, 1])),
            ),
        ),
        share * context.step_us,
        "likely",
        parts=tuple(p for p in PARTS if p not in _WAITS and not (context.on_gpu and p in DEVICE_PARTS)),
        cure=_MAYBE if afterwards.looked else _CURE,
        source_line="" if line is None else str(line),
        gone=pairs(afterwards.times),
    )


def in_own_code(context: RuleContext, key: str) -> Finding | None:
    """A part of each step goes to Python code of the user's in which PyTorch runs nothing, or hardly more."""
    account = context.facts.breakdown
    if account is None or not context.step_us or context.withheld("idle_causes") is not None:
        return None
    least = context.thresholds.idle_notice
    own = own_code(context.facts.run, account) if account.typical_share("unknown") >= least else None
    if own is not None and own.share >= least:
        sentence = "{share} of {unit} goes to Python code of yours in which PyTorch computes nothing."
        return _of_own(context, key, own, sentence, _OWN)
    own = calls_of_own(context)
    if own is None or own.share < least:
        return None
    sentence = (
        "{share} of {unit} goes to Python code of yours that calls PyTorch for hardly more than single numbers, one "
        "after the other."
    )
    return _of_own(context, key, own, sentence, _NUMBERS)


def calls_of_own(context: RuleContext) -> OwnCode | None:
    """Code of the user's that calls operators in which hardly anything is computed, and which no gradient needs."""
    account = context.facts.breakdown
    return own_calls(context.facts.run, account) if account is not None and not context.on_gpu else None


def _of_own(context: RuleContext, key: str, own: OwnCode, sentence: str, cure: str) -> Finding:
    step_us = context.step_us or 0.0
    return Finding(
        key,
        sentence.format(share=percent(own.share), unit=context.unit),
        (
            Evidence(
                f"{duration(own.share * step_us)} of {duration(step_us)}, most of it at one line",
                (int(own.times[0, 0]), int(own.times[0, 1])),
            ),
        ),
        own.share * step_us,
        "likely",
        parts=("unknown",) if cure == _OWN else ("unknown", "compute"),
        cure=cure,
        source_line=str(own.place),
        gone=pairs(own.times),
    )


def _short_pauses(context: RuleContext) -> float:
    """Pauses that are known by name, but were too short to be kept one by one: other findings tell them."""
    run, step_us = context.facts.run, context.step_us or 1.0
    total_ns = sum(p.total_ns for p in run.more_pauses)
    return total_ns / max(1, len(run.steps)) / 1e3 / step_us


def _share(context: RuleContext, afterwards: Afterwards) -> float:
    """Of a profiled step; on a GPU what of it leaves the GPU idle without waiting for it."""
    if not len(afterwards.times):
        return 0.0
    if not context.on_gpu:
        return afterwards.share()
    work = context.facts.work
    waits = joined(*(b.times for b in context.facts.blocking))
    return 0.0 if work is None else afterwards.share(subtract(work.idle, waits))


# -- without a name ----------------------------------------------------------------------------------------------------


def named_work(context: RuleContext, key: str) -> Finding | None:
    """Work that the trace names and that is no part of training, while the device idles."""
    other_us = max(0.0, context.part_us("other") - _pauses_in_steps_us(context))
    share = other_us / (context.step_us or 1.0)
    if share < context.thresholds.other_work_notice:
        return None
    return Finding(
        key,
        f"For {percent(share)} of {context.unit} the program does other work than training, which the trace names.",
        (
            Evidence(
                f"{duration(other_us)} of {duration(context.step_us or 0.0)} go to that{_names_of_others(context)}"
            ),
        ),
        other_us,
        "likely",
        parts=("other",),
        cure="Do it less often, or in another thread or process.",
    )


def _names_of_others(context: RuleContext) -> str:
    """The longest of what the trace names so."""
    timeline = context.facts.run.timeline
    if timeline is None:
        return ""
    rows = np.flatnonzero(spans.in_category(timeline, Category.USER_ANNOTATION) & spans.on_training_threads(timeline))
    took = np.bincount(timeline.name_id[rows], weights=timeline.duration_ns[rows], minlength=len(timeline.names))
    marks = (spans.is_step, spans.is_loader, spans.is_optimizer)
    names = [timeline.names[i] for i in np.argsort(-took).tolist() if took[i] > 0]
    others = [name for name in names if not any(is_known(name) for is_known in marks)][:_NAMED]
    return f", most of it to: {', '.join(others)}" if others else ""


def _pauses_in_steps_us(context: RuleContext) -> float:
    """Of a profiled step, in µs of the typical one: pauses, which findings of their own tell."""
    account = context.facts.breakdown
    if account is None or not account.steps:
        return 0.0
    steps = account.covered
    share = measure(intersect(steps, union_of(account.pauses_ns))) / max(1, measure(steps))
    return share * (context.step_us or 0.0)


def between_steps(context: RuleContext, key: str) -> Finding | None:
    """Time between the steps that no pause names, in a run long enough for it to be no start-up."""
    run, step = context.facts.run, context.step_us
    if run.source == "trace" or not step or len(run.steps) < 2:
        return None
    if run.code_wall_ns < context.thresholds.outside_least_s * 1e9:
        return None
    named = [p for p in run.pauses if run.steps.start_ns[0] <= p.start_ns < run.steps.end_ns[-1]]
    gaps = np.stack((run.steps.end_ns[:-1], run.steps.start_ns[1:]), axis=1)
    unnamed = subtract(union(gaps[:, 0], gaps[:, 1]), union_of((p.start_ns, p.end_ns) for p in named))
    between_ns = measure(unnamed) - _own_ns(context)
    share = between_ns / run.code_wall_ns
    if share < context.thresholds.outside_notice:
        return None
    return Finding(
        key,
        f"{percent(share)} of the cell's time lies between training steps, in code that gpulab does not know by name.",
        (Evidence(f"{duration(between_ns / 1e3)} of {duration(run.code_wall_ns / 1e3)}"),),
        between_ns / len(run.steps) / 1e3,
        "likely",
        parts=(f"{BETWEEN}/{key}",),
        cure="See what the code does between its steps: evaluate, save and log less often.",
        gone=pairs(unnamed),
    )


def _own_ns(context: RuleContext) -> int:
    """What starting and stopping the profiler took: that lies between steps too."""
    ours = context.facts.run.observer
    return max(ours.own_ns, (ours.profiler_start_ns or 0) + (ours.profiler_stop_ns or 0))


__all__ = ["between_steps", "calls_of_own", "following_update", "in_own_code", "named_work"]
