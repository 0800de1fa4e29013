"""Ranks that a cell or a script starts itself, such as a `torchrun` that it calls: recorded, and shown as one job."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from gpulab.api.fleet import keep_summaries
from gpulab.api.reading import report
from gpulab.capture.job import JOB
from gpulab.errors import StoreError
from gpulab.launch.following import followed_ranks
from gpulab.launch.launcher import record_words
from gpulab.run import Settings
from gpulab.store.folders import Store, new_id
from gpulab.store.jobs import await_job
from gpulab.views.report.ranks import RankedReport


@contextmanager
def followed(settings: Settings) -> Iterator[str]:
    """Inside, ranks are recorded with these settings, without a word; their job's id begins with what is given."""
    name = f"{platform.node()}-{new_id()}"
    with followed_ranks(record_words(_of_each(settings), [])[3:], {JOB: name}):
        yield name


def job_report(name: str) -> RankedReport | None:
    """The report of the last job whose id begins so; None where no rank was stored."""
    store = Store()
    try:
        ranks = [entry for entry in store.list() if entry.job is not None and entry.job.id.startswith(name)]
        if not ranks or (job := ranks[-1].job) is None:
            return None
        shown = report(await_job(store, job.id, job.world_size or 1))
    except StoreError:
        return None
    keep_summaries(shown, store.root)
    return shown


def _of_each(settings: Settings) -> Mapping[str, object]:
    given = {name: getattr(settings, name) for name in ("name", "steps", "warmup", "trace_steps", "device", "whole")}
    return {**given, "no_trace": not settings.trace, "no_live": True, "silent": True}
