"""The ranks of a job while they run, from the folder of each: any process that sees it can look."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from gpulab.errors import StoreError
from gpulab.run import Run
from gpulab.store import run_format
from gpulab.store.folders import COLUMNS, DOCUMENT, RUNNING_PREFIX
from gpulab.store.run_tables import ARRIVALS, MARKS, READINGS, Arrivals
from gpulab.store.table_file import Tail
from gpulab.tape.step_finder import StepFinder

LATEST_STEPS = 50  # of which the figures are
_KEPT_ROWS = 512


class LiveRank(Struct, frozen=True):
    """One rank by now; times are of its latest steps. None: not known yet.

    `heard_s` ago its file was written last; `has_ended`: it writes no more.
    """

    rank: int
    node: str
    step_count: int
    step_us: float | None
    data_wait_us: float | None
    busy: tuple[str, float] | None  # "GPU" by its utilization curve, else "CPU", of all cores, and the share of time
    arrivals: Arrivals
    heard_s: float
    has_ended: bool = False


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
        self._ranks: dict[Path, LiveRank] = {}  # the latest of each file

    def look(self) -> list[LiveRank]:
        """All ranks that were heard of, by number; of a rank that has begun again, the later one."""
        present = set(self._root.glob(f"{RUNNING_PREFIX}*")) - self._foreign
        for path in present:
            rank = self._read(path)
            if rank is not None:
                self._ranks[path] = rank
        for path in self._ranks.keys() - present:
            self._ranks[path] = replace(self._ranks[path], has_ended=True)
            self._tails.pop(path, None)
        latest = {self._ranks[path].rank: self._ranks[path] for path in sorted(self._ranks)}
        return [latest[number] for number in sorted(latest)]

    def _read(self, path: Path) -> LiveRank | None:
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
            heard_s = max(0.0, time.time() - (path / COLUMNS).stat().st_mtime)
        except (OSError, ValueError):
            return None
        start_ns, end_ns, wait_ns, _ = finder.rows_since(max(0, len(finder) - LATEST_STEPS)).T
        wall_ns = end_ns - start_ns
        some = len(wall_ns) > 0
        return LiveRank(
            rank=header.job.rank,
            node=header.job.node,
            step_count=len(finder),
            step_us=float(np.median(wall_ns)) / 1e3 if some else None,
            data_wait_us=float(np.mean(np.minimum(wait_ns, wall_ns))) / 1e3 if some else None,
            busy=_busy(tail, header),
            arrivals=tail.rows(ARRIVALS),
            heard_s=heard_s,
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
