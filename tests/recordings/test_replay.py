"""A replay gives the live view what the run gave it, in the run's own time, whatever the speed; it can be stopped."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import IPython.display
import numpy as np
import pytest
from msgspec.structs import replace

from gpulab import recordings
from gpulab.errors import StoreError, UsageError
from gpulab.live_feed import Delta, Feed
from gpulab.recordings.feed import RecordedFeed
from gpulab.run import Alert, Run
from gpulab.views.running import display
from gpulab.views.running.live_plot import Messages
from tests.recordings.test_reader import recorded
from tests.support import synthetic

RUN = synthetic.gpu_case().facts.run
LENGTH_S = RUN.wall_ns / 1e9


class Clock:
    """Stands where it is put."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def feed_of(run: Run, clock: Clock, speed: float = 4.0) -> RecordedFeed:
    return RecordedFeed(run, "h200/workers-0", speed, clock)


def played(feed: RecordedFeed, clock: Clock, ticks: int, tick_s: float) -> list[Delta]:
    deltas = []
    for _ in range(ticks):
        clock.now_s += tick_s
        deltas.append(feed.drain())
    return deltas


def test_all_steps_and_readings_come_once_and_in_order() -> None:
    clock = Clock()
    feed = feed_of(RUN, clock)
    deltas = played(feed, clock, 60, LENGTH_S / 4 / 50)
    steps = np.concatenate([delta.steps for delta in deltas])
    assert len(steps) == len(RUN.steps) and (np.diff(steps[:, 0]) > 0).all()
    np.testing.assert_allclose(steps[:, 1], RUN.steps.wall_ns / 1e6, rtol=1e-5)
    np.testing.assert_allclose(steps[:, 2], RUN.steps.data_wait_ns / 1e6, rtol=1e-5)
    for series in RUN.samples.series:
        rows = np.concatenate([delta.samples[series.name] for delta in deltas if series.name in delta.samples])
        np.testing.assert_allclose(rows[:, 1], series.value, rtol=1e-5)
    assert [info.name for info in feed.series()] == [series.name for series in RUN.samples.series]
    assert feed.is_over and deltas[-1].status.step == len(RUN.steps)


def test_a_second_of_the_clock_is_so_many_of_the_run() -> None:
    clock = Clock()
    feed = feed_of(RUN, clock, speed=2.0)
    clock.now_s += LENGTH_S / 8
    status = feed.drain().status
    assert math.isclose(status.elapsed_s, LENGTH_S / 4)
    assert status.step == int((RUN.steps.end_ns <= RUN.wall_ns / 4).sum())
    assert status.message == "recording h200/workers-0, 2 times as fast as it was"
    assert status.device_label == f"device: {RUN.device.name}" and not feed.is_over
    clock.now_s += 10 * LENGTH_S
    assert math.isclose(feed.drain().status.elapsed_s, LENGTH_S), "time stands still at the end"


def test_phases_and_alerts_are_those_of_the_run() -> None:
    clock = Clock()
    half = RUN.wall_ns // 2
    alerts = (Alert("data_starved", "waits for data", half // 2, half), Alert("gpu_idle", "idles", half + 1))
    alerted = replace(RUN, alerts=alerts)
    deltas = played(feed_of(alerted, clock), clock, 400, LENGTH_S / 4 / 380)
    phases = list(dict.fromkeys(delta.status.phase for delta in deltas))
    assert phases[0] in ("warm-up", "measuring") and "profiling" in phases and phases[-1] == "ending"
    assert list(dict.fromkeys(delta.status.alert for delta in deltas)) == ["", "waits for data", "idles"]


def test_the_live_view_takes_what_it_gives() -> None:
    clock, messages = Clock(), Messages()
    feed = feed_of(RUN, clock)
    for delta in played(feed, clock, 20, LENGTH_S / 4 / 19):
        messages.encode(delta, feed.series())
    history: dict[str, Any] = messages.history()
    assert history["head"]["status"]["step"] == len(RUN.steps)


# -- in a notebook -----------------------------------------------------------------------------------------------------


class Watcher:
    """A live view whose Stop is pressed at once, or never."""

    problem = None

    def __init__(self, *, stops: bool) -> None:
        self._stops = stops
        self.calls: list[str] = []
        self.shown: list[dict[str, str]] = []
        self.feed: Feed | None = None

    def begin(self, feed: Feed) -> None:
        self.calls.append("begin")
        self.feed = feed
        if self._stops:
            feed.request_stop()

    def end(self) -> None:
        self.calls.append("end")

    def replace(self, bundle: dict[str, str]) -> bool:
        self.calls.append("replace")
        self.shown.append(bundle)
        return True


@pytest.fixture
def root(tmp_path: Path) -> Path:
    recorded(tmp_path, "h200/workers-0", RUN)
    return tmp_path


def in_notebook(monkeypatch: pytest.MonkeyPatch, watcher: Watcher | None, why: str = "") -> None:
    monkeypatch.setattr(display, "in_notebook", lambda: True)
    monkeypatch.setattr(display, "live_view_or_none", lambda: watcher)
    monkeypatch.setattr(display, "why_no_live_view", lambda: why or None)


def test_a_replay_ends_with_the_report(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = Watcher(stops=False)
    in_notebook(monkeypatch, watcher)
    threads = {*threading.enumerate()}
    recordings.replay("h200/workers-0", 1000 * LENGTH_S, root)
    assert watcher.calls == ["begin", "end", "replace"]
    assert RUN.device.name in watcher.shown[0]["text/plain"]
    assert {*threading.enumerate()} <= threads


def test_stop_ends_it_at_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = Watcher(stops=True)
    in_notebook(monkeypatch, watcher)
    recordings.replay("h200/workers-0", 1e-9, root)
    assert watcher.calls == ["begin", "end", "replace"]
    assert watcher.feed is not None and watcher.feed.drain().status.stop_requested


def test_an_interrupt_leaves_no_view_behind(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = Watcher(stops=False)
    in_notebook(monkeypatch, watcher)

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gpulab.recordings.time.sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recordings.replay("h200/workers-0", 1e-9, root)
    assert watcher.calls == ["begin", "end"]


def test_without_a_live_view_the_report_says_why(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []
    in_notebook(monkeypatch, None, "the package anywidget is not installed")
    monkeypatch.setattr(IPython.display, "display", lambda bundle, **_: shown.append(bundle))
    recordings.replay("h200/workers-0", root=root)
    assert "the package anywidget is not installed" in shown[0]["text/html"]


def test_a_terminal_gets_a_sentence(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recordings.replay("h200/workers-0", root=root)
    said = capsys.readouterr().out
    assert "needs a notebook" in said and "gpulab.recordings.open('h200/workers-0')" in said


@pytest.mark.parametrize("speed", [0, -1, float("nan"), float("inf"), "fast", True, None])
def test_a_speed_that_is_none_is_refused(root: Path, speed: Any) -> None:
    with pytest.raises(UsageError, match=r"is no speed: give a number above 0"):
        recordings.replay("h200/workers-0", speed, root)


def test_a_recording_that_is_not_there_is_refused(root: Path) -> None:
    with pytest.raises(StoreError, match="Did you mean 'h200/workers-0'"):
        recordings.replay("h200/workers", root=root)
