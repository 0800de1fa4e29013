"""Runs one cell again and again with knobs turned, from the panel or by code, without an edit of the cell."""

from __future__ import annotations

import sys
import traceback
import uuid
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from html import escape
from typing import TYPE_CHECKING, Self

from msgspec import Struct, field

from gpulab.api.experiment import experiments, remember_trials
from gpulab.api.reading import report
from gpulab.capture import recorder
from gpulab.errors import GpulabError, UsageError
from gpulab.knobs.catalogue import KNOBS, parsed_value
from gpulab.knobs.knob import Value
from gpulab.knobs.observe.observation import Observation
from gpulab.knobs.variables import Plain
from gpulab.panel.output import KeptPrints, MainThread, PanelOutput, interruptible, prints_kept
from gpulab.panel.panel import PLAIN, SEEN, Kind, Level, Panel
from gpulab.tuning import cell_code
from gpulab.tuning.plan import Arm, Code, Listener, Plan, Progress
from gpulab.tuning.record import Experiment, Side
from gpulab.tuning.runner import Runner
from gpulab.tuning.single_run import observation_of
from gpulab.user_code import hide_gpulabs_frames
from gpulab.views.comparison.comparison import Compared
from gpulab.views.report.report import Report
from gpulab.views.running.display import in_notebook
from gpulab.views.running.widgets import accept_stop

if TYPE_CHECKING:
    from gpulab.views.running.widgets import Offer

Result = Report | Compared

BUSY = "A run goes on already: wait for its end, or press Stop."
NOTHING_TURNED = "Turn a knob first: there is nothing to compare with the cell as written."
SETTLING_S = 0.5  # after a run: clicks made meanwhile arrive now, and start nothing
INTERRUPTED = "Interrupted. What the cell trains is put back."

_WHAT: dict[Kind, str] = {"look": "looking at the cell: as written", "run": "run", "compare": "comparing"}


class _Job(Struct):
    """One thing that the lab does. `fault`: of ours, or bad input; what the user's code raised is `engine.error`."""

    kind: Kind
    engine: Runner
    from_panel: bool
    prints: KeptPrints = field(default_factory=KeptPrints)
    experiment: Experiment | None = None
    fault: BaseException | None = None
    result: Result | None = None

    @property
    def error(self) -> BaseException | None:
        return self.fault or self.engine.error


