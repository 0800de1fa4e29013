"""The ways to open a bench: `gpulab.lab`, `%gpulab panel`, and the button under a report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from gpulab.api.experiment import NO_CELL, code_of, main_names
from gpulab.bench import file
from gpulab.bench.output import BenchOutput, MainThread
from gpulab.bench.session import BenchSession
from gpulab.errors import UsageError
from gpulab.formatting import settings_words
from gpulab.tuning import cell_code
from gpulab.tuning.code import Code
from gpulab.views.widgets import Choice, Offer, Output, in_notebook

OPEN = "Try other settings"
NOTHING_TO_APPLY = "Nothing to apply: open the bench (%gpulab panel) and click the row whose edit you want."
OFFER = "Toggle settings, run and compare this cell: %gpulab panel"


def lab(
    code: Callable[[], object] | str | Code | None = None,
    *,
    steps: int | None = None,
    budget_s: float | None = None,
    save: bool = True,
) -> BenchSession:
    """The lab of a cell. `code`: its text, a function without arguments, or None for the cell profiled last.

    If no cell was profiled since the kernel started, None means the cell of the bench that was open last. Raises
    UsageError if there is none. `steps`: counted steps of a block of a comparison, or of a single run; `budget_s`:
    seconds for a comparison in all (None: gpulab chooses).
    """
    try:
        cell = code_of(code, main_names())
    except UsageError as e:
        bench = file.latest() if str(e) == NO_CELL else None
        if bench is None:
            raise
        cell = code_of(bench.code, main_names())
    return BenchSession(cell, steps=steps, budget_s=budget_s, save=save)


_open_sessions: list[BenchSession] = []
_offers: list[Offer] = []


def open_bench() -> None:
    """Do `%gpulab panel`: open the bench of the cell profiled last and close an earlier bench. Raises UsageError."""
    _open(lab(), None)


def apply_edit() -> None:
    """Do `%gpulab apply`: insert the edited cell below, if a widget cannot edit it in place. Raises UsageError."""
    session = _open_sessions[-1] if _open_sessions else None
    row = session.row_to_keep if session is not None else None
    if session is None or row is None or not row.cell:
        raise UsageError(NOTHING_TO_APPLY)
    cell_code.shell().set_next_input(f"%%gpuprofile\n{row.cell.rstrip()}", replace=False)
    session.go_on(row)


def offer_bench(settings: Mapping[str, str] | None = None) -> None:
    """Show buttons under a cell's report that open its bench and try `settings` in it. Nothing in a terminal.

    The buttons disappear when the next cell runs: only the latest report has buttons.
    """
    if not in_notebook():
        return
    code, output, main = code_of(None), BenchOutput(), MainThread()

    def open_session() -> BenchSession:
        _offers.clear()
        return _open(BenchSession(code, opener=offer), output)

    def open_it() -> None:
        open_session()

    def try_it() -> None:
        session = open_session()
        session.begin("run", session.choose(settings or {}))

    choices: list[Choice] = [(OPEN, lambda: main.call(open_it))]
    if settings:
        choices.insert(0, (f"Try {settings_words(settings)}", lambda: main.call(try_it)))
    offer = offer_until_the_next_cell(choices, OFFER, output)


def offer_until_the_next_cell(choices: Sequence[Choice], text: str, output: BenchOutput | Output) -> Offer:
    """Show buttons in this output, in place of all others."""
    _withdraw()
    offer = Offer(choices, text)
    if isinstance(output, Output):
        output.show({"text/html": offer.html(), "text/plain": text})
    else:
        output.offer(offer.html(), text)
    _offers.append(offer)
    _until_the_next_cell()
    return offer


def _open(session: BenchSession, output: BenchOutput | None) -> BenchSession:
    while _open_sessions:
        _open_sessions.pop().close()
    _open_sessions.append(session)
    session.show(output)
    return session


def _until_the_next_cell() -> None:
    events = sys.modules["IPython"].get_ipython().events

    def over(*info: object) -> None:
        events.unregister("pre_run_cell", over)
        _withdraw()

    events.register("pre_run_cell", over)


def _withdraw() -> None:
    """Remove the last buttons; the text next to them stays."""
    while _offers:
        _offers.pop().close()
