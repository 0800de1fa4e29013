"""`%%gpuprofile --ranks N`: the cell in N fresh processes, each a recorded rank, and one report of all of them."""

from __future__ import annotations

import ast
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from msgspec import Struct

from gpulab.api.live_ranks import live_rows
from gpulab.api.reading import report, runs
from gpulab.devices.child_path import import_path
from gpulab.errors import StoreError, UsageError
from gpulab.launch.launcher import Line, RankProcesses, launcher_words, record_words, shortage, threads_of_each
from gpulab.launch.notebook_source import notebook_source
from gpulab.run import Ranks
from gpulab.store.folders import Store, default_root, new_id
from gpulab.store.jobs import await_job
from gpulab.store.live_job import LiveJob
from gpulab.tuning.interrupts import Interrupted, interrupts_heard
from gpulab.views.report.ranks import RankedReport
from gpulab.views.running.display import in_notebook
from gpulab.views.running.live_ranks import LiveRanksOutput

EVERY_S = 1.0  # the ranks write as often
CELL, NOTEBOOK = "cell.py", "notebook.py"
STORED_S = 2.0  # after the last process has ended its run is on disk, or was killed and is found there
_LAST_WORDS = 5  # lines
_STOPPED = "Interrupted: above is what the ranks measured until then."
_OF_THE_KERNEL = ("JPY_PARENT_PID", "JPY_SESSION_NAME", "MPLBACKEND")  # would mislead a plain Python


class RankedCell(Struct, frozen=True):
    """A cell that is ready to run in so many ranks.

    `text` is the cell, `tree` its code; `options` are those of `gpulab record`. `setup`: what it reads of the notebook.
    """

    text: str
    setup: str
    ranks: int
    options: Mapping[str, object]
    full: bool = False

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
    ) -> RankedCell:
        """Raises UsageError where the cell reads what cannot come along."""
        return cls(text, notebook_source(tree, namespace, cells).text, ranks, options, full)

    def run(self) -> Ranks:
        """Run it, hand on what the ranks print, and show the report. Returns the runs.

        An interrupt asks all ranks to end at their next step, a second one ends them at once; then Interrupted is
        raised. Raises UsageError where no rank came as far as a run.
        """
        job_id = f"cell-{new_id()}"
        if short := shortage(self.ranks):
            print(f"gpulab: {short}", file=sys.stderr)
        with _folder(self) as folder:
            words = [*launcher_words(self.ranks, job_id), *self._record(folder)]
            (folder / "logs").mkdir()
            watched = _Watched(job_id) if not self.options.get("no_live") and in_notebook() else None
            followed = _Followed(RankProcesses(words, _environment(self.ranks), folder / "logs"), watched)
            status = followed.to_end()
        ranks = self._runs(job_id, status, followed)
        for run in reversed(ranks.runs.values()):  # rank 0 is `gpulab.runs[-1]`
            runs.add(run, Store().root / run.id)
        _show(report(ranks), watched, full=self.full)
        if followed.interrupted:
            raise Interrupted(_STOPPED)
        return ranks

    def _record(self, folder: Path) -> list[str]:
        options = {**self.options, "no_live": True, "silent": True, "before": folder / NOTEBOOK}
        return record_words(options, [str(folder / CELL)])

    def _runs(self, job_id: str, status: int, followed: _Followed) -> Ranks:
        try:
            return await_job(Store(), job_id, self.ranks, STORED_S)
        except StoreError:
            if followed.interrupted:
                raise Interrupted("Interrupted: no rank had begun a run.") from None
            own = "\n".join(followed.own_words[-_LAST_WORDS:]) if not followed.said else ""
            raise UsageError(f"No rank came as far as a run: PyTorch's launcher ended with {status}. {own}") from None


class _Watched:
    """The live view of a job, renewed about once a second by whoever has the time."""

    def __init__(self, job_id: str) -> None:
        self._job = LiveJob(default_root(), job_id)
        self._output = LiveRanksOutput()
        self._began_s = time.monotonic()
        self._due_s = self._began_s

    def look(self) -> None:
        """Show what is new. Never raises: a view that fails must not cost the user the run."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + EVERY_S
        with suppress(Exception):
            rows, late = live_rows(self._job.look())
            self._output.show(rows, late, now_s - self._began_s)

    def replace(self, bundle: Mapping[str, object]) -> bool:
        """Put the report in its place."""
        return self._output.replace(bundle)


class _Followed:
    """Processes whose output is handed on to the end, and who hear of interrupts."""

    def __init__(self, processes: RankProcesses, watched: _Watched | None) -> None:
        self._processes = processes
        self._watched = watched
        self.interrupted = False
        self.said = False  # some rank has printed something: what went wrong is among it
        self.own_words: list[str] = []  # the launcher's

    def to_end(self) -> int:
        """Returns the launcher's exit status; nothing of it is left."""
        try:
            with interrupts_heard(self._stop):
                for line in self._processes.lines():
                    if line is not None:
                        self._hand_on(line)
                    if self._watched is not None:
                        self._watched.look()
        finally:
            self._processes.kill()
            status = self._processes.end()
        return status

    def _stop(self) -> None:
        if self.interrupted:
            self._processes.kill()
        self.interrupted = True
        self._processes.stop()

    def _hand_on(self, line: Line) -> None:
        if line.rank is None:
            self.own_words.append(line.text)
            return
        self.said = True
        print(f"[rank {line.rank}] {line.text}", file=sys.stderr if line.is_error else sys.stdout)


@contextmanager
def _folder(cell: RankedCell) -> Iterator[Path]:
    """A folder with the cell and what it reads, which is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="gpulab-ranks-"))
    try:
        (folder / CELL).write_text(cell.text, encoding="utf-8")
        (folder / NOTEBOOK).write_text(cell.setup, encoding="utf-8")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _environment(ranks: int) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _OF_THE_KERNEL}
    return {**kept, **threads_of_each(ranks), "PYTHONPATH": os.pathsep.join(import_path())}


def _show(shown: RankedReport, watched: _Watched | None, *, full: bool) -> None:
    if not in_notebook():
        sys.stdout.write(shown.text(full=full) + "\n")
        return
    from IPython.display import display

    bundle = shown.bundle(full=full)
    if watched is None or not watched.replace(bundle):
        display(bundle, raw=True)  # type: ignore[no-untyped-call]
