"""Lets a browser end a run while the kernel is busy: a message type of our own on the kernel's control channel.

ipykernel serves that channel in its own thread while a cell runs. Comm messages are no substitute: they wait for the
end of the cell on ipykernel 6.31 and 7.4, and only 7.3 runs them in between.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

STOP_MESSAGE = "gpulab_stop"


class StopHandler:
    """Answers `gpulab_stop` messages: asks the run to end, and replies. Called in the kernel's control thread."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.runs: dict[str, Callable[[], None]] = {}

    def __call__(self, stream: object, ident: object, message: dict[str, object]) -> None:
        content = self._answer(message.get("content"))
        self._session.send(stream, f"{STOP_MESSAGE}_reply", content, parent=message, ident=ident)

    def _answer(self, content: object) -> dict[str, object]:
        key = content.get("run") if isinstance(content, dict) else None
        request_stop = self.runs.get(key) if isinstance(key, str) else None
        if request_stop is None:
            return {"status": "error", "ename": "RunOver", "evalue": "no such run goes on", "traceback": []}
        request_stop()
        return {"status": "ok"}


def accept_stop(kernel: Any, run_key: str, request_stop: Callable[[], None]) -> Callable[[], None]:
    """From now on a control message naming `run_key` calls `request_stop`; returns the function that ends this.

    Several runs share one handler. A kernel without control handlers (not ipykernel) accepts nothing, quietly: the
    browser then falls back to an interrupt.
    """
    handlers = getattr(kernel, "control_handlers", None)
    if not isinstance(handlers, MutableMapping):
        return lambda: None
    handler = handlers.get(STOP_MESSAGE)
    if not isinstance(handler, StopHandler):
        handler = StopHandler(kernel.session)
    handler.runs[run_key] = request_stop
    handlers[STOP_MESSAGE] = handler

    def undo() -> None:
        handler.runs.pop(run_key, None)
        if not handler.runs and handlers.get(STOP_MESSAGE) is handler:
            del handlers[STOP_MESSAGE]

    return undo
