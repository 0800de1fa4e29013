"""`%%gpuprofile --ranks N`: the cell in N fresh processes, each a recorded rank, and one report of all of them."""

from __future__ import annotations

import ast
import os
import shlex
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from gpulab.api.job_report import job_report, keep_only
from gpulab.api.live_ranks import LiveJob
from gpulab.api.reading import runs
from gpulab.devices.own_processes import import_path
from gpulab.errors import RankError, StoreError, UsageError
from gpulab.formatting import decapitalized
from gpulab.launch.launcher import (
    OF_THE_KERNEL,
    RECORD,
    Line,
    RankProcesses,
    launcher_words,
    option_words,
    shortage,
    threads_of_each,
)
from gpulab.launch.notebook_source import notebook_source
from gpulab.launch.own_ranks import own_ranks
from gpulab.launch.slurm import Allocation, SlurmProcesses, batch_script, outputs, submit, submit_words
from gpulab.run import Ranks, Run
from gpulab.store.files import make_folder, temporary_folder
from gpulab.store.folders import KILLED, Store, default_root, new_id
from gpulab.store.jobs import await_job
from gpulab.tuning.cell_code import Interrupted, on_interrupt
from gpulab.views.live_ranks import LiveRanksOutput
from gpulab.views.report.ranks import RankedReport
from gpulab.views.widgets import in_notebook
from gpulab.views.wording import cut

EVERY_S = 1.0  # the ranks write at the same rate
SHARED_S = 30.0  # until a shared folder shows another machine's files
CELL, NOTEBOOK, BATCH = "cell.py", "notebook.py", "job.sbatch"
STORED_S = 2.0  # after the last process has ended: its run is on disk by then
LOST_TOUCH_S = 10.0  # chosen by gpulab: in this time the other ranks notice that one was killed
_LAST_WORDS = 5  # lines
_WIDEST_CAUSE = 160  # characters
_STOPPED = "Interrupted: what the ranks measured so far is above."
_OF_A_JOB = ("SLURM_", "PMI_", "PMIX_", "OMPI_", "RANK", "WORLD_SIZE", "LOCAL_RANK")  # set if the notebook is in a job


