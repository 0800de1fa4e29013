"""Runs one cell again and again with other settings, from the bench or by code; each setting becomes a row.

The cell is never edited, and what it trains is put back after each run.
"""

from __future__ import annotations

import builtins
import dataclasses
import sys
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from html import escape
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from msgspec import Struct, field
from msgspec.structs import replace

from gpulab.analysis.facts import Facts, facts
from gpulab.api import climb as climbs
from gpulab.api.experiment import edited, remember_experiment, remember_full_runs, remember_speed, run_before
from gpulab.api.reading import report
from gpulab.api.runs_command import runs
from gpulab.bench import file
from gpulab.bench.output import BenchOutput, BenchWidget, KeptPrints, MainThread, interruptible, prints_kept
from gpulab.bench.toggles import Toggle, data, toggles_of
from gpulab.capture import recorder
from gpulab.errors import GpulabError, UsageError
from gpulab.knobs.catalogue import KNOBS, parsed_value
from gpulab.knobs.knob import Value
from gpulab.knobs.observation import Observation
from gpulab.run import Run
from gpulab.store.folders import new_id
from gpulab.tuning import bench as rows_of
from gpulab.tuning import cell_code
from gpulab.tuning.bench import Bench, Row
from gpulab.tuning.climb import Climber
from gpulab.tuning.climb_record import Bounds, Climb
from gpulab.tuning.code import Code
from gpulab.tuning.execute import FullRun
from gpulab.tuning.plan import Arm, Listener, Plan, Progress, arms_in, check_plan
from gpulab.tuning.record import BASELINE, Experiment, Side
from gpulab.tuning.resolve import observation_of
from gpulab.tuning.runner import Runner
from gpulab.user_code import hide_gpulabs_frames
from gpulab.views import bench as view
from gpulab.views import side_by_side
from gpulab.views.bars import FactorAxis
from gpulab.views.climb import Climbed
from gpulab.views.climb_sections import origin
from gpulab.views.comparison import Compared
from gpulab.views.live_view import in_notebook
from gpulab.views.progress import Level, Status
from gpulab.views.widgets import accept_stop

if TYPE_CHECKING:
    from gpulab.views.widgets import Offer

Kind = Literal["run", "each", "climb", "decide", "again"]
BUSY = "A run is already in progress: wait, or press Stop."
TWO_SETTINGS = "Change two or more toggles: each is measured alone, then all together."
PLAIN = "gpulab's bench needs a notebook; here: gpulab.lab().run(workers=2)"
INTERRUPTED = "Interrupted. The training state was restored."
MISSING = "The notebook had no {}: run the cells above first."
MEASURED_AGAIN = "The next run measures the baseline again: the objects that the cell reads are new."
APPLIED = "The cell now has {}. Run the baseline here, or run the cell: its new text is measured anew."
IN_MEMORY = 6  # runs with their traces; others are read from disk when they are opened
MORE_PAIRS = (5, 10, 30)  # to decide a row: at least, where it cannot be told how many would do, and at most


class _Job(Struct):
    """One thing that the bench does. `fault`: of ours, or bad input; what the user's code raised is `engine.error`."""

    kind: Kind
    engine: Runner | Climber
    rows: tuple[Row, ...]  # as they were before, in the order of the plan's arms
    from_click: bool
    turn: int  # of its first blocks, among all of the bench
    prints: KeptPrints = field(default_factory=KeptPrints)
    record: Experiment | Climb | None = None
    fault: BaseException | None = None
    status: Status = Status(True, "starting")
    axis: FactorAxis | None = None  # of the rows while they are measured

    @property
    def error(self) -> BaseException | None:
        return self.fault or self.engine.error


