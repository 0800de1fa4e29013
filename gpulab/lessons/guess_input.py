"""The field for a guess: plain HTML that stays readable in a saved notebook, made alive by a widget nobody sees.

A displayed widget is an error message in a notebook that was saved and opened again; see views/running/offer_buttons.
"""

from __future__ import annotations

import math
import uuid
from html import escape
from typing import Any

from gpulab.lessons.guesses import Question
from gpulab.user_code import PACKAGE_FOLDER
from gpulab.views.running.display import in_notebook
from gpulab.views.running.widgets import close, hidden_widget

MODULE = PACKAGE_FOLDER / "views" / "static" / "guess_input.js"
_FIELD = (
    "display:none;font:inherit;font-size:13px;width:6em;padding:3px 6px;margin:0 6px 0 0;border-radius:4px;"
    "color:inherit;background:rgba(128,128,128,0.12);border:1px solid rgba(128,128,128,0.5)"
)
_EXAMPLES = {"%": "40", "times": "1.5"}


class GuessInput:
    """What `lesson.guess(...)` gives: `value` is the number that was typed, None before that."""

    def __init__(self, name: str, question: Question) -> None:
        self.name = name  # of the variable that holds it
        self.question = question
        self.value: float | None = None
        self._key = uuid.uuid4().hex
        self._widget: Any = None

    def __repr__(self) -> str:
        if self.value is not None:
            return f"Your guess: {self.value:g}{self._unit}."
        return f"{self.question.text} Guess a number: {self._assignment}"

    @property
    def _unit(self) -> str:
        return " %" if self.question.unit == "%" else "×"

    @property
    def _assignment(self) -> str:
        return f"{self.name} = {_EXAMPLES[self.question.unit]}"

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        self._enliven()
        return {"text/plain": repr(self), "text/html": self.html()}

    def html(self) -> str:
        """The output: a front end that never meets the widget shows the words alone."""
        unit = self._unit.strip()
        spoken = "in per cent" if unit == "%" else "as a factor"
        value = "" if self.value is None else f"{self.value:g}"
        # no name, no form: JupyterLab keeps <input> only in what it trusts, and then the words say how to answer
        field = (
            f'<input type="number" step="any" aria-label="Your guess, {spoken}" value="{value}" style="{_FIELD}">'
            f'<span style="display:none;margin-right:8px">{unit}, then Enter,</span>'
        )
        words = f'<span style="font-size:13px;opacity:0.8">or write <code>{escape(self._assignment)}</code></span>'
        question = f"<div><b>Your guess.</b> {escape(self.question.text)}</div>"
        return f'<div class="gpulab-guess-{self._key}" style="margin:4px 0">{question}{field}{words}</div>'

    def _enliven(self) -> None:
        """In a notebook: a widget that shows the field and passes on what is typed."""
        if self._widget is None and in_notebook():
            self._widget = hidden_widget(MODULE)(key=self._key)
            self._widget.on_msg(self._heard)

    def _heard(self, _widget: object, content: dict[str, object], _buffers: object) -> None:
        if content.get("kind") != "guess":
            return
        try:
            value = float(str(content.get("value")))
        except ValueError:
            return
        if math.isfinite(value):
            self.value = value

    def close(self) -> None:
        """The field disappears; the words stay."""
        widget, self._widget = self._widget, None
        if widget is not None:
            widget.over = True
            close(widget)
