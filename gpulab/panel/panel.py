"""The panel: every knob of a cell in one grid of plain ipywidgets, what it is doing now, and the buttons.

It belongs to the main thread: ipywidgets' traits are not thread safe. It starts nothing by itself: each button calls
one of `Actions`, and whoever runs the cell tells the panel where it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, Literal, Protocol

from gpulab.knobs.knob import Knob, Value
from gpulab.knobs.observe.observation import Observation
from gpulab.panel.controls import ONE_LINE, KnobRow, OnMain, at_once, shown
from gpulab.tuning.plan import Progress
from gpulab.views.running.progress import share_done, words
from gpulab.views.running.widgets import close

Level = Literal["quiet", "good", "bad"]
Kind = Literal["look", "run", "compare"]

COLUMNS = "minmax(110px,150px) 122px minmax(84px,128px) minmax(140px,1fr)"
STEPS = "steps per run (0: gpulab chooses)"
STOP_HINT = (
    "End at the next step, with what there is. Where this button cannot reach a busy kernel (outside JupyterLab and "
    "Notebook), the notebook's own interrupt ends the run"
)
OPENING = (
    "Nothing has run yet. “Look at the cell” runs a few steps as written, puts its state back, and tells what it has."
)
SEEN = "These are the values that the cell had when it last ran. Turn a knob, then Run or Compare A/B."
PLAIN = "gpulab's panel needs a notebook; here: gpulab.lab().compare(workers=2)"

_COLOURS: dict[Level, str] = {
    "quiet": "color:var(--jp-ui-font-color2,inherit)",
    "good": "color:var(--jp-ui-font-color0,inherit);font-weight:600",
    "bad": "color:var(--jp-error-color1,#c0392b)",
}
_FRAME = "1px solid rgba(128,128,128,0.35)"


class Actions(Protocol):
    """What the buttons do. None of them raises."""

    def begin(self, kind: Kind, settings: Mapping[str, Value]) -> None: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...


class Panel:
    """The widgets. `root` is displayed; `settings` is what the user has chosen.

    `stop_key` names the run on the kernel's control channel; empty: there is no kernel, and a click is heard.
    `on_main` runs a task on the main thread: clicks may arrive on another one. Stop acts where it arrives.
    """

    def __init__(
        self, knobs: Sequence[Knob], cell: str, actions: Actions, stop_key: str = "", on_main: OnMain = at_once
    ) -> None:
        from ipywidgets import HTML, BoundedIntText, FloatProgress, Layout, VBox

        self._actions = actions
        self._stop_key = stop_key
        self._on_main = on_main
        self._cell = cell
        self._observation: Observation | None = None
        self._closed = False
        self._head = HTML(value=head(cell), layout=Layout(margin="0 0 4px 0", overflow="hidden"))
        self.rows = tuple(KnobRow(knob, self._judge, on_main) for knob in knobs)
        self.steps = BoundedIntText(
            value=0, min=0, max=100_000, layout=Layout(width="72px", margin="0 12px 0 4px"), tooltip=_STEPS_HINT
        )
        self._bar = FloatProgress(min=0.0, max=1.0, layout=Layout(width="260px", display="none", margin="0 8px 0 0"))
        self._now = HTML(layout=Layout(margin="0", flex="1 1 auto", overflow="hidden"))
        self._message = HTML(layout=Layout(margin="2px 0 0 0"))
        self.buttons = self._make_buttons()
        self.root = VBox(
            [self._head, self._grid(), self._controls(), _row([self._bar, self._now]), self._message],
            layout=Layout(border=_FRAME, padding="8px 12px", width="auto", max_width="1100px", margin="4px 0"),
        )
        self.root.add_class("gpulab-panel")
        self._allow_stop(False)
        self.say(OPENING)
        self._judge()

    # -- what it shows -------------------------------------------------------------------------------------------

    @property
    def settings(self) -> dict[str, Value]:
        return {row.knob.name: row.setting for row in self.rows if row.setting is not None}

    @property
    def block_steps(self) -> int | None:
        return int(self.steps.value) or None

    def show_observation(self, observation: Observation) -> None:
        """Fill in what the cell was seen to have."""
        self._observation = observation
        self._judge()

    def begin(self, what: str) -> None:
        self.allow_start(False)
        self._allow_stop(True)
        self._bar.value = 0.0
        self._bar.layout.display = ""
        self._now.value = _line(what)
        self.say("")

    def tell(self, progress: Progress) -> None:
        self._bar.value = max(self._bar.value, share_done(progress))
        self._now.value = _line(words(progress))

    def end(self, message: str, level: Level = "good") -> None:
        """Nothing runs any more; `allow_start` makes it ready for the next run."""
        self._allow_stop(False)
        self._bar.layout.display = "none"
        self._now.value = ""
        self.say(message, level)

    def say(self, message: str, level: Level = "quiet") -> None:
        self._message.value = (
            f'<div style="{_COLOURS[level]};line-height:1.35;white-space:pre-wrap">{escape(message)}</div>'
        )

    def text(self) -> str:
        """The panel without widgets: each knob with what was found and what is chosen."""
        return "\n".join([f"gpulab panel · {first_line(self._cell)}", *map(_text_row, self.rows)])

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for row in self.rows:
            row.close()
        for widget in _below(self.root):
            close(widget)

    # -- inside --------------------------------------------------------------------------------------------------

    def _grid(self) -> Any:
        from ipywidgets import GridBox, Layout

        cells = [cell for row in self.rows for cell in row.cells]
        layout = Layout(grid_template_columns=COLUMNS, grid_gap="3px 10px", align_items="center", width="auto")
        return GridBox(cells, layout=layout)

    def _make_buttons(self) -> dict[str, Any]:
        actions, main = self._actions, self._on_main
        looked = "A few steps as written; its state is put back"
        compared = "As written against these settings, in short blocks in random order"
        return {
            "look": _button("Look at the cell", looked, lambda: actions.begin("look", {}), main),
            "run": _button("Run", "One run with these settings, and its report", lambda: self._start("run"), main),
            "compare": _button("Compare A/B", compared, lambda: self._start("compare"), main),
            "stop": self._make_stop(),
            "reset": _button("Reset", "All knobs as found", self.reset, main),
            "close": _button("Close", "Stop and put the panel away", actions.close, main),
        }

    def _make_stop(self) -> Any:
        hint = STOP_HINT
        if not self._stop_key:
            return _button("Stop", hint, self._actions.stop, at_once)
        from gpulab.views.running.widgets import control_stop_button

        return control_stop_button(self._stop_key, hint, self._actions.stop)

    def _controls(self) -> Any:
        from ipywidgets import HTML

        words = HTML(value=f'<span title="{escape(_STEPS_HINT)}">{STEPS}</span>')
        first = [self.buttons[name] for name in ("look", "run", "compare", "stop")]
        box = _row([*first, words, self.steps, self.buttons["reset"], self.buttons["close"]])
        box.layout.margin, box.layout.flex_flow = "8px 0 4px 0", "row wrap"
        return box

    def reset(self) -> None:
        for row in self.rows:
            row.reset()
        self._judge()

    def allow_start(self, can: bool = True) -> None:
        """Whether the buttons that start a run can be pressed."""
        for name in ("look", "run", "compare"):
            self.buttons[name].disabled = not can

    def _allow_stop(self, can: bool) -> None:
        stop = self.buttons["stop"]
        stop.disabled, stop.button_style = not can, "warning" if can else ""

    def _judge(self) -> None:
        settings = self.settings
        for row in self.rows:
            row.show(self._observation, settings)
        if "look" in self.buttons:
            self.buttons["look"].button_style = "primary" if self._observation is None else ""
            self.buttons["compare"].button_style = "primary" if settings else ""

    def _start(self, kind: Kind) -> None:
        refused = [f"{r.knob.name}={r.setting}: {r.refusal}" for r in self.rows if r.refusal]
        if refused:
            self.say("; ".join(refused), "bad")
        else:
            self._actions.begin(kind, self.settings)


_STEPS_HINT = (
    "Counted steps of a run, and of each short run of a comparison; 0: gpulab chooses. Some for warm-up and the trace "
    "come on top, and no run goes on for more than 20 s"
)


def first_line(cell: str) -> str:
    """By which a user knows their cell: its first line that is neither empty nor a comment."""
    lines = [line.strip() for line in cell.splitlines() if line.strip()]
    return next((line for line in lines if not line.startswith("#")), lines[0] if lines else "a block of code")


def head(cell: str) -> str:
    count = len(cell.strip().splitlines())
    more = f" … ({count} lines)" if count > 1 else ""
    quiet = "color:var(--jp-ui-font-color2,inherit)"
    code = "font-family:var(--jp-code-font-family,monospace);font-size:var(--jp-code-font-size,13px)"
    return (
        f'<div style="{ONE_LINE}line-height:1.5">'
        f'<b>Knobs</b> <span style="{quiet}">of the cell</span> '
        f'<span style="{code}" title="{escape(cell)}">{escape(first_line(cell))}</span>'
        f'<span style="{quiet}">{more}</span></div>'
    )


def _line(text: str) -> str:
    return f'<div style="{ONE_LINE}">{escape(text)}</div>'


def _text_row(row: KnobRow) -> str:
    chosen = f" → {shown(row.setting)}" if row.setting is not None else ""
    why = f"  ({row.refusal})" if row.refusal else ""
    return f"{row.knob.name:<20}{shown(row.current)}{chosen}{why}"


def _button(words: str, hint: str, action: Callable[[], None], on_main: OnMain) -> Any:
    from ipywidgets import Button, Layout

    button = Button(description=words, tooltip=hint, layout=Layout(width="auto", margin="2px 6px 2px 0"))
    button.on_click(lambda _: on_main(action))
    return button


def _row(widgets: Sequence[Any]) -> Any:
    from ipywidgets import HBox, Layout

    return HBox(list(widgets), layout=Layout(align_items="center", width="auto"))


def _below(widget: Any) -> list[Any]:
    """It and all that it holds, the innermost first."""
    return [w for child in getattr(widget, "children", ()) for w in _below(child)] + [widget]
