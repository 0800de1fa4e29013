"""The stored runs that are ranks of one job, loaded together."""

from __future__ import annotations

import time
from pathlib import Path

from gpulab.errors import StoreError
from gpulab.run import TRACE_DROPPED, Job, Missing, Ranks, Run
from gpulab.store.folders import Store, read

WAIT_S, POLL_S = 10.0, 0.1


class SeveralJobs(StoreError):
    """A key matches several jobs."""


def job_of(store: Store, job_id: str) -> Ranks:
    """All stored ranks of a job, by its id or the beginning of the id.

    Raises StoreError if no rank can be read. Raises SeveralJobs if several ids match.
    """
    parts = _parts(store)
    full_id = _full_id([job.id for job, _ in parts], job_id)
    runs: dict[int, Run] = {}
    problems: list[Missing] = []
    world_size = 0
    for job, folder in parts:
        if job.id != full_id:
            continue
        world_size = max(world_size, job.world_size or 0)
        try:
            run = read(folder)
        except StoreError as e:
            problems.append(Missing(folder.name, str(e), key="unreadable_file"))
            continue
        if job.rank in runs:
            reason = f"rank {job.rank} was recorded more than once: its last run counts"
            problems.append(Missing(runs[job.rank].id, reason, key="duplicate_rank"))
        runs[job.rank] = run
    if not runs:
        raise StoreError(f"No rank of the job {job_id!r} is in {str(store.root)!r}; `gpulab runs` lists what is there.")
    absent = [rank for rank in range(world_size) if rank not in runs]
    if absent:
        numbers = ", ".join(map(str, absent[:8])) + ("…" if len(absent) > 8 else "")
        problems.append(Missing(f"rank {numbers}", "its run is not here", key="absent_rank"))
    for rank, run in runs.items():  # a run that ended early still has complete steps
        if run.outcome == "interrupted":
            why = run.outcome_detail or "it was interrupted"
            problems.append(Missing(f"rank {rank}", why, key="interrupted_rank"))
        elif run.outcome == "failed":
            problems.append(Missing(f"rank {rank}", f"failed: {run.outcome_detail}", key="failed_rank"))
    for rank, run in runs.items():
        dropped = [m.reason for m in run.missing if m.key == TRACE_DROPPED]
        problems += [Missing(f"rank {rank}", reason, key=TRACE_DROPPED) for reason in dropped]
    return Ranks(str(store.root / full_id), dict(sorted(runs.items())), world_size or None, tuple(problems))


def await_job(store: Store, job_id: str, world_size: int, wait_s: float = WAIT_S) -> Ranks:
    """The ranks of a job as soon as all are stored, or after `wait_s` seconds: ranks end one after the other."""
    until_s = time.monotonic() + wait_s
    while len({job.rank for job, _ in _parts(store) if job.id == job_id}) < world_size:
        if time.monotonic() > until_s:
            break
        time.sleep(POLL_S)
    return job_of(store, job_id)


def _parts(store: Store) -> list[tuple[Job, Path]]:
    """The stored ranks of all jobs, each with its folder."""
    return [(e.job, e.path) for e in store.list() if e.job is not None and e.path is not None]


def _full_id(ids: list[str], beginning: str) -> str:
    """The full id of the job with that beginning; the beginning itself if no job matches. Raises SeveralJobs."""
    matches = sorted({job_id for job_id in ids if beginning and job_id.startswith(beginning)})
    if beginning in matches or not matches:
        return beginning
    if not all(other.startswith(f"{matches[0]}.") for other in matches[1:]):  # its later runs, or restarts
        raise SeveralJobs(f"{beginning!r} matches {len(matches)} jobs: {', '.join(matches[:4])}. Give more characters.")
    return matches[0]
