"""`--only-ranks`: the report is made from all ranks; then only the chosen ones keep their trace."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpulab import cli
from gpulab.api.job_report import may_keep, rank_selection
from gpulab.api.reading import report
from gpulab.errors import UsageError
from gpulab.options import check_only_ranks, only_ranks_type
from gpulab.run import TRACE_DROPPED, Job
from gpulab.store.folders import Store, trace_path
from gpulab.store.jobs import job_of
from tests.cli.test_ranks import TRAINING
from tests.support.fork_server import EXECUTABLE, python_with_torch
from tests.support.strategies import tiny_run


def test_names_and_numbers_of_ranks() -> None:
    assert only_ranks_type("0, last,slowest,00") == "0,last,slowest"
    for wrong in ("", "first", "-1", "0,,1", "1.5", "٣"):
        with pytest.raises(UsageError, match="--only-ranks expects"):
            only_ranks_type(wrong)
    check_only_ranks(None, None)
    check_only_ranks("0,3,last", 4)
    with pytest.raises(UsageError, match="add --ranks N"):
        check_only_ranks("0", None)
    with pytest.raises(UsageError, match="numbers run from 0 to 3"):
        check_only_ranks("0,4", 4)


def test_a_script_of_one_process_has_no_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("print('ran')")
    assert cli.main(["record", "--only-ranks", "0", str(tmp_path / "train.py")]) == 2
    out, error = capsys.readouterr()
    assert "add --ranks N" in error and out == ""


def test_which_ranks_keep_their_trace() -> None:
    assert rank_selection("0,last,slowest", 8, 5) == {0, 5, 7}
    assert rank_selection("slowest", 8, None) == frozenset()
    jobs = [Job("j", rank, "torchrun", 4, rank) for rank in range(4)]
    assert [may_keep("1,last", job) for job in jobs] == [False, True, False, True]
    assert all(may_keep("0,slowest", job) for job in jobs), "who is the slowest shows at the end"
    assert all(may_keep(None, job) for job in jobs) and may_keep("0", None)


def write(path: Path) -> None:
    path.write_bytes(b"trace")


def test_a_dropped_trace_is_said_and_its_steps_stay(tmp_path: Path) -> None:
    store = Store(tmp_path / "runs")
    for rank in (0, 1):
        run = replace(tiny_run(f"20250101-000000-00000{rank}"), job=Job("j", rank, "torchrun", 2, rank))
        folder = store.save(run, write)
        assert trace_path(folder) is not None and run.timeline is not None
    before = store.load(folder)
    store.drop_trace(folder, "not kept (--only-ranks 0)")
    after = store.load(folder)
    assert trace_path(folder) is None and after.timeline is None and after.missing[-1].key == TRACE_DROPPED
    assert after.steps.end_ns.tolist() == before.steps.end_ns.tolist() and after.job == before.job
    (folder / "late.pt.trace.json.gz").write_bytes(b"written meanwhile")
    store.settle_trace(folder)
    assert trace_path(folder) is None
    store.settle_trace(store.find("20250101-000000-000000"))
    assert trace_path(store.find("20250101-000000-000000")) is not None, "another rank's stays"
    (problem,) = job_of(store, "j").problems
    assert (problem.what, problem.key) == ("rank 1", TRACE_DROPPED)


def test_only_the_slowest_of_two_ranks_keeps_its_trace(tmp_path: Path, own_store: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING.replace("0.01", "0.1"))  # a busy machine adds less
    command = [python_with_torch(), "-m", "gpulab", "record", "--ranks", "2", "--only-ranks", "slowest", "--no-live"]
    said = subprocess.run(
        [*command, str(tmp_path / "train.py"), "20"],
        capture_output=True,
        text=True,
        env=os.environ | {EXECUTABLE: python_with_torch()},
    )
    assert said.returncode == 0, said.stderr
    assert "Rank 1 arrives last" in said.stderr, "the report was made from all traces"
    assert said.stderr.count("only these ranks keep their trace: 1 (the slowest).") == 1
    store = Store(own_store / "runs")
    (job_id,) = {entry.job.id for entry in store.list() if entry.job is not None}
    job = job_of(store, job_id)
    traces = {rank: trace_path(store.root / run.id) is not None for rank, run in job.runs.items()}
    assert traces == {0: False, 1: True}
    assert {rank: run.timeline is not None for rank, run in job.runs.items()} == traces
    assert {rank: len(run.steps) for rank, run in job.runs.items()} == {0: 20, 1: 20}
    again = report(job)
    assert again.headline.key == "cannot_tell" and "Rank 1 arrives last" in again.headline.evidence
    assert again.spotlight == 1 and again.comparison.straggler is None
    assert all(rank.waiting_us is None for rank in again.comparison.ranks)
    assert "no trace" in again.text(full=True) and "TRACES THAT ARE NOT KEPT" in again.text(full=True)
