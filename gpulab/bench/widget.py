"""The front end's half of a bench: what it shows, and what its clicks ask for. It may be renewed from any thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, cast

from gpulab.user_code import PACKAGE_FOLDER
from gpulab.views.html_bars import static
from gpulab.views.running.progress import Status
from gpulab.views.running.widgets import Renewed

MODULE = PACKAGE_FOLDER / "views" / "static" / "bench.js"
Heard = Callable[[str, Mapping[str, Any]], None]


class BenchWidget(Renewed):
    """`root` is displayed. `heard` is called with what a click asks for, and with its words."""

    def __init__(self, key: str, run_key: str, cell: str, code: str, heard: Heard) -> None:
        root = _widget_class()(
            key=key,
            run_key=run_key,
            cell=cell,
            code=code,
            css=static("rows.css") + static("bench.css"),
            status=Status().sent(),
        )
        super().__init__(root)
        self.root.on_msg(lambda _widget, content, _buffers: heard(str(content.get("do", "")), content))

    @property
    def marks(self) -> list[str]:
        return list(self.root.marks)


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
        css = traitlets.Unicode().tag(sync=True)  # not `style`: front ends take that for a widget of ipywidgets
        toggles: Any = traitlets.List().tag(sync=True)
        unexpected = traitlets.Unicode().tag(sync=True)
        status = traitlets.Dict().tag(sync=True)
        table = traitlets.Unicode().tag(sync=True)
        marks: Any = traitlets.List().tag(sync=True)
        charts: Any = traitlets.List().tag(sync=True)
        detail = traitlets.Unicode().tag(sync=True)
        prints = traitlets.Unicode().tag(sync=True)
        edit = traitlets.Dict().tag(sync=True)

    return cast("Callable[..., Any]", BenchView)
