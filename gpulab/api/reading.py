"""`gpulab.report`, `diagnose`, `compare` and `load`: they read runs, stored runs and traces.

Nothing here records a run, so neither capture nor knobs are imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, overload

from msgspec.structs import replace

from gpulab.analysis.facts import facts
from gpulab.analysis.steps import step_change
from gpulab.api.diagnose import diagnose_job, diagnosis_for_report, learned_here, thresholds_of, thresholds_or_default
from gpulab.api.runs import Runs, read_entry
from gpulab.api.runs import runs as runs
from gpulab.diagnosis.diagnose import diagnose as diagnose_facts
from gpulab.errors import StoreError, TraceError, UsageError
from gpulab.run import Ranks, Run
from gpulab.store.folders import DOCUMENT, Store
from gpulab.store.jobs import SeveralJobs, job_of
from gpulab.trace import files
from gpulab.views import wording
from gpulab.views.report.ranks import RankedReport, job_opening
from gpulab.views.report.report import Diagnosed, Report
from gpulab.views.report.sections import opening
from gpulab.views.waiting import waiting

if TYPE_CHECKING:
    from gpulab.tuning.record import Speed
    from gpulab.views.comparison import Compared

speeds: dict[str, Speed] = {}  # by run id: its speed against the interleaved blocks of the baseline


@overload
def report(run: Run, unsaved: str = "") -> Report: ...


@overload
def report(run: Ranks) -> RankedReport: ...


def report(run: Run | Ranks, unsaved: str = "") -> Report | RankedReport:
    """The report of a run or of a job's ranks: `.text()`, `.html()`, `.json()`. `unsaved`: why it is not on disk."""
    with waiting("making the report"):
        if isinstance(run, Ranks):
            thresholds, notes = thresholds_or_default()
            job = diagnose_job(run, thresholds)
            return RankedReport(run, job.facts, job.comparison, job.each, replace(job.diagnosis, notes=notes))
        figures = facts(run)
        diagnosis = diagnosis_for_report(figures, learned_here(figures))
        return Report(figures, diagnosis, unsaved, step_change(run, runs.own), speeds.get(run.id))


def diagnose(run: Run | Ranks | str | Path, thresholds: Mapping[str, float] | None = None) -> Diagnosed:
    """What slows a run down, the costliest first: `.findings`, each with its evidence, cure and predicted gain.

    `run`: a `Run`, the `Ranks` of a job, a name or id in the store, or the path of a trace or of a folder of traces.
    `thresholds` override the `[thresholds]` table in gpulab.toml. Raises UsageError for thresholds that are unknown or
    contradict each other, StoreError or TraceError for a run that cannot be read.
    """
    limits = thresholds_of(thresholds)
    opened = open_run(run) if isinstance(run, str | Path) else run
    if isinstance(opened, Ranks):
        job = diagnose_job(opened, limits)
        return Diagnosed(job.diagnosis, job_opening(opened, job.facts))
    figures = facts(opened)
    return Diagnosed(diagnose_facts(figures, limits, learned_here(figures)), opening(figures))


def compare(*runs: Run | Ranks | str | Path, price_per_hour: float | None = None) -> Compared:
    """Each later run against the first: what differs, and whether the difference is more than noise.

    A run is a `Run`, its name or id in the store, or the path of a trace or of a folder of traces. Runs made one after
    the other are weaker evidence than interleaved blocks, and the result says so. `price_per_hour` of the machine adds
    the cost of a million samples. Raises UsageError for fewer than two runs or a run against itself, StoreError or
    TraceError for a run that cannot be read.
    """
    from gpulab.tuning.compare.blocks import compare_runs  # imports the knobs, which a report does not need
    from gpulab.views.comparison import Compared

    opened = [open_run(run) if isinstance(run, str | Path) else run for run in runs]
    _refuse_itself(opened)
    ranked = [job for job in opened if isinstance(job, Ranks)]
    if not ranked:
        return Compared(compare_runs([run for run in opened if isinstance(run, Run)]), price_per_hour)
    common = set.intersection(*(set(job.runs) for job in ranked))
    if not common:
        raise UsageError("The jobs have no rank in common: name the trace of one rank of each.")
    rank = min(common)
    runs_of_rank = [job.runs[rank] if isinstance(job, Ranks) else job for job in opened]
    note = f"Of each job rank {rank} is compared: the others may differ."
    return Compared(compare_runs(runs_of_rank, notes=[note]), price_per_hour)


def _refuse_itself(opened: Sequence[Run | Ranks]) -> None:
    """Raises UsageError if the first run is compared with itself."""
    stored = [run for run in opened if isinstance(run, Run)]
    first = next(iter(stored), None)
    if first is not None and any(first is run or (first.origin is None and first.id == run.id) for run in stored[1:]):
        raise UsageError(f"{first.name} cannot be compared with itself: name two runs. `gpulab runs` lists them.")


def open_run(what: str | Path, store: Store | None = None) -> Run | Ranks:
    """A stored run by id, name or folder, or the trace or the folder of traces that `what` names.

    The name of a rank, or the job's id, denotes the whole job; a rank's own id or folder denotes that rank alone. If a
    run and a file or folder have the same name, the run is opened; `./train.py` opens the file. Without a `store` this
    process's runs come first. Raises StoreError or TraceError if there is none.
    """
    path, key = Path(what), str(what)
    here = runs if store is None else Runs(store)
    try:
        entry = here.find(key)
    except StoreError as no_run:
        if path.name != DOCUMENT and (path.is_file() or path.is_dir()):
            return load(path)
        if os.sep in key and not path.exists():
            raise TraceError(f"There is no file or folder {key!r}: check the path.") from None
        try:
            return job_of(here.store, key)
        except SeveralJobs:
            raise
        except StoreError:
            raise no_run from None
    job = entry.job
    if job is None or entry.id.startswith(key) or path.is_dir():
        return read_entry(entry)
    if (job.world_size or 1) < 2 and key != job.id:
        return read_entry(entry)
    return job_of(here.store, job.id)


def load(path: str | Path) -> Run | Ranks:
    """A trace file or a stored run's folder as a `Run`, a folder of the traces of one job's ranks as `Ranks`.

    Raises TraceError or StoreError, in one sentence with the next step, if there is nothing to read.
    """
    with waiting(f"reading {wording.plain(str(path))}") as wait:
        return files.load(path, wait.tell)
