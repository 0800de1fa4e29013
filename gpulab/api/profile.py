"""What a user calls: profile a block of code, get its run and its report, find earlier runs."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self, overload

from gpulab.analysis.facts import facts
from gpulab.analysis.run_row import COLUMNS, run_row
from gpulab.api import runs_table
from gpulab.api.diagnose import diagnose_job, diagnosis_for_report, learned_here, thresholds_of, thresholds_or_default
from gpulab.api.load import load
from gpulab.capture.dataloader.worker_faults import deaths_unheard
from gpulab.capture.recorder import Capture, RunSource
from gpulab.capture.steps.loop import stop_behind
from gpulab.diagnosis.diagnose import diagnose as diagnose_facts
from gpulab.errors import GpulabError, StoreError, TraceError, UsageError
from gpulab.live_feed import Watcher
from gpulab.options import check_whole_number
from gpulab.run import Change, Outcome, Ranks, Run, Settings
from gpulab.store.folders import DOCUMENT, Store, read, trace_path
from gpulab.store.runs import Figures, Runs
from gpulab.tuning.compare.sequential import compare_runs
from gpulab.user_code import hide_gpulabs_frames
from gpulab.views.comparison.comparison import Compared
from gpulab.views.report.diagnosis import Diagnosed
from gpulab.views.report.ranks import RankedReport, job_opening
from gpulab.views.report.report import Report
from gpulab.views.report.sections import has_no_step, opening
from gpulab.views.running.alert_lines import alert_lines_or_none
from gpulab.views.running.display import Stage, in_notebook
from gpulab.views.running.progress_lines import progress_lines_or_none
from gpulab.views.running.waiting import waiting
from gpulab.views.wording import cut, plain

_ROOM = 100  # characters of an error; the traceback below has the rest

runs = Runs()
runs.show_with(runs_table.text, runs_table.html)
runs.export_with(Figures(COLUMNS, run_row))


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
        return Report(figures, diagnosis_for_report(figures, learned_here(figures)), unsaved)


def diagnose(run: Run | Ranks | str | Path, thresholds: Mapping[str, float] | None = None) -> Diagnosed:
    """What holds a run back, the costliest first: `.findings`, each with its evidence, cure and predicted gain.

    A run is a `Run`, the `Ranks` of a job, a name or id in the store, or the path of a trace or of a folder of traces.
    `thresholds` are set over those of the `[thresholds]` table in gpulab.toml. Raises UsageError for thresholds that
    are none or contradict each other, StoreError or TraceError for a run that cannot be read.
    """
    chosen = thresholds_of(thresholds)
    opened = open_run(run) if isinstance(run, str | Path) else run
    if isinstance(opened, Ranks):
        job = diagnose_job(opened, chosen)
        return Diagnosed(job.diagnosis, job_opening(opened, job.facts))
    figures = facts(opened)
    return Diagnosed(diagnose_facts(figures, chosen, learned_here(figures)), opening(figures))


def compare(*runs: Run | Ranks | str | Path, price_per_hour: float | None = None) -> Compared:
    """The runs after the first against the first: what differs, and whether that is more than noise.

    A run is a `Run`, its name or id in the store, or the path of a trace or of a folder of traces. Runs made one after
    the other are weaker evidence than blocks in turn, and the result says so. `price_per_hour` of the machine adds what
    a million samples cost. Raises UsageError for fewer than two or one and itself, StoreError or TraceError for one
    that cannot be read.
    """
    opened = [open_run(run) if isinstance(run, str | Path) else run for run in runs]
    _refuse_itself(opened)
    ranked = [job for job in opened if isinstance(job, Ranks)]
    if not ranked:
        return Compared(compare_runs([run for run in opened if isinstance(run, Run)]), price_per_hour)
    common = set.intersection(*(set(job.runs) for job in ranked))
    if not common:
        raise UsageError("The jobs have no rank in common: name the trace of one rank of each.")
    rank = min(common)
    chosen = [job.runs[rank] if isinstance(job, Ranks) else job for job in opened]
    note = f"Of each job rank {rank} is compared: the others may differ."
    return Compared(compare_runs(chosen, notes=[note]), price_per_hour)


def _refuse_itself(opened: Sequence[Run | Ranks]) -> None:
    """A run does not differ from itself, the first one. Raises UsageError."""
    stored = [run for run in opened if isinstance(run, Run)]
    first = next(iter(stored), None)
    if first is not None and any(_is_same(first, run) for run in stored[1:]):
        raise UsageError(f"{first.name} cannot be compared with itself: name two runs. `gpulab runs` lists them.")


def _is_same(one: Run, other: Run) -> bool:
    return one is other or (one.origin is None and one.id == other.id)


def open_run(what: str | Path, store: Store | None = None) -> Run | Ranks:
    """A stored run by id, name or folder, or the trace or the folder of traces that `what` names.

    Without a `store` this process's runs come first. Raises StoreError or TraceError where there is none.
    """
    path, key = Path(what), str(what)
    if path.name != DOCUMENT and (path.is_file() or (path.is_dir() and not _is_stored(key, store))):
        return load(path)
    if os.sep in key and not path.exists() and not _is_stored(key, store):
        raise TraceError(f"There is no file or folder {key!r}: check the path.")
    return runs[key] if store is None else store.load(key)


def _is_stored(key: str, store: Store | None) -> bool:
    """Whether a run is meant: a folder of traces may have the name of one, and a name may look like a path."""
    try:
        (store or runs.store).find(key)
    except StoreError:
        return False
    return True


class profile:
    """Profile the code of a `with` (or `async with`) block.

    After the block `run` is the record and `report` its report. The block's exceptions pass unchanged. `steps` ends the
    block early and cleanly after that many steps. `full` shows the whole report, not only its first screen. Raises
    UsageError for settings that cannot work.
    """

    def __init__(
        self,
        name: str = "",
        *,
        steps: int | None = None,
        warmup: int | None = None,
        trace_steps: int | None = None,
        trace: bool = True,
        live: bool = True,
        save: bool = True,
        device: str = "auto",
        whole: bool = False,
        show: bool = True,
        full: bool = False,
        source: RunSource = "block",
        code: str = "",
        changes: Callable[[Run], tuple[Change, ...]] | None = None,
        knobs: Mapping[str, str] | None = None,
    ) -> None:
        self.settings = Settings(name, steps, warmup, trace_steps, trace, live, save, device, whole, dict(knobs or {}))
        check(self.settings)
        self._changes = changes
        self._source: RunSource = source
        self._code = code
        self._show = show
        self._full = full
        self._run: Run | None = None
        self._report: Report | None = None
        self._unsaved = ""
        self._capture: Capture | None = None
        self._stage: Stage | None = None

    @property
    def run(self) -> Run:
        """The record. Raises GpulabError before the block has ended."""
        if self._run is None:
            raise GpulabError("The block has not ended yet: read its run after the with statement.")
        return self._run

    @property
    def report(self) -> Report:
        if self._report is None:
            self._report = report(self.run, self._unsaved)
        return self._report

    def start(self) -> None:
        """Begin now, before the `with`. Raises UsageError for a device that is not there, or after it has run."""
        if self._run is not None:
            raise UsageError("This gpulab.profile has run already: make a new one for each block.")
        if self._capture is not None:
            return
        self._stage = Stage.open(live=self.settings.live, full=self._full) if self._show else None
        watcher: Watcher | None = self._stage.watcher if self._stage is not None else None
        if watcher is None and self.settings.live and not in_notebook():
            watcher = progress_lines_or_none() if self._source == "script" else alert_lines_or_none()
        capture = Capture(self.settings, self._source, self._code, watcher)
        try:
            capture.start()
        except UsageError:
            raise
        except BaseException:  # an interrupt while torch is imported, say: leave nothing behind
            with suppress(Exception):
                capture.finish("failed")
            raise
        self._capture = capture

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        outcome, detail = _outcome(error)
        try:
            self._end(outcome, detail)
        except Exception as e:  # a fault of ours: it must not take the place of the user's own exception
            sys.stderr.write(f"gpulab: this run has no report, because gpulab failed ({_in_words(e)})\n")
        if error is not None:
            hide_gpulabs_frames(error)
        stop = stop_behind(error)
        return stop is not None and stop.capture is self._capture

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self.__exit__(kind, error, trace)

    @deaths_unheard()
    def _end(self, outcome: Outcome, detail: str) -> None:
        assert self._capture is not None
        self._run, write_trace = self._capture.finish(outcome, detail)
        if self._changes is not None:
            self._run = replace(self._run, changes=self._changes(self._run))
        runs.add(self._run, self._save(write_trace))
        if self._stage is not None:
            self._present()

    def _save(self, write_trace: Callable[[Path], None] | None) -> Path | None:
        """Write the run to the store; where that fails, remember why: the report says it."""
        if not self.settings.save:
            self._unsaved = "Saving was switched off."
            return None
        try:
            path = Store().save(self.run, write_trace)
            if write_trace is not None and trace_path(path) is None:
                self._run = read(path)  # the stored record says why its trace is not there
            return path
        except StoreError as e:
            self._unsaved = str(e)
            return None

    def _present(self) -> None:
        """Show the report. A view that fails loses neither the run nor the user's own exception."""
        assert self._stage is not None
        try:
            if self.run.outcome == "failed" and has_no_step(self.run) and not self.settings.whole:
                self._stage.say(_nothing_to_report(self.run, saved=self.settings.save and not self._unsaved))
            else:
                self._stage.show(self.report)
        except Exception as e:
            sys.stderr.write(f"gpulab: the report could not be shown ({_in_words(e)}); the run is {self.run.id}\n")


