"""The buttons below a run that ran out of memory: find what fits, prove a cure, let go of what only dead cells hold."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable, Mapping
from functools import partial

from gpulab.api.experiment import code_of
from gpulab.api.memory import NAME, failure_of, fit, is_size_known, last_run, memory, prove
from gpulab.bench.opening import offer_until_the_next_cell
from gpulab.bench.output import MainThread, interruptible
from gpulab.errors import GpulabError
from gpulab.formatting import settings_words
from gpulab.knobs.variables import Plain
from gpulab.memory.survey import free_results, free_tracebacks, notebook
from gpulab.tuning.code import Code
from gpulab.tuning.fit import candidates
from gpulab.tuning.schedule import Arm, Progress
from gpulab.user_code import CELL_WITHOUT_IPYTHON, global_names
from gpulab.views.memory import Fitted
from gpulab.views.progress import words
from gpulab.views.view import View
from gpulab.views.widgets import Choice, Offer, Output, in_notebook

_LINE = re.compile(r"line (\d+) of the cell")
OWNERS = "Who holds memory?"
LETS_GO = "Any other click first lets go of the dead cell's traceback and unfinished results. "
SIZE_UNKNOWN = f"What fits can be searched once the cell assigns a number to {NAME}. "
IN_WORDS = "The same in words: %gpulab fit batch_size, %gpulab memory"


class Cures:
    """The buttons, and the result of the last click above them."""

    def __init__(self, code: Code, fitted: Fitted | None = None) -> None:
        self._code, self._fitted = code, fitted
        self._main = MainThread()
        self._is_known = fitted is not None or is_size_known(code)
        self._text = (
            ("" if self._is_known else SIZE_UNKNOWN)
            + (LETS_GO if failure_of(last_run(code)) is not None else "")
            + IN_WORDS
        )
        self._offer: Offer | None = None
        self._result, self._buttons = Output(), Output()
        for output in (self._result, self._buttons):
            output.show({"text/plain": ""})

    def offer(self) -> None:
        """Show the buttons: find what fits, or each cure once that is known."""
        fitted, actions = self._fitted, list[tuple[str, Callable[[], View]]]()
        settings = [dict(cure.settings) for cure in fitted.result.cures] if fitted is not None else []
        if fitted is None and self._is_known:
            actions.append((f"Find the {NAME} that fits", self._fit))
            settings = candidates(self._code, NAME, 0, None)
        actions += [(f"Try {settings_words(Arm(cure).texts)}", partial(self._prove, cure)) for cure in settings]
        actions.append((OWNERS, memory))
        choices: list[Choice] = [
            (label, partial(self._main.call, partial(self._do, action))) for label, action in actions
        ]
        if self._offer is None:
            self._offer = offer_until_the_next_cell(choices, self._text, self._buttons)
        else:
            self._offer.choices = tuple(choices)
            self._buttons.show({"text/html": self._offer.html(), "text/plain": self._text})

    def _do(self, action: Callable[[], View]) -> None:
        if action is not memory:
            let_go(self._code)
        try:
            with interruptible():
                self._result.show(action().bundle())
        except (Exception, KeyboardInterrupt) as e:
            reason = str(e) if isinstance(e, GpulabError) else f"{type(e).__name__}: {e}"
            self._result.write(f"gpulab: {reason}")
        self.offer()

    def _fit(self) -> View:
        self._fitted = fit(self._code, show=False, tell=self._tell)
        return self._fitted

    def _prove(self, settings: Mapping[str, Plain]) -> View:
        self._fitted = self._fitted or fit(self._code, show=False, tell=self._tell)
        return prove(settings, self._fitted, self._code, tell=self._tell)

    def _tell(self, progress: Progress) -> None:
        self._result.write(f"gpulab: {words(progress)}")


def let_go(code: Code) -> None:
    """Let go of what only a dead cell holds: its traceback, and graphs of results of statements that it reached.

    Nothing of a cell whose last run did not run out of memory.
    """
    failure = failure_of(last_run(code))
    if failure is None:
        return
    free_tracebacks(notebook()[0])
    names = global_names(compile(code.tree, CELL_WITHOUT_IPYTHON, "exec"))
    line = _LINE.match(failure.line)
    reached = [one for one in code.tree.body if line is None or one.lineno <= int(line[1])]
    bound = global_names(compile(ast.Module(reached, []), CELL_WITHOUT_IPYTHON, "exec")).binds
    free_results(code.namespace, bound - names.reads - names.calls_read)


def offer_cures() -> None:
    """Show the buttons for the cell profiled last. Nothing in a terminal."""
    if in_notebook():
        Cures(code_of(None)).offer()


def fit_last(options: argparse.Namespace) -> None:
    """Do `%gpulab fit NAME`. Raises UsageError, and exceptions of the cell."""
    let_go(code_of(None))
    fitted = fit(name=options.name or NAME, least_free=options.free)
    if in_notebook():
        Cures(code_of(None), fitted).offer()
