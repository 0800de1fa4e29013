"""The parts of a notebook's output that are not static: outputs renewed in place, widgets, and the Stop button.

A cell runs on the main thread, where a click waits for the end of the run, so Stop uses the kernel's control channel. A
displayed widget becomes an error message once a notebook is saved and opened again. So an `Offer` is text with hidden
buttons; its invisible widget only shows the buttons and passes on their clicks (static/offer_buttons.js).
"""

from __future__ import annotations

import contextvars
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Protocol

from gpulab.views.page import macros, static

JOIN_TIMEOUT_S = 5.0


def running_kernel() -> Any:
    """The kernel that runs this code; None outside a kernel."""
    ipython = sys.modules.get("IPython")  # if IPython is not imported, there is no kernel
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None)


def in_notebook() -> bool:
    """Whether an IPython kernel runs this code: a front end that can show pictures."""
    return running_kernel() is not None


def show_bundle(bundle: Mapping[str, object]) -> None:
    """Show a display bundle as a new output of the cell."""
    from IPython.display import display

    display(bundle, raw=True)  # type: ignore[no-untyped-call]


class Output:
    """An output that is renewed in place. A view that fails must not cost the user the run."""

    def __init__(self) -> None:
        self._handle: Any = None

    def __bool__(self) -> bool:
        """Whether it is displayed."""
        return self._handle is not None

    def show(self, bundle: Mapping[str, object]) -> bool:
        """Replace the output's content. False if the front end failed; never raises."""
        with suppress(Exception):
            self._put(bundle)
            return True
        return False

    def show_widget(self, widget: Any, text: str) -> None:
        """Show the widget, with a text for front ends without widgets. Raises what the front end raises."""
        bundle, metadata = widget._repr_mimebundle_()
        self._put({**bundle, "text/plain": text}, metadata=metadata)

    def _put(self, bundle: Mapping[str, object], **metadata: object) -> None:
        from IPython.display import display

        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True, **metadata)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(bundle, raw=True, **metadata)

    def write(self, text: str) -> None:
        """Show a line of text."""
        self.show({"text/plain": text, "text/html": str(macros("running.html").line(text))})

    def clear(self) -> None:
        """Remove the output."""
        if self:
            self.show({"text/plain": "", "text/html": ""})


class Repeater:
    """Calls `task` every `every_s` seconds on a thread of its own, until `stop`, or until it fails or returns False."""

    def __init__(self, name: str, task: Callable[[], object], every_s: float, first_s: float | None = None) -> None:
        self._over = threading.Event()

        def repeat() -> None:
            pause_s = every_s if first_s is None else first_s
            with suppress(Exception):
                while not self._over.wait(pause_s) and task() is not False:
                    pause_s = every_s

        run = contextvars.copy_context().run  # says to which cell an output belongs
        self._thread = threading.Thread(target=run, args=(repeat,), name=f"gpulab-{name}", daemon=True)
        with suppress(RuntimeError):  # if no thread can be started
            self._thread.start()

    def stop(self) -> bool:
        """Whether the thread has ended within some seconds."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)
        return not self._thread.is_alive()


def close(widget: Any) -> None:
    """Close a widget and its layout and style widgets; ipywidgets keeps open ones until the kernel ends."""
    for name in ("layout", "style"):
        part = getattr(widget, name, None)
        if part is not None and hasattr(part, "close"):
            part.close()
    widget.close()


class Sent(Protocol):
    """A status such as `gpulab.views.progress.Status`."""

    @property
    def running(self) -> bool: ...
    def sent(self) -> dict[str, object]: ...


class Renewed:
    """A widget whose parts can be renewed from any thread; a status is sent only if it differs from the last."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._status: Sent | None = None
        self._lock = threading.Lock()
        self._context = contextvars.copy_context()  # says to which cell an output belongs

    def show(self, *, status: Sent | None = None, **parts: Any) -> None:
        """Renew these parts of the widget."""

        def renew() -> None:
            with self._lock, suppress(Exception):  # a view that fails must not end the run
                # a front end that sent a request waits for the final status
                if status is not None and (status != self._status or not status.running):
                    self._status = status
                    self.root.status = status.sent()
                for name, value in parts.items():
                    setattr(self.root, name, value)

        self._context.copy().run(renew)

    def close(self) -> None:
        close(self.root)


def widget_class(script: str, **traits: object) -> Callable[..., Any]:
    """The anywidget class of a script in `views/static`, with a synchronized trait per name and its initial value."""
    import anywidget
    import traitlets

    kinds: dict[type, Any] = {str: traitlets.Unicode, bool: traitlets.Bool, list: traitlets.List, dict: traitlets.Dict}
    fields = {name: kinds[type(value)](value).tag(sync=True) for name, value in traits.items()}
    name = script.partition(".")[0].title().replace("_", "")
    return type(name, (anywidget.AnyWidget,), {"_esm": str(static(script)), **fields})


class ProgressWidget(Renewed):
    """The progress with a Stop button. `stop` is called if the front end has no control channel."""

    def __init__(self, key: str, hint: str, stop: Callable[[], None]) -> None:
        self.key = key
        super().__init__(_stop_button()(run_key=key, hint=hint, css=static("rows.css") + static("bench.css")))
        self.root.on_msg(lambda _widget, content, _buffers: stop() if content.get("kind") == "stop" else None)


@cache
def _stop_button() -> Callable[..., Any]:
    """The widget class of frontend/src/stop_button.js. `css`, not `style`: `style` marks an ipywidgets widget."""
    status = {"running": True, "words": "gpulab: …", "fraction": 0}
    return widget_class("stop_button.js", run_key="", hint="", css="", status=status)


Choice = tuple[str, Callable[[], None]]


class Offer:
    """The buttons `choices`, each a label and the action of a click, before `text`, which says the same in words."""

    def __init__(self, choices: Sequence[Choice], text: str) -> None:
        self.choices = tuple(choices)
        self._text = text
        self._key = uuid.uuid4().hex
        self._widget: Any = hidden_widget("offer_buttons.js")(key=self._key)
        self._widget.on_msg(self._on_click)

    def html(self) -> str:
        """The output; a front end that does not run the widget shows only the text."""
        return str(macros("running.html").offer(self._key, [label for label, _ in self.choices], self._text))

    def _on_click(self, _widget: object, content: dict[str, object], _buffers: object) -> None:
        choice = str(content.get("choice", ""))
        if content.get("kind") == "offer" and choice.isdecimal() and int(choice) < len(self.choices):
            self.choices[int(choice)][1]()

    def close(self) -> None:
        """The buttons disappear; the text stays."""
        widget, self._widget = self._widget, None
        if widget is not None:
            widget.over = True
            close(widget)


@cache
def hidden_widget(script: str) -> Callable[..., Any]:
    """The class of a never displayed widget: its script controls the output with its `key` until it is `over`."""
    return widget_class(script, key="", over=False)


STOP_MESSAGE = "gpulab_stop"


class StopHandler:
    """Answers `gpulab_stop` messages: asks the run to end, and replies. Runs in the kernel's control thread."""

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
    """Let control messages with `run_key` call `request_stop`; returns the function that ends this.

    Several runs share one handler. On a kernel without control handlers (not ipykernel) nothing happens: the browser
    then falls back to an interrupt.
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
