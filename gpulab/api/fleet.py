"""`gpulab fleet`: which jobs among the runs of some folders waste GPUs, for a person or for cron."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import get_args

from msgspec.structs import asdict, fields

from gpulab.analysis.facts import facts
from gpulab.analysis.fleet import Fleet, FleetJob, OwnedSummary, on_the_cpu
from gpulab.analysis.fleet import fleet as by_waste
from gpulab.api.diagnose import diagnosis_for_report, summarize
from gpulab.errors import StoreError, UsageError
from gpulab.formatting import percent, plural
from gpulab.run_summary import RunSummary
from gpulab.store.exports import write_table
from gpulab.store.folders import Store, default_root, read
from gpulab.store.lookup import brief, is_within, since_when
from gpulab.store.summaries import keep_summary, stored_runs, stores_in
from gpulab.views.fleet import FleetView
from gpulab.views.view import Answer
from gpulab.views.waiting import waiting
from gpulab.views.wording import plain

ALERT_STATUS = 1
COLUMNS = {field.name: (get_args(field.type) or (field.type,))[0] for field in fields(FleetJob)}  # `runs` as one text


def fleet(
    *folders: str | Path,
    user: str = "",
    queue: str = "",
    since: str | datetime | timedelta = "",
    day: str = "",
    cpu: bool = False,
) -> FleetView:
    """Which jobs waste GPUs, the worst first: `.jobs`, `.text()`, `.html()`, `.json()`.

    `folders` have runs in or below them; without any, the runs of the current folder. `cpu`: jobs without a GPU count,
    too, with the CPU as their device. Raises StoreError for a folder that cannot be read or has no runs, UsageError for
    impossible conditions.
    """
    first, end = _period(since, day)
    roots, unreadable = _roots(folders)
    runs: list[OwnedSummary] = []
    for folder, owner, stored in _stored(roots, unreadable):
        try:
            summary = stored or _summarized(folder)
        except StoreError as e:
            unreadable.append((folder.name, str(e)))
            continue
        if user not in ("", owner) or queue not in ("", summary.queue) or not is_within(summary.created, first, end):
            continue
        runs.append(OwnedSummary(on_the_cpu(summary) if cpu else summary, owner, str(folder.parent)))
    period = f"on {first:%Y-%m-%d}" if day else f"since {first:%Y-%m-%d %H:%M}" if since else ""
    conditions = ", ".join(filter(None, (user and f"user {user}", queue and f"queue {queue}", period)))
    places = tuple(map(str, folders)) or (str(default_root()),)
    return FleetView(by_waste(runs), places, conditions, tuple(unreadable), cpu)


def _period(since: str | datetime | timedelta, day: str) -> tuple[datetime | None, datetime | None]:
    """The beginning and the end of the period; None: no limit. Raises UsageError."""
    if since and day:
        raise UsageError("--since and --day cannot be combined: drop one.")
    if not day:
        return since_when(since) if since else None, None
    try:
        first = datetime.combine(date.fromisoformat(day.strip()), datetime.min.time()).astimezone()
    except ValueError:
        raise UsageError(f"{brief(day)!r} is not a date: write it as 2026-11-20.") from None
    return first, first + timedelta(days=1)


def _roots(folders: Sequence[str | Path]) -> tuple[list[Path], list[tuple[str, str]]]:
    """The stores in the folders, and the folders without one. Raises StoreError if there is no store at all."""
    if not folders:
        return [default_root()], []
    roots: dict[Path, None] = {}
    problems: list[tuple[str, str]] = []
    for folder in folders:
        try:
            roots.update(dict.fromkeys(root.resolve() for root in stores_in(Path(folder))))
        except StoreError as e:
            problems.append((str(folder), str(e)))
    if not roots:
        raise StoreError(problems[0][1])
    return list(roots), problems


def show_fleet(options: argparse.Namespace) -> Answer:
    """Do `gpulab fleet`; `--alert` decides the exit status. Raises UsageError and StoreError."""
    folders = options.folders or ([] if options.store is None else [options.store])
    view = fleet(
        *folders, user=options.user, queue=options.queue, since=options.since, day=options.day, cpu=options.cpu
    )
    if options.alert is not None:
        view = _offenders(view, options.alert)
    sentences = []
    if options.export is not None:  # even without an offender, or an old file would stay
        jobs = (*view.fleet.jobs, *view.fleet.unmeasured)
        rows = [{**asdict(job), "runs": " ".join(job.runs)} for job in jobs]
        write_table(options.export, rows, COLUMNS)
        sentences.append(f"{plural(len(jobs), 'job')} written to {plain(str(options.export))}")
    if options.alert is None:
        return Answer(view, notes=tuple(sentences))
    return Answer(view, ALERT_STATUS if view.jobs else 0, tuple(sentences), silent=not view.jobs)


def _offenders(view: FleetView, share: float) -> FleetView:
    jobs = tuple(job for job in view.jobs if job.idle_fraction is not None and job.idle_fraction >= share)
    conditions = ", ".join(filter(None, (view.conditions, f"idle for {percent(share)} or more")))
    return FleetView(Fleet(jobs, ()), view.places, conditions, cpu=view.cpu)


def _stored(roots: Sequence[Path], problems: list[tuple[str, str]]) -> Iterator[tuple[Path, str, RunSummary | None]]:
    """The runs of all stores; those without a summary come last, with a progress line."""
    missing = []
    for root in filter(Path.is_dir, roots):
        if os.access(root, os.W_OK):
            Store(root).finish_killed()
        try:
            for stored in stored_runs(root):
                if stored[-1] is None:
                    missing.append(stored)
                else:
                    yield stored
        except StoreError as e:
            problems.append((str(root), str(e)))
    if not missing:
        return
    with waiting(f"reading {plural(len(missing), 'run')}") as wait:
        for count, stored in enumerate(missing):
            wait.tell(count / len(missing))
            yield stored


def _summarized(folder: Path) -> RunSummary:
    """Compute the summary of a run and store it for the next time. Raises StoreError if the run cannot be read."""
    figures = facts(read(folder))
    summary = summarize(figures, diagnosis_for_report(figures))
    keep_summary(folder, summary)
    return summary
