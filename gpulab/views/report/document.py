"""The figures of a run as plain data: a stable contract for programs, where null is "not measurable".

Keys of the accounting are those of every trace report; `step_us`, `data_wait_per_step_us`, `curves`, `loader`,
`missing`, `choices` and `observer` are the run's own. Times are microseconds since the start of the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from gpulab.analysis.breakdown import PARTS, Breakdown, StepParts
from gpulab.analysis.facts import Facts, TraceFacts
from gpulab.analysis.integrity import Integrity
from gpulab.analysis.operators import CostRow
from gpulab.analysis.steps import Spread
from gpulab.diagnosis.diagnose import headline
from gpulab.diagnosis.finding import Diagnosis
from gpulab.formatting import plain_values
from gpulab.run import Missing, Run
from gpulab.views.report.findings import documents
from gpulab.views.report.sections import pauses_document
from gpulab.views.wording import flag_names

SCHEMA = 2
COSTLIEST = 20


def document(facts: Facts, diagnosis: Diagnosis, before: str = "") -> dict[str, object]:
    """Every figure of the report, with its headline. Holds only dict, list, str, int, finite float, bool and None."""
    heading = {"headline": plain_values(headline(diagnosis, before))}
    figures = {"schema": SCHEMA, **_contract(facts), **_own(facts), **heading, **documents(diagnosis)}
    return plain_data(figures)


def _contract(facts: Facts) -> dict[str, object]:
    run, breakdown, trace = facts.run, facts.breakdown, facts.trace
    # peaks, and per device of the trace's memory events; their curves are in `run.memory_events`
    return {
        "source": run.source,
        "device": plain_values(run.device),
        "ranks": _ranks(run),
        "integrity": integrity(facts.integrity) if facts.integrity else None,
        "window_us": (run.timeline.window_ns[1] - run.timeline.window_ns[0]) / 1e3 if run.timeline else None,
        **picked(breakdown, "busy_fraction", "kernel_busy_fraction"),
        "steps": [_step(step) for step in breakdown.steps] if breakdown else None,
        "data_wait_us": _profiled_data_wait(run, breakdown) if breakdown else None,
        "tensor_core_fraction": trace.kernels.tensor_core_fraction if trace and trace.kernels else None,
        "memory": {
            **plain_values(facts.run.memory),
            "recorded": [
                {
                    **picked(curve, "device_index", "peak_bytes"),
                    "peak_us": curve.peak_t_ns / 1e3,
                    **picked(curve, "reserved_peak_bytes", "allocations", "releases", "growth_bytes", "absolute"),
                }
                for curve in facts.memory
            ],
        },
        "kernels": _costliest(facts.kernels) if facts.kernels else None,
        "operators": _costliest(facts.operators) if facts.operators else None,
    }


def _own(facts: Facts) -> dict[str, object]:
    run = facts.run
    return {
        "id": run.id,
        "name": run.settings.name,
        "created": run.created,
        "outcome": {"kind": run.outcome, "detail": run.outcome_detail},
        "wall_us": run.wall_ns / 1e3,
        "step_source": run.step_source,
        "step_count": len(run.steps),
        "step_us": _spread(facts.step_us),
        "profiled_step_us": _spread(facts.traced_step_us),
        "data_wait_per_step_us": _spread(facts.data_wait_us),
        "data_wait_fraction": facts.data_wait_fraction,
        "optimizer_per_step_us": _spread(facts.optimizer_us),
        **picked(facts, "samples_per_s", "steps_per_s", "outside_steps_fraction"),
        "dropped": [plain_values(d) for d in facts.selection.dropped],
        "breakdown": _step_breakdown(facts),
        "devices": [_device_account(account) for account in facts.trace.devices] if facts.trace else None,
        "kernel_statistics": _kernel_statistics(facts.trace) if facts.trace else None,
        "copies": [plain_values(row) for row in facts.trace.copies] if facts.trace else None,
        "exchanges": [plain_values(row) for row in facts.trace.exchanges] if facts.trace else None,
        "curves": [plain_values(c) for c in facts.curves],
        "loader": plain_values(run.loader) if run.loader else None,
        "loading": plain_values(facts.loading) if facts.loading else None,
        **pauses_document(run),
        "observer": _observer(facts),
        "missing": [_missing(m) for m in run.missing],
        "changes": [plain_values(c) for c in run.changes],
        "choices": [plain_values(c) for c in run.choices],
        "environment": plain_values(run.environment),
    }


def _step(step: StepParts) -> dict[str, object]:
    return {
        "number": step.number,
        "start_us": step.start_ns / 1e3,
        "wall_us": (step.end_ns - step.start_ns) / 1e3,
        "flags": flag_names(step.flags),
        "parts_us": {part: step.parts_ns[part] / 1e3 for part in PARTS},
    }


def _profiled_data_wait(run: Run, breakdown: Breakdown) -> dict[str, float | None]:
    """Over the profiled steps: how long the loop waited, and how much of it the device's work did not hide."""
    profiled = np.isin(run.steps.number, [step.number for step in breakdown.steps])
    exposed = sum(step.parts_ns["data_wait"] for step in breakdown.steps)
    waited = None if breakdown.whole_window else float(run.steps.data_wait_ns[profiled].sum() / 1e3)
    return {"waited": waited, "exposed": exposed / 1e3}


