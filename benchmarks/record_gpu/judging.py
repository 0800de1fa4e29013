"""What the rules say of each recording, held against the truth where there is one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from benchmarks.conductor import reason_of
from benchmarks.record_gpu.catalogue import Recording
from benchmarks.record_gpu.outlet import size_of
from gpulab.store import folders
from planted import judge
from planted.catalogue import HEALTHY


class Judgement(TypedDict, total=False):
    """Of one recording. `right` is None where there is no truth."""

    bytes: int
    steps: int
    step_ms: float | None
    headline: str
    summary: str
    findings: list[str]
    truth: list[str] | None  # headlines that count as right
    right: bool | None
    false_alarms: list[str]
    problem: str


def judgement(folder: Path, recording: Recording) -> Judgement:
    """What its report says. Never raises: what cannot be judged has a `problem`."""
    verdict: Judgement = {"bytes": size_of(folder), "truth": _accepted(recording), "right": None}
    try:
        import gpulab
        from gpulab.analysis.facts import facts

        run = folders.read(folder)
        step_us = facts(run).step_us
        said = judge.said(gpulab.diagnose(run))
        verdict["steps"] = len(run.steps)
        verdict["step_ms"] = None if step_us is None else float(step_us.median) / 1e3
        verdict["headline"], verdict["summary"] = said["headline"], said["summary"]
        verdict["findings"] = [finding["key"] for finding in said["findings"]]
        if recording.truth is not None:
            answer = judge.judgement(recording.truth, said)
            verdict["right"], verdict["false_alarms"] = answer["right"], answer["false_alarms"]
    except Exception as e:
        verdict["problem"] = reason_of(e)
    return verdict


def _accepted(recording: Recording) -> list[str] | None:
    return None if recording.truth is None else list(recording.truth.accepted)


def totals(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Of the recordings that are there and have a truth."""
    sick = {name: row for name, row in rows.items() if row.get("truth") not in (None, [HEALTHY])}
    healthy = {name: row for name, row in rows.items() if row.get("truth") == [HEALTHY]}
    return {
        "with_a_cause": sum(row.get("right") is not None for row in sick.values()),
        "headline_right": sum(bool(row.get("right")) for row in sick.values()),
        "healthy": sum(row.get("right") is not None for row in healthy.values()),
        "false_alarms": sum(row.get("right") is False for row in healthy.values()),
        "misses": [name for name, row in rows.items() if row.get("right") is False],
        "not_judged": [name for name, row in rows.items() if row.get("problem")],
    }
