"""Trace files that end in the middle: every view says so first, and none concludes anything from what is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gpulab
from gpulab.analysis.facts import facts
from gpulab.errors import UsageError
from gpulab.run import Ranks
from gpulab.trace.files import load
from gpulab.trace.load import load_run
from gpulab.views.report.report import Report
from tests.support import real_traces
from tests.support import trace_files as made

STEPS = [event for number in range(3, 9) for event in made.step(number, number * 1000.0)]
LOADER_ONLY = [event for event in STEPS if not event["name"].startswith("ProfilerStep")]


def cut_file(folder: Path, share: float, events: list[made.Event] = STEPS, **more: Any) -> Path:
    text = made.text([*made.labels(), *events], **more)
    return made.write(folder, text[: int(len(text) * share)], "cut.pt.trace.json")


def report_of(path: Path) -> Report:
    report = gpulab.report(load_run(path))
    assert isinstance(report, Report)
    return report


@pytest.mark.parametrize("share", [0.15, 0.4, 0.7, 0.95])
@pytest.mark.parametrize("more", [{}, {"deviceProperties": []}])
def test_nothing_is_concluded(tmp_path: Path, share: float, more: dict[str, Any]) -> None:
    """Whole, these steps wait for data for a fifth of their time."""
    report = report_of(cut_file(tmp_path, share, **more))
    assert [f.key for f in report.diagnosis.findings] == ["cannot_tell"]
    assert report.headline.sentence.startswith("This file is cut short") and report.diagnosis.untold == ()
    text = " ".join(report.text().split())
    assert "a trace from elsewhere, cut short" in text.partition("This file is cut short")[0]
    for conclusion in ("%%gpuprofile", "potential saving", "device: CPU", "(CPU"):
        assert conclusion not in text
    document: dict[str, Any] = json.loads(json.dumps(report.json()))
    assert document["device"]["kind"] != "cpu"
    empty = ("breakdown", "data_wait_us", "data_wait_per_step_us", "optimizer_per_step_us", "operators", "kernels")
    assert [document[key] for key in empty] == [None] * len(empty)


def test_a_device_that_the_file_does_not_reach(tmp_path: Path) -> None:
    on_host = [event for event in STEPS if event["cat"] in ("user_annotation", "cpu_op")]
    device = report_of(cut_file(tmp_path, 0.9, on_host, deviceProperties=[])).facts.run.device
    assert (device.kind, device.name) == ("unknown", "not in this part of the file")
    several = [{**made.DEVICE, "id": i, "name": f"GPU model {i}"} for i in range(2)]
    device = report_of(cut_file(tmp_path, 0.9, on_host, deviceProperties=several)).facts.run.device
    assert device.kind == "unknown", "nothing tells which of the two it was"


def test_steps_between_fetches_are_no_steps_then(tmp_path: Path) -> None:
    """Marks may be missing between two others; the profiler's own marks are spans of their own."""
    found = facts(load_run(cut_file(tmp_path, 0.7, LOADER_ONLY)))
    assert found.run.step_source == "DataLoader" and found.traced_step_us is None
    found = facts(load_run(cut_file(tmp_path, 0.7)))
    assert found.traced_step_us is not None and found.traced_step_us.median == pytest.approx(1000)


def test_a_cut_file_is_not_compared(tmp_path: Path) -> None:
    whole = load_run(made.write(tmp_path, made.text(STEPS), "whole.json"))
    with pytest.raises(UsageError, match="cut cannot be compared: its file is cut short"):
        gpulab.compare(whole, load_run(cut_file(tmp_path, 0.7)))


def test_a_cut_rank_is_named(tmp_path: Path) -> None:
    for rank in range(2):
        text = made.text(STEPS, distributedInfo={"rank": rank, "world_size": 2})
        made.write(tmp_path, text if rank else text[: int(len(text) * 0.8)], f"rank{rank}.json")
    ranks = load(tmp_path)
    assert isinstance(ranks, Ranks)
    assert [(p.what, p.key) for p in ranks.problems] == [("rank 0", "cut_short")]
    assert "copy rank0.json again" in ranks.problems[0].reason


@pytest.mark.parametrize("size", [30 << 10, 2_000_000])
def test_the_beginning_of_a_real_trace(tmp_path: Path, size: int) -> None:
    """30 KiB of it were once told to wait for data for 11 % of each step on a CPU: it is an H100, and 51 %."""
    path = tmp_path / "cut.pt.trace.json.gz"
    path.write_bytes(real_traces.path("h100_owlv2_starved").read_bytes()[:size])
    report = report_of(path)
    assert report.headline.key == "cannot_tell" and report.headline.sentence.startswith("This file is cut short")
    assert "device: not in this part of the file" in " ".join(report.text().split())
