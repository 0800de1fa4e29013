"""Alerts: what goes on for long is said once, quietly, and is gone when it is over; the record has the same."""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import gpulab
from gpulab.capture.alerts import ENDS_BELOW, SMOOTHED_S, Alerts, Smoothed, alerts_of
from gpulab.capture.recorder import Capture
from gpulab.errors import UsageError
from gpulab.live_feed import Delta, Feed, Status
from gpulab.run import Alert, Phase, Samples, Series, Settings
from gpulab.thresholds import DEFAULT
from gpulab.views.waiting import RunLines, run_lines_or_none
from tests.support import synthetic
from tests.support.loading_datasets import Planted

rows = st.lists(
    st.tuples(st.integers(1, 40).map(lambda n: n / 8), st.integers(0, 16).map(lambda n: n / 16)),
    min_size=1,
    max_size=80,
)


def played(steps: list[tuple[float, float]], end_s: float | None = None) -> tuple[Alert, ...]:
    """Steps back to back: wall time in s and the share of it that waits."""
    alerts, at = Alerts(DEFAULT), 0.0
    for wall, share in steps:
        at += wall
        alerts.steps(at, wall, wall * share)
    return alerts.all(at if end_s is None else end_s)


@given(rows)
def test_smoothing_against_the_definition(steps: list[tuple[float, float]]) -> None:
    smoothed, at, seen = Smoothed(), 0.0, list[tuple[float, float, float]]()
    for wall, share in steps:
        at += wall
        seen.append((at, wall * share, wall))
        kept = [row for row in seen if row[0] > at - SMOOTHED_S] or seen[-1:]
        assert smoothed.add(at, wall * share, wall) == pytest.approx(
            sum(r[1] for r in kept) / sum(r[2] for r in kept), abs=1e-9
        )


def by_hand(steps: list[tuple[float, float]]) -> list[tuple[float, float | None]]:
    """From when to when the smoothed share was high for long, found by looking back from each step."""
    ends = np.cumsum([wall for wall, _ in steps])
    smooth = []
    for i, at in enumerate(ends):
        kept = [j for j in range(i + 1) if ends[j] > at - SMOOTHED_S] or [i]
        smooth.append(sum(steps[j][0] * steps[j][1] for j in kept) / sum(steps[j][0] for j in kept))
    found: list[tuple[float, float | None]] = []
    i = 0
    while i < len(ends):
        if smooth[i] < DEFAULT.alert_data_wait:
            i += 1
            continue
        low = next((j for j in range(i, len(ends)) if smooth[j] < ENDS_BELOW * DEFAULT.alert_data_wait), None)
        last = len(ends) if low is None else low
        if any(
            ends[j] - ends[i] >= DEFAULT.alert_after_s and smooth[j] >= DEFAULT.alert_data_wait for j in range(i, last)
        ):
            found.append((float(ends[i]), None if low is None else float(ends[low])))
        i = last + 1 if low is not None else last
    return found


@given(rows)
def test_begin_and_end_against_looking_back(steps: list[tuple[float, float]]) -> None:
    found = [(a.since_ns / 1e9, None if a.until_ns is None else a.until_ns / 1e9) for a in played(steps)]
    expected = by_hand(steps)
    assert len(found) == len(expected)
    for (since, until), (since_s, until_s) in zip(found, expected, strict=True):
        assert since == pytest.approx(since_s, abs=1e-6)
        assert (until is None) == (until_s is None) and (until is None or until == pytest.approx(until_s, abs=1e-6))


def test_the_sentence_says_for_how_long() -> None:
    (alert,) = played([(0.5, 0.63)] * 60)
    assert alert == Alert(
        "data_starved", "Waiting for data for 29 s: the DataLoader's batches come late.", 500_000_000, None
    )
    assert played([(0.5, 0.63)] * 30) == (), "15 s are not long enough"
    assert played([(0.5, 0.2)] * 200) == ()


def test_it_does_not_flicker() -> None:
    wavering = [(0.5, 0.6)] * 60 + ([(0.5, 0.42)] * 20 + [(0.5, 0.6)] * 20) * 3
    (alert,) = played(wavering)
    assert alert.until_ns is None
    assert played([*wavering, *[(0.5, 0.3)] * 20])[0].until_ns is not None


def test_an_alert_ends_where_no_step_comes_any_more() -> None:
    alerts = Alerts(DEFAULT)
    for at in (*range(1, 31), *range(91, 121)):
        alerts.steps(float(at), 1.0, 0.9)
    first, second = alerts.all(120)
    assert (first.until_ns, second.since_ns, second.until_ns) == (30_000_000_000, 91_000_000_000, None)
    assert played([(0.5, 0.9)] * 60, end_s=100)[0].until_ns == 30_000_000_000


