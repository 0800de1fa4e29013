"""One knob as a row of plain ipywidgets: its control, its current value, why it cannot be turned, and its lesson."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from gpulab.errors import UsageError
from gpulab.knobs.dataloader.loader_options import with_settings
from gpulab.knobs.knob import Knob, Value
from gpulab.knobs.observe.observation import Observation
from gpulab.views.running.widgets import close
from gpulab.views.wording import lesson_path

AS_WRITTEN = "as written"
_UNTURNED = ""  # its value in a list: None would be no selection
LARGEST = 1_000_000  # that a number field takes; the knob says what it really refuses
UNSEEN = "look at the cell first"

_QUIET = "color:var(--jp-ui-font-color2,inherit);"
_LINES = "display:-webkit-box;-webkit-box-orient:vertical;overflow:hidden;white-space:normal;overflow-wrap:anywhere;"
ONE_LINE = _LINES + "-webkit-line-clamp:1;"  # text that may not wrap would widen the box that ipywidgets puts around it
_SMALL = "font-size:12px;line-height:1.25;"
_TWO_LINES = _LINES + "-webkit-line-clamp:2;"
_ACCENT = "color:var(--jp-brand-color1,#0072b2);font-weight:600;"
_WRAPPED = "white-space:normal;"
_WARNING = "color:var(--jp-warn-color0,#b36b00);" + _WRAPPED


OnMain = Callable[[Callable[[], None]], None]


def at_once(task: Callable[[], None]) -> None:
    task()


def shown(value: Value | None) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "–" if value is None else str(value)


class KnobRow:
    """Its cells from left to right are `cells`. `changed` is called whenever the user has turned it.

    Without an observation nothing is known of the cell, and no knob can be set. Everything here belongs to the main
    thread.
    """

    def __init__(self, knob: Knob, changed: Callable[[], None], on_main: OnMain = at_once) -> None:
        from ipywidgets import HTML, Box, Layout

        self.knob = knob
        self.current: Value | None = None
        self.refusal: str | None = None  # why the value chosen cannot be had
        self.cautions: tuple[str, ...] = ()
        self._changed = changed
        self._on_main = on_main
        self._observation: Observation | None = None
        self._choice: Value | None = None  # None: as written
        self._title = HTML(layout=_cell())
        self._place = Box(layout=Layout(width="auto", overflow="hidden", margin="0"))
        self._current = HTML(layout=_cell())
        self._words = HTML(layout=_cell())
        self.control: Any = None
        self._make_control()
        self.cells = (self._title, self._place, self._current, self._words)

    @property
    def setting(self) -> Value | None:
        return self._choice

    def show(self, observation: Observation | None, others: Mapping[str, Value]) -> None:
        """Tell what the cell has. `others`: the settings of all knobs, on which it may depend what this one can be."""
        if observation is not self._observation:
            self._observation = observation
            current = None if observation is None else self.knob.value_in(observation)
            if type(current) is not type(self.current) or current != self.current:
                self.current = current
                self._choice = None if self._choice == current else self._choice
                self._make_control()
        self._judge(with_settings(observation, others) if observation is not None else None)

    def reset(self) -> None:
        if self._choice is not None:
            self._choice = None
            self._make_control()

    # -- the control ---------------------------------------------------------------------------------------------

    def _make_control(self) -> None:
        before, self.control = self.control, make_control(self.knob, self.current, self._choice)
        self.control.observe(self._on_value, names="value")
        self._place.children = (self.control,)
        if before is not None:
            before.unobserve_all()
            close(before)

    def _on_value(self, change: Mapping[str, Any]) -> None:
        value = change["new"]
        self._on_main(lambda: self._choose(value))

    def _choose(self, value: Value) -> None:
        self._choice = None if value == _UNTURNED or (value == self.current and self.current is not None) else value
        self._changed()

    def _judge(self, observation: Observation | None) -> None:
        """Whether it can be turned at all, and to the value chosen."""
        if observation is None:
            self.refusal, self.cautions, why, able = None, (), "", False
        else:
            able, why = turnable(self.knob, observation, self.current)
            self.refusal = None if self._choice is None else _refusal(self.knob, observation, self._choice)
            self.cautions = () if self._choice is None else self.knob.cautions(observation, self._choice)
            able = able or self._choice is not None  # a choice that has become impossible can be taken back
        self.control.disabled = not able
        self._title.value = _title(self.knob.title, self._choice is not None, able)
        self._current.value = _current_words(self.current, observation is not None)
        unable = "" if able or self.refusal else why
        self._words.value = _words(self.knob, self.refusal or unable, self.cautions, alarm=not unable)

    def close(self) -> None:
        for widget in (self.control, *self.cells):
            close(widget)


def make_control(knob: Knob, current: Value | None, choice: Value | None) -> Any:
    """A checkbox, a number field or a list, as the values are; a value that is not known is a list's "as written"."""
    from ipywidgets import BoundedIntText, Checkbox, Dropdown, Layout

    value = current if choice is None else choice
    kinds = {type(option) for option in knob.options}
    if kinds == {bool} and current is not None:
        return Checkbox(value=bool(value), indent=False, description="", layout=Layout(width="auto", margin="0"))
    if kinds == {int} and current is not None:
        least = min(0, int(current)) if 0 in knob.options else 1
        step = 1 if min(int(o) for o in knob.options) < 2 else 8
        return BoundedIntText(value=int(value or 0), min=least, max=LARGEST, step=step, layout=_filling())
    values = list(dict.fromkeys([*knob.options, *(v for v in (current, choice) if v is not None)]))
    options: list[tuple[str, Value]] = [(shown(v), v) for v in values]
    if current is None:
        options.insert(0, (AS_WRITTEN, _UNTURNED))
    return Dropdown(options=options, value=_UNTURNED if value is None else value, layout=_filling())