class PanelSession:
    """Runs one cell again and again with knobs turned; the user's state is put back each time.

    It runs on the main thread, as %%gpuprofile does: the bar moves and Stop is heard meanwhile, all else waits.
    """

    def __init__(
        self,
        code: Code,
        *,
        steps: int | None = None,
        budget_s: float | None = None,
        save: bool = True,
        engine: Callable[[Code, Plan, Listener], Runner] = Runner,
    ) -> None:
        self.code = code
        self.steps = steps  # counted steps of a run or block; None: gpulab chooses
        self.budget_s = budget_s
        self.observation: Observation | None = observation_of(code)
        self._save = save
        self._engine = engine
        self._main = MainThread()
        self._job: _Job | None = None  # the one that runs
        self._last: _Job | None = None
        self._panel: Panel | None = None
        self._output: PanelOutput | None = None
        self._opener: Offer | None = None
        self._settling = False
        self._run_key = uuid.uuid4().hex

    # -- what a user calls ---------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self._job is not None

    @property
    def panel(self) -> Panel:
        """The widgets. Needs ipywidgets, which come with gpulab."""
        if self._panel is None:
            key = self._run_key if in_notebook() else ""
            self._panel = Panel(
                tuple(k for k in KNOBS.values() if not k.of_ranks), self.code.text, self, key, self._main.call
            )
            if self.steps is not None:
                self._panel.steps.value = self.steps
            if self.observation is not None:
                self._panel.show_observation(self.observation)
                self._panel.say(SEEN)
        return self._panel

    def look(self) -> Self:
        """Run the cell shortly as written, and note what it has. Raises UsageError while a run goes on."""
        return self._begin("look", {})

    def run(self, **settings: object) -> Self:
        """One run of the cell with these settings, after one as written. Raises UsageError, also while one goes on."""
        return self._begin("run", settings)

    def compare(self, **settings: object) -> Self:
        """The cell as written against these settings, in interleaved blocks. Raises UsageError as `run` does."""
        return self._begin("compare", settings)

    def stop(self) -> None:
        """End what runs at its next step boundary, with what there is."""
        job = self._job
        if job is not None:
            job.engine.stop()
            self._main.call(self._say_that_it_stops)

    def _say_that_it_stops(self) -> None:
        if self.running and self._panel is not None:
            self._panel.say("Stopping at the end of this step …")

    @property
    def result(self) -> Result | None:
        """What the last run gave; None where it gave nothing to compare or to report."""
        return self._last.result if self._last is not None else None

    def close(self) -> None:
        """End what runs, put the panel away, leave no widget."""
        self.stop()
        if self._panel is not None:
            if self._output is not None:
                self._output.close(self._panel.text())
            self._panel.close()
        if self._opener is not None:
            self._opener.close()
        self._panel = self._output = self._opener = None

    def keep(self, opener: Offer) -> None:
        """Close the offer that opened the panel with the panel, not before.

        JupyterLab 4.6 sends what widgets say to the subshell in whose messages they were made; ipykernel 7 ends that
        of a closed widget, and those that its click has made are heard no more.
        """
        self._opener = opener

    def _ipython_display_(self) -> None:
        self.show()

    def show(self, output: PanelOutput | None = None) -> None:
        """Display the panel, in an output that is already there or a new one; in a terminal say what to write."""
        if not in_notebook():
            sys.stdout.write(f"{PLAIN}\n")
            return
        self._output = output or PanelOutput()
        self._output.show(self.panel.root, self.panel.text())

    def __repr__(self) -> str:
        return f"<gpulab lab of {self.code.source}{', running' if self.running else ''}>"

    # -- one job -------------------------------------------------------------------------------------------------

    def begin(self, kind: Kind, settings: Mapping[str, Value]) -> None:
        """A button was pressed: what speaks against it is said in the panel."""
        if self._settling:
            return
        try:
            self._begin(kind, settings, from_panel=True)
        except GpulabError as e:
            self.panel.say(str(e), "quiet" if str(e) == BUSY else "bad")

    def _begin(self, kind: Kind, settings: Mapping[str, object], *, from_panel: bool = False) -> Self:
        if self._job is not None or recorder.active is not None:
            raise UsageError(BUSY)
        if kind == "compare" and not settings:
            raise UsageError(NOTHING_TURNED)
        plan = self._plan(kind, {name: parsed_value(name, value) for name, value in settings.items()})
        if in_notebook() and self._output is None and not from_panel:
            self.show()
        job = self._job = _Job(kind, self._engine(self.code, plan, self._tell), from_panel)
        self._last = None
        if self._panel is not None:
            self._panel.begin(_WHAT[kind])
        self._work(job)
        if job.error is not None and not from_panel:
            raise job.error
        return self

    def _plan(self, kind: Kind, settings: Mapping[str, Plain]) -> Plan:
        steps = self._panel.block_steps if self._panel is not None else self.steps
        return Plan(
            arms=(Arm(settings),) if settings else (),
            block_steps=steps,
            budget_s=self.budget_s if kind == "compare" else None,
            interleaved=kind == "compare",
            save=self._save and kind != "look",
        )

    def _work(self, job: _Job) -> None:
        """Never raises."""
        undo = accept_stop(getattr(cell_code.shell(), "kernel", None), self._run_key, job.engine.stop)
        keeping = prints_kept(job.prints) if in_notebook() or job.from_panel else nullcontext()
        try:
            with interruptible(), keeping:
                job.experiment = job.engine.run()
        except BaseException as e:
            job.fault = e
        finally:
            undo()
            self._end(job)

    def _tell(self, progress: Progress) -> None:
        if self._panel is not None:
            self._panel.tell(progress)

    # -- its end -------------------------------------------------------------------------------------------------

    def _end(self, job: _Job) -> None:
        """Remember and show what came of it. A view that fails loses nothing."""
        try:
            message, level = self._understand(job)
        except Exception as e:
            message, level = f"gpulab failed to show this ({type(e).__name__}: {e})", "bad"
        finally:
            self._job, self._last = None, job
        if self._panel is not None:
            self._panel.end(message, level)
            self._settling = True
            self._main.later(SETTLING_S, self._settled)

    def _settled(self) -> None:
        self._settling = False
        if self._panel is not None:
            self._panel.allow_start()

    def _understand(self, job: _Job) -> tuple[str, Level]:
        """Keep it and show it; the sentence for the panel."""
        if job.kind != "look":
            remember_trials(job.engine.trials)
        if job.engine.trials:
            self._see(job.engine.trials[0].observation)
        if job.error is not None:
            return self._failed(job, job.error)
        assert job.experiment is not None
        if job.kind == "look":
            return "This is what the cell has. Turn a knob, then Run or Compare A/B.", "quiet"
        if job.kind == "compare":
            compared = Compared(job.experiment)
            experiments.append(compared)
            job.result = compared
            self._show(compared, job)
            return compared.headline.sentence, "good"
        side = job.experiment.sides[-1]
        if side.facts is None or side.failure:
            stopped = job.experiment.stopped and not side.failure
            return f"{side.label}: {'stopped before it had run' if stopped else side.failure}", "bad"
        result = job.result = report(side.facts.run)
        self._show(result, job)
        return _run_words(result, side), "good"

    def _see(self, observation: Observation) -> None:
        self.observation = observation
        if self._panel is not None:
            self._panel.show_observation(observation)

    def _failed(self, job: _Job, error: BaseException) -> tuple[str, Level]:
        if isinstance(error, GpulabError):
            return str(error), "bad"
        if isinstance(error, KeyboardInterrupt):
            return INTERRUPTED, "bad"
        hide_gpulabs_frames(error)
        if self._output is not None:
            self._output.show_text("".join(traceback.format_exception(error)))
        return f"The cell raised {''.join(traceback.format_exception_only(error)).strip()}", "bad"

    def _show(self, result: Result, job: _Job) -> None:
        if self._output is not None:
            self._output.show_result(result.bundle(), _printed(job.prints))
        elif not job.from_panel:
            sys.stdout.write(result.text() + "\n")


def _run_words(result: Report, side: Side) -> str:
    checks = [f"{c.name}={c.value} {c.state}: {c.evidence}" for c in side.checks]
    return "\n".join([result.headline.sentence, *checks])


def _printed(prints: KeptPrints) -> str:
    """What the cell printed as written, folded."""
    if not prints.text.strip():
        return ""
    text = escape(("…" if prints.cut else "") + prints.text.rstrip())
    style = "font-size:12px;white-space:pre-wrap;margin:4px 0"
    return (
        '<details style="margin:8px 0;font-size:13px"><summary>What the cell printed</summary>'
        f'<pre style="{style}">{text}</pre></details>'
    )
