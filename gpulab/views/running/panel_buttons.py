"""Buttons in an output that stays readable when nobody answers them: plain HTML, made alive by a widget nobody sees.

A displayed widget is an error message in a notebook that was saved and opened again. So the output holds text and
hidden buttons, and the widget's only work is to show the buttons and to pass their clicks on (static/panel_buttons.js).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from functools import cache
from html import escape
from typing import Any, cast

from gpulab.user_code import PACKAGE_FOLDER
from gpulab.views.running.widgets import close

MODULE = PACKAGE_FOLDER / "views" / "static" / "panel_buttons.js"
_BUTTON = (
    "display:none;font:inherit;font-size:13px;padding:3px 12px;margin:0 8px 4px 0;cursor:pointer;border-radius:4px;"
    "color:inherit;background:rgba(128,128,128,0.15);border:1px solid rgba(128,128,128,0.5)"
)

Choice = tuple[str, Callable[[], None]]


class Offer:
    """The buttons `choices`, each a label and what a click does, before `text`, which says the same without them."""

    def __init__(self, choices: Sequence[Choice], text: str) -> None:
        self._choices = tuple(choices)
        self._text = text
        self._key = uuid.uuid4().hex
        self._widget: Any = _widget_class()(key=self._key)
        self._widget.on_msg(self._heard)

    def html(self) -> str:
        """The output: a front end that never meets the widget shows the text alone."""
        buttons = "".join(
            f'<button type="button" value="{i}" style="{_BUTTON}">{escape(label)}</button>'
            for i, (label, _) in enumerate(self._choices)
        )
        text = f'<span style="font-size:13px;opacity:0.8">{escape(self._text)}</span>'
        return f'<div class="gpulab-offer-{self._key}" style="margin:4px 0">{buttons}{text}</div>'

    def _heard(self, _widget: object, content: dict[str, object], _buffers: object) -> None:
        choice = str(content.get("choice", ""))
        if content.get("kind") == "offer" and choice.isdecimal() and int(choice) < len(self._choices):
            self._choices[int(choice)][1]()

    def close(self) -> None:
        """The buttons disappear; the text stays."""
        widget, self._widget = self._widget, None
        if widget is not None:
            widget.over = True
            close(widget)


@cache
def _widget_class() -> Callable[..., Any]:
    import anywidget
    import traitlets

    class OfferWidget(anywidget.AnyWidget):
        """Never displayed."""

        _esm = MODULE.read_text(encoding="utf-8")
        key = traitlets.Unicode().tag(sync=True)
        over = traitlets.Bool(False).tag(sync=True)

    return cast("Callable[..., Any]", OfferWidget)
