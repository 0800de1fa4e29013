"""What a finding about loading rests on: what the time to make a batch goes to, and at which line of the code."""

from __future__ import annotations

from gpulab.analysis.loader import LoadingFacts, times_by_cause, waiting_for_core_us
from gpulab.analysis.source_lines import (
    LineShare,
    SourceLine,
    hot_line_of_loading,
    line_only_at,
    lines_beside_cost,
    loading_lines,
)
from gpulab.diagnosis.context import RuleContext
from gpulab.formatting import duration, percent
from gpulab.intervals import EMPTY, Intervals, intersect, subtract
from gpulab.timeline import spans

_BESIDE_MAKING = ("slow_hand_over", "slow_sampler")
_PART_TOLD, _WAIT_TOLD = 0.01, 0.05  # ours, of a batch's time: a smaller part, or wait, is left out of the sentence


def making(inside: LoadingFacts) -> str:
    """How long a batch takes to make and what that goes to, in words."""
    return f"loading one batch takes {duration(inside.batch_us)} (median of {sampled(inside)}): {_split(inside)}"


def sampled(inside: LoadingFacts) -> str:
    """Of how many batches the figures speak, and out of how many."""
    few = f" timed, out of {inside.of_batches:,}" if inside.batches < inside.of_batches else ""
    return f"{inside.batches:,}{few}"


def _split(inside: LoadingFacts) -> str:
    parts = {
        "read": inside.read_us,
        "transform": inside.transform_us,
        "collate": inside.collate_us,
        "pin memory": inside.pin_us or 0.0,
    }
    words = ", ".join(f"{name} {duration(us)}" for name, us in parts.items() if us >= _PART_TOLD * inside.batch_us)
    waits = {
        "blocked on I/O or locks": times_by_cause(inside)["storage_bound"],
        "waiting for a free core": waiting_for_core_us(inside),
    }
    shares = {what: us / inside.batch_us for what, us in waits.items()}
    waiting = [f"{percent(share)} is {what}" for what, share in shares.items() if share >= _WAIT_TOLD]
    return f"{words}. Of this, {' and '.join(waiting)}" if waiting else words


# -- the line of code --------------------------------------------------------------------------------------------------


def sampler_line(context: RuleContext) -> LineShare | None:
    """The line that surely takes most of the loop's wait, in a sampler of the user's: the loop asks from elsewhere."""
    account, run, waits = context.facts.breakdown, context.facts.run, waiting_times(context)
    if run.loader is None or not run.loader.sampler_line or account is None:
        return None
    return line_only_at(run, waits, subtract(account.host_covered, waits))


def line_of_loading(context: RuleContext, key: str) -> tuple[str, bool]:
    """The line, or the loop, that surely takes most of the time to make batches, in whichever process makes them; and
    True.

    Where none surely does, the function that does the part that takes longest; and False: which of its lines is not
    known. Empty where that is no code of the user's.
    """
    looks = context.facts.run.loading_looks
    if key in _BESIDE_MAKING:
        line = sampler_line(context)
        return (str(line.place), True) if line is not None else (_written(context, key), False)
    if looks is None:
        sampled = _sampled(context)
        return (sampled, True) if sampled else (_written(context, key), False)
    place = hot_line_of_loading(context.facts.run, collating=key == "slow_collate")
    return (str(place), True) if place is not None else (_written(context, key), False)


def source_of_loading(context: RuleContext, key: str) -> tuple[SourceLine, ...]:
    """The lines around that line, each with its share of the time to make batches; empty where no line is named."""
    run = context.facts.run
    place = None if key in _BESIDE_MAKING else hot_line_of_loading(run, collating=key == "slow_collate")
    return () if place is None else lines_beside_cost(run, place, *loading_lines(run, collating=key == "slow_collate"))


def _written(context: RuleContext, key: str) -> str:
    loader, inside = context.facts.run.loader, context.facts.loading
    if loader is None or inside is None:
        return ""
    if key in ("slow_collate", "slow_hand_over"):
        return loader.collate_line
    longest = max(inside.read_us, inside.transform_us, inside.collate_us)
    if longest == inside.collate_us:
        return loader.collate_line
    return loader.items_line if longest == inside.read_us else loader.transform_line


def _sampled(context: RuleContext) -> str:
    if context.facts.worker_count != 0:
        return ""
    return context.python_line_at(waiting_times(context))


def waiting_times(context: RuleContext) -> Intervals:
    """When the training thread is in the DataLoader, within the profiled steps."""
    timeline, account = context.facts.run.timeline, context.facts.breakdown
    if timeline is None or account is None or not account.steps:
        return EMPTY
    return intersect(spans.loading_times(timeline), account.host_covered)
