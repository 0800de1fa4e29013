"""Rule about the first calls: where the profiled window holds them, it tells of no usual step."""

from __future__ import annotations

from gpulab.diagnosis.context import FindingKind, RuleContext
from gpulab.diagnosis.finding import Evidence, Finding, pairs
from gpulab.formatting import duration, percent
from gpulab.timeline.trace_steps import WORKERS, StartUp
from gpulab.timeline.trace_steps import start_up as start_up_of

_NAMED = 3  # ours: the longest calls; more would not be read
_CURE = (
    "Leave it out: run some steps before the profiler records, as torch.profiler.schedule(wait=1, warmup=3, active=5) "
    "does, and measure only after them."
)


def start_up(context: RuleContext) -> Finding | None:
    """The profiled window holds the first calls: libraries are loaded, the context is created, workers are started."""
    account, timeline = context.facts.breakdown, context.facts.run.timeline
    if account is None or timeline is None or context.withheld("idle_causes") is not None:
        return None
    share = account.start_up_ns / max(1, account.wall_ns)
    if share < context.thresholds.idle_notice:
        return None
    seen, once_us = start_up_of(timeline, account.device_index), account.start_up_ns / 1e3
    if not len(seen.times):
        return None
    return Finding(
        "start_up",
        f"{percent(share)} of the traced time is {_what(seen, steps=bool(context.facts.run.traced_numbers))}.",
        (Evidence(f"{duration(once_us)} of {duration(account.wall_ns / 1e3)}: {_calls(seen)}", pairs(seen.times)[0]),),
        None,
        "measured",
        parts=("start_up",),
        cure=_CURE,
        removed_ns=pairs(seen.times),
        once_us=once_us,
    )


def _what(seen: StartUp, *, steps: bool) -> str:
    if seen.calls[0][0] != WORKERS:
        return "starting up, once: the first calls load libraries and prepare the device"
    if steps:
        return "starting up, once: the DataLoader starts its workers at the first fetch"
    return "waiting for the only batch of this trace, once: the workers of a DataLoader start in their first batch"


def _calls(seen: StartUp) -> str:
    return ", ".join(f"{name} {duration(ns / 1e3)}" for name, ns in seen.calls[:_NAMED])


FINDINGS = (FindingKind("start_up", "starting up inside the traced window", start_up),)
