"""The report of a distributed job, and `--only-ranks`: which ranks keep their trace.

All ranks are profiled in the same steps: a rank profiled alone would become the slow one. The report uses all traces;
then the traces of ranks that are not selected are dropped; their steps and curves stay.
"""

from __future__ import annotations

import sys

from gpulab.api.diagnose import summarize
from gpulab.api.reading import report
from gpulab.errors import StoreError
from gpulab.options import LAST, SLOWEST
from gpulab.run import Job, Ranks
from gpulab.store.folders import Store
from gpulab.store.jobs import await_job
from gpulab.store.summaries import keep_summary
from gpulab.views.report.ranks import RankedReport


def job_report(ranks: Ranks, store: Store) -> RankedReport:
    """The report of a stored job. It stores the summary of each rank."""
    view = report(ranks)
    for rank, figures in view.facts.items():
        keep_summary(store.root / figures.run.id, summarize(figures, view.each[rank]))
    return view


def last_job_report(name: str) -> RankedReport | None:
    """The report of the last job whose id begins with `name`; None if no rank is stored."""
    store = Store()
    try:
        jobs = [entry.job for entry in store.list() if entry.job is not None and entry.job.id.startswith(name)]
        return job_report(await_job(store, jobs[-1].id, jobs[-1].world_size or 1), store) if jobs else None
    except StoreError:
        return None


def may_keep(only: str | None, job: Job | None) -> bool:
    """Whether this rank writes its trace file: it is selected, or may turn out to be the slowest."""
    if only is None or job is None or job.world_size is None or SLOWEST in (words := only.split(",")):
        return True
    return str(job.rank) in words or (LAST in words and job.rank == job.world_size - 1)


def rank_selection(only: str, world_size: int, slowest: int | None) -> frozenset[int]:
    """The ranks that `--only-ranks` selects; `slowest`: the rank for which the others wait."""
    numbers = {LAST: world_size - 1, SLOWEST: slowest}
    candidates = (numbers[word] if word in numbers else int(word) for word in only.split(","))
    return frozenset(rank for rank in candidates if rank is not None)


def keep_only(only: str, view: RankedReport, store: Store) -> None:
    """Drop the traces of the other ranks of a job, and print that. The report must exist already."""
    runs, slowest = view.ranks.runs, _slowest(view)
    keepers = rank_selection(only, view.ranks.world_size or len(runs), slowest)
    words = " ".join(view.headline.sentence.split())
    why = f"not kept (--only-ranks {only}); with all traces the report said: {words.rstrip('.')}"
    for rank in sorted(runs.keys() - keepers):
        try:
            store.drop_trace(store.root / runs[rank].id, why)
        except StoreError as e:
            sys.stderr.write(f"gpulab: the trace of rank {rank} is still there ({e})\n")
    names = ", ".join(
        f"{rank} (the slowest)" if rank == slowest else f"{rank}" for rank in sorted(keepers & runs.keys())
    )
    sys.stderr.write(f"gpulab: only these ranks keep their trace: {names or 'none'}.\n")


def _slowest(view: RankedReport) -> int | None:
    """The rank for which the others wait; else the rank that waits least; else the rank with the longest step."""
    if view.comparison.straggler is not None:
        return view.comparison.straggler
    waits = {r.rank: r.waiting_us for r in view.comparison.ranks if r.waiting_us is not None}
    if waits:
        return min(waits, key=lambda rank: waits[rank])
    steps = {rank: f.typical_step_us.median for rank, f in view.facts.items() if f.typical_step_us is not None}
    return max(steps, key=lambda rank: steps[rank], default=None)
