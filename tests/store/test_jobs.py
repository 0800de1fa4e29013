"""The stored ranks of one job are looked at together: one report, and what is missing is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from gpulab.api.cell_ranks import failure_words
from gpulab.api.reading import open_run, report
from gpulab.api.runs import Runs
from gpulab.errors import StoreError, TraceError
from gpulab.run import Job, Ranks, Run, Settings
from gpulab.store.folders import COLUMNS, KILLED, Store
from gpulab.store.jobs import await_job, job_of
from tests.support.strategies import tiny_run


def rank(number: int, of: int = 2, *, id: str = "20250101-000000-00000", job: str = "abc") -> Run:
    return replace(tiny_run(f"{id}{number}"), job=Job(job, number, "torchrun", of, number))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "runs")


def test_ranks_of_one_job_and_no_other(store: Store) -> None:
    for run in (rank(1), rank(0), rank(0, id="20250102-000000-00000", job="other"), tiny_run("20250103-000000-000000")):
        store.save(run)
    job = job_of(store, "abc")
    assert list(job.runs) == [0, 1] and job.world_size == 2 and not job.problems
    assert list(await_job(store, "other", 2, wait_s=0.0).runs) == [0], "who waits does not wait for ever"
    with pytest.raises(StoreError, match="No rank of the job 'third'"):
        job_of(store, "third")
    assert [e.job.id for e in store.list() if e.job is not None] == ["abc", "abc", "other"]


def test_a_job_is_one_row_of_the_list(store: Store) -> None:
    for day in (1, 2):
        store.save(rank(0, of=2, id=f"2024010{day}-000000-00000", job="twice"))
    store.save(rank(1, of=4, id="20240103-000000-00000"))
    store.save(rank(2, of=4))
    store.save(replace(rank(3, of=4), outcome="failed"))
    store.save(rank(1, of=4))
    for n in range(30):  # a job with many ranks does not push the others out of the list
        store.save(rank(n, of=30, id="20250105-000000-000", job="wide"))
    only = rank(0, of=1, id="20250106-000000-00000", job="of one")
    store.save(replace(only, settings=Settings("alone")))
    runs = Runs(store)
    head, alone, wide, small, again, twice, *rest = repr(runs).splitlines()
    assert head.split()[:2] == ["name", "id"] and " alone " in alone and "rank" not in alone
    assert "rank 0 of 2" in again and "rank 0 of 2" in twice
    assert "30 ranks" in wide and " wide " in wide and "completed" in wide
    assert "3 of 4 ranks" in small and " abc " in small and "failed (1 of 3)" in small
    assert len(rest) == 2 and rest[1].startswith("Saved in"), "nothing is hidden"
    assert "… and 6 older runs" in repr(runs.listing(2))
    rows = runs.rows()
    assert [row.position for row in rows] == [-1, -2, -32, -36, -37]
    assert [(len(row.outcomes), row.runs) for row in rows[1:]] == [(30, 30), (3, 4), (0, 1), (0, 1)]
    first = [job.id for row in rows[:3] if (job := runs[row.position or 0].job)]
    assert first == ["of one", "wide", "abc"]


def test_a_job_is_named_and_deleted_as_a_whole(store: Store) -> None:
    for number in range(3):
        store.save(replace(rank(number, of=3), settings=Settings("first")))
    for number in range(2):
        store.save(replace(rank(number, id="20250102-000000-00000", job="other"), settings=Settings("first")))
    runs = Runs(store)
    assert [d.id for d in runs.deletions(rank(1).id)] == [rank(1).id], "a rank that is meant"
    assert [d.id for d in runs.deletions("abc")] == [rank(n).id for n in range(3)]
    with pytest.raises(StoreError, match="2 runs are named 'first'"):
        runs.deletions("first")
    assert runs["abc"].id == rank(0).id and len(runs.delete("latest")) == 2
    assert len(runs.deletions("first")) == 3, "one job is left of that name"
    assert len(runs.delete("abc", "first")) == 3 and not len(runs)


def test_what_is_missing_is_said(store: Store) -> None:
    store.save(replace(rank(1, of=4), outcome="interrupted", outcome_detail="its process was killed"))
    store.save(rank(3, of=4))
    store.save(rank(3, of=4, id="20250105-000000-00000"))
    broken = store.save(rank(2, of=4))
    columns = (broken / COLUMNS).read_bytes()
    (broken / COLUMNS).write_bytes(columns[:-1] + bytes([columns[-1] ^ 1]))
    problems = {p.key: p for p in job_of(store, "abc").problems}
    assert set(problems) == {"unreadable_file", "duplicate_rank", "absent_rank", "interrupted_rank"}
    assert (
        problems["absent_rank"].what == "rank 0, 2" and problems["interrupted_rank"].reason == "its process was killed"
    )


def test_the_beginning_of_a_jobs_id_is_enough(store: Store) -> None:
    for job in ("node-12", "node-13"):
        store.save(rank(0, id=f"20250101-000000-{job[-2:]}", job=job))
    assert Path(job_of(store, "node-12").path).name == "node-12"
    store.save(rank(0, id="20250101-000000-14", job="other-14"))
    assert Path(job_of(store, "oth").path).name == "other-14"
    store.save(rank(0, id="20250101-000000-15", job="other-14.run2"))
    assert Path(job_of(store, "oth").path).name == "other-14", "its later runs do not make it unclear"
    with pytest.raises(StoreError, match=r"'node' matches 2 jobs: .*Give more characters"):
        job_of(store, "node")


def test_a_rank_that_failed_is_named(store: Store) -> None:
    for number, outcome, detail in ((0, "completed", ""), (1, "failed", "ValueError: sample 13")):
        unprofiled = replace(rank(number), timeline=None, traced_numbers=())
        store.save(replace(unprofiled, outcome=outcome, outcome_detail=detail))
    job = job_of(store, "abc")
    assert [(p.what, p.reason, p.key) for p in job.problems] == [
        ("rank 1", "failed: ValueError: sample 13", "failed_rank")
    ]
    text = report(job).text()
    assert "2 of 2 ranks · rank 1 failed" in text.splitlines()[0]
    assert "rank 1: failed: ValueError: sample 13" in text
    assert "Rank 1: ValueError: sample 13." in failure_words(job)
    assert "ProfilerActivity" not in text and "failed before a step was traced" in text


def test_who_was_killed_comes_before_who_lost_touch() -> None:
    killed = replace(rank(1), outcome="interrupted", outcome_detail=KILLED, wall_ns=9)
    lost = replace(rank(0), outcome="failed", outcome_detail="RuntimeError: Connection closed by peer", wall_ns=5)
    said = failure_words(Ranks("abc", {0: lost, 1: killed, 2: rank(2)}, 3))
    assert "Rank 1: its process was killed. After it rank 0: RuntimeError: Connection closed by peer." in said
    assert failure_words(Ranks("abc", {0: rank(0), 1: rank(1)}, 2)) == ""
    first = replace(rank(0), outcome="failed", outcome_detail="ValueError: sample 13", wall_ns=5 * 10**9)
    later = replace(killed, wall_ns=22 * 10**9)  # it stood still, and was ended for that
    assert "Rank 0: ValueError: sample 13. After it rank 1: its" in failure_words(Ranks("abc", {0: first, 1: later}, 2))
    said = failure_words(Ranks("abc", {0: lost}, 2), "script", 1)
    assert "of the script. Rank 1 ended before it had recorded a step. After it rank 0: RuntimeError" in said
    ended = failure_words(Ranks("abc", {0: rank(0), 1: rank(1)}, 2), "cell", 3)
    assert ended.endswith("PyTorch's launcher ended with 3.")


def test_conditions_delete_whole_jobs_and_names_are_theirs(store: Store) -> None:
    for number in range(3):
        store.save(replace(rank(number, of=3), outcome="failed" if number == 1 else "completed"))
    runs = Runs(store)
    assert runs.name("latest", "better") and [run.settings.name for run in Runs(store)] == ["better"] * 3
    assert len(runs.where(outcome="failed").deletions()) == 3


def test_a_run_goes_before_a_file_of_its_name(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(replace(rank(0, of=1), settings=Settings(name="train.py")))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import torch")
    stored = open_run("train.py", store)
    assert isinstance(stored, Run) and stored.settings.name == "train.py"
    with pytest.raises(TraceError, match="is not JSON"):
        open_run("./train.py", store)


def test_a_rank_stands_for_its_job_unless_it_is_meant(store: Store) -> None:
    for number in range(2):
        path = store.save(rank(number))
    for key in ("abc", "latest", "-2"):
        assert isinstance(open_run(key, store), Ranks), key
    for key in (rank(1).id, str(path)):
        opened = open_run(key, store)
        assert isinstance(opened, Run) and opened.id == rank(1).id
    store.save(rank(0, of=1, id="20250109-000000-00000", job="alone"))
    assert isinstance(open_run("latest", store), Run)
