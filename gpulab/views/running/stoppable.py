"""Progress of something that runs the user's cell on the main thread, with a Stop button that is heard meanwhile."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self

from gpulab.views.running.live import WIDGET_VIEW
from gpulab.views.running.progress import Progressing
from gpulab.views.running.stop_message import accept_stop
from gpulab.views.running.widgets import close

STOPPED_BY = "To end it: the Stop button above, or the notebook's own. What the cell trains is put back."


class Shown(Protocol):
    """A result with its views."""

    def text(self) -> str: ...
    def bundle(self) -> dict[str, object]: ...


class Stoppable(Progressing):
    """As `Progressing`; `stop` is what the button calls, `hint` what it says."""

    def __init__(self, stop: Callable[[], None], hint: str, *, show: bool = True) -> None:
        super().__init__(None, show=show)
        self._stop = stop
        self._hint = hint
        self._button: Any = None
        self._button_handle: Any = None
        self._refuse_stop: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        if self._notebook:
            with suppress(Exception):  # the notebook's own stop button is there without ipywidgets, too
                self._show_button()
        return super().__enter__()

    def _show_button(self) -> None:
        from IPython.display import display

        from gpulab.views.running.stop_button import control_stop_button

        key = uuid.uuid4().hex
        button = self._button = control_stop_button(key, self._hint, self._stop)
        button.disabled, button.button_style = False, "warning"
        view = {WIDGET_VIEW: {"version_major": 2, "version_minor": 0, "model_id": button.model_id}}
        self._refuse_stop = accept_stop(sys.modules["IPython"].get_ipython().kernel, key, self._stop)
        self._button_handle = display(  # type: ignore[no-untyped-call]
            {**view, "text/plain": STOPPED_BY}, raw=True, display_id=True
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._refuse_stop()
        with suppress(Exception):
            if self._button_handle is not None:  # a widget in a saved notebook is an error message
                self._button_handle.update({"text/plain": "", "text/html": ""}, raw=True)
            if self._button is not None:
                close(self._button)
        super().__exit__(kind, error, trace)

    def put(self, shown: Shown) -> None:
        """The result takes the place of the progress."""
        if self._handle is not None:
            self._handle.update(shown.bundle(), raw=True)
        elif self._show:
            sys.stdout.write(shown.text() + "\n")


__all__ = ["Shown", "Stoppable"]
