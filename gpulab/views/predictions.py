"""What settings of the knobs would bring, before any is tried."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from html import escape

from gpulab.formatting import capitalized
from gpulab.prediction.prediction import Prediction
from gpulab.views.comparison.prediction import memory_words, predicted_words
from gpulab.views.wording import plain

WIDTH = 100
NOTHING = "No finding of this run names a knob, so nothing is predicted. Name a setting: %gpulab predict workers=2"
_INDENT = "      "


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predictions for one run, to display."""

    run: str
    predictions: tuple[Prediction, ...]

    def __repr__(self) -> str:
        if not self.predictions:
            return NOTHING
        blocks = [self._title]
        for settings, speed, reason in map(_cells, self.predictions):
            blocks += textwrap.wrap(f"  {settings}: {speed}", WIDTH, subsequent_indent=_INDENT)
            blocks += textwrap.wrap(reason, WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
        return "\n".join([*blocks, *self._next_step])

    def _repr_html_(self) -> str:
        if not self.predictions:
            return f"<p>{escape(NOTHING)}</p>"
        rows = "".join(f"<tr>{''.join(map(_html_cell, _cells(p)))}</tr>" for p in self.predictions)
        table = f'<table style="border-collapse:collapse;text-align:left"><tbody>{rows}</tbody></table>'
        return f"<p>{escape(self._title)}</p>{table}" + "".join(f"<p>{escape(line)}</p>" for line in self._next_step)

    @property
    def _title(self) -> str:
        return f"Predicted for the run {plain(self.run)}, not measured:"

    @property
    def _next_step(self) -> list[str]:
        settings = next((_settings(p) for p in self.predictions if p.ratio is not None), None)
        return [f"To measure it: %%gpuprofile --ab {settings.replace(', ', ',')}"] if settings is not None else []


def _settings(prediction: Prediction) -> str:
    return plain(", ".join(f"{name}={value}" for name, value in prediction.settings.items()))


def _cells(prediction: Prediction) -> tuple[str, str, str]:
    """The settings, what they would bring, and the reason."""
    speed = "no prediction"
    if prediction.ratio is not None:
        speed = f"{predicted_words(prediction)} as fast{memory_words(prediction)}"
    reasons = map(plain, (prediction.refused or prediction.basis, prediction.memory_basis))
    return _settings(prediction), speed, " ".join(f"{capitalized(reason)}." for reason in reasons if reason)


def _html_cell(words: str) -> str:
    return f'<td style="padding:2px 12px 2px 0;vertical-align:top;text-align:left">{escape(words)}</td>'