def _step_breakdown(facts: Facts) -> dict[str, object] | None:
    """The one that every view shows; `median_us` and `profiled_share` are of the profiled steps alone."""
    account, shares = facts.breakdown, facts.shares
    if account is None or shares is None:
        return None
    return {
        **picked(account, "device", "whole_window", "median_step"),
        "step_us": shares.step_us,
        "share": {part: shares.share[part] for part in PARTS},
        "part_us": {part: shares.us(part) for part in PARTS},
        "median_us": {part: account.median_us[part] for part in PARTS},
        "profiled_share": {part: account.share[part] for part in PARTS},
    }


def _breakdown(breakdown: Breakdown) -> dict[str, object]:
    return {
        **picked(breakdown, "device", "whole_window", "median_step"),
        "median_us": {part: breakdown.median_us[part] for part in PARTS},
        "share": {part: breakdown.share[part] for part in PARTS},
    }


def _ranks(run: Run) -> dict[str, object] | None:
    origin = run.origin
    if origin is None or origin.rank is None:
        return None
    return picked(origin, "rank", "world_size", "backend")


def _kernel_statistics(trace: TraceFacts) -> dict[str, object]:
    figures = ("count", "short_count_fraction", "short_time_fraction", "est_achieved_occupancy_pct")
    launches = plain_values(trace.launches) if trace.launches else None
    return {**picked(trace.kernels, *figures), **picked(trace, "est_sm_efficiency"), "launches": launches}


def _device_account(account: Breakdown) -> dict[str, object]:
    return {**picked(account, "device_index", "busy_fraction", "kernel_busy_fraction"), **_breakdown(account)}


def integrity(verdict: Integrity) -> dict[str, object]:
    return {"state": verdict.state, "checks": [plain_values(check) for check in verdict.checks]}


def _costliest(rows: Sequence[CostRow]) -> list[dict[str, object]]:
    return [plain_values(row) for row in rows[:COSTLIEST]]


def _spread(spread: Spread | None) -> dict[str, object] | None:
    return None if spread is None else plain_values(spread)


def _observer(facts: Facts) -> dict[str, object]:
    observer = facts.run.observer
    return {
        "hooks_us_per_step": facts.observer_us_per_step,
        "profiler_start_us": _us(observer.profiler_start_ns),
        "profiler_stop_us": _us(observer.profiler_stop_ns),
        **picked(observer, "event_count", "window_truncated"),
    }


def _missing(missing: Missing) -> dict[str, object]:
    return {**picked(missing, "key", "what", "reason"), "since_us": _us(missing.since_ns)}


def _us(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e3


def picked(record: object, *names: str) -> dict[str, object]:
    """Attributes of a record by their names; where there is no record, None for each."""
    return {name: None if record is None else getattr(record, name) for name in names}


def plain_data(figures: Mapping[str, object]) -> dict[str, object]:
    """Plain Python data, dict, list and what JSON holds; a float that JSON cannot hold is None."""
    return {str(key): _plain(value) for key, value in figures.items()}


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return plain_data(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
