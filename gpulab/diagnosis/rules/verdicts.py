"""What is said where no cause speaks: all is well, or what is missing to tell. Exactly one of the two answers."""

from __future__ import annotations

from collections.abc import Callable

from gpulab.analysis.breakdown import Breakdown
from gpulab.analysis.steps import Spread
from gpulab.diagnosis.context import FEWEST_STEPS, Case
from gpulab.diagnosis.finding import Evidence, Finding, Level
from gpulab.formatting import duration, percent


def cannot_tell(case: Case) -> Finding | None:
    """No conclusion can be drawn, with what is missing for one."""
    return next((found for reason in _REASONS if (found := reason(case)) is not None), None)


def healthy(case: Case) -> Finding | None:
    """The device computes for nearly all of the time."""
    if cannot_tell(case) is not None:
        return None
    account = case.facts.breakdown
    assert account is not None, "without an accounting it cannot be told"
    return Finding(
        "healthy",
        f"The {_device(case)} {'works' if case.on_gpu else 'computes'} for {percent(_working(case))} of {case.unit}, "
        "and nothing is known that holds training back much.",
        (Evidence(_basis(case, account)), *_rest(case)),
        None,
        "measured",
        level="good",
    )


# -- why it cannot be told, the strongest reason first -----------------------------------------------------------------


def _no_steps(case: Case) -> Finding | None:
    run, account = case.facts.run, case.facts.breakdown
    if len(run.steps):
        return None
    wall, loaded = duration(run.code_wall_ns / 1e3), run.source == "trace"
    withheld = case.withheld("breakdown")
    if account is None and withheld:
        return None
    if account is None:
        return _unknown(
            f"No training step was found in {wall}, so nothing can be said about where a step's time goes.",
            "Record the trace with profiler.step() after each step"
            if loaded
            else "Mark steps with gpulab.step(), or profile from the first line with --whole",
        )
    if account.busy_fraction is not None:
        return None  # what the GPU waited for can be told without steps
    busiest = max(account.share, key=lambda p: account.share[p])
    return _unknown(
        f"No training step was found: this is the whole {'trace' if loaded else 'cell'}, {wall}, as one.",
        f"Largest part: {busiest.replace('_', ' ')}, {percent(account.share[busiest])} of the profiled time",
        "notice",
    )


def _too_few(case: Case) -> Finding | None:
    n = len(case.facts.run.steps)
    known = case.facts.typical_step_us is not None
    if not n or (known and not case.too_few_steps):
        return None
    return _unknown(
        f"Only {n} step{'s' if n > 1 else ''} ran, too few to name a bottleneck.",
        f"Run at least {FEWEST_STEPS} steps",
    )


def _damaged(case: Case) -> Finding | None:
    """The trace cannot carry a conclusion about the device."""
    reason = case.withheld("breakdown")
    if reason is not None and case.facts.breakdown is None:
        what = "what the GPU did" if case.on_gpu else "where the time goes"
        return _unknown(f"The trace is damaged, so nothing can be said about {what}.", reason)
    if not case.on_gpu:
        return None
    reason, idle = case.withheld("idle_causes"), case.idle
    if reason is None or idle is None or idle < case.thresholds.idle_notice:
        return None
    return _unknown(
        f"The GPU has nothing to do for {percent(idle)} of {case.unit}; this trace cannot tell why.",
        reason,
        parts=("unknown",),
    )


def _not_profiled(case: Case) -> Finding | None:
    step = case.facts.typical_step_us
    if case.facts.breakdown is not None or step is None:
        return None
    waited = case.facts.data_wait_us
    fed = (
        f"; time waiting for data is below {percent(case.thresholds.data_wait_notice)} of it"
        if waited is not None and waited.median < case.thresholds.data_wait_notice * step.median
        else ""
    )
    return _unknown(
        f"A training step takes {duration(step.median)}; it was not profiled, so what it is spent on is not known.",
        f"Median of {_steps(step)}{fed}. Run it with the profiler, which gpulab uses unless told otherwise",
    )


def _unexplained(case: Case) -> Finding | None:
    unknown = case.share("unknown")
    if unknown < case.thresholds.unknown_too_much:
        return None
    return _unknown(
        f"For {percent(unknown)} of {case.unit} PyTorch ran nothing: the time goes to Python code that the trace does "
        "not name.",
        f"{duration(case.part_us('unknown'))} of {duration(case.step_us or 0.0)} without an operator",
        "notice",
        parts=("unknown",),
    )


def _not_accounted(case: Case) -> Finding | None:
    if case.facts.breakdown is not None:
        return None
    return _unknown("Nothing can be said about where the time goes.", "The run holds no accounting of its time")


def _many_small_causes(case: Case) -> Finding | None:
    account, working = case.facts.breakdown, _working(case)
    if account is None or working >= 1 - case.thresholds.idle_notice or _spread_thin(case):
        return None
    return _unknown(
        f"The {_device(case)} computes for {percent(working)} of {case.unit}; no single cause explains the rest.",
        f"{_basis(case, account)}; unknown: {percent(case.share('unknown'))}",
    )


_REASONS: tuple[Callable[[Case], Finding | None], ...] = (
    _no_steps,
    _too_few,
    _damaged,
    _not_profiled,
    _not_accounted,
    _unexplained,
    _many_small_causes,
)


def _unknown(summary: str, evidence: str, level: Level = "unknown", parts: tuple[str, ...] = ()) -> Finding:
    return Finding("cannot_tell", summary, (Evidence(evidence),), None, "measured", parts=parts, level=level)


def _spread_thin(case: Case) -> bool:
    """On a CPU: what is not computing is explained, and no cause of it is worth telling."""
    if case.on_gpu or case.share("unknown") >= case.thresholds.idle_notice:
        return False
    return _working(case) >= 1 - case.thresholds.idle_bad and _feeding(case) < case.thresholds.data_wait_notice


def _feeding(case: Case) -> float:
    """Of the typical step, waiting for data."""
    waited = case.facts.data_wait_fraction
    return waited if waited is not None else case.share("data_wait")


def _rest(case: Case) -> tuple[Evidence, ...]:
    """Where the rest goes, if it is more than the usual gaps."""
    if _working(case) >= 1 - case.thresholds.idle_notice:
        return ()
    unknown = percent(case.share("unknown"))
    return (
        Evidence(f"of the rest, {percent(_feeding(case))} is waiting for data, {unknown} Python between operations"),
    )


def _device(case: Case) -> str:
    return "CPU" if case.idle is None else "GPU"


def _working(case: Case) -> float:
    return case.share("compute") if case.idle is None else 1 - case.idle


def _basis(case: Case, account: Breakdown) -> str:
    step = case.facts.typical_step_us
    if step is not None:
        return f"Median step {duration(step.median)} over {_steps(step)}"
    start_ns, end_ns = account.span_ns
    return f"From {duration((end_ns - start_ns) / 1e3)}"


def _steps(step: Spread) -> str:
    return f"{step.count} step{'s' if step.count > 1 else ''}"
