"""What settings of the knobs would bring, before any is tried."""

from __future__ import annotations

import html as markup
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from gpulab.prediction.prediction import Prediction
from gpulab.views.comparison.prediction import memory_words, predicted_words
from gpulab.views.wording import plain

WIDTH = 100
NOTHING = "No finding of this run names a knob, so nothing is foretold. Ask for one: %gpulab predict workers=2"


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predictions for one run, to display."""

    run: str
    predictions: tuple[Prediction, ...]

    def __repr__(self) -> str:
        if not self.predictions:
            return NOTHING
        blocks = [_title(self.run), *(_block(made) for made in self.predictions), _how(self.predictions)]
        return "\n".join(block for block in blocks if block)

    def _repr_html_(self) -> str:
        if not self.predictions:
            return f"<p>{markup.escape(NOTHING)}</p>"
        rows = "".join(
            f"<tr>{_cell(_named(made))}{_cell(_said(made))}{_cell(_because(made))}</tr>" for made in self.predictions
        )
        table = f'<table style="border-collapse:collapse;text-align:left"><tbody>{rows}</tbody></table>'
        how = _how(self.predictions)
        return f"<p>{markup.escape(_title(self.run))}</p>{table}" + (f"<p>{markup.escape(how)}</p>" if how else "")


def _title(run: str) -> str:
    return f"Foretold for the run {plain(run)}, not measured:"


def _block(made: Prediction) -> str:
    head = f"  {_named(made)}: {_said(made)}"
    why = _because(made)
    lines = textwrap.wrap(head, WIDTH, subsequent_indent="      ")
    return "\n".join([*lines, *textwrap.wrap(why, WIDTH, initial_indent="      ", subsequent_indent="      ")])


def _named(made: Prediction) -> str:
    return plain(", ".join(f"{name}={value}" for name, value in made.settings.items()))


def _said(made: Prediction) -> str:
    if made.ratio is None:
        return "no prediction"
    return f"{predicted_words(made)} as fast{memory_words(made)}"


def _because(made: Prediction) -> str:
    told = (made.refused or made.basis, made.memory_basis)
    return " ".join(f"{why[:1].upper()}{why[1:]}." for why in map(plain, told) if why)


def _how(predictions: Sequence[Prediction]) -> str:
    named = next((p for p in predictions if p.ratio is not None), None)
    return f"To hold it against the truth: %%gpuprofile --ab {_named(named).replace(', ', ',')}" if named else ""


def _cell(words: str) -> str:
    return f'<td style="padding:2px 12px 2px 0;vertical-align:top;text-align:left">{markup.escape(words)}</td>'
