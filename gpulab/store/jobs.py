"""The ranks of one job among the stored runs, so that they are looked at together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from gpulab.errors import StoreError
from gpulab.run import NOT_KEPT, Missing, Ranks, Run
from gpulab.store.folders import Entry, Store

WAIT_S, LOOK_S = 10.0, 0.1


class SeveralJobs(StoreError):
    """A word may mean any of several jobs."""


def job_of(store: Store, job_id: str) -> Ranks:
    """All stored ranks of a job, by its id or the beginning of it.

    Raises StoreError where there is none that can be read, or several jobs begin so.
    """
    entries = _entries(store, job_id) or _entries_beginning(store, job_id)
    runs: dict[int, Run] = {}
    problems: list[Missing] = []
    for entry in entries:
        assert entry.job is not None
        try:
            run = store.load(entry.path)
        except StoreError as e:
            problems.append(Missing(entry.id, str(e), key="unreadable_file"))
            continue
        if entry.job.rank in runs:
            reason = f"rank {entry.job.rank} was recorded more than once: its last run counts"
            problems.append(Missing(runs[entry.job.rank].id, reason, key="duplicate_rank"))
        runs[entry.job.rank] = run
    if not runs:
        raise StoreError(f"No rank of the job {job_id!r} is in {str(store.root)!r}; `gpulab runs` lists what is there.")
    world_size = max((e.job.world_size or 0 for e in entries if e.job is not None), default=0) or None
    absent = [rank for rank in range(world_size or 0) if rank not in runs]
    if absent:
        named = ", ".join(map(str, absent[:8])) + ("…" if len(absent) > 8 else "")
        problems.append(Missing(f"rank {named}", "its run is not here", key="absent_rank"))
    problems += [p for rank, run in runs.items() if (p := _early_end(rank, run)) is not None]
    for rank, run in runs.items():
        problems += [Missing(f"rank {rank}", m.reason, key=NOT_KEPT) for m in run.missing if m.key == NOT_KEPT]
    return Ranks(
        str(Path(store.root, entries[0].job.id if entries[0].job else job_id)),
        dict(sorted(runs.items())),
        world_size,
        tuple(problems),
    )


def await_job(store: Store, job_id: str, world_size: int, wait_s: float = WAIT_S) -> Ranks:
    """The same once all ranks are stored, or `wait_s` have passed: they end one after the other."""
    until_s = time.monotonic() + wait_s
    while len({e.job.rank for e in _entries(store, job_id) if e.job is not None}) < world_size:
        if time.monotonic() > until_s:
            break
        time.sleep(LOOK_S)
    return job_of(store, job_id)


def _entries(store: Store, job_id: str) -> Sequence[Entry]:
    return [e for e in store.list() if e.job is not None and e.job.id == job_id]


def _entries_beginning(store: Store, beginning: str) -> Sequence[Entry]:
    entries = [e for e in store.list() if e.job is not None and beginning and e.job.id.startswith(beginning)]
    ids = sorted({e.job.id for e in entries if e.job is not None})
    if ids and all(other.startswith(f"{ids[0]}.") for other in ids[1:]):  # its later runs, or restarts
        return [e for e in entries if e.job is not None and e.job.id == ids[0]]
    if len(ids) > 1:
        raise SeveralJobs(f"{beginning!r} matches {len(ids)} jobs: {', '.join(ids[:4])}. Give more characters.")
    return entries


def _early_end(rank: int, run: Run) -> Missing | None:
    """What ended a rank before its code was through; its steps up to then are whole."""
    if run.outcome == "interrupted":
        return Missing(f"rank {rank}", run.outcome_detail or "it was interrupted", key="interrupted_rank")
    if run.outcome == "failed":
        return Missing(f"rank {rank}", f"failed: {run.outcome_detail}", key="failed_rank")
    return None
