"""One report of one run, and each way to show it.

The figures as plain data (docs/report-json.md) are a contract for programs; null means "not measurable". The keys of
the accounting are the same as in every trace report; `step_us`, `data_wait_per_step_us`, `curves`, `loader`, `missing`,
`choices` and `observer` describe this run. Times are microseconds since the start of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup
from msgspec.structs import asdict

from gpulab.analysis.breakdown import PARTS, Breakdown
from gpulab.analysis.facts import Facts, TraceFacts
from gpulab.analysis.memory_peak import memory_peak
from gpulab.analysis.steps import StepChange
from gpulab.diagnosis.finding import Diagnosis, Finding, Undetermined
from gpulab.diagnosis.headline import Headline, headline
from gpulab.formatting import capitalized, duration, picked, plural, speedup
from gpulab.memory_record import Holding
from gpulab.run import Run
from gpulab.views.layout import Section, present
from gpulab.views.report.findings import documents, finding_sections, open_questions_section
from gpulab.views.report.run_sections import pauses_document
from gpulab.views.report.sections import more, opening, sections
from gpulab.views.report.timeline_page import timeline_section
from gpulab.views.run_figure import picture
from gpulab.views.view import View
from gpulab.views.wording import flag_names, plain

if TYPE_CHECKING:
    from gpulab.tuning.record import Speed


@dataclass(frozen=True, slots=True)
class Report(View):
    """The facts and the diagnosis of a run, with their views.

    `unsaved` is the reason why the run is not on disk (a sentence for the user); empty if it is on disk. `change`: the
    effect of its settings on the step, if its baseline was measured before; `speed`: the same from interleaved blocks.
    """

    facts: Facts
    diagnosis: Diagnosis
    unsaved: str = ""
    change: StepChange | None = None
    speed: Speed | None = None

    @property
    def headline(self) -> Headline:
        """The first finding's sentence, its evidence and its level."""
        return headline(self.diagnosis, self._before())

    def _figures(self) -> dict[str, object]:
        return report_document(self.facts, self.diagnosis, self._before())

    def _before(self) -> str:
        """The settings without effect, then "84.0 ms per step; baseline: 179 ms."; empty for a run of the baseline.

        If interleaved blocks were measured, their speedup replaces both times: it is better evidence than one run each.
        """
        changes, change, speed = self.facts.run.changes, self.change, self.speed
        words = [f"{c.name}={c.value} had no effect: {plain(c.evidence)}." for c in changes if c.state == "no effect"]
        if changes and len(words) == len(changes):
            return " ".join(words)
        if speed is not None and speed.times_as_fast is not None:
            times = speedup(speed.times_as_fast, speed.times_as_fast_interval, ("speedup {}", ""))
            pairs = f"{plural(speed.pairs, 'pair')} of interleaved blocks"
            words.append(f"{capitalized(speed.verdict)}: {times} per {speed.unit} over the baseline, in {pairs}.")
        elif change is not None:
            words.append(f"{duration(change.now_us)} per {change.unit}; baseline: {duration(change.before_us)}.")
            words += [f"One-time cost: {duration(change.setup_s * 1e6)}."] if change.setup_s is not None else []
        return " ".join(words)

    def _opening(self) -> str:
        return opening(self.facts)

    def _more(self) -> str:
        return more(self.facts.run, self.unsaved)

    def _sections(self) -> tuple[Section, ...]:
        causes = finding_sections(self.diagnosis, below_headline=True, source=self.facts.run.source)
        return (*causes, *sections(self.facts, self.unsaved, open_questions_section(self.diagnosis)))

    def _picture(self) -> Markup:
        return picture(self.facts)

    def _timeline(self) -> Markup:
        return timeline_section(self.facts.run, self.facts.breakdown)


# The diagnosis of a run on its own: in a terminal, in a notebook, as data.


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosed(View):
    """A diagnosis with its views. `opening` is one line: what was run, and where.

    `findings` are ranked by the time that they would save per step; the first one is the headline.
    """

    result: Diagnosis
    opening: str = ""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """At least one finding, even if only `healthy` or `cannot_tell`."""
        return self.result.findings

    @property
    def untold(self) -> tuple[Undetermined, ...]:
        """The questions that could not be decided, and what to record to decide them."""
        return self.result.untold

    @property
    def first(self) -> Finding:
        """The finding of the headline."""
        return self.result.first

    @property
    def step_us(self) -> float | None:
        """The typical step, in µs."""
        return self.result.step_us

    @property
    def headline(self) -> Headline:
        """The sentence, its evidence and its level."""
        return headline(self.result)

    def of(self, key: str) -> Finding | None:
        """The finding with that key, or None."""
        return self.result.of(key)

    def _figures(self) -> dict[str, object]:
        return documents(self.result)

    def __repr__(self) -> str:
        return self.text().rstrip("\n")

    def _opening(self) -> str:
        return self.opening

    def _sections(self) -> tuple[Section, ...]:
        return present(*finding_sections(self.result, below_headline=True), open_questions_section(self.result))


SCHEMA = 2
COSTLIEST = 20


def report_document(facts: Facts, diagnosis: Diagnosis, before: str = "") -> dict[str, object]:
    """Every figure of the report, with its headline."""
    heading = {"headline": headline(diagnosis, before)}
    return {"schema": SCHEMA, **_accounting(facts), **_of_the_run(facts), **heading, **documents(diagnosis)}


