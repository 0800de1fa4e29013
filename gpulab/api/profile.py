"""`gpulab.profile`: profiles a block of code, stores its run and shows its report."""

from __future__ import annotations

import platform
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from msgspec.structs import replace

from gpulab.analysis.facts import has_no_step
from gpulab.api.diagnose import summarize
from gpulab.api.job_report import last_job_report
from gpulab.api.reading import report
from gpulab.api.runs import runs
from gpulab.capture.job import JOB, current_job
from gpulab.capture.loader_facts import ignoring_worker_deaths
from gpulab.capture.recorder import Capture, RunSource
from gpulab.capture.threads import outcome_of, stop_behind
from gpulab.errors import GpulabError, StoreError, UsageError
from gpulab.formatting import capitalized
from gpulab.launch.launcher import option_words
from gpulab.launch.own_ranks import followed_ranks, own_ranks
from gpulab.live_feed import Monitor
from gpulab.options import QUICK_RUN_STEPS, at_most, check_whole_number
from gpulab.run import Missing, Outcome, Run, Settings
from gpulab.store.folders import Store, WriteTrace, new_id
from gpulab.store.summaries import keep_summary
from gpulab.user_code import hide_gpulabs_frames
from gpulab.views.live_view import Stage
from gpulab.views.report.report import Report
from gpulab.views.waiting import run_lines_or_none
from gpulab.views.widgets import in_notebook
from gpulab.views.wording import cut, plain

if TYPE_CHECKING:
    from gpulab.tuning.execute import Execution

