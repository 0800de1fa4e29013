"""Runs one cell again and again with different settings, from the bench or by code; each setting becomes a row.

The cell is never edited, and the state of its training is restored after each run.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self, get_args

from msgspec import Struct, field
from msgspec.structs import replace

from gpulab.analysis.facts import Facts, facts
from gpulab.api import climb as climbs
from gpulab.api.experiment import edited, remember_experiment, remember_full_runs, remember_speed, run_before
from gpulab.api.runs import runs
from gpulab.bench import file
from gpulab.bench.output import (
    BenchOutput,
    BenchWidget,
    MainThread,
    Prints,
    collecting,
    detail,
    edit_offer,
    error_words,
    first_line,
    interruptible,
    missing_names,
    page,
    rows_words,
)
from gpulab.bench.toggles import Kind, Toggle, arm_of, data, plan_of, toggles_of, valid
from gpulab.capture import recorder
from gpulab.errors import GpulabError, UsageError
from gpulab.knobs.catalogue import KNOBS, parsed_value
from gpulab.knobs.knob import Value
from gpulab.knobs.observation import Observation
from gpulab.store.folders import new_id
from gpulab.tuning import bench as rows_of
from gpulab.tuning import cell_code
from gpulab.tuning.bench import Bench, Row
from gpulab.tuning.climb import Climber
from gpulab.tuning.climb_record import Bounds, Climb
from gpulab.tuning.code import Code
from gpulab.tuning.execute import FullRun
from gpulab.tuning.record import Experiment, Side
from gpulab.tuning.resolve import observation_of
from gpulab.tuning.runner import Runner
from gpulab.tuning.schedule import Arm, Listener, Plan, Progress, check_plan
from gpulab.views import bench as view
from gpulab.views.bars import FactorAxis
from gpulab.views.climb import Climbed, origin
from gpulab.views.comparison import Compared
from gpulab.views.progress import Level, Status
from gpulab.views.widgets import accept_stop, in_notebook

if TYPE_CHECKING:
    from gpulab.views.widgets import Offer

BUSY = "A run is already in progress: wait, or press Stop."
PLAIN = "gpulab's bench needs a notebook; here: gpulab.lab().run(workers=2)"
MEASURED_AGAIN = "The next run measures the baseline again: the objects that the cell reads are new."
APPLIED = "The cell now has {}. Run the baseline here, or run the cell: its new text is measured anew."
IN_MEMORY = 6  # runs with their traces; others are read from disk when opened


class _Job(Struct):
    """One job of the bench. `fault`: error of gpulab or of the input; `engine.error`: error of the user's code."""

    kind: Kind
    engine: Runner | Climber
    rows: tuple[Row, ...]  # the former rows, in the order of the plan's arms
    from_click: bool
    turn: int  # of its first blocks, counted over the whole bench
    prints: Prints = field(default_factory=Prints)
    record: Experiment | Climb | None = None
    fault: BaseException | None = None
    status: Status = Status(True, "starting")
    axis: FactorAxis | None = None  # for the rows while they are measured

    @property
    def error(self) -> BaseException | None:
        return self.fault or self.engine.error


