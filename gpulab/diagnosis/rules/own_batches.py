"""The rule about a loop that makes its batches itself, without a DataLoader: the device waits while it does."""

from __future__ import annotations

from gpulab.analysis.breakdown import Breakdown
from gpulab.analysis.loader import share_beside
from gpulab.analysis.source_lines import lower_share
from gpulab.diagnosis.context import RuleContext
from gpulab.diagnosis.finding import Evidence, Finding, pairs
from gpulab.diagnosis.rules.calls import batch_call
from gpulab.formatting import duration, percent, plural
from gpulab.intervals import intersect, union_of
from gpulab.run import OwnBatches

# Ours, of the time that batches take. Where the thread sleeps for less of it, that time is work for the processor.
# Where it sleeps for more, and nothing else in the steps may be asleep, it waits for a disk, a network or a lock.
_AT_WORK, _ASLEEP = 0.25, 0.6

_CURE = (
    "Overlap loading with training: move this code into a Dataset and use "
    "DataLoader(…, num_workers=2, persistent_workers=True), or a prefetch thread with a queue.Queue of two batches. Or "
    "prepare the batches once, before training."
)

_BECAUSE = {
    "cpu_preprocessing": "; it is CPU work",
    "storage_bound": "; it is blocked on I/O or locks",
    "data_starved": "",
}


def makes_own_batches(context: RuleContext) -> bool:
    """Whether it is known that the loop makes its batches, and at which lines."""
    account = context.facts.breakdown
    return _unprofiled(context) is not None or (account is not None and bool(account.prepared_ns))


def making_own_batches(context: RuleContext) -> Finding | None:
    """A part of each step goes to the lines that make what the model is called with."""
    account, step_us = context.facts.breakdown, context.step_us
    if not makes_own_batches(context) or account is None or not step_us or context.withheld("idle_causes") is not None:
        return None
    times = intersect(union_of(account.prepared_ns), account.host_covered)
    share = context.share("data_wait")
    if share < context.thresholds.data_wait_notice:
        return None
    key = _cause(context, account)
    summary = (
        f"{'Input-bound: ' if share >= context.thresholds.data_wait_bad else ''}{percent(share)} of {context.unit} "
        "goes to making the next batch"
    )
    return Finding(
        key,
        f"{summary}{_BECAUSE[key]}.",
        (
            Evidence(_basis(context, account, share * step_us), pairs(times)[0] if len(times) else None),
            *batch_call(context),
        ),
        share * step_us,
        "likely",
        parts=("data_wait",) if context.on_gpu else ("data_wait", "compute", "unknown"),
        cure=_CURE,
        source_line=context.python_line_at(times),
        level="bad" if share >= context.thresholds.data_wait_bad else "notice",
        removed_ns=pairs(times),
    )


def _cause(context: RuleContext, account: Breakdown) -> str:
    """Whether making batches keeps the thread at work or asleep, as far as its CPU time tells. A GPU lets it sleep."""
    cores, share = context.facts.cores, context.share("data_wait")
    if context.on_gpu or cores is None or cores.thread_cpu_fraction is None or cores.thread_wait_fraction is None:
        return "data_starved"
    asleep = 1 - cores.thread_cpu_fraction - cores.thread_wait_fraction
    if asleep <= _AT_WORK * share:
        return "cpu_preprocessing"
    elsewhere = account.share["unknown"] + account.share["other"]
    return "storage_bound" if asleep >= _ASLEEP * share and elsewhere <= _AT_WORK * share else "data_starved"


def _unprofiled(context: RuleContext) -> OwnBatches | None:
    own = context.facts.run.own_batches
    return own if share_beside(context.facts.run) is not None else None


def _basis(context: RuleContext, account: Breakdown, time_us: float) -> str:
    own, stack = _unprofiled(context), context.facts.run.stack
    looks = ""
    if own is not None and not context.on_gpu:
        looks = f"{own.preparing_looks} of {own.looks} samples beside the traced steps: {_between(own)}"
    elif stack is not None:
        profiled = plural(len(account.steps), "traced step")
        looks = f"{int((stack.prepares_batch == 1).sum())} of {len(stack.t_ns)} samples, {profiled}"
    return f"{duration(time_us)} of {context.whole} goes into making the model's input ({looks})"


def _between(own: OwnBatches) -> str:
    """The 95 % interval of the share, "26 % to 45 %"."""
    low, high = (
        lower_share(own.preparing_looks, own.looks),
        1 - lower_share(own.looks - own.preparing_looks, own.looks),
    )
    return f"{percent(low)} to {percent(high)}"
