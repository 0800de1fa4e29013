"""Predicted speedups of settings that were not tried yet, next to the speedups that were measured afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup
from msgspec.structs import replace

from gpulab.diagnosis.headline import Headline
from gpulab.formatting import NOT_MEASURABLE, capitalized, factor, sentence, speed_figures, speed_within, speedup
from gpulab.prediction.prediction import Prediction
from gpulab.tuning.record import Comparison
from gpulab.verdict import is_decided
from gpulab.views import text
from gpulab.views.bars import PREDICTED, BarRow, FactorRange, axis_of, bar_rows, labels, layers
from gpulab.views.layout import Column, Section, leading, present
from gpulab.views.report.findings import to_try
from gpulab.views.view import View
from gpulab.views.wording import plain

NOTHING = "No finding of this run names a setting, so nothing is predicted. Name a setting: %gpulab predict workers=2"
_TITLE = "Predicted, not measured"
_GROUNDS = "What the predictions rest on"
_AXIS = "Predicted speedup vs. this run (log scale). Each range should contain the measured speedup in 19 of 20 cases"


@dataclass(frozen=True, slots=True, repr=False)
class Predicted(View):
    """Predictions for one run, to display."""

    run: str
    predictions: tuple[Prediction, ...]
    doubt: str = ""  # what disturbed the run behind the predictions, as sentences
    source: str | None = None  # source of that run

    @property
    def headline(self) -> Headline:
        """The first prediction that has a result, and how to measure it."""
        if not self.predictions:
            first, _, rest = NOTHING.partition(". ")
            return Headline("nothing_predicted", f"{first}.", rest, "unknown")
        best = next((p for p in self.predictions if p.ratio is not None and p.interval is not None), None)
        if best is None:
            return self._no_prediction(self.predictions[0])
        words = predicted_words(best)
        first_line = f"{_TITLE}: {_label(best)} {'is' if 'slower' in words else 'gives'} {words}."
        return Headline("predicted", first_line, f"{self._of_run()} {self._to_measure(best)}", "unknown")

    def _no_prediction(self, first: Prediction) -> Headline:
        """Why there is no prediction, and the command that measures the setting if only a run can show its effect."""
        why = sentence(plain(first.reason))
        command = self._to_measure(first) if first.needs_run else ""
        evidence = " ".join(filter(None, (why, command)))
        return Headline("nothing_predicted", f"No prediction for {_label(first)}.", evidence, "unknown")

    def _figures(self) -> dict[str, object]:
        return {"schema": 1, "source": "predictions", "run": self.run, "predictions": self.predictions}

    def __repr__(self) -> str:
        return "\n".join(text.section_lines(self._section()))

    def _opening(self) -> str:
        return f"predictions · {plain(self.run)}" if self.run else "predictions"

    def _more(self) -> str:
        settings = dict(self.predictions[0].settings) if len(self.predictions) == 1 else None
        arguments = [repr(plain(self.run))] if self.run else []
        arguments += [f"settings={settings}"] if settings else []
        return self._more_in_python(f"predict({', '.join(arguments)})")

    def _of_run(self) -> str:
        predicted_from = f"Predicted from the run “{plain(self.run)}”." if self.run else "Predicted from the last run."
        return " ".join(filter(None, (predicted_from, plain(self.doubt))))

    def _sections(self) -> tuple[Section, ...]:
        return present(leading(replace(self._section(), title=_GROUNDS, pictured=True)) if self.predictions else None)

    def _picture(self) -> Markup:
        ranges = [_range(p) for p in self.predictions]
        axis = axis_of(factor for one in ranges if one is not None for factor in one.factors)
        rows = [
            BarRow(_label(p), NONE, sentence(plain(p.reason)))
            if one is None
            else BarRow(_label(p), predicted_words(p), layers=layers(axis, one))
            for p, one in zip(self.predictions, ranges, strict=True)
        ]
        return bar_rows(_AXIS, rows, labels(axis))

    def _section(self) -> Section:
        if not self.predictions:
            return Section(_TITLE, lines=(NOTHING,))
        columns = (Column("setting"), Column("speedup"), Column("", "wrap"))
        predicted = [p for p in self.predictions if p.ratio is not None]
        lines = [self._of_run(), *map(self._to_measure, predicted[:1])]
        return Section.table(_TITLE, columns, map(_cells, self.predictions), lines)

    def _to_measure(self, prediction: Prediction) -> str:
        return f"Measure it {to_try(','.join(_settings(prediction)), self.source, None)}"


def _label(prediction: Prediction) -> str:
    return ", ".join(_settings(prediction))


def _settings(prediction: Prediction) -> list[str]:
    return [plain(f"{name}={value}") for name, value in prediction.settings.items()]


def _range(prediction: Prediction) -> FactorRange | None:
    if prediction.ratio is None or prediction.interval is None or prediction.interval[0] <= 0:
        return None
    low, high = prediction.interval
    middle = None if prediction.only_sign else 1 / prediction.ratio
    return FactorRange(middle, (1 / high, 1 / low), PREDICTED)


def _cells(prediction: Prediction) -> tuple[str, str, str]:
    """The settings, their predicted speedup and memory, and the reason."""
    speed = f"{predicted_figures(prediction)}{memory_words(prediction)}"
    reasons = (prediction.reason or prediction.basis, prediction.memory_basis)
    return _label(prediction), speed, " ".join(sentence(plain(reason)) for reason in reasons if reason)


NONE = "no prediction"


def speed_words(ratio: float, interval: tuple[float, float] | None) -> str:
    """A ratio of times in words: "2.0× speedup (1.8–2.3)"; "slower" only if both bounds are slower."""
    is_slower = ratio > 1 and (interval is None or interval[0] > 1)
    times = None if interval is None else (1 / interval[1], 1 / interval[0])
    return speedup(1 / ratio, times, ("{} speedup", "{} slower" if is_slower else ""))


def predicted_words(prediction: Prediction) -> str:
    """A prediction as a speedup; a mere range has no middle."""
    if prediction.ratio is None or prediction.interval is None:
        return f"{NONE}: {plain(prediction.refused)}"
    if prediction.only_sign:
        low, high = (factor(1 / edge) for edge in reversed(prediction.interval))
        return f"{low}× to {high}× speedup"
    return speed_words(prediction.ratio, prediction.interval)


def predicted_figures(prediction: Prediction) -> str:
    """A speedup for a table: "1.9 (1.6–2.3)", or "1.6 to 2.3" for a mere range, which has no middle."""
    if prediction.ratio is None or prediction.interval is None:
        return NONE
    if prediction.only_sign:
        return speed_within(prediction.ratio, prediction.interval)[1].replace("–", " to ")
    return speed_figures(prediction.ratio, prediction.interval)


def memory_words(prediction: Prediction) -> str:
    """ "; 1.4× today's peak of the GPU's memory"; empty if no change of memory is predicted."""
    if prediction.memory_ratio is None or prediction.memory_ratio == 1:
        return ""
    return f"; {factor(prediction.memory_ratio)}× today's peak of the GPU's memory"


def section(comparisons: Sequence[Comparison]) -> Section | None:
    """A line for each setting with a prediction; None if no setting has one."""
    pairs = [(c, c.b.prediction) for c in comparisons if c.b.prediction is not None]
    if not pairs:
        return None
    cells: list[tuple[str, ...]] = [(plain(c.b.label), *_measured_cells(c, prediction)) for c, prediction in pairs]
    columns = [Column("setting"), Column("predicted"), Column("measured"), Column("", "wrap")]
    if not any(agreement for *_, agreement in cells):
        cells, columns = [line[:-1] for line in cells], columns[:-1]
    lines = [
        "Predicted before the setting ran, from this experiment's baseline; from an earlier run it may differ. The "
        "range should contain the measured speedup in 19 of 20 cases."
    ]
    for c, prediction in pairs:
        side = "" if len(pairs) == 1 else f"{plain(c.b.label)}: "
        if prediction.basis:
            lines.append(f"{side}{plain(prediction.basis)}.")
        if prediction.memory_basis:
            memory = plain(prediction.memory_basis)
            lines.append(f"{side}{memory if side else capitalized(memory)}.")
    result = "; ".join(_in_short(c, prediction) for c, prediction in pairs)
    return Section.table("Predicted and measured", columns, cells, dict.fromkeys(lines), wide=True, result=result)


def _in_short(comparison: Comparison, prediction: Prediction) -> str:
    """ "workers=2: as predicted: speedup 2.9 (1.1–6.3) predicted, 2.3 (1.6–2.6) measured"."""
    if prediction.ratio is None or prediction.interval is None:
        return f"{plain(comparison.b.label)}: {NONE}"
    agreement, outcome = _agreement(comparison, prediction), "not measured"
    if (measured := _measured(comparison)) is not None:
        outcome = f"{speed_figures(*measured)} measured"
    verdict = f"{agreement}: " if agreement else ""
    return f"{plain(comparison.b.label)}: {verdict}speedup {predicted_figures(prediction)} predicted, {outcome}"


def _measured(comparison: Comparison) -> tuple[float, tuple[float, float] | None] | None:
    """The measured ratio and its interval; None if the comparison has no ratio."""
    if comparison.ratio is None or comparison.verdict == "not comparable":
        return None
    return comparison.ratio, comparison.interval


def _measured_cells(comparison: Comparison, prediction: Prediction) -> tuple[str, str, str]:
    figures = _measured(comparison)
    measured = speed_words(*figures) if figures is not None else NOT_MEASURABLE
    if prediction.ratio is None:
        return NONE, measured, plain(prediction.reason)
    return predicted_words(prediction), measured, _agreement(comparison, prediction) + memory_words(prediction)


def _agreement(comparison: Comparison, prediction: Prediction) -> str:
    """Whether the prediction held; an undecided comparison confirms nothing."""
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