class BenchSession:
    """The bench of one cell. Its runs go on on the main thread, as those of %%gpuprofile do.

    `bench` holds the rows; they are kept on disk unless `save` is false, and a later bench of the same cell has them.
    """

    def __init__(
        self,
        code: Code,
        *,
        steps: int | None = None,
        budget_s: float | None = None,
        save: bool = True,
        engine: Callable[[Code, Plan, Listener, Sequence[tuple[Arm, FullRun]]], Runner] = Runner,
    ) -> None:
        self.steps = steps  # counted steps of a run or block; None: gpulab chooses
        self.budget_s = budget_s
        self._save, self._engine = save, engine
        self._main = MainThread()
        self._figures: dict[str, Facts] = {}  # by the id of the run
        self._toggles: tuple[Toggle, ...] = ()
        self._unexpected = ""  # why nothing is expected of any toggle
        self._job: _Job | None = None  # the one that runs
        self._last: Compared | None = None
        self._prints = ""
        self._key, self._run_key = uuid.uuid4().hex, uuid.uuid4().hex
        self._widget: BenchWidget | None = None
        self._output: BenchOutput | None = None
        self._opener: Offer | None = None
        self._take_code(code)
        self._remember_speeds()

    # -- what a user calls ---------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self._job is not None

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.bench.rows

    @property
    def result(self) -> Compared | None:
        """The last comparison; None before there was one."""
        return self._last

    def run(self, **settings: object) -> Self:
        """Measure these settings against the baseline: one more row. Without any, the baseline.

        Raises UsageError, also while a run goes on, and what the baseline raises.
        """
        return self._begin("run", _parsed(settings))

    def each(self, **settings: object) -> Self:
        """Measure each setting by itself and all together, in turn: whether their gains add up. Raises as `run`."""
        return self._begin("each", _parsed(settings))

    def climb(self) -> Self:
        """Try what is expected to help most, setting by setting; each try is a row. Raises as `run`."""
        return self._begin("climb", {})

    def decide(self, row: Row) -> Self:
        """Measure more pairs of a row. Raises as `run`."""
        return self._begin("decide", {}, row)

    def stop(self) -> None:
        """End what runs at its next step boundary, with what there is."""
        if (job := self._job) is not None:
            job.status = replace(job.status, stopping=True)
            self._draw_status(job.status)
            job.engine.stop()

    def close(self) -> None:
        """End what runs and put the bench away; its table stays as HTML."""
        self.stop()
        if self._output is not None:
            self._output.close(self._page(), view.text(self.bench))
        if self._widget is not None:
            self._widget.close()
        if self._opener is not None:
            self._opener.close()
        self._widget = self._output = self._opener = None

    def keep(self, opener: Offer) -> None:
        """Close the offer that opened the bench with the bench, not before.

        JupyterLab 4.6 sends what widgets say to the subshell in whose messages they were made; ipykernel 7 ends that
        of a closed widget, and those that its click has made are heard no more.
        """
        self._opener = opener

    def show(self, output: BenchOutput | None = None) -> None:
        """Display it, in an output that is already there or a new one; in a terminal say what to write."""
        if not in_notebook():
            sys.stdout.write(f"{view.text(self.bench) if self.rows else PLAIN}\n")
            return
        self._output = output or BenchOutput()
        cell = first_line(self.code.text)
        self._widget = BenchWidget(self._key, self._run_key, cell, self.code.text, self._hear)
        self._toggles, self._unexpected = toggles_of(_KNOBS, self._observation, None)
        self._draw_all()
        self._say(self._problem or self._news, "bad" if self._problem else "quiet")
        self._output.show(self._widget.root, self._page(), view.text(self.bench))
        if self.rows and not self._problem:
            self._keep_rows()  # after a restart the bench that was open last is opened again
        self._main.later(0.0, self._predict)

    def _ipython_display_(self) -> None:
        self.show()

    def __repr__(self) -> str:
        return f"<gpulab bench of {self.code.source}, {len(self.rows)} rows{', running' if self.running else ''}>"

    # -- what it knows of the cell -------------------------------------------------------------------------------

    @property
    def _observation(self) -> Observation | None:
        _, full_run = self._done.get(BASELINE, (None, None))
        return full_run.observation if full_run is not None else observation_of(self.code) or self.bench.observation

    @property
    def _news(self) -> str:
        """What is other than when the rows were measured: after a restart of the kernel, above all."""
        missing = self._missing_names
        said = [MISSING.format(", ".join(missing))] if missing else []
        if self.bench.baseline is not None and observation_of(self.code) is None:
            said.append(MEASURED_AGAIN)
        return " ".join(said)

    def _take_code(self, code: Code) -> None:
        """The rows of this cell. Its last run in this process is the first row: it is not made again."""
        self.code = code
        self.bench, self._problem = file.load(code.text) if self._save else (Bench(code.text), "")
        self._done: dict[str, tuple[Arm, FullRun]] = {}  # of this process, by label
        self._settings: dict[str, Value] = {}  # of the toggles
        self._take_newest()

    def _take_newest(self) -> None:
        _, before = self._done.get(BASELINE, (None, None))
        for arm, full_run in run_before(self.code, Plan(arms=())):
            if before is None or full_run.run.id != before.run.id:
                self._take(arm, full_run)

    def go_on(self, row: Row) -> None:
        """The cell has this row's edit now: the rows stay, and the new text has a baseline of its own."""
        bench, self._problem = self.bench.at(row.cell), ""
        if self._save:
            self._problem = file.save(bench.joined(file.load(row.cell)[0]))
        self._take_code(edited(self.code, row.cell))
        if not self._save or self._problem:
            self.bench = bench
        self._toggles, self._unexpected = toggles_of(_KNOBS, self._observation, None)
        self._show(cell=first_line(self.code.text), code=self.code.text)
        self._draw_all()
        self._say(self._problem or APPLIED.format(row.title), "bad" if self._problem else "good")
        self._main.later(0.0, self._predict)

    def _take(self, arm: Arm, full_run: FullRun) -> None:
        self._done[arm.label] = (arm, full_run)
        for old in [label for label in self._done if label != BASELINE][:-IN_MEMORY]:
            del self._done[old]
        if not arm.settings:
            side = Side(arm.label, {}, self._facts(full_run.run), losses=full_run.losses)
            bench = replace(self.bench, observation=full_run.observation)
            self.bench = bench.put(rows_of.with_run(bench.baseline or Row(new_id()), side))

    def _facts(self, run: Run) -> Facts:
        figures = self._figures.pop(run.id, None) or facts(run)
        self._figures[run.id] = figures
        for old in list(self._figures)[:-IN_MEMORY]:
            del self._figures[old]
        return figures

    def _figures_of(self, row: Row) -> Facts | None:
        """Of the row's run in full; None where it is not stored any more."""
        if row.run_id in self._figures:
            return self._facts(self._figures[row.run_id].run)
        with suppress(GpulabError):
            return self._facts(runs.store.load(row.run_id)) if row.run_id else None
        return None

    # -- what a click asks for -----------------------------------------------------------------------------------

    def _hear(self, what: str, content: Mapping[str, Any]) -> None:
        if what == "stop":
            self.stop()
        else:
            self._main.call(lambda: self._answer(what, content))

    def _answer(self, what: str, content: Mapping[str, Any]) -> None:
        """On the main thread. Never raises."""
        try:
            row = self.bench.row(str(content.get("row", "")))
            if what in get_args(Kind):
                self._settings = valid(content.get("settings", self._settings))
                self.begin(what, self._settings, row)  # type: ignore[arg-type]
            elif what == "choose":
                self.choose(content.get("settings", {}))
            elif what == "open":
                self._open([str(x) for x in content.get("rows", [])])
            elif what == "close":
                self.close()
            elif row is not None:
                self._change(what, row, content)
        except Exception as e:
            self._say(f"gpulab failed to do this ({type(e).__name__}: {e})", "bad")

    def begin(self, kind: Kind, settings: Mapping[str, Value], row: Row | None = None) -> None:
        """As a click does: what speaks against it is said in the bench."""
        try:
            self._begin(kind, settings, row, from_click=True)
        except GpulabError as e:
            self._say(str(e), "quiet" if str(e) == BUSY else "bad")

    def choose(self, settings: Mapping[str, object]) -> dict[str, Value]:
        """Set the toggles to these; those that are no setting of a knob are left out."""
        self._settings = valid(settings)
        failures = {row.label: row.failure for row in self.bench.own if row.failure}
        toggles = data(self._toggles, self._observation, self._settings, failures)
        self._show(unexpected=self._unexpected, toggles=toggles)
        return self._settings

    def _change(self, what: str, row: Row, content: Mapping[str, Any]) -> None:
        if what in ("use", "applied"):
            self.choose(row.settings) if what == "use" else self.go_on(row)
            return
        if what == "remove":
            self.bench = self.bench.remove(row.id)
        elif what == "pin":
            self.bench = self.bench.put(replace(row, pinned=not row.pinned))
        elif what == "rename":
            self.bench = self.bench.put(replace(row, name=str(content.get("name", "")).strip()[:80]))
        self._keep_rows()
        self._draw_rows()

    def _open(self, ids: Sequence[str]) -> None:
        """One row's report, or two side by side."""
        marks = [row.id for row in self.rows if row.id in ids]
        marks.sort(key=list(ids).index)
        self._show(marks=marks[:2])
        self._draw_rows()

    # -- one job -------------------------------------------------------------------------------------------------

    def _begin(
        self, kind: Kind, settings: Mapping[str, object], row: Row | None = None, *, from_click: bool = False
    ) -> Self:
        if self._job is not None or recorder.active is not None:
            raise UsageError(BUSY)
        if self.bench.baseline is not None and not self._done and (missing := self._missing_names):
            raise UsageError(MISSING.format(", ".join(missing)))  # after a restart: the rows stay as they are
        job = self._climb_job(from_click) if kind == "climb" else self._job_of(kind, settings, row, from_click)
        if in_notebook() and self._output is None and not from_click:
            self.show()
        self._job, self._last, self._prints = job, None, ""
        self._draw_status(job.status)
        self._work(job)
        if job.error is not None and not from_click:
            raise job.error
        return self

    def _job_of(self, kind: Kind, settings: Mapping[str, object], row: Row | None, from_click: bool) -> _Job:
        arms = self._arms(kind, settings, row)
        rows = tuple(self._row_for(arm, kind) for arm in arms)
        self._take_newest()  # the cell may have run while the bench was open
        done = dict(self._done)
        if kind != "decide":
            done = {label: full_run for label, full_run in done.items() if label == BASELINE and arms}
        plan = Plan(
            arms=arms,
            block_steps=self.steps,
            pairs=_more_pairs(row) if kind == "decide" and row is not None else None,
            budget_s=self.budget_s if arms else None,
            interleaved=bool(arms),
            early=bool(arms),
            save=self._save,
        )
        if arms:
            check_plan(plan)
        engine = self._engine(self.code, plan, self._tell, tuple(done.values()))
        engine.tick = self._tick
        return _Job(kind, engine, rows, from_click, self.bench.next_turn)

    def _arms(self, kind: Kind, settings: Mapping[str, object], row: Row | None) -> tuple[Arm, ...]:
        if row is not None and kind in ("decide", "again"):
            return (self._arm_of(row.settings),) if row.settings else ()
        values: dict[str, Any] = dict(settings)
        together = Arm(values)
        if kind == "each":
            if len(values) < 2:
                raise UsageError(TWO_SETTINGS)
            return (*(Arm({name: value}) for name, value in values.items()), together)
        return (together,) if values else ()

    def _arm_of(self, settings: Mapping[str, str]) -> Arm:
        (arm,) = arms_in(self.code.variables, [f"{name}={value}" for name, value in settings.items()])
        return arm

    def _row_for(self, arm: Arm, kind: Kind) -> Row:
        row = self.bench.of(arm.texts)
        if row is None:
            return Row(new_id(), arm.texts)
        return replace(row, blocks=(), speed=None, failure="") if kind == "again" or row.failure else row

    def _climb_job(self, from_click: bool) -> _Job:
        climber = climbs.climber_of(self.code, Bounds(save=self._save))
        climber.tell, climber.tick, climber.on_attempt = self._tell, self._tick, self._take_attempts
        return _Job("climb", climber, (), from_click, self.bench.next_turn)

    def _work(self, job: _Job) -> None:
        """Never raises."""
        undo = accept_stop(getattr(cell_code.shell(), "kernel", None), self._run_key, job.engine.stop)
        keeping = prints_kept(job.prints) if in_notebook() or job.from_click else nullcontext()
        try:
            with interruptible(), keeping:
                job.record = job.engine.run()
        except BaseException as e:
            job.fault = e
        finally:
            undo()
            self._end(job)

    # -- while it runs -------------------------------------------------------------------------------------------

    def _tell(self, progress: Progress) -> None:
        self._tick(progress)
        job = self._job
        if job is not None and isinstance(job.engine, Runner) and progress.in_blocks and self._widget is not None:
            bench = self._so_far(job)
            job.axis = view.axis_so_far(view.ordered(bench), job.axis)
            self._draw_rows(bench, job.axis)

    def _tick(self, progress: Progress) -> None:
        """Also from another thread."""
        job = self._job
        if job is not None:
            job.status = Status.of(progress, job.status, stopping=job.status.stopping)
            self._draw_status(job.status)

    def _so_far(self, job: _Job) -> Bench:
        """The bench with what the blocks of this job say until now."""
        assert isinstance(job.engine, Runner)
        for full_run in job.engine.full_runs:
            if not full_run.run.settings.knobs and self.bench.baseline is None and len(full_run.run.steps):
                self._take(Arm(), full_run)
        return self.bench.so_far(job.rows, job.engine.blocks, job.turn)

    # -- its end -------------------------------------------------------------------------------------------------

    def _end(self, job: _Job) -> None:
        """Remember and show what came of it. A view that fails loses nothing."""
        try:
            message, level = self._understand(job)
        except Exception as e:
            message, level = f"gpulab failed to show this ({type(e).__name__}: {e})", "bad"
        finally:
            self._job = None
        self._keep_rows()
        self._prints = _printed(job.prints)
        self._draw_all()
        self._draw_status(Status(message=message, level=level))
        self._main.later(0.0, self._predict)

    def _understand(self, job: _Job) -> tuple[str, Level]:
        """Keep what there is; the sentence that is said of it."""
        remember_full_runs(job.engine.full_runs)
        for full_run in job.engine.full_runs:
            if full_run.error is None:
                arm = self._arm_of(full_run.run.settings.knobs) if full_run.run.settings.knobs else Arm()
                self._take(arm, full_run)
        said = ""
        if isinstance(job.record, Experiment):
            said = self._take_experiment(job, job.record)
        elif isinstance(job.record, Climb):
            said = self._take_climb(job.record)
        if job.error is not None:
            return self._failed(job.error)
        if not job.from_click and not in_notebook():
            sys.stdout.write(f"{said}\n")
        return said, "good"

    def _take_experiment(self, job: _Job, experiment: Experiment) -> str:
        if self.bench.baseline is None or not experiment.sides:
            return "Stopped before the cell ran."
        self.bench = self.bench.with_comparisons(experiment.sides[0], job.rows, experiment.comparisons, job.turn)
        if not experiment.comparisons:
            return "Baseline measured: it is the first row. Change a toggle, then press Run."
        self._last = remember_experiment(experiment)
        ids, (first, *others) = {row.id for row in job.rows}, view.ordered(self.bench)
        if job.kind == "each" and (total := rows_of.add_up(experiment)) is not None:
            return view.sum_words(total)
        judged = [row for row in others if row.id in ids and (row.failure or (row.speed and row.speed.ratio))]
        sentences = [side_by_side.sentence(first, row, row.speed) for row in judged]
        return " ".join(["Stopped."] * experiment.stopped + sentences) or "Nothing was compared."

    def _take_attempts(self, record: Climb) -> None:
        """Each rung is a row: what was kept before it and it, against the baseline by way of what was kept."""
        if record.written is not None and self.bench.baseline is None:
            self.bench = self.bench.put(rows_of.with_run(Row(new_id()), record.written))
        for rung in record.rungs[-1:]:  # the others were taken when they ended
            self.bench = self.bench.with_attempt(rung, new_id(), origin(rung))
        if self._widget is not None:
            self._draw_rows()

    def _take_climb(self, record: Climb) -> str:
        self._take_attempts(record)
        if record.whole is not None:
            self.bench = self.bench.with_climb(record)
            self._last = remember_experiment(record.whole)
        return Climbed(record).headline.sentence

    def _failed(self, error: BaseException) -> tuple[str, Level]:
        if isinstance(error, GpulabError):
            return str(error), "bad"
        if isinstance(error, KeyboardInterrupt):
            return INTERRUPTED, "bad"
        missing = self._missing_names
        if isinstance(error, NameError) and error.name in missing:
            return MISSING.format(", ".join(missing)), "bad"
        hide_gpulabs_frames(error)
        trace = escape("".join(traceback.format_exception(error)))
        self._prints = f'<pre style="font-size:12px;white-space:pre-wrap">{trace}</pre>'
        return f"The cell raised {''.join(traceback.format_exception_only(error)).strip()}", "bad"

    @property
    def _missing_names(self) -> list[str]:
        """That the cell reads and the notebook has not: after a restart."""
        return sorted(n for n in self.code.variables.read if n not in self.code.namespace and not hasattr(builtins, n))

    def _remember_speeds(self) -> None:
        for row in self.rows:
            remember_speed(row.run_id, row.speed)

    def _keep_rows(self) -> None:
        self._remember_speeds()
        if self._save and (problem := file.save(self.bench)):
            self._say(problem, "bad")

    # -- what it shows -------------------------------------------------------------------------------------------

    def _show(self, *, status: Status | None = None, **parts: object) -> None:
        if self._widget is not None:
            self._widget.show(status=status, **parts)

    def _say(self, message: str, level: Level = "quiet") -> None:
        status = Status() if (job := self._job) is None else job.status
        self._draw_status(replace(status, message=message, level=level))

    def _draw_status(self, status: Status) -> None:
        self._show(status=status)

    def _predict(self) -> None:
        """What each toggle is expected to bring, from the trace of the first row's run."""
        baseline = self.bench.baseline
        figures = self._figures_of(baseline) if baseline is not None else None
        self._toggles, self._unexpected = toggles_of(_KNOBS, self._observation, figures)
        self.choose(self._settings)

    def _draw_all(self) -> None:
        self.choose(self._settings)
        self._draw_rows()

    def _draw_rows(self, bench: Bench | None = None, axis: FactorAxis | None = None) -> None:
        """The table; with the bench at rest also what is open, the edit, and the HTML that is saved."""
        marks = self._widget.marks if self._widget is not None else []
        table = view.tables(bench or self.bench, marks, alive=True, axis=axis)
        if bench is not None:
            self._show(table=table)
            return
        detail, charts = self._detail(marks)
        self._show(table=table, charts=charts, detail=detail, prints=self._prints, edit=self._edit())
        if self._output is not None:
            self._output.save(self._key, self._page(detail), view.text(self.bench))

    def _page(self, detail: str | None = None) -> str:
        """What a saved notebook shows; `detail` where it was made already."""
        marks = self._widget.marks if self._widget is not None else []
        code = f'<div class="gp-benchhead"><b>Bench</b><code>{escape(first_line(self.code.text))}</code></div>'
        return view.static_page(self.bench, code, self._detail(marks)[0] if detail is None else detail)

    def _detail(self, marks: Sequence[str]) -> tuple[str, list[dict[str, object]]]:
        """The report of one row, or two side by side and their charts as data: in a live bench these have a cursor."""
        rows = [row for mark in marks for group in view.groups(self.bench) for row in group if row.id == mark]
        if not rows:
            return "", []
        if len(rows) == 1:
            figures = self._figures_of(rows[0])
            if figures is None:
                return "", []
            whole = dataclasses.replace(report(figures.run), change=None)  # the row says what its settings bring
            return view.full_run_words(rows[0]) + whole.fragment(), []
        a, b = rows
        both = (a, b, self._figures_of(a), self._figures_of(b))
        html = side_by_side.fragment(*both, rows_of.between(a, b), self.bench.edit_between(a, b))
        return html, [chart.data() for chart in side_by_side.charts(*both)]

    @property
    def row_to_keep(self) -> Row | None:
        """The row that was opened last, else the best; None where it has no edit, or the cell has it already."""
        marks = self._widget.marks if self._widget is not None else []
        opened = [row for row in map(self.bench.row, marks) if row is not None and row.settings]
        row = opened[-1] if opened else self.bench.best
        return None if row is None or not row.edit or view.is_in(self.bench, row) else row

    def _edit(self) -> dict[str, object]:
        row = self.row_to_keep
        if row is None:
            return {"text": ""}
        lost = [] if row in self.bench.own else [r.title for r in self.rows if view.is_in(self.bench, r)]
        instead = f" instead of {', '.join(lost)}" if lost else ""  # it is an edit of the text before
        texts = [] if self.code.source == "block" else [self.code.text, *reversed(self.bench.texts), row.cell]
        title, html = f"Keep {row.label}{instead}", view.edit_html(row, self.bench)
        return {"title": title, "html": html, "text": row.edit, "cell": row.cell, "row": row.id, "texts": texts}


