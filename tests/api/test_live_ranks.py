"""`gpulab watch`: the ranks of the job that began last, or of the one that is named, until they have ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from gpulab.api.live_ranks import watch
from gpulab.errors import StoreError
from gpulab.run import Job, Run
from tests.store.test_journal import journal_of, sketch


def rank(job: str, number: int, created: str, cluster_id: str = "") -> Run:
    run_id = f"20260101-00000{number}-{job}00000"
    return replace(sketch(run_id), job=Job(job, number, "torchrun", 2, cluster_id=cluster_id), created=created)


@pytest.mark.parametrize(("asked", "shown"), [("", "b"), ("a", "a"), ("77", "a")])
def test_the_job_is_shown_until_it_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: str, shown: str
) -> None:
    jobs = {"a": ("2026-01-01T00:00:00+00:00", "77"), "b": ("2026-01-02T00:00:00+00:00", "")}
    journals = [journal_of(tmp_path, rank(job, n, *jobs[job])) for job in jobs for n in (0, 1)]
    looks = 0

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            for journal in journals:
                journal.remove()

    assert watch(tmp_path, asked, sleep=sleep) == 0
    said = capsys.readouterr().out
    assert f"job {shown}\n" in said and "rank 0: step 7" in said and "rank 1: step 7" in said
    assert said.endswith(f"gpulab report {shown}\n") and looks == 2


def test_a_job_that_does_not_run(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"No job runs in .* Start one with gpulab record"):
        watch(tmp_path)
    journal = journal_of(tmp_path, rank("a", 0, "2026-01-01T00:00:00+00:00"))
    with pytest.raises(StoreError, match=r"No job 'x' runs in .* These run: a"):
        watch(tmp_path, "x")
    journal.remove()
