"""A comparison as plain data: a stable contract for programs, where null is "not measurable" (docs/compare-json.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpulab.formatting import plain_values
from gpulab.tuning.compare.cost import cell_steps, cost_of, spending
from gpulab.tuning.compare.headline import comparison_headline, experiment_headline
from gpulab.tuning.record import Comparison, Experiment, LossComparison, Side
from gpulab.verdict import EQUIVALENT
from gpulab.views.comparison.sections import keep_faster
from gpulab.views.comparison.table import profiled_us, unprofiled_us
from gpulab.views.report.document import picked, plain_data

SCHEMA = 1


def document(record: Comparison | Experiment, price_per_hour: float | None = None) -> dict[str, object]:
    """Every figure. Holds only dict, list, str, int, finite float, bool and None."""
    if isinstance(record, Comparison):
        kind, headline, figures = "comparison", comparison_headline(record), _comparison(record, price_per_hour)
    else:
        kind, headline, figures = "experiment", experiment_headline(record), _experiment(record, price_per_hour)
    whole = {"schema": SCHEMA, "kind": kind, "headline": plain_values(headline), **figures}
    return plain_data(whole)


def _experiment(experiment: Experiment, price_per_hour: float | None) -> dict[str, object]:
    comparisons = [_comparison(c, price_per_hour) for c in experiment.comparisons]
    return {**picked(experiment, "name", "seconds", "stopped", "notes"), "comparisons": comparisons}


def _comparison(comparison: Comparison, price_per_hour: float | None) -> dict[str, object]:
    return {
        **picked(comparison, "verdict", "evidence", "unit", "times_as_fast", "times_as_fast_interval"),
        **picked(comparison, "ratio", "interval", "noise_floor", "pairs"),
        "equivalence": EQUIVALENT,
        "setup_s": comparison.setup_s,
        **_break_even(comparison),
        **picked(comparison, "differences", "notes", "restored"),
        "parts": [plain_values(change) for change in comparison.parts],
        "parts_left_out": comparison.parts_left_out or None,
        "loss": _loss(comparison.loss) if comparison.loss else None,
        "a": _side(comparison.a, comparison, price_per_hour),
        "b": _side(comparison.b, comparison, price_per_hour),
    }


def _break_even(comparison: Comparison) -> dict[str, object]:
    cost = cost_of(comparison)
    steps, interval = (cost.steps, cost.interval) if cost is not None else (None, None)
    return {
        "break_even_steps": steps,
        "break_even_interval": interval,
        "cell_steps": cell_steps(comparison.a.facts),
    }


def _loss(loss: LossComparison) -> dict[str, object]:
    return {
        **picked(loss, "verdict", "words", "seeds"),
        "a": _curve(loss.a),
        "b": _curve(loss.b),
        "band": loss.band,
    }


def _curve(losses: Sequence[float]) -> list[float | str | None]:
    """NaN is null; an infinite loss is a text, for JSON has no number for it."""
    return [None if math.isnan(x) else x if math.isfinite(x) else ("inf" if x > 0 else "-inf") for x in losses]


def _prediction(side: Side) -> dict[str, object] | None:
    prediction = side.prediction
    if prediction is None:
        return None
    texts = {name: text or None for name, text in picked(prediction, "memory_basis", "basis", "refused").items()}
    return {**picked(prediction, "ratio", "interval", "memory_ratio", "setup_s", "only_sign"), **texts}


def _side(side: Side, comparison: Comparison, price_per_hour: float | None) -> dict[str, object]:
    run = side.facts.run if side.facts is not None else None
    return {
        "label": side.label,
        "settings": dict(side.settings),
        "run": run.id if run is not None else None,
        **picked(side, "us_per_step", "us_per_sample"),
        "unprofiled_us_per_step": unprofiled_us(side, comparison),
        "profiled_us_per_step": profiled_us(side),
        "memory": plain_values(run.memory) if run is not None else None,
        "per_million_samples": plain_values(spending(side, price_per_hour)),
        "checks": [plain_values(check) for check in side.checks],
        "failure": side.failure or None,
        "prediction": _prediction(side),
        "edit": side.edit if side is comparison.b and keep_faster(comparison) else None,
        "edit_is_diff": side.edit_is_diff,
        "blocks": [
            {
                **picked(block, "turn", "order", "step_count", "dropped", "sample_count"),
                "time_us": block.time_ns / 1e3,
            }
            for block in side.blocks
        ],
    }
