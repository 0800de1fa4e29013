"""`gpulab fleet` and `%gpulab fleet`: which jobs waste GPUs, of the runs in any folders, for a person or for cron."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from gpulab.analysis.fleet import Fleet, FleetJob, OwnedSummary, on_the_cpu
from gpulab.analysis.fleet import fleet as gathered
from gpulab.api.arguments import Parser, split, take_store
from gpulab.errors import StoreError, UsageError
from gpulab.formatting import percent, plural
from gpulab.options import share_type
from gpulab.run_summary import RunSummary
from gpulab.store.folders import Store, default_root, read
from gpulab.store.lookup import moment, shortened, since_when
from gpulab.store.summaries import Stored, keep_summary, stored_runs, stores_in
from gpulab.views.fleet import FleetView
from gpulab.views.waiting import waiting
from gpulab.views.wording import plain

if TYPE_CHECKING:
    from gpulab.views.report.ranks import RankedReport

HELP = """\
{prog} [FOLDER …] [CONDITION …] [--all]   the jobs that leave GPUs idle for longest, and why
{prog} … --alert SHARE         only jobs whose GPUs are idle for that share or more; exit status 1 if any
{prog} … --cpu                 also jobs without a GPU: the CPU is then their device
{prog} … --export FILE         one row per job: .csv, .json or .parquet
{prog} … --html FILE, --json   as a page, as figures

