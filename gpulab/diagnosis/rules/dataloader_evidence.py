"""What a finding about loading rests on: what the time to make a batch goes to, and at which line of the code."""

from __future__ import annotations

from gpulab.analysis.host.dataloader import LoadingFacts
from gpulab.analysis.host.source_lines import LEAST_SHARE, LineShare, line_of, lines_of
from gpulab.diagnosis.context import RuleContext
from gpulab.formatting import duration
from gpulab.intervals import EMPTY, Intervals, intersect
from gpulab.timeline import spans

_MOST = 0.5  # ours: what takes half of a batch's time decides what its workers need
_PART_TOLD, _WAIT_TOLD = 0.01, 0.05  # ours, of a batch's time: a smaller part, or wait, is left out of the sentence


def times_by_cause(inside: LoadingFacts) -> dict[str, float]:
    """µs per batch by cause. Waiting for a core is part of what computes; other waiting is not ready for one."""
    waited = inside.read_us * (inside.read_waited_fraction or 0.0)
    waited += inside.transform_us * (inside.transform_waited_fraction or 0.0)
    working, free = inside.read_us + inside.transform_us - waited, 1 - (inside.core_wait_fraction or 0.0)
    return {
        "cpu_preprocessing": working * free,
        "storage_bound": waited,
        "slow_collate": inside.collate_us * free,
    }


def waiting_for_core_us(inside: LoadingFacts) -> float:
    """Of a batch: ready to compute, but without a core."""
    waited_us = times_by_cause(inside)["storage_bound"]
    computing_us = inside.read_us + inside.transform_us - waited_us + inside.collate_us
    return computing_us * (inside.core_wait_fraction or 0.0)


def mostly_waits(inside: LoadingFacts) -> bool:
    """At least half of the time to make a batch is waiting for a disk, a network or a lock: it needs no core."""
    return times_by_cause(inside)["storage_bound"] >= _MOST * inside.batch_us


def making(inside: LoadingFacts) -> str:
    """How long a batch takes to make and what that goes to, in words."""
    return f"making one batch takes {duration(inside.batch_us)} (median of {inside.batches}), of it {_split(inside)}"


def _split(inside: LoadingFacts) -> str:
    parts = {
        "reading": inside.read_us,
        "transforming": inside.transform_us,
        "putting together": inside.collate_us,
        "page-locking": inside.pin_us or 0.0,
    }
    words = ", ".join(f"{name} {duration(us)}" for name, us in parts.items() if us >= _PART_TOLD * inside.batch_us)
    waits = {
        "for a disk, a network or a lock": times_by_cause(inside)["storage_bound"],
        "for a free processor core": waiting_for_core_us(inside),
    }
    for what, time_us in waits.items():
        if time_us >= _WAIT_TOLD * inside.batch_us:
            words += f"; {duration(time_us)} is waiting {what}"
    return words


# -- the line of code --------------------------------------------------------------------------------------------------


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
    lines = [line for line in lines_of(run, waits) if line.looks > 0 and line.place.function]
    for first in lines:
        whole = [line for line in lines if _function(line) == _function(first)]
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
    return intersect(spans.loading_times(timeline), account.host_covered)