def _accounting(facts: Facts) -> dict[str, object]:
    """The keys that every trace report has; `recorded`: peaks per device, whose curves are in `run.memory_events`."""
    run, breakdown, trace = facts.run, facts.breakdown, facts.trace
    ranked = run.origin is not None and run.origin.rank is not None
    memory = [
        {
            **picked(curve, "device_index", "peak_bytes"),
            "peak_us": curve.peak_t_ns / 1e3,
            **picked(curve, "reserved_peak_bytes", "allocations", "releases", "growth_bytes", "absolute"),
        }
        for curve in facts.memory
    ]
    return {
        "source": run.source,
        "device": run.device,
        "ranks": picked(run.origin, "rank", "world_size", "backend") if ranked else None,
        "integrity": picked(facts.integrity, "state", "checks") if facts.integrity else None,
        "window_us": (run.timeline.window_ns[1] - run.timeline.window_ns[0]) / 1e3 if run.timeline else None,
        **picked(breakdown, "busy_fraction", "kernel_busy_fraction"),
        "steps": _steps(breakdown) if breakdown else None,
        "data_wait_us": _profiled_data_wait(run, breakdown) if breakdown else None,
        "tensor_core_fraction": trace.kernels.tensor_core_fraction if trace and trace.kernels else None,
        "memory": {**asdict(run.memory), "recorded": memory},
        "kernels": facts.kernels[:COSTLIEST] or None,
        "operators": facts.operators[:COSTLIEST] or None,
    }


def _of_the_run(facts: Facts) -> dict[str, object]:
    run, trace, observer = facts.run, facts.trace, facts.run.observer
    return {
        "id": run.id,
        "name": run.settings.name,
        "created": run.created,
        "outcome": {"kind": run.outcome, "detail": run.outcome_detail},
        "wall_us": run.wall_ns / 1e3,
        "step_source": run.step_source,
        "step_count": len(run.steps),
        "step_us": facts.step_us,
        "profiled_step_us": facts.traced_step_us,
        "data_wait_per_step_us": facts.data_wait_us,
        "data_wait_fraction": facts.data_wait_fraction,
        "optimizer_per_step_us": facts.optimizer_us,
        **picked(facts, "samples_per_s", "steps_per_s", "outside_steps_fraction"),
        "dropped": facts.selection.dropped,
        "breakdown": _step_breakdown(facts),
        "devices": [_device_account(account) for account in trace.devices] if trace else None,
        "kernel_statistics": _kernel_statistics(trace) if trace else None,
        **picked(trace, "copies", "exchanges"),
        **picked(facts, "curves"),
        "memory_account": _memory_account(run),
        "loader": run.loader,
        "loading": facts.loading,
        **pauses_document(run),
        "observer": {
            "hooks_us_per_step": facts.observer_us_per_step,
            "profiler_start_us": _us(observer.profiler_start_ns),
            "profiler_stop_us": _us(observer.profiler_stop_ns),
            **picked(observer, "event_count", "window_truncated"),
        },
        "missing": [{**picked(m, "key", "what", "reason"), "since_us": _us(m.since_ns)} for m in run.missing],
        **picked(run, "changes", "choices", "environment"),
    }


def _memory_account(run: Run) -> dict[str, object] | None:
    """The peak of tensor memory by kind with its largest owners, and how memory ran out; None if neither is known."""
    peak, failure = memory_peak(run), run.memory_account and run.memory_account.failure
    if peak is None and failure is None:
        return None
    return {
        **picked(peak and peak.ledger, "device", "step", "moment"),
        **picked(peak, "bytes", "unknown_bytes", "reserve_bytes"),
        "by_kind": dict(peak.by_kind) if peak else None,
        "owners": _largest(peak.ledger.holdings) if peak else None,
        "failure": {**asdict(failure), "holdings": _largest(failure.holdings)} if failure else None,
    }


def _largest(holdings: Sequence[Holding]) -> list[Holding]:
    return sorted(holdings, key=lambda holding: -holding.bytes)[:COSTLIEST]


def _steps(breakdown: Breakdown) -> list[dict[str, object]]:
    return [
        {
            "number": step.number,
            "start_us": step.start_ns / 1e3,
            "wall_us": (step.end_ns - step.start_ns) / 1e3,
            "flags": flag_names(step.flags),
            "parts_us": {part: step.parts_ns[part] / 1e3 for part in PARTS},
        }
        for step in breakdown.steps
    ]


def _profiled_data_wait(run: Run, breakdown: Breakdown) -> dict[str, float | None]:
    """Over the profiled steps: how long the loop waited, and how much of that wait the device's work did not hide."""
    profiled = np.isin(run.steps.number, [step.number for step in breakdown.steps])
    exposed = sum(step.parts_ns["data_wait"] for step in breakdown.steps)
    waited = None if breakdown.whole_window else float(run.steps.data_wait_ns[profiled].sum() / 1e3)
    return {"waited": waited, "exposed": exposed / 1e3}


def _step_breakdown(facts: Facts) -> dict[str, object] | None:
    """The breakdown that every view shows; `median_us` and `profiled_share` cover only the profiled steps."""
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


def _kernel_statistics(trace: TraceFacts) -> dict[str, object]:
    figures = ("count", "short_count_fraction", "short_time_fraction", "est_achieved_occupancy_pct")
    return {**picked(trace.kernels, *figures), **picked(trace, "est_sm_efficiency", "launches")}


def _device_account(account: Breakdown) -> dict[str, object]:
    return {
        **picked(account, "device_index", "busy_fraction", "kernel_busy_fraction"),
        **picked(account, "device", "whole_window", "median_step"),
        "median_us": {part: account.median_us[part] for part in PARTS},
        "share": {part: account.share[part] for part in PARTS},
    }


def _us(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e3
