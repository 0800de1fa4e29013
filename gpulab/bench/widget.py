"""The front end's half of a bench: what it shows, and what its clicks ask for. It may be renewed from any thread."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, Literal, cast

from msgspec import Struct

from gpulab.user_code import PACKAGE_FOLDER
from gpulab.views.html_bars import static
from gpulab.views.running.widgets import close

MODULE = PACKAGE_FOLDER / "views" / "static" / "bench.js"
Level = Literal["quiet", "good", "bad"]
Heard = Callable[[str, Mapping[str, Any]], None]


class Status(Struct):
    """What goes on, in words and as a share; when nothing does, what came of it."""

    running: bool = False
    words: str = ""
    fraction: float = 0.0
    message: str = ""
    level: Level = "quiet"


class BenchWidget:
    """`root` is displayed. `heard` is called with what a click asks for, and with its words."""

    def __init__(self, key: str, run_key: str, cell: str, code: str, heard: Heard) -> None:
        self.root: Any = _widget_class()(
            key=key,
            run_key=run_key,
            cell=cell,
            code=code,
            style=static("rows.css") + static("bench.css"),
            status=_plain(Status()),
        )
        self.root.on_msg(lambda _widget, content, _buffers: heard(str(content.get("do", "")), content))
        self._lock = threading.Lock()
        self._context = contextvars.copy_context()  # says to which cell an output belongs

    @property
    def marks(self) -> list[str]:
        return list(self.root.marks)

    def show(self, **parts: object) -> None:
        """Renew these parts of it."""

        def renew() -> None:
            with self._lock, suppress(Exception):  # a view that fails ends no run
                for name, value in parts.items():
                    setattr(self.root, name, _plain(value) if isinstance(value, Status) else value)

        self._context.copy().run(renew)

    def close(self) -> None:
        close(self.root)


def _plain(status: Status) -> dict[str, object]:
    return {name: getattr(status, name) for name in Status.__struct_fields__}


@cache
def _widget_class() -> Callable[..., Any]:
    import anywidget
    import traitlets

    class BenchView(anywidget.AnyWidget):
        """A view of frontend/src/bench.js."""

        _esm = MODULE.read_text(encoding="utf-8")
        key = traitlets.Unicode().tag(sync=True)
        run_key = traitlets.Unicode().tag(sync=True)
        cell = traitlets.Unicode().tag(sync=True)
        code = traitlets.Unicode().tag(sync=True)
        style = traitlets.Unicode().tag(sync=True)
        toggles: Any = traitlets.List().tag(sync=True)
        unexpected = traitlets.Unicode().tag(sync=True)
        status = traitlets.Dict().tag(sync=True)
        table = traitlets.Unicode().tag(sync=True)
        marks: Any = traitlets.List().tag(sync=True)
        detail = traitlets.Unicode().tag(sync=True)
        edit = traitlets.Dict().tag(sync=True)

    return cast("Callable[..., Any]", BenchView)