class BenchSession:
    """The bench of one cell. It runs the cell on the main thread, as %%gpuprofile does.

    `bench` holds the rows. Unless `save` is false, rows are stored on disk and reappear in a later bench of the cell.
    `opener` is the offer that opened the bench. It closes only with the bench: ipykernel 7 ends the subshell of a
    closed widget, and JupyterLab 4.6 sends messages of widgets to the subshell that created them.
    """

    def __init__(
        self,
        code: Code,
        *,
        steps: int | None = None,
        budget_s: float | None = None,
        save: bool = True,
        opener: Offer | None = None,
        engine: Callable[[Code, Plan, Listener, Sequence[tuple[Arm, FullRun]]], Runner] = Runner,
    ) -> None:
        self.steps = steps  # counted steps of a run or block; None: gpulab chooses
        self.budget_s = budget_s
        self._save, self._opener, self._engine = save, opener, engine
        self._main = MainThread()
        self._toggles: tuple[Toggle, ...] = ()
        self._unexpected = ""  # why no toggle has an expectation
        self._job: _Job | None = None  # the running job
        self.result: Compared | None = None  # the last comparison
        self._prints = ""
        self._key, self._run_key = uuid.uuid4().hex, uuid.uuid4().hex
        self._widget: BenchWidget | None = None
        self._output: BenchOutput | None = None
        self._take_code(code)
        for row in self.rows:
            remember_speed(row.run_id, row.speed)

    # -- public methods ---------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self._job is not None

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.bench.rows

    def run(self, **settings: object) -> Self:
        """Measure these settings against the baseline, as one more row; without settings, measure the baseline.

        Raises UsageError, also while another run is going on, and any exception of the baseline.
        """
        return self._begin("run", settings)

    def each(self, **settings: object) -> Self:
        """Measure each setting alone and all together, interleaved, to see if their gains add up. Raises as `run`."""
        return self._begin("each", settings)

    def climb(self) -> Self:
        """Try setting by setting what is expected to help most; each attempt is a row. Raises as `run`."""
        return self._begin("climb", {})

    def decide(self, row: Row) -> Self:
        """Measure more pairs of a row. Raises as `run`."""
        return self._begin("decide", {}, row)

    def stop(self) -> None:
        """End the current run at its next step boundary; keeps the results so far."""
        if (job := self._job) is not None:
            job.status = replace(job.status, stopping=True)
            self._show(status=job.status)
            job.engine.stop()

    def close(self) -> None:
        """End the current run and close the bench; its table stays as HTML."""
        self.stop()
        if self._output is not None:
            self._output.close(self._page(), view.text(self.bench))
        for one in (self._widget, self._opener):
            if one is not None:
                one.close()
        self._widget = self._output = self._opener = None

    def show(self, output: BenchOutput | None = None) -> None:
        """Display the bench in `output` or a new one; in a terminal, print how to use it."""
        if not in_notebook():
            sys.stdout.write(f"{view.text(self.bench) if self.rows else PLAIN}\n")
            return
        self._output = output or BenchOutput()
        text = self.code.text
        self._widget = BenchWidget(self._key, self._run_key, first_line(text), text, self._receive)
        self._draw_anew(self._news)
        self._output.show(self._widget.root, self._page(), view.text(self.bench))
        if self.rows and not self._problem:
            self._keep_rows()  # so that after a restart the bench open last is opened again

    _ipython_display_ = show

    def __repr__(self) -> str:
        return f"<gpulab bench of {self.code.source}, {len(self.rows)} rows{', running' * self.running}>"

    @property
    def _observation(self) -> Observation | None:
        if self._baseline is not None:
            return self._baseline.observation
        return observation_of(self.code) or self.bench.observation

    @property
    def _news(self) -> str:
        """What has changed since the rows were measured, mainly by a restart of the kernel."""
        again = self.bench.baseline is not None and observation_of(self.code) is None
        return " ".join(filter(None, (missing_names(self.code), MEASURED_AGAIN if again else "")))

    def _take_code(self, code: Code) -> None:
        """Load the rows of this cell. Its last run in this process becomes the first row and is not repeated."""
        self.code = code
        self.bench, self._problem = file.load(code.text) if self._save else (Bench(code.text), "")
        self._baseline: FullRun | None = None  # made in this process
        self._full_runs: dict[str, tuple[Arm, FullRun]] = {}  # by label of the settings
        self._settings: dict[str, Value] = {}  # state of the toggles
        self._take_newest()

    def _take_newest(self) -> None:
        for arm, full_run in run_before(self.code, Plan(arms=())):
            if self._baseline is None or full_run.run.id != self._baseline.run.id:
                self._take(arm, full_run)

    def go_on(self, row: Row) -> None:
        """This row's edit was applied to the cell: the rows stay, and the new text gets its own baseline."""
        bench, problem = self.bench.at(row.cell), ""
        if self._save:
            problem = file.save(bench.joined(file.load(row.cell)[0]))
        self._take_code(edited(self.code, row.cell))
        if not self._save or self._problem:
            self.bench = bench
        self._problem = problem or self._problem
        self._show(cell=first_line(self.code.text), code=self.code.text)
        self._draw_anew(APPLIED.format(row.title), "good")

    def _take(self, arm: Arm, full_run: FullRun) -> None:
        if arm.settings:
            self._full_runs.pop(arm.label, None)
            self._full_runs[arm.label] = (arm, full_run)
            for old in list(self._full_runs)[:-IN_MEMORY]:
                del self._full_runs[old]
            return
        self._baseline = full_run
        side = Side(arm.label, {}, facts(full_run.run), losses=full_run.losses)
        bench = replace(self.bench, observation=full_run.observation)
        self.bench = bench.put(rows_of.with_run(bench.baseline or Row(new_id()), side))

    # -- requests by clicks -----------------------------------------------------------------------------------

    def _receive(self, what: str, content: Mapping[str, Any]) -> None:
        if what == "stop":
            self.stop()
        else:
            self._main.call(lambda: self._answer(what, content))

    def _answer(self, what: str, content: Mapping[str, Any]) -> None:
        """Handle a request on the main thread. Never raises."""
        try:
            row = self.bench.row(str(content.get("row", "")))
            if what in get_args(Kind):
                self._settings = valid(content.get("settings", self._settings))
                self.begin(what, self._settings, row)  # type: ignore[arg-type]
            elif what == "choose":
                self.choose(content.get("settings", {}))
            elif what == "open":
                ids = [str(x) for x in content.get("rows", [])]
                self._show(marks=sorted((row.id for row in self.rows if row.id in ids), key=ids.index)[:2])
                self._draw_rows()
            elif what == "close":
                self.close()
            elif row is not None and what == "use":
                self.choose(row.settings)
            elif row is not None and what == "applied":
                self.go_on(row)
            elif row is not None:
                self._change(what, row, content)
        except Exception as e:
            self._say(f"gpulab failed to do this ({type(e).__name__}: {e})", "bad")

    def begin(self, kind: Kind, settings: Mapping[str, Value], row: Row | None = None) -> None:
        """Begin a job as a click does: an error is shown in the bench."""
        try:
            self._begin(kind, settings, row, from_click=True)
        except GpulabError as e:
            self._say(str(e), "quiet" if str(e) == BUSY else "bad")

    def choose(self, settings: Mapping[str, object]) -> dict[str, Value]:
        """Set the toggles; names and values that no knob has are ignored."""
        self._settings = valid(settings)
        failures = {row.label: row.failure for row in self.bench.own if row.failure}
        toggles = data(self._toggles, self._observation, self._settings, failures)
        self._show(unexpected=self._unexpected, toggles=toggles)
        return self._settings

    def _change(self, what: str, row: Row, content: Mapping[str, Any]) -> None:
        if what == "remove":
            self.bench = self.bench.remove(row.id)
        elif what == "pin":
            self.bench = self.bench.put(replace(row, pinned=not row.pinned))
        elif what == "rename":
            self.bench = self.bench.put(replace(row, name=str(content.get("name", "")).strip()[:80]))
        self._keep_rows()
        self._draw_rows()

    # -- one job -------------------------------------------------------------------------------------------------

    def _begin(
        self, kind: Kind, settings: Mapping[str, object], row: Row | None = None, *, from_click: bool = False
    ) -> Self:
        if self._job is not None or recorder.active is not None:
            raise UsageError(BUSY)
        restarted = self.bench.baseline is not None and self._baseline is None and not self._full_runs
        if restarted and (missing := missing_names(self.code)):
            raise UsageError(missing)  # the rows stay as they are
        engine: Runner | Climber
        rows: tuple[Row, ...] = ()
        if kind == "climb":
            engine = climbs.climber_of(self.code, Bounds(save=self._save))
            engine.on_attempt = self._take_attempts
        else:
            values = {name: parsed_value(name, value) for name, value in settings.items()}
            engine, rows = self._runner(kind, values, row)
        engine.tell, engine.tick = self._tell, self._tick
        if in_notebook() and self._output is None and not from_click:
            self.show()
        job = self._job = _Job(kind, engine, rows, from_click, self.bench.next_turn)
        self.result, self._prints = None, ""
        self._show(status=job.status)
        self._work(job)
        if job.error is not None and not from_click:
            raise job.error
        return self

    def _runner(self, kind: Kind, settings: Mapping[str, object], row: Row | None) -> tuple[Runner, tuple[Row, ...]]:
        """The runner for these settings, and the rows that it measures, in the order of its arms."""
        plan, rows = plan_of(kind, settings, row, self.bench, self.code.variables)
        plan = replace(plan, block_steps=self.steps, budget_s=self.budget_s if plan.arms else None, save=self._save)
        if plan.arms:
            check_plan(plan)
        self._take_newest()  # the cell may have run while the bench was open
        done = [(Arm(), self._baseline)] if plan.arms and self._baseline is not None else []
        if kind == "decide":
            done += self._full_runs.values()
        return self._engine(self.code, plan, self._tell, tuple(done)), rows

    def _work(self, job: _Job) -> None:
        """Run the job. Never raises."""
        undo = accept_stop(getattr(cell_code.shell(), "kernel", None), self._run_key, job.engine.stop)
        prints = collecting(job.prints) if in_notebook() or job.from_click else nullcontext()
        try:
            with interruptible(), prints:
                job.record = job.engine.run()
        except BaseException as e:
            job.fault = e
        finally:
            undo()
            self._end(job)

    def _tell(self, progress: Progress) -> None:
        self._tick(progress)
        job = self._job
        if job is None or not isinstance(job.engine, Runner) or not progress.in_blocks or self._widget is None:
            return
        for full_run in job.engine.full_runs:
            if not full_run.run.settings.knobs and self.bench.baseline is None and len(full_run.run.steps):
                self._take(Arm(), full_run)
        bench = self.bench.so_far(job.rows, job.engine.blocks, job.turn)
        job.axis = view.axis_so_far(view.ordered(bench), job.axis)
        self._show(table=view.tables(bench, self._marks, alive=True, axis=job.axis))

    def _tick(self, progress: Progress) -> None:
        """Show progress; also called from another thread."""
        job = self._job
        if job is not None:
            job.status = Status.of(progress, job.status, stopping=job.status.stopping)
            self._show(status=job.status)

    def _end(self, job: _Job) -> None:
        """Store and show the result. A failing view loses nothing."""
        try:
            message, level = self._understand(job)
        except Exception as e:
            message, level = f"gpulab failed to show this ({type(e).__name__}: {e})", "bad"
        finally:
            self._job = None
        self._keep_rows()
        self._prints += job.prints.html
        self.choose(self._settings)
        self._draw_rows()
        self._show(status=Status(message=message, level=level))
        self._main.later(0.0, self._predict)

    def _understand(self, job: _Job) -> tuple[str, Level]:
        """Store the result; returns the sentence to show and its level."""
        remember_full_runs(job.engine.full_runs)
        for full_run in job.engine.full_runs:
            if full_run.error is None:
                knobs = full_run.run.settings.knobs
                self._take(arm_of(knobs, self.code.variables), full_run)
        message = ""
        if isinstance(job.record, Experiment):
            message = self._take_experiment(job, job.record)
        elif isinstance(job.record, Climb):
            self._take_attempts(job.record)
            if job.record.whole is not None:
                self.bench = self.bench.with_climb(job.record)
                self.result = remember_experiment(job.record.whole)
            message = Climbed(job.record).headline.sentence
        if job.error is not None:
            message, self._prints = error_words(job.error, missing_names(self.code))
            return message, "bad"
        if not job.from_click and not in_notebook():
            sys.stdout.write(f"{message}\n")
        return message, "good"

    def _take_experiment(self, job: _Job, experiment: Experiment) -> str:
        if self.bench.baseline is None or not experiment.sides:
            return "Stopped before the cell ran."
        self.bench = self.bench.with_comparisons(experiment.sides[0], job.rows, experiment.comparisons, job.turn)
        if not experiment.comparisons:
            return "Baseline measured: it is the first row. Change a toggle, then press Run."
        self.result = remember_experiment(experiment)
        total = rows_of.add_up(experiment) if job.kind == "each" else None
        return view.sum_words(total) if total is not None else rows_words(self.bench, job.rows, experiment.stopped)

    def _take_attempts(self, record: Climb) -> None:
        """Each attempt becomes a row: its speed is multiplied with the speed of the settings kept before."""
        if record.baseline is not None and self.bench.baseline is None:
            self.bench = self.bench.put(rows_of.with_run(Row(new_id()), record.baseline))
        for rung in record.rungs[-1:]:  # earlier attempts were added when they ended
            self.bench = self.bench.with_attempt(rung, new_id(), origin(rung))
        if self._widget is not None:
            self._draw_rows()

    def _keep_rows(self) -> None:
        for row in self.rows:
            remember_speed(row.run_id, row.speed)
        if self._save and (problem := file.save(self.bench)):
            self._say(problem, "bad")

    # -- display -------------------------------------------------------------------------------------------

    def _show(self, *, status: Status | None = None, **parts: object) -> None:
        if self._widget is not None:
            self._widget.show(status=status, **parts)

    def _say(self, message: str, level: Level = "quiet") -> None:
        status = Status() if (job := self._job) is None else job.status
        self._show(status=replace(status, message=message, level=level))

    def _predict(self) -> None:
        """Compute the expected gain of each toggle from the trace of the first row's run."""
        baseline = self.bench.baseline
        figures = _figures_of(baseline) if baseline is not None else None
        self._toggles, self._unexpected = toggles_of(_KNOBS, self._observation, figures)
        self.choose(self._settings)

    def _draw_anew(self, message: str, level: Level = "quiet") -> None:
        """Redraw everything, then update the toggles' expectations."""
        self._toggles, self._unexpected = toggles_of(_KNOBS, self._observation, None)
        self.choose(self._settings)
        self._draw_rows()
        self._say(self._problem or message, "bad" if self._problem else level)
        self._main.later(0.0, self._predict)

    def _draw_rows(self) -> None:
        """Draw the table, the open rows, the edit, and the HTML that is saved."""
        marks = self._marks
        below, charts = detail(self.bench, marks, _figures_of)
        table, edit = view.tables(self.bench, marks, alive=True), edit_offer(self.bench, self.row_to_keep, self.code)
        self._show(table=table, charts=charts, detail=below, prints=self._prints, edit=edit)
        if self._output is not None:
            self._output.save(self._key, page(self.bench, self.code, below), view.text(self.bench))

    def _page(self) -> str:
        """The HTML that a saved notebook shows."""
        return page(self.bench, self.code, detail(self.bench, self._marks, _figures_of)[0])

    @property
    def _marks(self) -> list[str]:
        """The ids of the rows that are open."""
        return self._widget.marks if self._widget is not None else []

    @property
    def row_to_keep(self) -> Row | None:
        """The row opened last, else the best row; None if it has no edit, or the cell already has the edit."""
        rows = [row for row in map(self.bench.row, self._marks) if row is not None and row.settings]
        row = rows[-1] if rows else self.bench.best
        return None if row is None or not row.edit or view.is_in(self.bench, row) else row


_KNOBS = tuple(knob for knob in KNOBS.values() if not knob.of_ranks)


@lru_cache(maxsize=IN_MEMORY)
def _facts_of(run_id: str) -> Facts:
    """The figures of a stored run. Raises StoreError if it is not stored any more."""
    own = next((run for run in runs.own if run.id == run_id), None)
    return facts(own if own is not None else runs.store.load(run_id))


def _figures_of(row: Row) -> Facts | None:
    """The figures of the row's full run; None if it is not stored any more."""
    with suppress(GpulabError):
        return _facts_of(row.run_id) if row.run_id else None
    return None
