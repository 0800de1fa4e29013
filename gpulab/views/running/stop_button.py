"""The panel's Stop button for a cell that runs on the main thread, where a click waits for the end of the run.

It asks on the kernel's control channel, as the live view does: see gpulab.views.running.stop_message.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

from gpulab.user_code import PACKAGE_FOLDER

MODULE = PACKAGE_FOLDER / "views" / "static" / "stop_button.js"


def control_stop_button(run_key: str, hint: str, action: Callable[[], None]) -> Any:
    """A widget with `disabled` like a Button's. `action` is called where the front end has no control channel."""
    widget = _widget_class()(run_key=run_key, hint=hint)

    def heard(_widget: object, content: dict[str, object], _buffers: object) -> None:
        if content.get("kind") == "stop":
            action()

    widget.on_msg(heard)
    return widget


@cache
def _widget_class() -> Callable[..., Any]:
    import anywidget
    import traitlets

    class StopButton(anywidget.AnyWidget):
        """A view of live/src/stop_button.js."""

        _esm = MODULE.read_text(encoding="utf-8")
        run_key = traitlets.Unicode().tag(sync=True)
        hint = traitlets.Unicode().tag(sync=True)
        disabled = traitlets.Bool(True).tag(sync=True)
        button_style = traitlets.Unicode()

    return cast("Callable[..., Any]", StopButton)