def _filling() -> Any:
    from ipywidgets import Layout

    return Layout(width="100%", margin="1px 0")


def turnable(knob: Knob, observation: Observation, current: Value | None) -> tuple[bool, str]:
    """Whether there is another value that it can have here, else the reason why not."""
    nearby = (1, current + 1) if type(current) is int else ()  # a dataset of 6 items takes batches of 1 to 6
    values = [*knob.options, *nearby]
    others = [value for value in values if value != current]
    reasons = [_refusal(knob, observation, option) for option in others]
    if not reasons or None in reasons:
        return True, ""
    return False, str(reasons[0])


def _refusal(knob: Knob, observation: Observation, value: Value) -> str | None:
    try:
        return knob.refuses(observation, knob.parse(str(value)))
    except UsageError as e:
        return str(e)


# -- words -------------------------------------------------------------------------------------------------------------


def _title(title: str, changed: bool, able: bool) -> str:
    if changed:
        return f'<div style="{ONE_LINE}{_ACCENT}" title="changed">● {escape(title)}</div>'
    faded = "" if able else "opacity:0.55;"
    return f'<div style="{ONE_LINE}{faded}">{escape(title)}</div>'


def _current_words(current: Value | None, looked: bool) -> str:
    if not looked:
        return f'<div style="{ONE_LINE}{_QUIET}" title="{UNSEEN}">as found: ?</div>'
    hint = ' title="not seen in this cell"' if current is None else ""
    return f'<div style="{ONE_LINE}{_QUIET}"{hint}>as found: {escape(shown(current))}</div>'


def _words(knob: Knob, refusal: str, cautions: tuple[str, ...], *, alarm: bool) -> str:
    """`alarm`: the user has chosen what it warns of; that a knob has nothing to act on is no fault of theirs."""
    help_line = f"{escape(knob.help)}{_lesson_link(knob.lesson)}"
    warning = refusal or "; ".join(cautions)
    hint = escape(" · ".join(words for words in (warning, knob.help) if words))
    if not warning:
        return f'<div style="{_SMALL}{_TWO_LINES}{_QUIET}" title="{hint}">{help_line}</div>'
    style = _WARNING if alarm else _QUIET + _WRAPPED
    return (
        f'<div style="{_SMALL}padding:2px 0" title="{hint}"><div style="{style}">{escape(warning)}</div>'
        f'<div style="{ONE_LINE}{_QUIET}">{help_line}</div></div>'
    )


def _lesson_link(lesson: str) -> str:
    path = lesson_path(lesson)
    if path is None:
        return ""
    return f' <a href="{escape(path)}" target="_blank" style="text-decoration:underline">lesson</a>'


def _cell() -> Any:
    from ipywidgets import Layout

    return Layout(width="auto", margin="0", overflow="hidden")
