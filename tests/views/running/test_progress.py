"""What is shown while an experiment runs: what goes on, for how long, and a Stop button."""

from __future__ import annotations

import sys
import threading

import IPython.display
import pytest

from gpulab.tuning.plan import Progress
from gpulab.views.running import progress as module
from gpulab.views.running.progress import Progressing, share_done, words
from tests.views.running.test_waiting import Terminal

BLOCK = Progress("block 6 of 90: baseline", 5, 90, 33.0, in_blocks=True)


class Handle:
    def __init__(self) -> None:
        self.bundles: list[dict[str, str]] = []

    def update(self, bundle: dict[str, str], **_: object) -> None:
        self.bundles.append(bundle)


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Handle:
    """The output of a notebook."""
    made = Handle()
    monkeypatch.setattr(module, "in_notebook", lambda: True)
    monkeypatch.setattr(module, "RENEWED_S", 0.0)
    monkeypatch.setattr(IPython.display, "display", lambda bundle, **_: made)
    return made


@pytest.mark.parametrize(
    ("progress", "said"),
    [
        (BLOCK, "block 6 of 90: baseline (5 of 90 done, about 33 s left)"),
        (Progress("baseline: step 12 of 40", 0.3, 2, None, False, 8.0, 40.0, 60.0),
         "baseline: step 12 of 40 · 8 s of about 40 s, at most 60 s"),
        (Progress("baseline", 0, 2, None, False, 0.0, None, 60.0), "baseline · 0 s of at most 60 s"),
        (Progress("baseline", 0, 2, None, False, 3.0, 60.0, 60.0), "baseline · 3 s of about 60 s"),
        (Progress("baseline", 0, 2, None, False, 3.0, 20.0, 20.0, "The budget of 20 s is short."),
         "baseline · 3 s of about 20 s. The budget of 20 s is short."),
        (Progress("baseline", 0, 1, None, False, 3.0), "baseline · 3 s"),
    ],
)  # fmt: skip
def test_one_line_says_how_long_it_takes(progress: Progress, said: str) -> None:
    assert words(progress) == said


def test_the_bar_follows_the_time(handle: Handle) -> None:
    assert share_done(Progress("baseline", 0, 2, None, False, 15.0, None, 60.0)) == 0.25
    with Progressing(None) as progressing:
        progressing.tell(Progress("baseline", 0, 2, None, False, 15.0, 30.0, 60.0))
        progressing.tell(Progress("baseline", 0, 2, None, False, 16.0, 60.0, 60.0))
    assert all("width:50.0%" in bundle["text/html"] for bundle in handle.bundles), "it never goes back"


def test_steps_are_shown_from_another_thread_and_taken_away(handle: Handle) -> None:
    with Progressing(None, show=False) as progressing:
        thread = threading.Thread(target=progressing.tick, args=(BLOCK,))
        thread.start()
        thread.join()
    assert "block 6 of 90" in handle.bundles[0]["text/plain"]
    assert handle.bundles[-1] == {"text/plain": "", "text/html": ""}


def test_a_terminal_shows_progress_without_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progressing(None, show=False) as progressing:
        progressing.tell(BLOCK)
    assert "block 6 of 90" in terminal.getvalue() and terminal.getvalue().endswith("\r")
