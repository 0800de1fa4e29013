"""What was foretold of each setting before it ran, beside what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from gpulab.formatting import NOT_MEASURABLE, factor, factor_within
from gpulab.prediction.prediction import Prediction
from gpulab.tuning.record import Comparison
from gpulab.views.comparison.table import name
from gpulab.views.layout import Column, Row, Section
from gpulab.views.wording import plain

NONE = "no prediction"


def speed_words(ratio: float, interval: tuple[float, float] | None) -> str:
    """A ratio of times as a speed: "2.0× (1.8–2.3×)"."""
    if interval is None:
        return f"{factor(1 / ratio)}×"
    middle, around = factor_within(1 / ratio, (1 / interval[1], 1 / interval[0]))
    return f"{middle}× ({around}×)"


def predicted_words(made: Prediction) -> str:
    """The same of a prediction; a mere range has no middle."""
    if made.ratio is None or made.interval is None:
        return f"{NONE}: {plain(made.refused)}"
    if made.only_sign:
        low, high = (factor(1 / edge) for edge in reversed(made.interval))
        return f"between {low}× and {high}×"
    return speed_words(made.ratio, made.interval)


def memory_words(made: Prediction) -> str:
    """ "; 1.4× today's peak of the GPU's memory", or nothing where it stays what it is or is not foretold."""
    if made.memory_ratio is None or made.memory_ratio == 1:
        return ""
    return f"; {factor(made.memory_ratio)}× today's peak of the GPU's memory"


def section(found: Sequence[Comparison]) -> Section | None:
    """A line for each setting of which something was foretold or not; None where nothing was asked for."""
    told = [(c, c.b.prediction) for c in found if c.b.prediction is not None]
    if not told:
        return None
    rows = tuple(Row((name(c.b), *_cells(c, made))) for c, made in told)
    columns: tuple[Column, ...] = (Column("setting"), Column("predicted"), Column("measured"), Column("", "wrap"))
    if not any(row.cells[-1] for row in rows):
        rows, columns = tuple(Row(row.cells[:-1]) for row in rows), columns[:-1]
    lines = ["How many times as fast, with the range that should hold it in 19 of 20 cases; told before it ran."]
    one = len(told) == 1
    for c, made in told:
        if made.basis:
            lines.append(f"{plain(made.basis)}." if one else f"{name(c.b)}: {plain(made.basis)}.")
        if made.memory_basis:
            memory = plain(made.memory_basis)
            lines.append(f"{memory[:1].upper()}{memory[1:]}." if one else f"{name(c.b)}: {memory}.")
    return Section("Predicted and measured", columns, rows, tuple(dict.fromkeys(lines)), wide=True)


def _cells(found: Comparison, made: Prediction) -> tuple[str, str, str]:
    measured = NOT_MEASURABLE
    if found.ratio is not None and found.verdict != "not comparable":
        measured = speed_words(found.ratio, found.interval)
    if made.ratio is None:
        return NONE, measured, plain(made.refused)
    return predicted_words(made), measured, _judged(found, made) + memory_words(made)


def _judged(found: Comparison, made: Prediction) -> str:
    """Whether the prediction held."""
    if made.interval is None or found.ratio is None or found.verdict == "not comparable":
        return ""
    low, high = made.interval
    inside = low <= found.ratio <= high
    if made.only_sign:
        return "inside the range" if inside else "outside the range"
    if inside:
        return "as predicted"
    if found.interval is not None and found.interval[0] <= high and low <= found.interval[1]:
        return "cannot be told apart from the prediction"
    return "faster than predicted" if found.ratio < low else "slower than predicted"


__all__ = ["memory_words", "predicted_words", "section", "speed_words"]
