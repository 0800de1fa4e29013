"""What was predicted for each setting before it ran, beside what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from gpulab.formatting import NOT_MEASURABLE, capitalized, factor, speed_figures, speed_within, speedup
from gpulab.prediction.prediction import Prediction
from gpulab.tuning.record import Comparison
from gpulab.verdict import is_decided
from gpulab.views.comparison.table import name
from gpulab.views.layout import Column, Section
from gpulab.views.wording import plain

NONE = "no prediction"


def speed_words(ratio: float, interval: tuple[float, float] | None) -> str:
    """A ratio of times in words: "2.0× speedup (1.8–2.3)"; "slower" only where no bound says otherwise."""
    is_slower = ratio > 1 and (interval is None or interval[0] > 1)
    times = None if interval is None else (1 / interval[1], 1 / interval[0])
    return speedup(1 / ratio, times, ("{} speedup", "{} slower" if is_slower else ""))


def predicted_words(prediction: Prediction) -> str:
    """A prediction as a speed; a mere range has no middle."""
    if prediction.ratio is None or prediction.interval is None:
        return f"{NONE}: {plain(prediction.refused)}"
    if prediction.only_sign:
        low, high = (factor(1 / edge) for edge in reversed(prediction.interval))
        return f"{low}× to {high}× speedup"
    return speed_words(prediction.ratio, prediction.interval)


def predicted_figures(prediction: Prediction) -> str:
    """For a column of times as fast, "1.9 (1.6–2.3)"; a mere range, "1.6 to 2.3", has no middle."""
    if prediction.ratio is None or prediction.interval is None:
        return NONE
    if prediction.only_sign:
        return speed_within(prediction.ratio, prediction.interval)[1].replace("–", " to ")
    return speed_figures(prediction.ratio, prediction.interval)


def memory_words(prediction: Prediction) -> str:
    """ "; 1.4× today's peak of the GPU's memory", or nothing where no change of it is predicted."""
    if prediction.memory_ratio is None or prediction.memory_ratio == 1:
        return ""
    return f"; {factor(prediction.memory_ratio)}× today's peak of the GPU's memory"


def section(comparisons: Sequence[Comparison]) -> Section | None:
    """A line for each setting for which a prediction was asked; None where none was."""
    asked = [(c, c.b.prediction) for c in comparisons if c.b.prediction is not None]
    if not asked:
        return None
    cells: list[tuple[str, ...]] = [(name(c.b), *_cells(c, prediction)) for c, prediction in asked]
    columns = [Column("setting"), Column("predicted"), Column("measured"), Column("", "wrap")]
    if not any(judged for *_, judged in cells):
        cells, columns = [line[:-1] for line in cells], columns[:-1]
    lines = [
        "Predicted before the setting ran, from this experiment's baseline; from an earlier run it may differ. The "
        "range should contain the measured speedup in 19 of 20 cases."
    ]
    for c, prediction in asked:
        side = "" if len(asked) == 1 else f"{name(c.b)}: "
        if prediction.basis:
            lines.append(f"{side}{plain(prediction.basis)}.")
        if prediction.memory_basis:
            memory = plain(prediction.memory_basis)
            lines.append(f"{side}{memory if side else capitalized(memory)}.")
    result = "; ".join(_in_short(c, prediction) for c, prediction in asked)
    return Section.table("Predicted and measured", columns, cells, dict.fromkeys(lines), wide=True, result=result)


def _in_short(comparison: Comparison, prediction: Prediction) -> str:
    """ "workers=2: as predicted: speedup 2.9 (1.1–6.3) predicted, 2.3 (1.6–2.6) measured"."""
    if prediction.ratio is None or prediction.interval is None:
        return f"{name(comparison.b)}: {NONE}"
    judged, outcome = _judged(comparison, prediction), "not measured"
    if (measured := _measured(comparison)) is not None:
        outcome = f"{speed_figures(*measured)} measured"
    verdict = f"{judged}: " if judged else ""
    return f"{name(comparison.b)}: {verdict}speedup {predicted_figures(prediction)} predicted, {outcome}"


def _measured(comparison: Comparison) -> tuple[float, tuple[float, float] | None] | None:
    """The ratio and its interval; None where the comparison has none to hold a prediction against."""
    if comparison.ratio is None or comparison.verdict == "not comparable":
        return None
    return comparison.ratio, comparison.interval


def _cells(comparison: Comparison, prediction: Prediction) -> tuple[str, str, str]:
    figures = _measured(comparison)
    measured = speed_words(*figures) if figures is not None else NOT_MEASURABLE
    if prediction.ratio is None:
        return NONE, measured, plain(prediction.reason)
    return predicted_words(prediction), measured, _judged(comparison, prediction) + memory_words(prediction)


def _judged(comparison: Comparison, prediction: Prediction) -> str:
    """Whether the prediction held; what decides nothing confirms nothing."""
    if prediction.interval is None or comparison.ratio is None or _measured(comparison) is None:
        return ""
    if not is_decided(comparison.verdict):
        return "undecided"
    low, high = prediction.interval
    inside = low <= comparison.ratio <= high
    if prediction.only_sign:
        return "inside the range" if inside else "outside the range"
    if inside:
        return "as predicted"
    if comparison.interval is not None and comparison.interval[0] <= high and low <= comparison.interval[1]:
        return "consistent with the prediction"
    return "faster than predicted" if comparison.ratio < low else "slower than predicted"
