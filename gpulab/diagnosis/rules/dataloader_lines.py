"""Which line of the user's code a batch takes longest in: sampled, or where the slow part is written."""

from __future__ import annotations

from gpulab.analysis.host.source_lines import LEAST_SHARE, LineShare, line_of, lines_of
from gpulab.diagnosis.context import RuleContext
from gpulab.intervals import EMPTY, Intervals, intersect
from gpulab.timeline import spans


def line_of_loading(context: RuleContext, key: str) -> str:
    """The line that takes half of the wait of the profiled steps, else the costliest one of the function that does.

    Where none surely does, and where workers load (no stack is sampled in them), the place where the part that takes
    longest is written. Empty where that is no code of the user's.
    """
    return _sampled(context) or _written(context, key)


def _written(context: RuleContext, key: str) -> str:
    loader, inside = context.facts.run.loader, context.facts.loading
    if loader is None or inside is None:
        return ""
    if key == "slow_collate":
        return loader.collate_line
    longest = max(inside.read_us, inside.transform_us, inside.collate_us)
    if longest == inside.collate_us:
        return loader.collate_line
    return loader.items_line if longest == inside.read_us else loader.transform_line


def _sampled(context: RuleContext) -> str:
    if context.facts.worker_count != 0:
        return ""
    run, waits = context.facts.run, _waits(context)
    place = line_of(run, waits)
    if place is not None:
        return str(place)
    found = [line for line in lines_of(run, waits) if line.looks > 0 and line.place.function]
    for first in found:
        whole = [line for line in found if _function(line) == _function(first)]
        if len(whole) > 1 and sum(line.share for line in whole) >= LEAST_SHARE:
            return str(first.place)
    return ""


def _function(line: LineShare) -> tuple[str, str]:
    return line.place.file, line.place.function


def _waits(context: RuleContext) -> Intervals:
    """When the training thread is in the DataLoader, within the profiled steps."""
    timeline, account = context.facts.run.timeline, context.facts.breakdown
    if timeline is None or account is None or not account.steps:
        return EMPTY
    inside = spans.on_training_thread(timeline) & spans.named(timeline, spans.is_loader)
    return intersect(spans.covered(timeline, inside), account.host_covered)


__all__ = ["line_of_loading"]
