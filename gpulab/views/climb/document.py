"""A climb as plain data: a stable contract for programs, where null is "not measurable" (docs/climb-json.md)."""

from __future__ import annotations

import dataclasses

from gpulab.diagnosis.finding import Finding
from gpulab.prediction.prediction import Prediction
from gpulab.tuning.climb.record import Climb, Rung
from gpulab.tuning.record import Side
from gpulab.views.climb.attempts import busy_fraction
from gpulab.views.climb.sections import headline, kept_edit
from gpulab.views.comparison import document as comparison_document
from gpulab.views.comparison.table import memory_peak_bytes
from gpulab.views.report.document import finite

SCHEMA = 1


def document(found: Climb) -> dict[str, object]:
    """Every figure. Holds only dict, list, str, int, finite float, bool and None."""
    kept = kept_edit(found)
    whole = {
        "schema": SCHEMA,
        "kind": "climb",
        "headline": dataclasses.asdict(headline(found)),
        "ended": found.ended,
        "seconds": found.seconds,
        "kept": found.kept,
        "edit": kept.code if kept is not None else None,
        "edit_is_diff": kept is not None and found.top is not None and found.top.edit_is_diff,
        "written": _side(found.written),
        "rungs": [_rung(rung) for rung in found.rungs],
        "whole": comparison_document.document(found.whole) if found.whole is not None else None,
        "left": [_finding(f) for f in found.left.findings] if found.left is not None else [],
        "not_tried": [{"setting": p.label, "why": p.why} for p in found.passed],
    }
    return {key: finite(value) for key, value in whole.items()}


def _rung(rung: Rung) -> dict[str, object]:
    found = rung.comparison
    return {
        "number": rung.number,
        "settings": dict(rung.settings),
        "back": list(rung.back),
        "finding": rung.finding.key,
        "kept": rung.kept,
        "outcome": rung.outcome,
        "words": rung.words,
        "prediction": _prediction(rung.prediction),
        "verdict": found.verdict if found is not None else None,
        "ratio": found.ratio if found is not None else None,
        "interval": list(found.interval) if found is not None and found.interval is not None else None,
        "loss": rung.loss.verdict if rung.loss is not None else None,
        "seconds": rung.seconds,
        **_side(found.b if found is not None else None),
    }


def _side(side: Side | None) -> dict[str, object]:
    known = side.facts if side is not None else None
    return {
        "run": known.run.id if known is not None else None,
        "us_per_step": side.us_per_step if side is not None else None,
        "us_per_sample": side.us_per_sample if side is not None else None,
        "busy_fraction": busy_fraction(known),
        "data_wait_fraction": known.data_wait_fraction if known is not None else None,
        "memory_bytes": memory_peak_bytes(side) if side is not None else None,
    }


def _prediction(prediction: Prediction | None) -> dict[str, object] | None:
    if prediction is None:
        return None
    interval = list(prediction.interval) if prediction.interval is not None else None
    return {"ratio": prediction.ratio, "interval": interval, "refused": prediction.refused or None}


def _finding(finding: Finding) -> dict[str, object]:
    return {
        "key": finding.key,
        "summary": finding.summary,
        "recoverable_us_per_step": finding.recoverable_us_per_step,
        "cure": finding.cure or None,
        "source_line": finding.source_line or None,
    }
