"""An interrupt at the worst moment: it ends what runs, and leaves nothing half done."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import gpulab
from gpulab.capture import torch_hooks
from gpulab.tuning import cell_code
from gpulab.tuning.cell_code import on_interrupt, users_code
from tests.tuning.cells import CELL, SETUP

pytestmark = pytest.mark.usefixtures("interrupts_come")


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_who_waits_too_long_for_the_end_is_heard_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_code, "PATIENCE_S", -1.0)
    with on_interrupt(lambda: None):
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupt()


@pytest.mark.parametrize("inside", [False, True])
def test_it_is_raised_in_the_users_code_alone(inside: bool) -> None:
    stops: list[str] = []
    with on_interrupt(lambda: stops.append("outer")) as outer:
        with on_interrupt(lambda: stops.append("inner")) as inner:
            if inside:
                with pytest.raises(KeyboardInterrupt), users_code():
                    interrupt()
                assert stops == ["inner", "outer"]
            interrupt()
        assert stops == ["inner", "outer"] * (2 if inside else 1)
        assert isinstance(outer.error, KeyboardInterrupt) and isinstance(inner.error, KeyboardInterrupt)


def _while_installing(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch_hooks._optimizer

    def interrupted(*args: Any) -> Any:
        interrupt()
        return original(*args)

    monkeypatch.setattr(torch_hooks, "_optimizer", interrupted)


def _while_taking_out(monkeypatch: pytest.MonkeyPatch) -> None:
    original: Callable[..., Any] = torch_hooks.install

    def install(*args: Any, **options: Any) -> Any:
        made = original(*args, **options)
        undo: ExitStack = args[-1]
        undo.callback(interrupt)
        return made

    monkeypatch.setattr(torch_hooks, "install", install)


def _while_silencing(monkeypatch: pytest.MonkeyPatch) -> None:
    original = redirect_stdout.__enter__

    def entered(silence: redirect_stdout[io.StringIO]) -> io.StringIO:
        output = original(silence)
        interrupt()
        return output

    monkeypatch.setattr(redirect_stdout, "__enter__", entered)


@pytest.mark.parametrize(
    ("moment", "call"),
    [(_while_installing, "experiment"), (_while_taking_out, "headspace"), (_while_silencing, "experiment")],
)
def test_in_the_middle_of_our_own_work_nothing_is_left_half_done(
    moment: Callable[[pytest.MonkeyPatch], None], call: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is left of ours is seen by the fixture that looks after every test."""
    stdout = sys.stdout
    runs = tmp_path / "runs"  # a file: variables are put back for each run

    def run() -> None:
        with runs.open("a") as file:
            file.write("x")
        if runs.stat().st_size == 3:  # a block: the full runs are over
            moment(monkeypatch)
        exec(SETUP + CELL, {"__name__": "__main__"})

    def asked() -> None:
        if call == "headspace":
            gpulab.headspace(run, steps=4, pairs=3, show=False)
        else:
            gpulab.experiment(run, {"fused_optimizer": "on"}, steps=4, pairs=3, save=False, show=False)

    with pytest.raises(KeyboardInterrupt):
        asked()
    monkeypatch.undo()
    assert 3 <= runs.stat().st_size <= 5 and sys.stdout is stdout
