"""The ranks of a job as any process sees them while they run: from their folders, each look reads what is new."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from gpulab.api.live_ranks import LiveJob, watch
from gpulab.errors import StoreError
from gpulab.run import Job, Run
from gpulab.store.journal import Journal
from gpulab.store.run_format import ARRIVAL, ARRIVALS, MARKS
from tests.store.test_journal import ORIGIN_NS, journal_of, sketch
from tests.support.tapes import steps_by_hand


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

    ending = watch(Namespace(store=tmp_path, job=asked), sleep).content
    said = capsys.readouterr().out
    assert f"job {shown}\n" in said and "rank 0: step 7" in said and "rank 1: step 7" in said
    assert ending.endswith(f"gpulab report {shown}") and looks == 2


def test_a_job_that_does_not_run(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"No job runs in .* Start one with gpulab record"):
        watch(Namespace(store=tmp_path, job=""))
    journal = journal_of(tmp_path, rank("a", 0, "2026-01-01T00:00:00+00:00"))
    with pytest.raises(StoreError, match=r"No job 'x' runs in .* These run: a"):
        watch(Namespace(store=tmp_path, job="x"))
    journal.remove()


def rank_of(number: int, job: str = "abc") -> Run:
    return replace(sketch(f"20260101-000000-00000{number}"), job=Job(job, number, "torchrun", 2, number, "n1"))


def steps(journal: Journal, count: int, ns: int) -> None:
    journal.append(MARKS, steps_by_hand(count, ns, start_ns=ORIGIN_NS + 700, wait_ns=ns // 4).tobytes())


def test_each_rank_by_its_latest_steps(tmp_path: Path) -> None:
    journals = [journal_of(tmp_path, rank_of(n)) for n in (1, 0)]
    foreign, alone = journal_of(tmp_path, rank_of(5, "another")), journal_of(tmp_path, sketch("20260101-000000-00000a"))
    job = LiveJob(tmp_path, "abc")
    first, _ = job.poll()
    assert [r.rank for r in first] == [0, 1] and [r.step_count for r in first] == [7, 7]
    steps(journals[0], 100, 4_000_000)
    for journal, late_ns in zip(journals, (10, 0), strict=True):  # rank 1 comes 10 of 100 ns late
        arrivals = [(3, number, 100 * number + late_ns) for number in range(8)]
        journal.append(ARRIVALS, np.array(arrivals, ARRIVAL).tobytes())
    (zero, one), late = job.poll()
    assert (one.step_count, one.step_us, one.data_wait_us) == (107, 4000.0, 1000.0) and zero.step_count == 7
    assert zero.waits is not None and zero.waits.waits == pytest.approx(0.1) and late == 1
    assert one.busy is not None and one.busy[0] == "CPU" and one.busy[1] == pytest.approx(0.55)
    for journal in (*journals, foreign, alone):
        journal.remove()


def test_a_rank_that_has_ended_stays_in_sight(tmp_path: Path) -> None:
    journals = [journal_of(tmp_path, rank_of(n)) for n in (0, 1)]
    job = LiveJob(tmp_path, "abc")
    job.poll()
    journals[1].remove()
    assert [(r.rank, r.has_ended) for r in job.poll()[0]] == [(0, False), (1, True)]
    journals[0].remove()
    assert [(r.rank, r.has_ended) for r in job.poll()[0]] == [(0, True), (1, True)]


def test_a_rank_that_joins_later_is_seen(tmp_path: Path) -> None:
    journal = journal_of(tmp_path, sketch())
    job = LiveJob(tmp_path, "abc")
    assert job.poll() == ([], None)
    journal.write_document(replace(sketch(), job=Job("abc", 0, "torch.distributed", 2)))
    assert [r.rank for r in job.poll()[0]] == [0]
    journal.remove()


def test_torn_and_foreign_files_are_passed_over(tmp_path: Path) -> None:
    journal = journal_of(tmp_path, rank_of(0))
    (tmp_path / ".running-x.spool").write_bytes(b"\x89PNG")
    with open(journal.path, "ab") as file:
        file.write(b"ROWS torn")
    assert [r.rank for r in LiveJob(tmp_path, "abc").poll()[0]] == [0]
    journal.remove()
