"""What settings of the knobs would bring, before any is tried."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from gpulab.diagnosis.diagnose import Headline
from gpulab.formatting import sentence, speed_within
from gpulab.prediction.prediction import Prediction
from gpulab.views import html_bars, html_rows, text
from gpulab.views.comparison.prediction import NONE, memory_words, predicted_figures, predicted_words
from gpulab.views.html_rows import FactorRange
from gpulab.views.interval_places import FactorAxis, axis_of
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
    doubt: str = ""  # what disturbed the run from which they are made, as sentences
    source: str | None = None  # of that run

    @property
    def headline(self) -> Headline:
        """The first prediction that says something, and how to measure it."""
        if not self.predictions:
            first, _, rest = NOTHING.partition(". ")
            return Headline("nothing_predicted", f"{first}.", rest, "unknown")
        best = next((p for p in self.predictions if p.ratio is not None), None)
        if best is None:
            return self._no_prediction(self.predictions[0])
        said = f"{_TITLE}: {_named(best)} gives {_speed(best)}."
        return Headline("predicted", said, f"{self._of_run()} {self._to_measure(best)}", "unknown")

    def _no_prediction(self, first: Prediction) -> Headline:
        """Why there is none, and the command that measures it where only a run tells."""
        why = sentence(plain(first.reason))
        command = self._to_measure(first) if first.needs_run else ""
        evidence = " ".join(filter(None, (why, command)))
        return Headline("nothing_predicted", f"No prediction for {_named(first)}.", evidence, "unknown")

    def __repr__(self) -> str:
        return "\n".join(text.section_lines(self._section()))

    def _opening(self) -> str:
        return f"predictions · {plain(self.run)}" if self.run else "predictions"

    def _more(self) -> str:
        asked = dict(self.predictions[0].settings) if len(self.predictions) == 1 else None
        given = [repr(plain(self.run))] if self.run else []
        given += [f"settings={asked}"] if asked else []
        return self._more_in_python(f"predict({', '.join(given)})")

    def _of_run(self) -> str:
        predicted_from = f"Predicted from the run “{plain(self.run)}”." if self.run else "Predicted from the last run."
        return " ".join(filter(None, (predicted_from, plain(self.doubt))))

    def _sections(self) -> tuple[Section, ...]:
        return present(leading(replace(self._section(), title=_GROUNDS, pictured=True)) if self.predictions else None)

    def _picture(self) -> str:
        ranges = [_range(p) for p in self.predictions]
        axis = axis_of(factor for one in ranges if one is not None for factor in one.factors)
        pairs = list(zip(self.predictions, ranges, strict=True))
        refused = [html_rows.row(_named(p), NONE, note=sentence(plain(p.reason))) for p, one in pairs if one is None]
        rows = [_row(p, one, axis) for p, one in pairs if one is not None]
        if not rows:
            return html_rows.picture(*refused)
        return html_rows.picture(html_bars.caption(_AXIS), *rows, html_rows.factor_axis(axis), *refused)

    def _section(self) -> Section:
        if not self.predictions:
            return Section(_TITLE, lines=(NOTHING,))
        columns = (Column("setting"), Column("speedup"), Column("", "wrap"))
        asked = [p for p in self.predictions if p.ratio is not None]
        lines = [self._of_run(), *map(self._to_measure, asked[:1])]
        return Section.table(_TITLE, columns, map(_cells, self.predictions), lines)

    def _to_measure(self, prediction: Prediction) -> str:
        return f"Measure it {to_try(','.join(_settings(prediction)), self.source, None)}"


def _named(prediction: Prediction) -> str:
    return ", ".join(_settings(prediction))


def _settings(prediction: Prediction) -> list[str]:
    return [plain(f"{name}={value}") for name, value in prediction.settings.items()]


def _speed(prediction: Prediction) -> str:
    """ "1.9× speedup (1.6–2.3)"; a mere range has no middle."""
    assert prediction.ratio is not None
    middle, around = speed_within(prediction.ratio, prediction.interval)
    low, _, high = around.partition("–")
    if prediction.only_sign:
        return f"between {low}× and {high}× speedup"
    return f"{middle}× speedup ({around})" if around else f"{middle}× speedup"


def _range(prediction: Prediction) -> FactorRange | None:
    if prediction.ratio is None or prediction.interval is None or prediction.interval[0] <= 0:
        return None
    low, high = prediction.interval
    middle = None if prediction.only_sign else 1 / prediction.ratio
    return FactorRange(middle, (1 / high, 1 / low), html_rows.PREDICTED)


def _row(prediction: Prediction, shown: FactorRange, axis: FactorAxis) -> str:
    return html_rows.row(_named(prediction), predicted_words(prediction), html_rows.factor_row(axis, shown))


def _cells(prediction: Prediction) -> tuple[str, str, str]:
    """The settings, what they would bring, and the reason."""
    speed = f"{predicted_figures(prediction)}{memory_words(prediction)}"
    reasons = (prediction.reason or prediction.basis, prediction.memory_basis)
    return _named(prediction), speed, " ".join(sentence(plain(reason)) for reason in reasons if reason)