def _nothing_to_report(run: Run, *, saved: bool) -> str:
    """One sentence, above the traceback of code that raised before it trained."""
    raised = cut(plain(run.outcome_detail), _ROOM) or "an error"
    sentence = f"gpulab: the code raised before its first training step ({raised}), so there is no report."
    return sentence if not saved else f"{sentence} What was recorded: gpulab report {run.id} --all"


def check(settings: Settings) -> None:
    """Refuse settings that cannot work. Raises UsageError naming the option."""
    for option, value, least in (
        ("steps", settings.steps, 1),
        ("warmup", settings.warmup, 0),
        ("trace-steps", settings.trace_steps, 1),
    ):
        check_whole_number(f"--{option}", value, least)
    if not settings.trace and (settings.trace_steps is not None or settings.whole):
        other = "--trace-steps" if settings.trace_steps is not None else "--whole"
        raise UsageError(f"--no-trace and {other} contradict each other: leave one out.")
    if settings.steps is not None and settings.warmup is not None and settings.warmup >= settings.steps:
        raise UsageError(
            f"--warmup {settings.warmup} leaves nothing of --steps {settings.steps}: "
            "ask for more steps or less warm-up."
        )


def _outcome(error: BaseException | None) -> tuple[Outcome, str]:
    if error is None:
        return "completed", ""
    stop = stop_behind(error)
    if stop is not None:
        return "stopped", "" if error is stop else _in_words(error)
    if isinstance(error, SystemExit) and not error.code:
        return "completed", "SystemExit"
    return ("interrupted" if isinstance(error, KeyboardInterrupt) else "failed"), _in_words(error)


def _in_words(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()