class RankedCell(Struct, frozen=True):
    """A cell that is ready to run in several ranks.

    `text`: the cell; `setup`: the source of what it reads from the notebook; `options`: for `gpulab record`. Without an
    `allocation` on a cluster the ranks run on this machine.
    """

    text: str
    setup: str
    ranks: int
    options: Mapping[str, object]
    full: bool = False
    allocation: Allocation | None = None

    @classmethod
    def of(
        cls,
        text: str,
        tree: ast.Module,
        namespace: Mapping[str, object],
        cells: Sequence[str],
        ranks: int,
        options: Mapping[str, object],
        *,
        full: bool = False,
        allocation: Allocation | None = None,
    ) -> RankedCell:
        """Raises UsageError if the cell reads objects that cannot be transferred, or the ranks do not fit the nodes."""
        if allocation is not None:
            _ = allocation.of_each_node, allocation.words
        if (own := own_ranks(text, sure=True)) is not None:
            raise UsageError(f"{own.starter} starts its own ranks: with --ranks, use {own.instead} instead.")
        return cls(text, notebook_source(tree, namespace, cells), ranks, options, full, allocation)

    def run(self) -> Ranks:
        """Run the cell, show the ranks' output and the report. Returns the runs.

        An interrupt asks all ranks to end at their next step, a second one ends them at once; then Interrupted is
        raised. Raises UsageError if no rank recorded a run, and RankError, after the report, if a rank failed.
        """
        is_live = not self.options.get("no_live") and in_notebook()
        follower = Follower(_LiveRanks if is_live else None)
        ranks = self._record(follower)
        for run in reversed(ranks.runs.values()):  # rank 0 is `gpulab.runs[-1]`
            runs.add(run, Store().root / run.id)
        report = job_report(ranks, Store())
        live = follower.view.output if isinstance(follower.view, _LiveRanks) else None
        _show(report, live, full=self.full)
        if only := self.options.get("only_ranks"):
            keep_only(str(only), report, Store())
        if follower.interrupted:
            raise Interrupted(_STOPPED)
        status = follower.status if isinstance(follower.status, int) else 0  # Slurm's word is about the job
        if failure := failure_words(ranks, status=status):
            raise RankError(failure)
        return ranks

    def record(self, *, quiet: bool) -> Ranks:
        """Run the cell without a report; `quiet`: without the ranks' output. Raises as `run`."""
        follower = Follower(None, quiet=quiet)
        ranks = self._record(follower)
        if follower.interrupted:
            raise Interrupted(_STOPPED)
        return ranks

    def _record(self, follower: Follower) -> Ranks:
        own_id = f"cell-{new_id()}"
        with self.folder(own_id, follower) as folder:
            follower.to_end(lambda: self.begin(own_id, folder))
        return self._runs(follower)

    def begin(
        self, own_id: str, folder: Path, more: Mapping[str, object] | None = None, tasks: int = 1
    ) -> tuple[str, Processes]:
        """Start the job. Returns its id and its processes. `folder`: for its files; `more`: options of `gpulab record`.

        On a cluster it is an array of `tasks` jobs.

        Raises UsageError if the cluster rejects it.
        """
        (folder / CELL).write_text(self.text, encoding="utf-8")
        (folder / NOTEBOOK).write_text(self.setup, encoding="utf-8")
        (folder / "logs").mkdir()
        own_options = {"no_live": True, "silent": True, "before": folder / NOTEBOOK}
        target = [*RECORD, *option_words({**self.options, **own_options, **(more or {})}), str(folder / CELL)]
        if self.allocation is None:
            if short := shortage(self.ranks):
                print(f"gpulab: {short}", file=sys.stderr)
            words = [*launcher_words(self.ranks, own_id, folder / "logs"), *target]
            return own_id, RankProcesses(words, _environment(self.ranks), folder / "logs")
        script = folder / BATCH
        own = {"PYTHONPATH": _own_modules(), "GPULAB_DIR": str(default_root().parent)}
        script.write_text(batch_script(self.allocation, own_id, target, folder, own, tasks), encoding="utf-8")
        words = submit_words(self.allocation, script, tasks)
        submitted = submit(words)
        script_text = f"{shlex.join(words)}\n\n{script.read_text(encoding='utf-8')}"
        print(f"Slurm job {submitted.number} runs this file; Stop cancels it.\n\n{script_text}")
        return f"slurm-{submitted.number}.0-{own_id}", SlurmProcesses(submitted, outputs(folder, tasks))

    @contextmanager
    def folder(self, own_id: str, follower: Follower) -> Iterator[Path]:
        """A folder for the cell and its sources, removed afterwards; a cluster's nodes must see it."""
        if self.allocation is None:
            with temporary_folder("gpulab-ranks-") as folder:
                yield folder
            return
        folder = default_root().parent / "jobs" / own_id
        make_folder(folder)
        try:
            yield folder
        finally:
            if not follower.may_go_on:  # otherwise the job may still begin
                shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # it contains another job's folder
                folder.parent.rmdir()

    def _runs(self, follower: Follower) -> Ranks:
        wait_s = STORED_S if self.allocation is None else SHARED_S
        try:
            return await_job(Store(), follower.job_id, self.ranks, wait_s)
        except StoreError:
            if follower.interrupted:
                raise Interrupted("Interrupted: no rank had begun a run.") from None
            raise UsageError(f"No rank recorded a run. {self.ending_words(follower)}") from None

    def ending_words(self, follower: Follower) -> str:
        """How a job without a result ended, in the launcher's or Slurm's words."""
        own = "\n".join(follower.own_words[-_LAST_WORDS:]) if not follower.said else ""
        if self.allocation is None:
            why = f"PyTorch's launcher ended with {follower.status}."
        else:
            why = f"Slurm says: {follower.status}."
            if not (follower.said or own):
                place = str(default_root().parent)
                own = f"The nodes wrote nothing to {place!r}: can they see it? Set GPULAB_DIR to a shared folder."
        return f"{why} {own}".rstrip()


def failure_words(ranks: Ranks, code: str = "cell", status: int = 0) -> str:
    """The rank that failed first, as far as the runs show, and the ranks that failed later; empty if none failed.

    A killed rank comes before ranks that failed within `LOST_TOUCH_S` after its last record, because they were waiting
    for it. `status`: the launcher's exit status; if it is not 0, a rank without a run is named.
    """
    ends = {rank: run for rank, run in ranks.runs.items() if run.outcome == "failed" or _was_killed(run)}
    order = sorted(ends, key=lambda rank: _end_s(ends[rank]) - (LOST_TOUCH_S if _was_killed(ends[rank]) else 0.0))
    said = [f"Rank {rank}: {_sentence(ends[rank].outcome_detail)}" for rank in order]
    absent = [rank for rank in range(ranks.world_size or 0) if rank not in ranks.runs] if status else []
    said = [*(f"Rank {rank} ended before it had recorded a step." for rank in absent), *said]
    opening = f"The ranks did not come to the end of the {code}."
    if not said:
        return f"{opening} PyTorch's launcher ended with {status}." if status else ""
    first, *others = said
    after = f" After it {decapitalized(' '.join(others))}" if others else ""
    return f"{opening} {first}{after}"


def _was_killed(run: Run) -> bool:
    return run.outcome == "interrupted" and KILLED in run.outcome_detail


