"""A job's ranks while they run: what their journals say, as rows of the live view, in a notebook or at a terminal."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from gpulab.analysis.collectives import Arrived, rank_waits, straggler
from gpulab.errors import StoreError
from gpulab.run import Run
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
LATEST_STEPS = 50  # of which the figures are
_KEPT_ROWS = 256


def running_jobs(root: Path) -> dict[str, str]:
    """The jobs that go on, the one that began last at the end: the id of each, and its cluster's own."""
    began: dict[str, tuple[str, str]] = {}
    for path in root.glob(f"{RUNNING_PREFIX}*"):
        header = _header(path)
        if header is not None and header.job is not None:
            earlier = began.get(header.job.id, ("", ""))[0]
            began[header.job.id] = max(earlier, header.created), header.job.cluster_id
    return {job: began[job][1] for job in sorted(began, key=lambda job: (began[job][0], job))}


class LiveJob:
    """Looks at the folders of one job again and again; each look reads what is new."""

    def __init__(self, root: Path, job_id: str) -> None:
        self._root, self._job_id = root, job_id
        self._tails: dict[Path, tuple[Tail, StepFinder]] = {}
        self._foreign: set[Path] = set()
        self._ranks: dict[Path, RankRow] = {}  # the latest of each folder
        self._arrivals: dict[Path, Arrived] = {}

    def look(self) -> tuple[list[RankRow], int | None]:
        """All ranks that were heard of, by number, and which of them holds up the others.

        Of a rank that has begun again, the later one.
        """
        present = set(self._root.glob(f"{RUNNING_PREFIX}*")) - self._foreign
        for path in present:
            rank = self._read(path)
            if rank is not None:
                self._ranks[path] = rank
        for path in self._ranks.keys() - present:
            self._ranks[path] = replace(self._ranks[path], has_ended=True)
            self._tails.pop(path, None)
        latest = {self._ranks[path].rank: path for path in sorted(self._ranks)}
        several = len({self._ranks[path].node for path in latest.values()}) > 1  # two nodes have two clocks
        waits = {} if several else rank_waits({number: self._arrivals[path] for number, path in latest.items()})
        rows = [
            replace(rank, waits=waits.get(number), node=rank.node if several else "")
            for number, rank in ((number, self._ranks[latest[number]]) for number in sorted(latest))
        ]
        return rows, straggler(waits, DEFAULT.skew_notice)

    def _read(self, path: Path) -> RankRow | None:
        header = _header(path)
        if header is None or header.job is None:  # without a job it may still join
            return None
        if header.job.id != self._job_id:
            self._foreign.add(path)
            return None
        if path not in self._tails:
            finder = StepFinder(0)
            self._tails[path] = Tail(path / COLUMNS, _KEPT_ROWS, {MARKS: finder.read}), finder
        tail, finder = self._tails[path]
        try:
            tail.read()
            silence_s = max(0.0, time.time() - (path / COLUMNS).stat().st_mtime)
        except (OSError, ValueError):
            return None
        start_ns, end_ns, wait_ns, _ = finder.rows_since(max(0, len(finder) - LATEST_STEPS)).T
        wall_ns = end_ns - start_ns
        some = len(wall_ns) > 0
        arrivals = tail.rows(ARRIVALS)
        self._arrivals[path] = Arrived(arrivals["group"], arrivals["sequence"], arrivals["time_ns"])
        return RankRow(
            rank=header.job.rank,
            node=header.job.node,
            step_count=len(finder),
            step_us=float(np.median(wall_ns)) / 1e3 if some else None,
            data_wait_us=float(np.mean(np.minimum(wait_ns, wall_ns))) / 1e3 if some else None,
            busy=_busy(tail, header),
            waits=None,
            silence_s=silence_s,
            has_ended=False,
        )


def _header(folder: Path) -> Run | None:
    try:
        return run_format.decode_header((folder / DOCUMENT).read_bytes())
    except (OSError, StoreError):
        return None


def _busy(tail: Tail, header: Run) -> tuple[str, float] | None:
    """In its last seconds."""
    readings = tail.rows(READINGS)
    for name, label in (("gpu_utilization_pct", "GPU"), ("cpu_pct", "CPU")):
        for number, series in enumerate(header.samples.series):
            if series.name == name:
                values = readings["value"][readings["series"] == number][-5:]
                values = values[np.isfinite(values)]
                if len(values):
                    return label, float(values.mean()) / 100
    return None


def watch(options: argparse.Namespace, sleep: Callable[[float], None] = time.sleep) -> Answer:
    """Do `gpulab watch`: show a job's ranks until all have ended; without a job the one that began last.

    Ctrl-C ends it, and not the job. Raises StoreError where no such job runs.
    """
    store = Store(options.store)
    root = store.root
    store.finish_killed()  # what has no process any more does not run
    running = running_jobs(root)
    chosen = options.job or next(reversed(running), "")
    chosen = next((job for job, number in running.items() if number and number == chosen), chosen)
    if chosen not in running:
        named = f"No job {chosen!r}" if chosen else "No job"
        start = "Start one with gpulab record --ranks N SCRIPT, or name its folder with --store"
        others = f"These run: {', '.join(running)}" if running else start
        raise StoreError(f"{named} runs in {str(root)!r}. {others}.")
    job, screen = LiveJob(root, chosen), _Screen()
    try:
        while True:
            store.finish_killed()
            ranks, late = job.look()
            screen.show(f"job {chosen}\n{view.text(ranks, late)}")
            if all(rank.has_ended for rank in ranks) and chosen not in running_jobs(root):
                return Answer(f"All ranks have ended. The report: gpulab report {chosen}")
            sleep(EVERY_S if screen.renews else LOG_EVERY_S)
    except KeyboardInterrupt:
        return Answer(" ")  # the prompt begins on a line of its own


class _Screen:
    """A few lines that are renewed in place at a terminal, and written one below the other into a file."""

    def __init__(self) -> None:
        self.renews = sys.stdout.isatty()
        self._height = 0

    def show(self, text: str) -> None:
        if self.renews:  # a line that wraps would take the place of two
            width = shutil.get_terminal_size().columns - 1
            text = "\n".join(line[:width] for line in text.split("\n"))
        back = f"\x1b[{self._height}F\x1b[J" if self.renews and self._height else ""
        sys.stdout.write(f"{back}{text}\n")
        sys.stdout.flush()
        self._height = text.count("\n") + 1