_KNOBS = tuple(knob for knob in KNOBS.values() if not knob.of_ranks)


def _parsed(settings: Mapping[str, object]) -> dict[str, Any]:
    return {name: parsed_value(name, value) for name, value in settings.items()}


def valid(settings: object) -> dict[str, Value]:
    """What a front end sent, as values of knobs; what is none is left out."""
    values: dict[str, Value] = {}
    for name, value in settings.items() if isinstance(settings, Mapping) else ():
        if name in KNOBS and isinstance(value, (bool, int, float, str)):
            with suppress(UsageError):
                values[name] = KNOBS[name].parse(value)
    return values


def _more_pairs(row: Row) -> int:
    least, unknown, most = MORE_PAIRS
    needed = row.speed.pairs_to_decide if row.speed is not None else None
    return unknown if needed is None else min(most, max(least, needed - (row.speed.pairs if row.speed else 0)))


def first_line(cell: str) -> str:
    """By which a user knows their cell: its first line that is neither empty nor a comment."""
    lines = [line.strip() for line in cell.splitlines() if line.strip()]
    return next((line for line in lines if not line.startswith("#")), lines[0] if lines else "a block of code")


def _printed(prints: KeptPrints) -> str:
    """What the baseline printed, folded."""
    if not prints.text.strip():
        return ""
    text = escape(("…" if prints.cut else "") + prints.text.rstrip())
    style = "font-size:12px;white-space:pre-wrap;margin:4px 0"
    return (
        '<details style="margin:8px 0;font-size:13px"><summary>What the cell printed</summary>'
        f'<pre style="{style}">{text}</pre></details>'
    )
