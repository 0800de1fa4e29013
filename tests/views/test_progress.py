"""What is shown while an experiment runs: what goes on, for how long, and a Stop button."""

from __future__ import annotations

import re
import sys
import threading
import time
from typing import Any

import IPython.display
import pytest
from msgspec.structs import replace

from gpulab.tuning.record import Block
from gpulab.tuning.schedule import Arm, Progress
from gpulab.views import progress as module
from gpulab.views.comparison import Comparing
from gpulab.views.progress import Progressing, Status, share_done, words
from gpulab.views.widgets import Renewed
from tests.views.test_waiting import Terminal

MS = 1_000_000
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
    widths = [re.findall(r"width:([\d.]+)%", bundle["text/html"]) for bundle in handle.bundles[:2]]
    assert widths == [["50.0"], ["53.3"]], "it never goes back"


def test_a_status_says_when_it_began_and_the_page_counts_on() -> None:
    def after(elapsed_s: float, before: Status, **more: Any) -> Status:
        return Status.of(
            replace(Progress("block 1: cache=on", 0, 9, None, True, elapsed_s, None, 60.0), **more), before
        )

    first = after(3.0, Status())
    assert (first.words, first.rest, first.whole_s) == ("block 1: cache=on", " of at most 60 s", 60.0)
    assert first.since_s == pytest.approx(time.time() - 3.0, abs=2)
    assert after(3.01, first) == first, "nothing is sent that only counts on"
    assert after(3.02, first, what="block 2: baseline") == replace(first, words="block 2: baseline")
    assert after(30.0, replace(first, since_s=time.time() - 30.0), most_s=90.0).fraction == 0.5, "it never goes back"


class Page:
    """A widget's root in the front end."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "status":
            self.sent.append(value)
        super().__setattr__(name, value)


def test_only_what_is_new_is_sent_and_each_status_at_rest() -> None:
    page = Page()
    widget = Renewed(page)
    for status in (Status(True, "a"), Status(True, "a"), Status(True, "b"), Status(), Status()):
        widget.show(status=status)
    assert [(s["running"], s["words"]) for s in page.sent] == [(True, "a"), (True, "b"), (False, ""), (False, "")]
    assert all(abs(s["sent_s"] - time.time()) < 60 for s in page.sent)


def test_a_comparison_shows_its_figures_while_it_goes_on(handle: Handle) -> None:
    ran: list[Block] = []
    arms = [Arm({"workers": 2})]
    with Comparing(lambda: None, "hint", arms, lambda: ran) as comparing:
        comparing.tell(BLOCK)
        assert "<table" not in handle.bundles[-1]["text/html"]
        for turn in range(4):
            times_ms = ((0, 500), (1, 250 + turn), (0, 500))
            ran += [Block(arm, turn, order, 5, 3, 80, ms * MS) for order, (arm, ms) in enumerate(times_ms)]
            comparing.tell(replace(BLOCK, elapsed_s=4.0))
            told = handle.bundles[-1]["text/plain"].split(" · ")[1]
            assert told.startswith("baseline 100 ms; workers=2 50") and told.endswith(
                f"{turn + 1} pair{'s' * (turn > 0)}"
            )
            assert ("speedup 2.0×, " in told) is (turn < 3), "no interval before four pairs"
    assert "<table" in handle.bundles[-2]["text/html"]


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