def test_an_idle_gpu_is_told_unless_the_data_is_why() -> None:
    alerts = Alerts(DEFAULT)
    for i in range(60):
        alerts.utilization(0.5 * i, 4)
    (idle,) = alerts.all(30)
    assert idle.key == "gpu_idle"
    assert idle.words == "GPU idle for 30 s: it had no work most of that time."
    both = Alerts(DEFAULT)
    for i in range(60):
        both.utilization(0.5 * i, 4)
        both.steps(0.5 * i + 0.1, 0.5, 0.4)
    assert [a.key for a in both.all(30)] == ["data_starved"]


def test_the_record_gives_the_same_as_the_live_view() -> None:
    run = synthetic.cpu_case().run
    wall = np.full(400, 200.0)
    steps = synthetic.steps(wall, np.where(np.arange(400) < 250, 150.0, 5.0), [Phase.MEASURED] * 400)
    curve = Series("gpu_utilization_pct", "%", "GPU", "NVML", (np.arange(800) * 10**8), np.full(800, 95.0))
    found = alerts_of(steps, Samples((curve,)), run.wall_ns, DEFAULT)
    assert [a.key for a in found] == ["data_starved"]
    assert found[0].since_ns < 10**9 and 50e9 < (found[0].until_ns or 0) < 60e9
    assert alerts_of(replace(steps, data_wait_ns=steps.data_wait_ns // 10), Samples(()), 10**9, DEFAULT) == ()


def test_thresholds_of_time_and_share() -> None:
    assert DEFAULT.changed({"alert_after_s": 40}).alert_after_s == 40
    for name, value in (("alert_after_s", -1), ("alert_data_wait", 1.5)):
        with pytest.raises(UsageError, match=name):
            DEFAULT.changed({name: value})


class Watch:
    """A view that keeps what it was told."""

    def begin(self, feed: Feed) -> None:
        self.feed, self.told = feed, set[str]()

    def look(self) -> None:
        self.told.add(self.feed.drain().status.alert)

    def end(self) -> None:
        self.look()


def test_a_starving_run_says_so_while_it_runs_and_in_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpulab.toml").write_text("[thresholds]\nalert_after_s = 0.2\n")
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = Watch()
    capture = Capture(Settings(trace=False), "block", "", watch)
    capture.start()
    try:
        for x in torch.utils.data.DataLoader(Planted(60, wait_s=0.02), batch_size=2):
            model(x).sum().backward()
            optimizer.step()
            watch.look()
    finally:
        run, _ = capture.finish("completed")
        capture.close()
    assert any(
        t.startswith("Waiting for data for ") and t.endswith("the DataLoader's batches come late.") for t in watch.told
    )
    (alert,) = run.alerts
    assert alert.key == "data_starved" and alert.until_ns is None
    report = gpulab.report(run)
    assert "ALERTS WHILE IT RAN" in report.text(full=True) and alert.words[:12] in report.text(full=True)
    document = json.loads(json.dumps(report.json()))
    assert document["alerts"] == [
        {"key": "data_starved", "words": alert.words, "since_us": alert.since_ns / 1e3, "until_us": None}
    ]


class Scripted:
    """A feed whose alert the test sets."""

    alert = ""

    def drain(self) -> Delta:
        status = Status("measuring", 1, None, "run", 1.0, "device: CPU", alert=self.alert)
        return Delta(status, np.empty((0, 4), np.float32))

    def so_far(self) -> None:
        return None


def test_a_terminal_hears_of_an_alert_at_its_begin_and_end() -> None:
    stream, feed = io.StringIO(), Scripted()
    lines = RunLines(stream, interval_s=0.001)
    lines.begin(feed)  # type: ignore[arg-type]
    for words in ("Waiting for data for 20 s", "Waiting for data for 21 s", "", "GPU idle for 20 s"):
        feed.alert = words
        deadline = time.monotonic() + 60
        while lines._alerted != bool(words) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.01)
    lines.end()
    said = [line for line in stream.getvalue().splitlines() if line]
    assert said == [
        "gpulab: Waiting for data for 20 s",
        "gpulab: That is over.",
        "gpulab: GPU idle for 20 s",
    ]
    assert not [t for t in threading.enumerate() if t.name == "gpulab-alerts"]


@pytest.mark.parametrize("stream", [io.StringIO(), None])
def test_only_a_terminal_is_told(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    assert run_lines_or_none() is None
