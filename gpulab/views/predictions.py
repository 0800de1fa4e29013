"""What settings of the knobs would bring, before any is tried."""

from __future__ import annotations

from dataclasses import dataclass

from gpulab.formatting import sentence
from gpulab.prediction.prediction import Prediction
from gpulab.views import html, text
from gpulab.views.comparison.prediction import NONE, memory_words, predicted_words
from gpulab.views.layout import Column, Section
from gpulab.views.wording import plain

NOTHING = "No finding of this run names a knob, so nothing is predicted. Name a setting: %gpulab predict workers=2"


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predictions for one run, to display."""

    run: str
    predictions: tuple[Prediction, ...]

    def __repr__(self) -> str:
        return "\n".join(text.section_lines(self._section()))

    def _repr_html_(self) -> str:
        return html.fragment_section(self._section())

    def _section(self) -> Section:
        title = "Predicted, not measured"
        if not self.predictions:
            return Section(title, lines=(NOTHING,))
        columns = (Column("setting"), Column("how fast"), Column("", "wrap"))
        asked = [p for p in self.predictions if p.ratio is not None]
        lines = [f"For the run {plain(self.run)}."]
        lines += [f"To measure it: %%gpuprofile --ab {','.join(_settings(p))}" for p in asked[:1]]
        return Section.table(title, columns, map(_cells, self.predictions), lines)


def _settings(prediction: Prediction) -> list[str]:
    return [plain(f"{name}={value}") for name, value in prediction.settings.items()]


def _cells(prediction: Prediction) -> tuple[str, str, str]:
    """The settings, what they would bring, and the reason."""
    speed = NONE
    if prediction.ratio is not None:
        speed = f"{predicted_words(prediction)} as fast{memory_words(prediction)}"
    reasons = (prediction.refused or prediction.basis, prediction.memory_basis)
    return ", ".join(_settings(prediction)), speed, " ".join(sentence(plain(reason)) for reason in reasons if reason)