_ROOM = 100  # characters of an error; the traceback below has the rest


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
        execution: Execution | None = None,
        terminated: Callable[[], None] = lambda: None,
        keeps_trace: Callable[[Run], bool] = lambda run: True,
        progress_of: str = "",
    ) -> None:
        knobs = {} if execution is None else execution.arm.texts
        requested = Settings(name, steps, warmup, trace_steps, trace, live, save, device, whole, knobs)
        check(requested)
        self.settings = replace(requested, steps=at_most(requested.steps, QUICK_RUN_STEPS))
        self._execution = execution
        self._when_terminated = terminated
        self._progress_of = progress_of
        self._keeps_trace = keeps_trace
        self._source: RunSource = source
        self._code = code
        self._show = show
        self._full = full
        self._run: Run | None = None
        self._report: Report | None = None
        self._unsaved = ""
        self._path: Path | None = None
        self._capture: Capture | None = None
        self._stage: Stage | None = None
        self._follows = ExitStack()
        self._ranks = ""  # beginning of the id of a job that the code itself starts

    @property
    def run(self) -> Run:
        """The record. Raises GpulabError before the block has ended."""
        if self._run is None:
            raise GpulabError("The block has not ended yet: read its run after the with statement.")
        return self._run

    @property
    def path(self) -> Path | None:
        """The folder of the stored run; None if it is not on disk."""
        return self._path

    @property
    def report(self) -> Report:
        if self._report is None:
            self._report = report(self.run, self._unsaved)
            if self._path is not None:
                keep_summary(self._path, summarize(self._report.facts, self._report.diagnosis))
        return self._report

    def start(self) -> None:
        """Begin now, before the `with`. Raises UsageError for a missing device, or after it has run."""
        if self._run is not None:
            raise UsageError("This gpulab.profile has run already: make a new one for each block.")
        if self._capture is not None:
            return
        self._stage = Stage.open(live=self.settings.live, full=self._full) if self._show else None
        monitor: Monitor | None = self._stage.monitor if self._stage is not None else None
        if monitor is None and self.settings.live and not in_notebook():
            job = current_job()
            if not self._progress_of or job is None or job.rank == 0:  # only rank 0 prints
                monitor = run_lines_or_none(self._progress_of)
        keep = self._keep_terminated if self.settings.save else None
        capture = Capture(self.settings, self._source, self._code, monitor, keep)
        try:
            capture.start()
        except UsageError:
            raise
        except BaseException:  # such as an interrupt while torch is imported: clean up
            with suppress(Exception):
                capture.finish("failed")
            capture.close()
            raise
        self._capture = capture

    def __enter__(self) -> Self:
        self.start()
        if self.settings.save and self._source in ("cell", "statement"):
            self._ranks = self._follows.enter_context(followed(self.settings, silent=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        outcome, detail = outcome_of(error)
        assert self._capture is not None
        self._follows.close()
        try:
            if not self._capture.terminated:
                self._end(outcome, detail, error)
        except Exception as e:  # a fault of gpulab must not hide the user's own exception
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

    @ignoring_worker_deaths()
    def _end(self, outcome: Outcome, detail: str, error: BaseException | None) -> None:
        assert self._capture is not None
        try:
            self._take(*self._capture.finish(outcome, detail, error))
        finally:
            self._capture.close()

    def _keep_terminated(self, run: Run, write_trace: WriteTrace | None) -> None:
        """Store and show the run in the middle of the user's code, because the process was told to terminate."""
        try:
            self._take(run, write_trace)
            self._when_terminated()
        except Exception as e:
            sys.stderr.write(f"gpulab: this run has no report, because gpulab failed ({_in_words(e)})\n")

    def _take(self, run: Run, write_trace: WriteTrace | None) -> None:
        """Store the run, show it, and add the trace."""
        self._run = run
        if self._execution is not None:
            self._run = replace(self._run, changes=self._execution.changes(self._run))
        self._run = replace(self._run, missing=(*self._run.missing, *_unfollowed(self._run, self._started_processes())))
        path = self._path = self._save()
        runs.add(self._run, path)
        if self._stage is not None:
            self._present()
        if path is not None and write_trace is not None and self._keeps_trace(self._run):
            self._add_trace(path, write_trace)

    def _started_processes(self) -> int:
        return self._capture.started_processes if self._capture is not None else 0

    def _add_trace(self, path: Path, write_trace: WriteTrace) -> None:
        """Add the profiler's trace after the report, because writing it takes longest."""
        try:
            run = Store().add_trace(path, self.run, write_trace)
        except StoreError as e:
            sys.stderr.write(f"gpulab: the profiler's trace is not beside the run ({e})\n")
            return
        if run is not self._run:
            self._run, self._report = run, None
            runs.add(run, path)
            if self._stage is not None:
                sys.stderr.write(f"gpulab: the profiler's trace is not beside the run ({run.missing[-1].reason})\n")

    def _save(self) -> Path | None:
        """Write the run to the store; if that fails, keep the reason for the report."""
        if not self.settings.save:
            self._unsaved = "Saving was switched off."
            return None
        try:
            return Store().save(self.run)
        except StoreError as e:
            self._unsaved = str(e)
            return None

    def _raised_early(self) -> bool:
        """Whether the code raised before its first step, and there is nothing to report."""
        run = self.run
        out_of_memory = run.memory_account is not None and run.memory_account.failure is not None
        return run.outcome == "failed" and has_no_step(run) and not self.settings.whole and not out_of_memory

    def _present(self) -> None:
        """Show the report. A failing view loses neither the run nor the user's own exception."""
        assert self._stage is not None
        try:
            ranks = last_job_report(self._ranks) if self._ranks and has_no_step(self.run) else None
            if ranks is not None:
                self._stage.show(ranks)
            elif self._raised_early():
                self._stage.say(_nothing_to_report(self.run, saved=self.settings.save and not self._unsaved))
            else:
                self._stage.show(self.report)
        except Exception as e:
            sys.stderr.write(f"gpulab: the report could not be shown ({_in_words(e)}); the run is {self.run.id}\n")


def _unfollowed(run: Run, started: int) -> tuple[Missing, ...]:
    """A note on processes started by code that itself had no step: they cannot be recorded."""
    if not started or not has_no_step(run):
        return ()
    own = own_ranks(run.code)
    ranks = own.ranks if own is not None and own.ranks != "N" else str(started)
    command = f"gpulab record --ranks {ranks}" if run.source == "script" else f"%%gpuprofile --ranks {ranks}"
    which = "the process" if started == 1 else f"the {started} processes"
    starter = own.starter if own is not None else "this code"
    do = f"use {own.instead} instead, under {command}" if own is not None else f"start them with {command}"
    reason = f"{which} that {starter} starts cannot be followed: {do}"
    return (Missing("ranks", reason, key="ranks"),)


def _nothing_to_report(run: Run, *, saved: bool) -> str:
    """One sentence, above the traceback of code that raised before it trained."""
    raised = cut(plain(run.outcome_detail), _ROOM) or "an error"
    sentence = f"gpulab: the code raised before its first training step ({raised}), so there is no report."
    sentence += "".join(f" {capitalized(m.reason)}." for m in run.missing if m.key in ("ranks", "empty_loader"))
    return sentence if not saved else f"{sentence} What was recorded: gpulab report {run.id} --all"


def check(settings: Settings) -> None:
    """Raises UsageError for settings that cannot work, naming the option."""
    for option, value, least in (
        ("steps", settings.steps, 1),
        ("warmup", settings.warmup, 0),
        ("trace-steps", settings.trace_steps, 1),
    ):
        check_whole_number(f"--{option}", value, least)
    if not settings.trace and (settings.trace_steps is not None or settings.whole):
        other = "--trace-steps" if settings.trace_steps is not None else "--whole"
        raise UsageError(f"--no-trace and {other} cannot be combined: drop one.")
    if settings.steps is not None and settings.warmup is not None and settings.warmup >= settings.steps:
        raise UsageError(
            f"--warmup {settings.warmup} leaves nothing of --steps {settings.steps}: "
            "ask for more steps or less warm-up."
        )


def _in_words(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


@contextmanager
def followed(settings: Settings, *, silent: bool) -> Iterator[str]:
    """Inside, ranks are recorded with these settings. Yields the beginning of the job's id. `silent`: no report."""
    words = {name: getattr(settings, name) for name in ("name", "steps", "warmup", "trace_steps", "device", "whole")}
    words |= {"no_trace": not settings.trace, "no_save": not settings.save, "no_live": True, "silent": silent}
    name = f"{platform.node()}-{new_id()}"
    with followed_ranks(option_words(words), {JOB: name}):
        yield name
