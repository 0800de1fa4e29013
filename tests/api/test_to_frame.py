"""`to_frame()` of a captured run: the columns as pandas sees them, and a clear word where pandas is missing."""

from __future__ import annotations

import builtins
import sys
import time
from typing import Any

import numpy as np
import pytest

import gpulab
from gpulab.capture import recorder
from gpulab.run import Category, Run


@pytest.fixture(scope="module")
def run() -> Run:
    """Twenty steps of a small training loop over a DataLoader, with curves and a trace."""
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader, TensorDataset

    layer = torch.nn.Linear(32, 32)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with gpulab.profile("frames", device="cpu", show=False, save=False) as p:
        for (batch,) in DataLoader(TensorDataset(torch.randn(80, 32)), batch_size=4):
            layer(batch).sum().backward()
            optimizer.step()
        _await_readings()
    return p.run


def _await_readings() -> None:
    """Until the sampling process has answered and read its meters a few times."""
    assert recorder.active is not None
    deadline = time.monotonic() + 120
    while not recorder.active.drain().samples and time.monotonic() < deadline:
        time.sleep(0.02)


def test_steps_are_one_row_each(run: Run) -> None:
    frame = run.steps.to_frame()
    assert len(frame) == len(run.steps) == 20
    assert {name: str(kind) for name, kind in frame.dtypes.items()} == {
        "number": "int64",
        "start_ns": "int64",
        "end_ns": "int64",
        "data_wait_ns": "int64",
        "optimizer_ns": "int64",
        "batch_count": "int64",
        "sample_count": "int64",
        "phase": "uint8",
        "flags": "uint8",
        "own_ns": "int64",
    }
    assert frame["sample_count"].tolist() == [4] * 20
    assert (frame["end_ns"] - frame["start_ns"]).tolist() == run.steps.wall_ns.tolist()
    assert frame["data_wait_ns"].gt(0).all() and frame["optimizer_ns"].gt(0).all()


def test_samples_are_one_row_per_reading(run: Run) -> None:
    frame = run.samples.to_frame()
    assert frame.columns.tolist() == ["name", "unit", "source", "t_ns", "value"]
    assert (frame["t_ns"].dtype, frame["value"].dtype) == (np.int64, np.float64)
    assert len(frame) == sum(len(s.t_ns) for s in run.samples.series) > 0
    for series in run.samples.series:
        mine = frame[frame["name"] == series.name]
        assert mine["value"].tolist() == series.value.tolist() and mine["t_ns"].tolist() == series.t_ns.tolist()
        assert set(mine["unit"]) == {series.unit} and set(mine["source"]) == {series.source}


def test_the_timeline_is_one_row_per_span_with_names_spelled_out(run: Run) -> None:
    timeline = run.timeline
    assert timeline is not None
    frame = timeline.to_frame()
    columns = ["name", "category", "lane", "start_ns", "duration_ns", "correlation", *timeline.extra]
    assert frame.columns.tolist() == columns and len(frame) == len(timeline) > 0
    assert {str(frame[c].dtype) for c in ("start_ns", "duration_ns", "correlation")} == {"int64"}
    assert {str(frame[c].dtype) for c in timeline.extra} <= {"float64"}
    row = int(np.flatnonzero(timeline.category == Category.CPU_OP)[0])
    assert frame["name"][row] == timeline.names[timeline.name_id[row]]
    assert frame["category"][row] == "cpu_op" and str(frame["lane"][row])
    steps = frame[frame["name"].str.startswith("ProfilerStep#")]
    assert {f"ProfilerStep#{n}" for n in run.traced_numbers} <= set(steps["name"])


def test_without_pandas_the_error_names_it_and_the_next_step(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    for columns in (run.steps, run.samples, run.timeline):
        assert columns is not None
        with pytest.raises(ImportError, match="A DataFrame needs pandas: pip install pandas"):
            columns.to_frame()


def test_capturing_and_reporting_need_no_pandas(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_pandas(name: str, *rest: Any, **options: Any) -> Any:
        assert not name.startswith("pandas"), "pandas is optional"
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without_pandas)
    assert gpulab.report(run).text(full=True)