def _end_s(run: Run) -> float:
    """The end of the run by this machine's clock, to a second."""
    return datetime.fromisoformat(run.created).timestamp() + run.wall_ns / 1e9


def _sentence(words: str) -> str:
    line = cut(words.strip().partition("\n")[0], _WIDEST_CAUSE)
    return line if line.endswith(".") else f"{line}."


class Processes(Protocol):
    """The processes of a job, here or on a cluster. `status_words`: the state of a queued job, else empty."""

    @property
    def status_words(self) -> str: ...
    @property
    def may_go_on(self) -> bool: ...
    def lines(self) -> Iterator[Line | None]: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...
    def end(self) -> int | str: ...


class JobView(Protocol):
    """A view of a running job, refreshed at a fixed interval."""

    every_s: float

    def refresh(self, elapsed_s: float) -> None:
        """Show the news."""


class _LiveRanks:
    """The live view of a job's ranks."""

    every_s = EVERY_S

    def __init__(self, job_id: str, processes: Processes) -> None:
        self._job = LiveJob(default_root(), job_id)
        self._processes = processes
        self.output = LiveRanksOutput()

    def refresh(self, elapsed_s: float) -> None:
        rows, late = self._job.poll()
        self.output.show_ranks(rows, late, elapsed_s, self._processes.status_words)


class Follower:
    """Follows a job to its end: passes on its output, refreshes its view and reacts to interrupts."""

    def __init__(self, new_view: Callable[[str, Processes], JobView] | None, *, quiet: bool = False) -> None:
        """`new_view` creates the view of a job, from its id. `quiet`: the ranks' output is not shown."""
        self._new_view = new_view
        self._quiet = quiet
        self._processes: Processes | None = None
        self.view: JobView | None = None
        self.job_id = ""
        self.status: int | str = ""  # the exit status, or a cluster's word for it
        self.interrupted = False
        self.said = False  # some rank has printed something, probably the error
        self.own_words: list[str] = []  # the launcher's own output

    @property
    def may_go_on(self) -> bool:
        """Whether the job may still run, because its cluster does not answer."""
        return self._processes is not None and self._processes.may_go_on

    def to_end(self, begin: Callable[[], tuple[str, Processes]]) -> None:
        """Start the job and follow it until all its processes have ended. Raises what `begin` raises."""
        with on_interrupt(self.stop):
            self.job_id, self._processes = begin()
            try:
                if self.interrupted:  # before there were processes to stop
                    self._processes.stop()
                self.view = self._new_view(self.job_id, self._processes) if self._new_view is not None else None
                began_s = due_s = time.monotonic()
                for line in self._processes.lines():
                    if line is not None:
                        self._hand_on(line)
                    if self.view is not None and (now_s := time.monotonic()) >= due_s:
                        due_s = now_s + self.view.every_s
                        with suppress(Exception):  # a failing view must not cost the user the run
                            self.view.refresh(now_s - began_s)
            except KeyboardInterrupt:  # a repeated interrupt ends the wait
                self.interrupted = True
            finally:
                self._processes.kill()
                self.status = self._processes.end()

    def stop(self) -> None:
        """Ask all ranks to end soon; the second time, end them at once."""
        again, self.interrupted = self.interrupted, True
        if self._processes is not None:
            if again:
                self._processes.kill()
            self._processes.stop()

    def _hand_on(self, line: Line) -> None:
        if line.rank is None:
            self.own_words.append(line.text)
            return
        self.said = True
        if self._quiet and not line.is_error:
            return
        print(f"[rank {line.rank}] {line.text}", file=sys.stderr if line.is_error else sys.stdout)


def _environment(ranks: int) -> dict[str, str]:
    own = {n: v for n, v in os.environ.items() if n not in OF_THE_KERNEL and not n.startswith(_OF_A_JOB)}
    place = str(default_root().parent)  # absolute, because the cell may change the current folder
    return {**own, **threads_of_each(ranks), "PYTHONPATH": _own_modules(), "GPULAB_DIR": place}


def _own_modules() -> str:
    """The folders in which this notebook finds modules, except the standard ones of this Python installation."""
    standard = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths = (path for path in dict.fromkeys(import_path()) if path not in standard)
    return os.pathsep.join(path for path in paths if not path.endswith((".zip", "lib-dynload")))


def _show(report: RankedReport, live: LiveRanksOutput | None, *, full: bool) -> None:
    """Show the report, in place of the live view if there is one."""
    if not in_notebook():
        sys.stdout.write(report.text(full=full) + "\n")
        return
    from IPython.display import display

    bundle = report.bundle(full=full)
    if live is None or not live.replace(bundle):
        display(bundle, raw=True)  # type: ignore[no-untyped-call]
