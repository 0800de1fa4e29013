"""Lesson 02: a trace that is drawn, the line that costs most, and the same images faster."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gpulab.lessons import profile_first
from gpulab.lessons.check import Note, Speed, Table
from gpulab.lessons.measured import Faster
from gpulab.lessons.profile_first import (
    CULPRIT,
    SHIFT_MISTAKES,
    check_costliest,
    check_rewrite,
    draw_limit,
    draw_trace,
    limit_beside_share,
    rolled,
)

Images = npt.NDArray[Any]


def shift(images: Images, offsets: Images) -> Images:
    """As the notebook has it."""
    shifted = np.empty_like(images)
    for i in range(len(images)):
        for row in range(images.shape[1]):
            shifted[i, row] = np.roll(images[i, row], offsets[i])
    return shifted


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check measures this in place of time."""
    monkeypatch.setattr("gpulab.lessons.check.time_pairs", lambda *a, **k: Speed(20.0, (18.0, 22.0), 0.01, 0.0005, 9))


# -- what a share can bring --------------------------------------------------------------------------------------------


def test_the_formula_is_drawn() -> None:
    axes = draw_limit().axes[0]
    points = [np.asarray(line.get_xydata())[0] for line in axes.lines[1:]]
    marked = {(round(float(x)), round(float(y), 2)) for x, y in points}
    assert {(50, 2.0), (75, 4.0), (90, 10.0)} <= marked


@pytest.mark.parametrize(("sure", "is_first"), [(True, True), (True, False), (False, True)])
def test_a_promised_share_stands_beside_the_measured_one(
    monkeypatch: pytest.MonkeyPatch, sure: bool, is_first: bool
) -> None:
    findings = [SimpleNamespace(source_line="", cost_us=9.0) for _ in range(2)]
    findings[1].source_line, findings[1].cost_us = "np.roll(...)", 12.0
    first = findings[1] if is_first else findings[0]
    diagnosed = SimpleNamespace(findings=findings, step_us=16.0, first=first)
    monkeypatch.setattr(profile_first, "latest_run", lambda name: name)
    monkeypatch.setattr(profile_first, "diagnose", lambda run: diagnosed)
    monkeypatch.setattr(profile_first, "times_faster", lambda name: Faster(5.0, sure))
    table = limit_beside_share("first", "limit")
    assert isinstance(table, Table)
    assert [line.split()[-4:] for line in table.lines[1:3]] == [
        ["share", "75", "%", "4.0×"],
        ["shift", "80", "%", "5.0×"],
    ]
    assert any("may be chance" in line for line in table.lines) is not sure
    assert any("another cause first" in line for line in table.lines) is not is_first
    findings[1].cost_us = 16.0
    assert isinstance(limit_beside_share("first", "limit"), Note), "no factor where nothing would be left"


# -- the trace ---------------------------------------------------------------------------------------------------------


def test_a_step_is_drawn_from_its_trace(trained: Any) -> None:
    figure = draw_trace("first")
    assert not isinstance(figure, Note)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[0] == "training thread" and "called by it" in labels
    assert figure.axes[0].get_title(loc="left").startswith("step ")


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run with three profiled steps of a small training."""
    import torch

    from gpulab.api.profile import profile

    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile("first", warmup=0, trace_steps=2, show=False, save=False) as profiled:
        for _ in range(8):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
    monkeypatch.setattr(profile_first, "latest_run", lambda name: profiled.run)
    return profiled.run


def test_the_plugin_counts_no_wait_for_the_dataloader(tmp_path: Path) -> None:
    """What the lesson says of it: an annotation of the DataLoader is dropped, one that is an operator is not."""
    pytest.importorskip("torch_tb_profiler")
    shares = [
        profile_first._plugin_costs(_trace(tmp_path / f"{category}.json.gz", category))
        for category in ("cpu_op", "user_annotation")
    ]
    assert [None if costs is None else costs["DataLoader"] for costs in shares] == [600.0, 0.0]


def _trace(path: Path, category: str) -> Path:
    name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    spans = [
        ("user_annotation", "ProfilerStep#1", 0, 1000),
        (category, name, 10, 600),
        ("cpu_op", "aten::mm", 700, 200),
    ]
    events = [
        {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": length, "args": {}}
        for cat, name, start, length in spans
    ]
    with gzip.open(path, "wt") as file:
        json.dump({"schemaVersion": 1, "traceEvents": events}, file)
    return path


def test_a_file_that_the_plugin_cannot_read_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("{")
    assert profile_first._plugin_costs(tmp_path / "trace.json") is None


# -- the line ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "state", "hint"),
    [(33, "right", "The report says so"), (3, "wrong", "the number that the report gives (cell [2], line 33)")],
)
def test_a_number_is_that_of_the_report(answer: int, state: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [SimpleNamespace(source_line=""), SimpleNamespace(source_line=f"cell [2], line 33: {CULPRIT}")]
    monkeypatch.setattr(profile_first, "latest_run", lambda name: object())
    monkeypatch.setattr(profile_first, "diagnose", lambda run: SimpleNamespace(findings=findings))
    checked = check_costliest(answer)
    assert (checked.state, hint in checked.hint) == (state, True), checked
    assert "The report says so, too: cell [2], line 33" in check_costliest(CULPRIT).hint
    findings.clear()
    assert "named no line for certain" in check_costliest(CULPRIT).hint


# -- the same images, faster -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("speed")
def test_an_answer_for_one_shape_alone_is_found_out() -> None:
    with pytest.raises(ValueError, match="reshape"):
        check_rewrite(lambda images, offsets: rolled(images, offsets).reshape(-1, 5, 5), shift)


@pytest.mark.parametrize(("words", "mistake"), SHIFT_MISTAKES, ids=range(len(SHIFT_MISTAKES)))
@pytest.mark.usefixtures("speed")
def test_each_wrong_shift_has_its_own_hint(words: str, mistake: Any) -> None:
    checked = check_rewrite(mistake, shift)
    assert (checked.state, checked.hint) == ("wrong", words)


@pytest.mark.usefixtures("speed")
def test_a_right_answer_is_told_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for sure, words in ((True, "speedup 2.7×, the limit"), (False, "Now put it into the training")):
        most = SimpleNamespace(times=2.7, sure=sure)
        monkeypatch.setattr(profile_first, "times_faster", lambda name, most=most: most)
        assert words in check_rewrite(rolled, shift).hint
