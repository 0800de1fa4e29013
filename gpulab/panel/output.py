"""The panel's place in a notebook: the widgets, and below them the last result, which is saved.

A widget in a saved notebook is an error message without its kernel; what stands around it stays readable, and takes the
place of that message where the notebook is trusted.
"""

from __future__ import annotations

from html import escape
from typing import Any

from gpulab.views.running.live_plot import WIDGET_VIEW

REOPEN = "The knobs of this cell stood here. Run the cell again, then %gpulab panel opens them."
# The front end writes its message as the only text of the widget's place, which then holds no element.
_DEAD = "div.jupyter-widgets:not(:has(*))"  # no button, which has no element inside either
_NOTE = (
    "<style>.gpulab-panel-note{display:none}"
    f".jp-OutputArea-child:has(.gpulab-panel-note)+.jp-OutputArea-child {_DEAD}{{display:none}}"
    f".jp-OutputArea-child:has(+.jp-OutputArea-child {_DEAD}) .gpulab-panel-note{{display:block}}</style>"
    f'<div class="gpulab-panel-note" style="font-size:13px">{REOPEN}</div>'
)


class PanelOutput:
    """Four outputs of the cell that showed the panel: an offer, the panel, the result, what the cell printed."""

    def __init__(self) -> None:
        self._offer: Any = None
        self._panel: Any = None
        self._result: Any = None
        self._printed: Any = None

    def offer(self, html: str, text: str) -> None:
        """Display what opens the panel, with room for it below."""
        self._make_room()
        self._offer.update({"text/html": html, "text/plain": text}, raw=True)

    def show(self, root: Any, text: str) -> None:
        """Display the panel with room below; shown again, it takes the place of what was shown before."""
        self._make_room()
        view = {WIDGET_VIEW: {"version_major": 2, "version_minor": 0, "model_id": root.model_id}, "text/plain": text}
        self._offer.update({"text/html": _NOTE, "text/plain": ""}, raw=True)
        self._panel.update(view, raw=True)

    def _make_room(self) -> None:
        from IPython.display import display

        if self._panel is None:
            for name in ("_offer", "_panel", "_result", "_printed"):
                handle = display({"text/plain": ""}, raw=True, display_id=True)  # type: ignore[no-untyped-call]
                setattr(self, name, handle)

    def show_result(self, bundle: dict[str, object], printed: str) -> None:
        if self._panel is not None:
            self._result.update(bundle, raw=True)
            self._printed.update({"text/html": printed, "text/plain": ""}, raw=True)

    def show_text(self, text: str) -> None:
        """A traceback in place of a result."""
        if self._panel is not None:
            self._result.update({"text/plain": text, "text/html": _quoted(text)}, raw=True)
            self._printed.update({"text/plain": ""}, raw=True)

    def close(self, text: str) -> None:
        """Put the panel's settings, as text, where the panel was."""
        if self._panel is not None:
            self._offer.update({"text/plain": ""}, raw=True)
            self._panel.update({"text/plain": text, "text/html": _quoted(text)}, raw=True)


def _quoted(text: str) -> str:
    return f'<pre style="font-size:12px;white-space:pre-wrap">{escape(text)}</pre>'