FOLDER: a folder with runs in it or below it (default: the runs of this folder).
CONDITION: --user NAME, --queue NAME, --day 2026-11-20, --since 2026-11-20 or 30m, 2h, 3d, 1w"""

ALERT_STATUS = 1
COLUMNS = {
    **{"id": str, "name": str, "user": str, "queue": str, "created": str, "device_name": str, "ranks": int},
    **{"world_size": int, "gpus": int, "wall_s": float, "gpu_hours": float, "wasted_gpu_hours": float},
    **{"idle_fraction": float, "at_least": bool, "reason": str, "headline": str, "level": str, "cause": str},
    **{"source_line": str, "knob": str, "rank": int, "runs": str},
}


class Conditions(Struct, frozen=True):
    """Which runs count; an empty condition always holds."""

    user: str = ""
    queue: str = ""
    since: datetime | None = None
    until: datetime | None = None

    def fit(self, run: RunSummary, user: str) -> bool:
        """Whether all hold."""
        if (self.user and user != self.user) or (self.queue and run.queue != self.queue):
            return False
        if self.since is None and self.until is None:
            return True
        try:
            began = moment(run.created)
        except StoreError:
            return False
        return (self.since is None or began >= self.since) and (self.until is None or began < self.until)

    def __str__(self) -> str:
        """In words."""
        since = f"since {self.since:%Y-%m-%d %H:%M}" if self.since is not None and self.until is None else ""
        day = f"on {self.since:%Y-%m-%d}" if self.since is not None and self.until is not None else ""
        user, queue = (
            f"{what} {value}" if value else "" for what, value in (("user", self.user), ("queue", self.queue))
        )
        return ", ".join(filter(None, (user, queue, day, since)))


def fleet(
    *folders: str | Path,
    user: str = "",
    queue: str = "",
    since: str | datetime | timedelta = "",
    day: str = "",
    cpu: bool = False,
) -> FleetView:
    """Which jobs waste GPUs, the worst first: `.jobs`, `.text()`, `.html()`, `.json()`.

    A folder has runs in it or below it; without one, the runs of this folder. `cpu`: a job without a GPU counts, too,
    with the CPU as its device. Raises StoreError for a folder that
    cannot be read or has no runs, UsageError for conditions that cannot be.
    """
    wanted = conditions(user, queue, since, day)
    roots, unreadable = _roots(folders)
    chosen: list[OwnedSummary] = []
    for stored in _stored(roots, unreadable):
        try:
            summary = stored.summary or _summarized(stored.path)
        except StoreError as e:
            unreadable.append((stored.path.name, str(e)))
            continue
        if wanted.fit(summary, stored.user):
            summary = on_the_cpu(summary) if cpu else summary
            chosen.append(OwnedSummary(summary, stored.user, str(stored.path.parent)))
    places = tuple(map(str, folders)) or (str(default_root()),)
    return FleetView(gathered(chosen), places, str(wanted), tuple(unreadable), cpu)


def _roots(folders: Sequence[str | Path]) -> tuple[list[Path], list[tuple[str, str]]]:
    """Each store once, and the folders that have none. Raises StoreError where there is no store at all."""
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


def conditions(user: str, queue: str, since: str | datetime | timedelta, day: str) -> Conditions:
    """From what a user gave. Raises UsageError."""
    if since and day:
        raise UsageError("--since and --day cannot be combined: drop one.")
    if not day:
        return Conditions(user, queue, since_when(since) if since else None)
    try:
        first = datetime.combine(date.fromisoformat(day.strip()), datetime.min.time()).astimezone()
    except ValueError:
        raise UsageError(f"{shortened(day)!r} is not a date: write it as 2026-11-20.") from None
    return Conditions(user, queue, first, first + timedelta(days=1))


def magic(line: str) -> None:
    """Do what the rest of the line after `%gpulab fleet` asks and show it. Raises UsageError and StoreError."""
    asked = _asked(split(line, "%gpulab fleet"), "%gpulab fleet")
    if isinstance(asked, str):
        print(asked)
        return
    view, options = asked
    if options.json or options.export or options.html:
        print(_written(view, options), end="")
        return
    from IPython.display import display

    display(view.bundle(full=options.all), raw=True)  # type: ignore[no-untyped-call]


def terminal(words: Sequence[str], prog: str = "gpulab fleet") -> tuple[str, int]:
    """The same for a terminal, and the exit status, which `--alert` decides. Raises UsageError and StoreError."""
    store, rest = take_store(words, prog)
    asked = _asked(rest, prog, store)
    if isinstance(asked, str):
        return f"{asked}\n", 0
    view, options = asked
    if options.alert is None:
        return _written(view, options), 0
    written = _written(view, options)  # files too, which would be yesterday's
    return (written, ALERT_STATUS) if view.jobs else ("", 0)


def _asked(words: Sequence[str], prog: str, store: Store | None = None) -> tuple[FleetView, argparse.Namespace] | str:
    """What is to be shown and how; the help where that is asked for."""
    if any(word in ("-h", "--help") for word in words):
        return HELP.format(prog=prog)
    parser = Parser(prog, "[FOLDER …] [CONDITION …]")
    parser.add_argument("folders", nargs="*")
    for name in ("--user", "--queue", "--since", "--day"):
        parser.add_argument(name, default="")
    parser.add_argument("--alert", type=share_type("--alert"))
    for name in ("--export", "--html"):
        parser.add_argument(name, type=Path)
    for name in ("--cpu", "--json", "--all"):
        parser.add_argument(name, action="store_true")
    options = parser.read(words)
    folders = options.folders or ([] if store is None or store.root == default_root() else [store.root])
    view = fleet(
        *folders, user=options.user, queue=options.queue, since=options.since, day=options.day, cpu=options.cpu
    )
    return (view if options.alert is None else _offenders(view, options.alert)), options


def _offenders(view: FleetView, share: float) -> FleetView:
    jobs = tuple(job for job in view.jobs if job.idle_fraction is not None and job.idle_fraction >= share)
    asked = ", ".join(filter(None, (view.asked, f"idle for {percent(share)} or more")))
    return FleetView(Fleet(jobs, ()), view.places, asked, cpu=view.cpu)


def _written(view: FleetView, options: argparse.Namespace) -> str:
    """What a command prints; files that it was to write are written. Raises UsageError and StoreError."""
    import json

    from gpulab.store.exports import write_table
    from gpulab.store.files import write_whole

    said = []
    if options.export is not None:
        jobs = (*view.fleet.jobs, *view.fleet.unmeasured)
        write_table(options.export, [_row(job) for job in jobs], COLUMNS)
        said.append(f"{plural(len(jobs), 'job')} written to {plain(str(options.export))}")
    if options.html is not None:
        write_whole(options.html, view.html().encode())
        said.append(f"The fleet is in {plain(str(options.html))}")
    if options.json:
        return json.dumps(view.json(), indent=2, allow_nan=False) + "\n"
    return "".join(f"{line}\n" for line in said) if said else view.text(full=options.all)


def _row(job: FleetJob) -> dict[str, str | int | float | bool | None]:
    return {**msgspec.structs.asdict(job), "runs": " ".join(job.runs)}


def _stored(roots: Sequence[Path], problems: list[tuple[str, str]]) -> Iterator[Stored]:
    """The runs of all stores; those whose figures are made anew come last, with a line that says so."""
    missing: list[Stored] = []
    for root in roots:
        if not root.is_dir():
            continue
        if os.access(root, os.W_OK):
            Store(root).finish_killed()
        try:
            for stored in stored_runs(root):
                if stored.summary is None:
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


def keep_summaries(shown: RankedReport, root: Path) -> None:
    """Put its summary beside each rank of a job in that store."""
    from gpulab.api.summary import summarize

    for rank, figures in shown.facts.items():
        keep_summary(root / figures.run.id, summarize(figures, shown.each[rank]))


def _summarized(folder: Path) -> RunSummary:
    """Made anew, and kept for the next time. Raises StoreError where the run cannot be read."""
    from gpulab.analysis.facts import facts
    from gpulab.api.diagnose import diagnosis_for_report
    from gpulab.api.summary import summarize

    figures = facts(read(folder))
    summary = summarize(figures, diagnosis_for_report(figures))
    keep_summary(folder, summary)
    return summary
