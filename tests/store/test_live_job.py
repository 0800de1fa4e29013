"""The ranks of a job as any process sees them while they run: from their folders, each look reads what is new."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from gpulab.run import Job, Run
from gpulab.store.journal import Journal
from gpulab.store.live_job import LiveJob
from gpulab.store.run_tables import ARRIVAL, ARRIVALS, MARKS
from tests.store.test_journal import ORIGIN_NS, journal_of, sketch
from tests.support.tapes import steps_by_hand


def rank(number: int, job: str = "abc") -> Run:
    return replace(sketch(f"20260101-000000-00000{number}"), job=Job(job, number, "torchrun", 2, number, "n1"))


def steps(journal: Journal, count: int, ns: int) -> None:
    marks = steps_by_hand(count, ns, start_ns=ORIGIN_NS + 700, wait_ns=ns // 4)
    journal.append(MARKS, marks.tobytes())


def test_each_rank_by_its_latest_steps(tmp_path: Path) -> None:
    journals = [journal_of(tmp_path, rank(n)) for n in (1, 0)]
    foreign, alone = journal_of(tmp_path, rank(5, "another")), journal_of(tmp_path, sketch("20260101-000000-00000a"))
    job = LiveJob(tmp_path, "abc")
    first = job.look()
    assert [r.rank for r in first] == [0, 1] and [r.step_count for r in first] == [7, 7] and first[0].node == "n1"
    steps(journals[0], 100, 4_000_000)
    arrivals = np.array([(3, 8, 15), (3, 9, 16)], ARRIVAL)
    journals[0].append(ARRIVALS, arrivals.tobytes())
    zero, one = job.look()
    assert (one.step_count, one.step_us, one.data_wait_us) == (107, 4000.0, 1000.0) and zero.step_count == 7
    assert one.arrivals["sequence"].tolist() == [8, 9] and len(zero.arrivals) == 0
    assert one.busy is not None and one.busy[0] == "CPU" and one.busy[1] == pytest.approx(0.55)
    for journal in (*journals, foreign, alone):
        journal.remove()


def test_a_rank_that_has_ended_stays_in_sight(tmp_path: Path) -> None:
    journals = [journal_of(tmp_path, rank(n)) for n in (0, 1)]
    job = LiveJob(tmp_path, "abc")
    job.look()
    journals[1].remove()
    assert [(r.rank, r.has_ended) for r in job.look()] == [(0, False), (1, True)]
    journals[0].remove()
    assert [(r.rank, r.has_ended) for r in job.look()] == [(0, True), (1, True)]


def test_a_rank_that_joins_later_is_seen(tmp_path: Path) -> None:
    journal = journal_of(tmp_path, sketch())
    job = LiveJob(tmp_path, "abc")
    assert job.look() == []
    journal.write_document(replace(sketch(), job=Job("abc", 0, "torch.distributed", 2)))
    assert [r.rank for r in job.look()] == [0]
    journal.remove()


def test_torn_and_foreign_files_are_passed_over(tmp_path: Path) -> None:
    journal = journal_of(tmp_path, rank(0))
    (tmp_path / ".running-x.spool").write_bytes(b"\x89PNG")
    with open(journal.path, "ab") as file:
        file.write(b"ROWS torn")
    assert [r.rank for r in LiveJob(tmp_path, "abc").look()] == [0]
    journal.remove()
