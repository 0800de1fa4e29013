"""A comparison as plain data: a stable contract for programs, where null is "not measurable" (docs/compare-json.md)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from gpulab.tuning.compare.cost import spending
from gpulab.tuning.compare.headline import comparison_headline, experiment_headline
from gpulab.tuning.record import Comparison, Experiment, LossComparison, PartChange, Side
from gpulab.views.comparison.sections import worth_keeping
from gpulab.views.comparison.table import profiled_us, unprofiled_us
from gpulab.views.report.document import finite

SCHEMA = 1


def document(found: Comparison | Experiment, price_per_hour: float | None = None) -> dict[str, object]:
    """Every figure. Holds only dict, list, str, int, finite float, bool and None."""
    if isinstance(found, Comparison):
        kind, headline, figures = "comparison", comparison_headline(found), _comparison(found, price_per_hour)
    else:
        kind, headline, figures = "experiment", experiment_headline(found), _experiment(found, price_per_hour)
    whole = {"schema": SCHEMA, "kind": kind, "headline": dataclasses.asdict(headline), **figures}
    return {key: finite(value) for key, value in whole.items()}


def _experiment(found: Experiment, price_per_hour: float | None) -> dict[str, object]:
    return {
        "name": found.name,
        "seconds": found.seconds,
        "stopped": found.stopped,
        "notes": list(found.notes),
        "comparisons": [_comparison(c, price_per_hour) for c in found.comparisons],
    }


def _comparison(found: Comparison, price_per_hour: float | None) -> dict[str, object]:
    return {
        "verdict": found.verdict,
        "evidence": found.evidence,
        "unit": found.unit,
        "ratio": found.ratio,
        "interval": list(found.interval) if found.interval else None,
        "noise_floor": found.noise_floor,
        "pairs": found.pairs,
        "differences": list(found.differences),
        "notes": list(found.notes),
        "restored": found.restored,
        "parts": [_part(change) for change in found.parts],
        "loss": _loss(found.loss) if found.loss else None,
        "a": _side(found.a, found, price_per_hour),
        "b": _side(found.b, found, price_per_hour),
    }


def _part(change: PartChange) -> dict[str, object]:
    return dataclasses.asdict(change)


def _loss(loss: LossComparison) -> dict[str, object]:
    return {
        "verdict": loss.verdict,
        "words": loss.words,
        "seeds": loss.seeds,
        "a": _curve(loss.a),
        "b": _curve(loss.b),
        "band": [list(step) for step in loss.band],
    }


def _curve(losses: Sequence[float]) -> list[float | str | None]:
    """NaN is null; an infinite loss is told as text, for JSON has no number for it."""
    return [None if math.isnan(x) else x if math.isfinite(x) else ("inf" if x > 0 else "-inf") for x in losses]


def _prediction(side: Side) -> dict[str, object] | None:
    made = side.prediction
    if made is None:
        return None
    return {
        "ratio": made.ratio,
        "interval": list(made.interval) if made.interval else None,
        "memory_ratio": made.memory_ratio,
        "memory_basis": made.memory_basis or None,
        "only_sign": made.only_sign,
        "basis": made.basis or None,
        "refused": made.refused or None,
    }


def _side(side: Side, found: Comparison, price_per_hour: float | None) -> dict[str, object]:
    run = side.facts.run if side.facts is not None else None
    return {
        "label": side.label,
        "settings": dict(side.settings),
        "run": run.id if run is not None else None,
        "us_per_step": side.us_per_step,
        "us_per_sample": side.us_per_sample,
        "unprofiled_us_per_step": unprofiled_us(side, found),
        "profiled_us_per_step": profiled_us(side),
        "memory": dataclasses.asdict(run.memory) if run is not None else None,
        "per_million_samples": dataclasses.asdict(spending(side, price_per_hour)),
        "checks": [dataclasses.asdict(check) for check in side.checks],
        "failure": side.failure or None,
        "prediction": _prediction(side),
        "edit": side.edit if side.edit and worth_keeping(side) else None,
        "edit_is_diff": side.edit_is_diff,
        "blocks": [
            {
                "turn": block.turn,
                "order": block.order,
                "step_count": block.step_count,
                "dropped": block.dropped,
                "sample_count": block.sample_count,
                "time_us": block.time_ns / 1e3,
            }
            for block in side.blocks
        ],
    }
