"""The ranks of a running job, from their journals: rows of the live view in a notebook or at a terminal."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from gpulab.analysis.collectives import Arrived, rank_waits, straggler
from gpulab.errors import StoreError
from gpulab.run import Job, Run
from gpulab.store import run_format
from gpulab.store.folders import COLUMNS, DOCUMENT, RUNNING_PREFIX, Store
from gpulab.store.run_format import ARRIVALS, MARKS, READINGS
from gpulab.store.table_file import Tail
from gpulab.tape.step_finder import StepFinder
from gpulab.thresholds import DEFAULT
from gpulab.views import live_ranks as view
from gpulab.views.live_ranks import RankRow
from gpulab.views.view import Answer

EVERY_S, LOG_EVERY_S = 1.0, 10.0  # at a terminal, and in a file
LATEST_STEPS = 50  # the figures cover these steps
_MOST_ROWS = 256


def running_jobs(root: Path) -> dict[str, str]:
    """The ids of the running jobs, the latest last, each with its id on the cluster."""
    headers = filter(None, map(_header, root.glob(f"{RUNNING_PREFIX}*")))
    ranks = sorted((run.created, run.job.id, run.job.cluster_id) for run in headers if run.job is not None)
    numbers: dict[str, str] = {}
    for _, job_id, number in ranks:
        numbers.pop(job_id, None)
        numbers[job_id] = number
    return numbers


class _LiveRank:
    """One rank, as far as its folder is read."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / COLUMNS
        self._finder = StepFinder(0)
        self._tail = Tail(self._file, _MOST_ROWS, {MARKS: self._finder.read})
        self.row: RankRow | None = None
        self.arrivals = Arrived(*np.empty((3, 0), np.int64))

    def poll(self, header: Run, job: Job) -> None:
        """Read new records. Raises OSError and ValueError if nothing can be read."""
        self._tail.read()
        silence_s = max(0.0, time.time() - self._file.stat().st_mtime)
        start_ns, end_ns, wait_ns, _ = self._finder.rows_since(max(0, len(self._finder) - LATEST_STEPS)).T
        wall_ns = end_ns - start_ns
        arrivals = self._tail.rows(ARRIVALS)
        self.arrivals = Arrived(arrivals["group"], arrivals["sequence"], arrivals["time_ns"])
        self.row = RankRow(
            rank=job.rank,
            node=job.node,
            step_count=len(self._finder),
            step_us=float(np.median(wall_ns)) / 1e3 if len(wall_ns) else None,
            data_wait_us=float(np.mean(np.minimum(wait_ns, wall_ns))) / 1e3 if len(wall_ns) else None,
            busy=self._busy(header),
            waits=None,
            silence_s=silence_s,
            has_ended=False,
        )

    def _busy(self, header: Run) -> tuple[str, float] | None:
        """The recent utilization of the device, and its name."""
        readings = self._tail.rows(READINGS)
        for name, label in (("gpu_utilization_pct", "GPU"), ("cpu_pct", "CPU")):
            for number, series in enumerate(header.samples.series):
                values = readings["value"][readings["series"] == number][-5:]
                values = values[np.isfinite(values)]
                if series.name == name and len(values):
                    return label, float(values.mean()) / 100
        return None


class LiveJob:
    """The ranks of one job, from their folders; each `poll` reads new records."""

    def __init__(self, root: Path, job_id: str) -> None:
        self._root, self._job_id = root, job_id
        self._ranks: dict[Path, _LiveRank] = {}

    def poll(self) -> tuple[list[RankRow], int | None]:
        """All ranks that have reported, by number, and the rank that holds up the others.

        If a rank has restarted, its later run counts.
        """
        present = set(self._root.glob(f"{RUNNING_PREFIX}*"))
        for path in present:
            header = _header(path)
            if header is not None and header.job is not None and header.job.id == self._job_id:
                with suppress(OSError, ValueError):
                    self._ranks.setdefault(path, _LiveRank(path)).poll(header, header.job)
        latest: dict[int, tuple[RankRow, Arrived]] = {}
        for path, rank in sorted(self._ranks.items()):
            if rank.row is not None:
                row = rank.row if path in present else replace(rank.row, has_ended=True)
                latest[row.rank] = row, rank.arrivals
        several = len({row.node for row, _ in latest.values()}) > 1  # two nodes have two clocks
        waits = {} if several else rank_waits({number: arrivals for number, (_, arrivals) in latest.items()})
        rows = [
            replace(row, waits=waits.get(number), node=row.node if several else "")
            for number, (row, _) in sorted(latest.items())
        ]
        return rows, straggler(waits, DEFAULT.skew_notice)


def _header(folder: Path) -> Run | None:
    try:
        return run_format.decode_header((folder / DOCUMENT).read_bytes())
    except (OSError, StoreError):
        return None


def watch(options: argparse.Namespace, sleep: Callable[[float], None] = time.sleep) -> Answer:
    """Do `gpulab watch`: show a job's ranks until all have ended; by default the job that began last.

    Ctrl-C ends the view, not the job. Raises StoreError if no such job is running.
    """
    store = Store(options.store)
    store.finish_killed()  # runs without a process are over
    running = running_jobs(store.root)
    key = options.job or next(reversed(running), "")
    job_id = next((job for job, number in running.items() if key and key in (job, number)), None)
    if job_id is None:
        what = f"No job {key!r}" if key else "No job"
        start = "Start one with gpulab record --ranks N SCRIPT, or name its folder with --store"
        others = f"These run: {', '.join(running)}" if running else start
        raise StoreError(f"{what} runs in {str(store.root)!r}. {others}.")
    job, screen = LiveJob(store.root, job_id), _Screen()
    try:
        while True:
            store.finish_killed()
            ranks, late = job.poll()
            screen.show(f"job {job_id}\n{view.text(ranks, late)}")
            if all(rank.has_ended for rank in ranks) and job_id not in running_jobs(store.root):
                return Answer(f"All ranks have ended. The report: gpulab report {job_id}")
            sleep(EVERY_S if screen.renews else LOG_EVERY_S)
    except KeyboardInterrupt:
        return Answer(" ")  # the prompt begins on a line of its own


class _Screen:
    """A few lines that are replaced in place at a terminal, and appended to a file."""

    def __init__(self) -> None:
        self.renews = sys.stdout.isatty()
        self._height = 0

    def show(self, text: str) -> None:
        if self.renews:  # a wrapped line would occupy two rows
            width = shutil.get_terminal_size().columns - 1
            text = "\n".join(line[:width] for line in text.split("\n"))
        back = f"\x1b[{self._height}F\x1b[J" if self.renews and self._height else ""
        sys.stdout.write(f"{back}{text}\n")
        sys.stdout.flush()
        self._height = text.count("\n") + 1
