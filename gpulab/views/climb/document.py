"""A climb as plain data: a stable contract for programs, where null is "not measurable" (docs/climb-json.md)."""

from __future__ import annotations

from gpulab.diagnosis.finding import Finding
from gpulab.formatting import plain_values
from gpulab.prediction.prediction import Prediction
from gpulab.tuning.climb.record import Attempt, Climb
from gpulab.tuning.record import Side
from gpulab.views.climb.attempts import busy_fraction
from gpulab.views.climb.sections import headline, kept_edit
from gpulab.views.comparison import document as comparison_document
from gpulab.views.comparison.table import memory_peak_bytes
from gpulab.views.report.document import picked, plain_data

SCHEMA = 1


def document(climb: Climb) -> dict[str, object]:
    """Every figure. Holds only dict, list, str, int, finite float, bool and None."""
    edit = kept_edit(climb)
    whole = {
        "schema": SCHEMA,
        "kind": "climb",
        "headline": plain_values(headline(climb)),
        **picked(climb, "ended", "seconds", "kept"),
        "edit": edit.code if edit is not None else None,
        "edit_is_diff": edit is not None and climb.top is not None and climb.top.edit_is_diff,
        "written": _side(climb.written),
        "rungs": [_rung(rung) for rung in climb.rungs],
        "whole": comparison_document.document(climb.whole) if climb.whole is not None else None,
        "left": [_finding(f) for f in climb.left.findings] if climb.left is not None else [],
        "not_tried": [{"setting": p.label, "why": p.why} for p in climb.passed],
    }
    return plain_data(whole)


def _rung(rung: Attempt) -> dict[str, object]:
    comparison = rung.comparison
    return {
        "number": rung.number,
        "settings": dict(rung.settings),
        "back": list(rung.back),
        "finding": rung.finding.key if rung.finding is not None else "screening",
        **picked(rung, "kept", "outcome", "words"),
        "prediction": _prediction(rung.prediction),
        **picked(comparison, "verdict", "times_as_fast", "times_as_fast_interval", "ratio", "interval"),
        "us_per_step_before": comparison.a.us_per_step if comparison is not None else None,
        "us_per_sample_before": comparison.a.us_per_sample if comparison is not None else None,
        "loss": rung.loss.verdict if rung.loss is not None else None,
        "seconds": rung.seconds,
        **_side(comparison.b if comparison is not None else None),
    }


def _side(side: Side | None) -> dict[str, object]:
    facts = side.facts if side is not None else None
    return {
        "run": facts.run.id if facts is not None else None,
        **picked(side, "us_per_step", "us_per_sample"),
        "busy_fraction": busy_fraction(facts),
        **picked(facts, "data_wait_fraction"),
        "memory_bytes": memory_peak_bytes(side) if side is not None else None,
    }


def _prediction(prediction: Prediction | None) -> dict[str, object] | None:
    if prediction is None:
        return None
    return {**picked(prediction, "ratio", "interval"), "refused": prediction.refused or None}


def _finding(finding: Finding) -> dict[str, object]:
    return {
        **picked(finding, "key", "summary", "recoverable_us_per_step"),
        "cure": finding.cure or None,
        "source_line": finding.source_line or None,
    }
