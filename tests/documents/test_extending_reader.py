"""The reader of docs/extending.md, run as it stands there: its figures against queries of the same file."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import gpulab
from gpulab.analysis.facts import facts
from gpulab.cli import main
from gpulab.errors import TraceError
from gpulab.run import Run
from gpulab.trace import load
from tests.support.paths import ROOT

DOCUMENT = ROOT / "docs" / "extending.md"
MS = 1_000_000
THREAD = 40 << 24 | 41  # of process 40

TABLES = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE NVTX_EVENTS (start INT NOT NULL, end INT, text TEXT, globalTid INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT NOT NULL, end INT NOT NULL, globalTid INT, correlationId INT,
  nameId INT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT NOT NULL, end INT NOT NULL, deviceId INT NOT NULL,
  streamId INT NOT NULL, correlationId INT, demangledName INT NOT NULL);
INSERT INTO StringIds VALUES (1, 'cudaLaunchKernel'), (2, 'ampere_sgemm_128x64_tn'), (3, 'add_kernel');
"""


@pytest.fixture(autouse=True)
def reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of the page, in the list as the page says."""
    section = DOCUMENT.read_text(encoding="utf-8").split("\n## A reader\n")[1].split("\n## ")[0]
    code, line = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    module = ModuleType("nsight_systems")
    exec(compile(code, str(DOCUMENT), "exec"), vars(module))
    exec(line, vars(module))
    for ending, function in vars(module)["READERS"].items():
        monkeypatch.setitem(load.READERS, ending, function)


def spans() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Five steps of 10 ms that begin at 1 s: each launches two kernels, which take 3 ms and 2 ms."""
    for step in range(5):
        begin = 1000 * MS + step * 10 * MS
        for number, (name, took) in enumerate([(2, 3 * MS), (3, 2 * MS)]):
            launch, correlation = begin + number * 4 * MS, 2 * step + number + 1
            yield "CUPTI_ACTIVITY_KIND_RUNTIME", (launch, launch + 5000, THREAD, correlation, 1)
            yield "CUPTI_ACTIVITY_KIND_KERNEL", (launch + 20_000, launch + 20_000 + took, 0, 7, correlation, name)


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "train.sqlite"
    with sqlite3.connect(path) as database:
        database.executescript(TABLES)
        for step in range(5):
            begin = 1000 * MS + step * 10 * MS
            mark = (begin, begin + 10 * MS, f"ProfilerStep#{step}", THREAD)
            database.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?)", mark)
        for table, values in spans():
            database.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", values)
    database.close()
    return path


def test_steps_and_kernels_are_those_of_the_file(report: Path) -> None:
    run = gpulab.load(report)
    assert isinstance(run, Run) and run.timeline is not None
    assert run.steps.number.tolist() == [0, 1, 2, 3, 4] and run.step_source == "ProfilerStep"
    assert run.device.kind == "cuda" and run.device.index == 0
    with sqlite3.connect(report) as database:
        query = "SELECT value, sum(end - start) FROM CUPTI_ACTIVITY_KIND_KERNEL JOIN StringIds ON id = demangledName"
        expected = dict(database.execute(f"{query} GROUP BY value").fetchall())
    database.close()
    frame = run.timeline.to_frame()
    kernels = frame[frame["category"] == "kernel"]
    assert kernels.groupby("name")["duration_ns"].sum().to_dict() == expected


def test_half_of_each_step_is_idle(report: Path) -> None:
    run = gpulab.load(report)
    assert isinstance(run, Run)
    breakdown = facts(run).breakdown
    assert breakdown is not None
    assert breakdown.busy_fraction == pytest.approx(0.5, abs=0.01)


def test_the_command_line_reads_it(report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(report)]) == 0
    assert "5 steps" in capsys.readouterr().out


def test_another_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    path.write_text("no database at all, but long enough that SQLite looks at it" * 20)
    with pytest.raises(TraceError, match="no export of Nsight Systems"):
        gpulab.load(path)
