"""How a user comes to a panel: `gpulab.lab`, `%gpulab panel`, and the button under a report."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from gpulab.api.experiment import code_of, main_names
from gpulab.panel.main_thread import MainThread
from gpulab.panel.output import PanelOutput
from gpulab.panel.panel import open_button
from gpulab.panel.session import PanelSession
from gpulab.tuning.plan import DEFAULT_BUDGET_S, Code
from gpulab.views.running.display import in_notebook
from gpulab.views.running.widgets import close

OFFER = "Turn a knob on this cell, and prove what it brings: %gpulab panel"


def lab(
    code: Callable[[], object] | str | Code | None = None,
    *,
    steps: int | None = None,
    budget_s: float = DEFAULT_BUDGET_S,
    save: bool = True,
) -> PanelSession:
    """The lab of a cell: its text, a function without arguments, or None for the cell that was profiled last.

    Raises UsageError where no cell was profiled yet. `steps` counted steps make a block of a comparison, within
    `budget_s` seconds, or are those of a single run.
    """
    return PanelSession(code_of(code, main_names()), steps=steps, budget_s=budget_s, save=save)


_opened: list[PanelSession] = []
_offered: list[tuple[PanelOutput, Any]] = []


def open_panel() -> PanelSession:
    """`%gpulab panel`: the panel of the cell profiled last. An earlier one is closed. Raises UsageError without one."""
    return _open(lab(), None)


def offer_panel() -> None:
    """Under the report of a cell: a button that opens its panel there. In a terminal, nothing.

    When the next cell is run it turns into text: a saved notebook should hold no widget that nothing answers.
    """
    if not in_notebook():
        return
    code, output = code_of(None), PanelOutput()

    def opened() -> None:
        _offered.clear()
        session = PanelSession(code)
        session.keep(button)
        _open(session, output)

    _withdraw()
    button = open_button(opened, MainThread().call)
    output.show(button, OFFER)
    _offered.append((output, button))
    _until_the_next_cell()


def _open(session: PanelSession, output: PanelOutput | None) -> PanelSession:
    while _opened:
        _opened.pop().close()
    _opened.append(session)
    session.show(output)
    return session


def _until_the_next_cell() -> None:
    events = sys.modules["IPython"].get_ipython().events

    def over(*info: object) -> None:
        events.unregister("pre_run_cell", over)
        _withdraw()

    events.register("pre_run_cell", over)


def _withdraw() -> None:
    """Put text where the last button was: only the latest report has one, and a saved widget cannot be read."""
    while _offered:
        output, button = _offered.pop()
        output.close(OFFER)
        close(button)
