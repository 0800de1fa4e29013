"""The panel's place in a notebook: the widgets, and below them the last result as pictures and tables that are saved.

A widget in a saved notebook is an error message without its kernel; what stands below it stays readable.
"""

from __future__ import annotations

from html import escape
from typing import Any

from gpulab.views.running.live_plot import WIDGET_VIEW


class PanelOutput:
    """Three outputs of the cell that showed the panel: the panel, the result, what the cell printed."""

    def __init__(self) -> None:
        self._panel: Any = None
        self._result: Any = None
        self._printed: Any = None

    def show(self, root: Any, text: str) -> None:
        """Display it with room below; shown again, it takes the place of what was shown before."""
        from IPython.display import display

        view = {WIDGET_VIEW: {"version_major": 2, "version_minor": 0, "model_id": root.model_id}, "text/plain": text}
        if self._panel is not None:
            self._panel.update(view, raw=True)
            return
        self._panel = display(view, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        self._result = display({"text/plain": ""}, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        self._printed = display({"text/plain": ""}, raw=True, display_id=True)  # type: ignore[no-untyped-call]

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
            self._panel.update({"text/plain": text, "text/html": _quoted(text)}, raw=True)


def _quoted(text: str) -> str:
    return f'<pre style="font-size:12px;white-space:pre-wrap">{escape(text)}</pre>'
