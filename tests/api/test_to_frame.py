"""`to_frame()` of a run: the columns as pandas sees them, and a clear word where pandas is missing."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from msgspec.structs import replace

from gpulab.run import Category, Run
from tests.support.synthetic import gpu_case


@pytest.fixture
def run() -> Run:
    return gpu_case().run


def test_steps_are_one_row_each(run: Run) -> None:
    frame = run.steps.to_frame()
    assert len(frame) == len(run.steps) == 60
    kinds = {name: str(kind) for name, kind in frame.dtypes.items()}
    columns = ("number", "start_ns", "end_ns", "data_wait_ns", "optimizer_ns", "batch_count", "sample_count")
    assert kinds == {**dict.fromkeys(columns, "int64"), "phase": "uint8", "flags": "uint8"}
    with_own = replace(run.steps, own_ns=np.ones(60, np.int64)).to_frame()
    assert set(with_own) - set(frame) == {"own_ns"}, "a column that was measured"
    assert frame["sample_count"].tolist() == run.steps.sample_count.tolist()
    assert (frame["end_ns"] - frame["start_ns"]).tolist() == run.steps.wall_ns.tolist()


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


def test_without_pandas_the_error_names_it_and_the_next_step(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    for columns in (run.steps, run.samples, run.timeline):
        assert columns is not None
        with pytest.raises(ImportError, match="A DataFrame needs pandas: pip install pandas"):
            columns.to_frame()
