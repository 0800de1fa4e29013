"""Measures one execution: starts everything that observes it, ends it, and makes the record."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from time import perf_counter_ns
from typing import Literal

import numpy as np
from msgspec.structs import replace

from gpulab.capture import threads
from gpulab.capture.alerts import UTILIZATION, Alerts, alerts_of
from gpulab.capture.batch_clock import LoadingClock
from gpulab.capture.calls import OUTSIDE, WITHIN, call_samples, loading_samples, own_batches, stack_samples
from gpulab.capture.gpu import PeakMemory, other_device, working_gpus
from gpulab.capture.job import RunOfJob, StartedProcesses, arrivals, current_job
from gpulab.capture.loader_facts import ignoring_worker_deaths
from gpulab.capture.memory_reader import MemoryReader
from gpulab.capture.pilot import BEFORE_STEPS, Pilot
from gpulab.capture.places import Naming, lines_above
from gpulab.capture.profiler import Window, stays
from gpulab.capture.sampler import CoreReadings, Sampler
from gpulab.capture.stack_sampler import SamplingProcess, StackSampler
from gpulab.capture.threads import WORDS, Deadline, StopRun, Terminations
from gpulab.capture.torch_hooks import install_pauses
from gpulab.capture.training_facts import TrainingFactsReader
from gpulab.devices.machine import detect_device, environment
from gpulab.errors import UsageError
from gpulab.formatting import capitalized
from gpulab.live_feed import Delta, Monitor, SeriesInfo, SoFar, Status
from gpulab.memory_record import MemoryAccount
from gpulab.patching.attributes import warnings_at_users_line
from gpulab.run import (
    Choice,
    Environment,
    Job,
    Loader,
    Missing,
    Observer,
    Outcome,
    Run,
    Samples,
    Series,
    Settings,
    Steps,
    Timeline,
)
from gpulab.store.folders import WriteTrace, configured, default_root, new_id
from gpulab.store.journal import Journal, JournalWriter
from gpulab.store.run_format import ARRIVALS
from gpulab.thresholds import DEFAULT, Thresholds
from gpulab.timeline.labels import LAUNCHES, labels

RunSource = Literal["cell", "statement", "block", "script"]

active: Capture | None = None  # the innermost capture that runs in this process

STOP_PATIENCE_S = 2.0  # until code without a step boundary is stopped between two lines
STEPS_MISSED = 3  # if no step has ended for so many mean steps, none will

SO_FAR_FROM, SO_FAR_TO = 10, 20_000  # steps


class Capture:
    """Measures the code that runs between `start` and `finish`, on the thread that called `start`.

    `keep` is called with the finished run when SIGTERM comes before the code has ended: at the next step, in the middle
    of the code, which may go on without being measured.
    """

    def __init__(
        self,
        settings: Settings,
        source: RunSource,
        code: str = "",
        view: Monitor | None = None,
        keep: Callable[[Run, WriteTrace | None], None] | None = None,
    ) -> None:
        self.settings = settings
        self.source = source
        self.code = code
        self._view = view
        self._undo = ExitStack()
        self._missing: list[Missing] = []
        self._choices: list[Choice] = []
        self._thresholds = _thresholds()
        self._alerts = Alerts(self._thresholds)
        self._own_ns = 0
        self._turn = ExitStack()  # while this thread measures
        self._begins_ns = 0
        self._document_state: tuple[object, ...] = ()  # of the journal's document
        self._arrived_ns = 0  # arrival at the newest collective in the journal
        self._keep = keep
        self._stop_request = (0, 0)  # steps at the time of the request, and that time
        self._stepless_stop = Deadline(STOP_PATIENCE_S, self._stop_without_step, lambda: None)
        self._terminations = Terminations(
            self._terminate_soon,
            self._terminate_now,
            lambda: self._journal_writer.update(),  # so that a reader has the steps so far, whatever follows
        )
        self._finished: tuple[Run, WriteTrace | None] | None = None
        self._finishing = False  # from now on a signal waits for `close`
        self.terminated = False  # the run was finished and passed to `keep`
        self._started = StartedProcesses()

    def start(self) -> None:
        """Begin to measure. Raises UsageError for an impossible device, or if another thread measures."""
        global active
        self.device = detect_device(self.settings.device)
        self._turn.enter_context(threads.measuring())
        self._origin_ns = perf_counter_ns()
        self._created = datetime.now(UTC)
        self._id = new_id(self._created)
        self._run_of_job = RunOfJob() if self.settings.save else None
        self._job = self._current_job()
        on_gpu = self.device.kind == "cuda"
        self._stacks = SamplingProcess()
        self._pilot = Pilot(
            self,
            self.settings,
            self.code,
            lambda: Window(self.device.kind, self._stacks),
            self._origin_ns,
            on_gpu=on_gpu,
        )
        self._phases = self._pilot.phases
        if self.settings.trace:
            self._stacks.start()
        self._calls = StackSampler(self._stacks, "calls", OUTSIDE, WITHIN, on_cpu=not on_gpu)
        self._clock = LoadingClock(self._origin_ns, self._stacks)
        self._journal_writer = JournalWriter(
            Journal(default_root(), self._id, self._origin_ns) if self.settings.save else None, self._write_so_far
        )
        self._cores = self._pilot.cores = CoreReadings(self._origin_ns)
        self._sampler = Sampler(os.getpid(), self.device, self._origin_ns, cores=self._cores)
        self._sampler.start()
        self._journal_writer.start()
        self._pilot.peaks = PeakMemory() if on_gpu else None
        if on_gpu and stays():
            reason = (
                "an earlier run of this process was traced; PyTorch's profiler stays attached, which makes CUDA "
                "calls slower"
            )
            self._choices.append(Choice("profiler", "attached since an earlier run", reason))
        self._hook_torch()
        self._pilot.begin()
        self._outer, active = active, self
        if self._view is not None:
            self._view.begin(self)
        if self.settings.whole or self.source == "statement":
            self._phases.profile_whole()
        self._cores.begin()
        if self._keep is not None:
            self._terminations.begin()
        if self.settings.trace:
            self._calls.start()
        self._begins_ns = self._pilot.starts()  # the user's code
        self._own_ns = self._begins_ns - self._phases.cost_ns  # before the user's code, without the profiler

    @ignoring_worker_deaths()
    def finish(
        self, outcome: Outcome, detail: str = "", error: BaseException | None = None
    ) -> tuple[Run, WriteTrace | None]:
        """Remove every hook and end the child processes; returns the record, and a function that writes its trace.

        `error`: what the code raised, whose traceback may hold the memory that ran out.

        Call `close` once the record is stored: until then a reader may still finish the run in place of this process.
        """
        if self._finished is not None:
            return self._finished
        self._finishing = True
        self._stepless_stop.cancel()
        self._terminations.be_patient()
        if self._terminations.count:
            outcome, detail = "interrupted", WORDS
        try:
            self._finished = self._finish(outcome, detail, error)
            return self._finished
        finally:
            self._stacks.stop()
            self._turn.close()

    def close(self) -> None:
        """Call this once the run is stored, or will not be stored. A SIGTERM that came meanwhile takes effect now."""
        self._journal_writer.close()
        self._terminations.end()
        self._terminations.deliver()

    def _terminate_soon(self) -> None:
        if not self._finishing:
            self._pilot.terminate_soon(self._hand_over)

    def _terminate_now(self) -> None:
        if not self._finishing:
            self._pilot.terminate()

    def _hand_over(self) -> None:
        """Finish in the middle of the user's code, on SIGTERM."""
        assert self._keep is not None
        self.terminated = True
        try:
            self._keep(*self.finish("interrupted", WORDS))
        finally:
            self.close()

    def _finish(self, outcome: Outcome, detail: str, error: BaseException | None) -> tuple[Run, WriteTrace | None]:
        wall_ns = self.now()
        self._job = self._current_job() or self._job  # the code may have destroyed its process group
        pilot, phases = self._pilot, self._phases
        pilot.ends(wall_ns)
        own_ns = self._own_ns + phases.cost_ns
        samples, lost, extremes = self._stop_observing()
        steps, finder = pilot.finish(wall_ns, detail), pilot.reader.finder
        timeline = phases.timeline(self._origin_ns, len(steps))
        recording = phases.recording if timeline is not None else None
        samples = self._follow_gpu(timeline, samples)
        if pilot.events is not None and pilot.events.index != self.device.index:
            steps = replace(steps, device_ns=Steps.empty().device_ns)  # another GPU timed them
        traced: tuple[int, ...] = ()
        if timeline is not None:
            self._check_device(timeline)
            whole = set(steps.number[steps.end_ns <= timeline.window_ns[1]].tolist())
            traced = tuple(n for n in phases.traced if n in whole)
        fed = bool(steps.batch_count.any())
        more_pauses = pilot.pauses.finish(
            steps.start_ns + self._origin_ns, trains=finder.trains, loop=pilot.loop.update
        )
        naming = Naming(self.code, lines_above(self.code, self.source), pilot.loop.step_lines)
        pauses = pilot.pauses.recorded(self._origin_ns, naming)
        traced_lines = recording.lines if recording is not None else None
        stack = stack_samples(traced_lines, self._origin_ns, pilot.loop, naming)
        grad_off_ns = pilot.pauses.grad_off_ns
        calls, callees = call_samples(self._calls, self._origin_ns, steps, pilot.loop, naming, grad_off_ns)
        loading = loading_samples(self._clock.samples(finder.feeder), naming)
        batches, untimed, excess = self._clock.finish(finder.feeder)
        peaks, unknown_peaks = (pilot.peaks or PeakMemory()).peaks(self.device, extremes)
        observer = Observer(
            hooks_ns=finder.hooks_ns,
            own_ns=own_ns,
            profiler_start_ns=phases.start_cost_ns or None,
            profiler_stop_ns=phases.stop_cost_ns or None,
            event_count=len(timeline) if timeline is not None else 0,
            window_truncated=phases.truncated,
            profiler_stays=stays(),
        )
        run = replace(
            self._sketch(()),
            steps=replace(steps, input_values=pilot.model_inputs.values_of(steps, self._origin_ns)),
            samples=_since(samples, self._begins_ns),
            timeline=timeline,
            wall_ns=wall_ns,
            outcome=outcome,
            outcome_detail=detail,
            step_source=finder.source if len(steps) else "whole cell",
            loader=self._loader(naming) if fed or not len(steps) else None,
            memory=peaks,
            observer=observer,
            missing=(*pilot.missing, *self._missing, *lost, *phases.missing, *unknown_peaks, *untimed),
            choices=(*phases.choices, *self._choices, *excess, *self._journal_writer.problems),
            traced_numbers=traced,
            batches=batches,
            pauses=pauses,
            more_pauses=more_pauses,
            stack=stack,
            places=naming.places,
            own_batches=own_batches(calls, steps) if pilot.loop.make_batches and not fed else None,
            loading_looks=loading,
            call_looks=calls,
            callees=callees,
            excerpts=naming.excerpts,
            alerts=alerts_of(steps, samples, wall_ns, self._thresholds),
            core_times=self._cores.times(),
            core_use=self._cores.use(),
            memory_account=self._memory_account(naming, len(steps), error),
            training=pilot.facts and pilot.facts.finish(self._calls.samples, steps, self._origin_ns),
        )
        return run, recording.write if recording is not None else None

    def _stop_observing(self) -> tuple[Samples, tuple[Missing, ...], dict[str, float]]:
        """Remove every hook and end all sampling; returns the curves, what is missing in them, and their extremes."""
        global active
        self._calls.stop()
        try:
            self._undo.close()
            if active is self:
                active = self._outer
            self._end_window()
            if self._view is not None:
                self._view.end()
        finally:
            self._journal_writer.stop()
            stopped = self._sampler.stop()
        return stopped

    def _end_window(self) -> None:
        """Stop the profiler. An error in it costs the trace, not the run."""
        try:
            self._phases.finish(stepless=self._pilot.stepless)
        except Exception as e:
            self._phases.abandon()
            reason = f"the profiler could not be ended ({type(e).__name__}: {str(e).partition(chr(10))[0]})"
            self._missing.append(Missing("step breakdown and kernels", reason, key="breakdown"))

    def _memory_account(self, naming: Naming, steps: int, error: BaseException | None) -> MemoryAccount | None:
        """Who held the memory. An error in it costs this account, not the run."""
        if self._pilot.memory is None or self._terminations.count:
            return None
        with suppress(Exception):
            gpu = (self.device.index or 0) if self.device.kind == "cuda" else None
            return self._pilot.memory.finish(naming, steps, gpu, error)
        return None

    def _environment(self) -> Environment:
        """The environment as the run had it: at its end the knobs have already restored what was before."""
        present = environment(self._sampler.packages)
        if not self.settings.knobs:
            return present
        from gpulab.knobs.catalogue import KNOBS

        for name, text in self.settings.knobs.items():
            with suppress(UsageError):  # a value of a variable that has a knob's name
                present = KNOBS[name].environment_with(present, KNOBS[name].parse(text)) if name in KNOBS else present
        return present

    def _loader(self, naming: Naming) -> Loader | None:
        loaders = self._pilot.loaders
        facts = loaders.of(self._pilot.reader.finder.feeder)
        if loaders.record is None:
            return None
        return replace(
            loaders.record,
            remade=loaders.remade,
            batch_tensors=facts.tensors if facts is not None else None,
            worker_threads=self._clock.worker_threads,
            **{name: naming.words(line) for name, line in facts.lines.items()} if facts is not None else {},
        )

    # -- for the user and the live view --------------------------------------------------------------------------

    def now(self) -> int:
        return perf_counter_ns() - self._origin_ns

    def so_far(self) -> SoFar | None:
        """The run so far, from any thread; None with too few steps, or with too many to copy them repeatedly."""
        if not SO_FAR_FROM <= self._pilot.step_count <= SO_FAR_TO:
            return None
        sketch = self._sketch(self._sampler.series())
        times, use = self._cores.times(), self._cores.use()
        steps = self._pilot.reader.so_far()
        return SoFar(replace(sketch, steps=steps, core_times=times, core_use=use), self._thresholds)

    def request_stop(self) -> None:
        self._stop_request = (self._pilot.step_count, self.now())
        self._pilot.stop()
        self._stepless_stop.start()

    def _stop_without_step(self) -> None:
        """End the code between two lines, if no step has ended since the request for longer than steps take.

        Only once, so that the code can clean up undisturbed.
        """
        (count, since_ns), now_ns = self._stop_request, self.now()
        if self._pilot.step_count != count:
            self._stop_request = self._pilot.step_count, now_ns
        elif not self._finishing and (not count or now_ns - since_ns > STEPS_MISSED * now_ns / count):
            self._stop_request = count, 2**62
            raise StopRun(self)

    @property
    def started_processes(self) -> int:
        """How many processes the code has started; nothing is measured in them."""
        return self._started.count

    @property
    def step_count(self) -> int:
        """Steps so far. From any thread."""
        return self._pilot.step_count

    @property
    def beside_steps(self) -> str:
        return self._pilot.beside_steps

    def series(self) -> tuple[SeriesInfo, ...]:
        return self._sampler.series()

    def drain(self) -> Delta:
        """Steps, readings and status since the last call."""
        start, end, wait, samples = self._pilot.reader.fresh().T
        wall = np.maximum(end - start, 1)
        rate = np.where(samples >= 0, samples / (wall / 1e9), np.nan)
        steps = np.stack([(end - self._origin_ns) / 1e9, wall / 1e6, np.minimum(wait, wall) / 1e6, rate], axis=1)
        readings = self._sampler.drain()
        if len(steps):
            waited = np.minimum(wait, wall)
            self._alerts.steps(float(steps[-1, 0]), float(wall.sum() / 1e9), float(waited.sum() / 1e9), len(steps))
        for t_s, percent in readings.get(UTILIZATION, ()):
            self._alerts.utilization(float(t_s), float(percent))
        return Delta(self._status(), steps.astype(np.float32), readings)

    def _current_job(self) -> Job | None:
        return self._run_of_job.current() if self._run_of_job is not None else current_job()

    def _hook_torch(self) -> None:
        self._undo.enter_context(warnings_at_users_line())
        pilot = self._pilot
        pilot.clock, pilot.facts = self._clock, TrainingFactsReader()
        pilot.memory = MemoryReader(pilot.note_own, lambda: pilot.reader.read().count)
        self._pilot.install(self._undo)
        self._started.install(self._undo)
        install_pauses(self._pilot.pauses, self._pilot.tape, self._undo)
        self._clock.start(self._undo)

    def _write_so_far(self, journal: Journal) -> None:
        """Append new data to the journal, in case the process is killed. On a thread of gpulab. Raises OSError."""
        series, missing = self._sampler.series(), self._pilot.missing
        self._job = self._current_job() or self._job
        state = (
            *(len(series), len(missing), self._pilot.reader.finder.source, self._pilot.loaders.record),
            *(self.device, self._job),
        )
        if state != self._document_state:
            journal.write_document(self._sketch(series))
            self._document_state = state
        self._pilot.reader.write(journal)
        self._sampler.write(journal)
        if self._job is not None and len(latest := arrivals()):
            journal.append(ARRIVALS, latest[latest["time_ns"] > self._arrived_ns].tobytes())
            self._arrived_ns = int(latest["time_ns"].max())

    def _sketch(self, series: tuple[SeriesInfo, ...]) -> Run:
        """The run as it is known while it goes on, without its columns."""
        nothing = np.empty(0, np.int64), np.empty(0, np.float64)
        return Run(
            id=self._id,
            created=self._created.isoformat(timespec="seconds"),
            source=self.source,
            settings=self.settings,
            device=self.device,
            environment=self._environment(),
            steps=Steps.empty(),
            samples=Samples(tuple(Series(s.name, s.unit, s.label, s.source, *nothing) for s in series)),
            timeline=None,
            wall_ns=self.now(),
            outcome="interrupted",
            step_source=self._pilot.reader.finder.source or "whole cell",
            code=self.code,
            loader=self._pilot.loaders.record,
            missing=(*self._pilot.missing, *self._missing),
            choices=tuple(self._choices),
            job=self._job,
        )

    def _status(self) -> Status:
        total, of = self.settings.steps, "run"
        if total is None and self._phases.epoch_steps:
            total, of = self._phases.epoch_steps, "epoch"
        name = self.device.name if self.device.kind == "cuda" else "CPU"
        elapsed_s = self.now() / 1e9
        alert = self._alerts.active(elapsed_s)
        beside = self._pilot.beside_steps
        return Status(
            phase=self._phases.label,
            step=self._pilot.step_count,
            total=total,
            total_of=of,
            elapsed_s=elapsed_s,
            device_label=f"device: {name}",
            stop_requested=self._pilot.stopping,
            message=capitalized(beside) if beside != BEFORE_STEPS else "",  # the view itself says that
            alert=alert.words if alert is not None else "",
        )

    def _follow_gpu(self, timeline: Timeline | None, samples: Samples) -> Samples:
        """The curves of the GPU that the run used, which may differ from the one assumed at its start."""
        if self.settings.device not in ("auto", "cuda"):
            return samples  # the user named it
        events, peaks = self._pilot.events, self._pilot.peaks
        grew, timed = peaks.busiest() if peaks is not None else None, events.index if events is not None else None
        worked = working_gpus(timeline) or [index for index in (grew, timed) if index is not None]
        if (other := other_device(self.device, worked, samples)) is not None:
            self.device, samples, choice, missing = other
            self._choices.append(choice)
            self._missing += missing
        return samples

    def _check_device(self, timeline: Timeline) -> None:
        """Check, on a machine with a GPU, that the profiled code used it and that the trace has its kernels."""
        if self.device.kind != "cuda" or timeline.has_device_events:
            return
        if labels(timeline).of(*LAUNCHES).any():
            reason = "CUDA work was launched and no kernel came back: CUPTI is refused or taken (see gpulab doctor)"
            self._missing.append(Missing("step breakdown and kernels", reason, key="breakdown"))
        elif self.settings.device == "auto":
            self.device = detect_device("cpu")
            self._choices.append(Choice("device", "CPU", "the traced steps made no CUDA call"))


def _thresholds() -> Thresholds:
    """The user's thresholds; the defaults if they are invalid, which the report says."""
    try:
        return DEFAULT.changed(configured("thresholds"))
    except UsageError:
        return DEFAULT


def _since(samples: Samples, begins_ns: int) -> Samples:
    """The readings from the start of the user's code on."""
    first = [int(np.searchsorted(s.t_ns, begins_ns)) for s in samples.series]
    pairs = zip(samples.series, first, strict=True)
    return Samples(tuple(replace(s, t_ns=s.t_ns[i:], value=s.value[i:]) for s, i in pairs if i < len(s.t_ns)))
