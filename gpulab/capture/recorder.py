"""One measured execution: hears the loop's marks, counts steps, ends the run when asked to, makes its record."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Literal, TypeVarTuple

import numpy as np

from gpulab.capture import hooks, memory, workers
from gpulab.capture.feed import Delta, SeriesInfo, Status, Watcher
from gpulab.capture.loader import Loaders, samples_in
from gpulab.capture.phases import Phases
from gpulab.capture.sampler import Sampler
from gpulab.capture.tracker import Answer, StepTracker
from gpulab.capture.weights import Watch
from gpulab.capture.window import Window
from gpulab.run import Choice, Missing, Observer, Outcome, Phase, Run, Samples, Settings, StepFlag, Timeline
from gpulab.sources.kineto import launches
from gpulab.sources.machine import detect_device, environment
from gpulab.sources.store import new_id

RunSource = Literal["cell", "statement", "block", "script"]

active: Capture | None = None  # the capture that runs in this process: `gpulab.step()` finds it here

TRAINING = (
    r"\.(backward|fit|step)\(|trainer\.train\(|(?<![.\w])train\w*\("  # a cell that evaluates first will still train
)
BACKLOG_LIMIT = 200_000  # steps kept for a live view that has stopped reading


class StopRun(BaseException):
    """Ends the user's code at a step boundary. No Exception, so that `except Exception` lets it pass."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self.capture = capture


Given = TypeVarTuple("Given")


def guarded(mark: Callable[[Capture, *Given], None]) -> Callable[[Capture, *Given], None]:
    """A fault of ours must not become the user's: it ends the measuring, not the cell."""

    @functools.wraps(mark)
    def careful(self: Capture, *args: *Given) -> None:
        if self.fault is not None:
            return
        try:
            mark(self, *args)
        except Exception as e:
            if workers.death(str(e)) is not None:  # torch's signal handler raises wherever the main thread is
                raise
            self.give_up(e)

    return careful


class Capture:
    """Measures what runs between `start` and `finish`, on the thread that called `start`."""

    def __init__(self, settings: Settings, source: RunSource, code: str = "", watcher: Watcher | None = None) -> None:
        self.settings = settings
        self.source = source
        self.code = code
        self.fault: Exception | None = None
        self._watcher = watcher
        self._undo = ExitStack()
        self._missing: list[Missing] = []
        self._choices: list[Choice] = []
        self._cannot_start: Missing | None = None
        self._phases = Phases(settings, code, self._new_window, self._overdue, lambda: self._hear_modules(True))
        self._loaders = Loaders()
        self._feeder: int | None = None
        self._epoch_steps: int | None = None
        self._weights: Watch | None = None
        self._modules: hooks.ModuleHook | None = None
        self._calls = 0
        self._wanted = settings.steps
        self._will_train = re.search(TRAINING, code) is not None
        self._stopping = False  # the run ends at the next step boundary
        self._due = False  # it ends at the next chance
        self._counted = 0
        self._generation = 0
        self._compiled = 0
        self._hooks_ns = 0
        self._own_ns = 0
        self._begins_ns = 0
        self._fresh: deque[tuple[int, int, int, int]] = deque(maxlen=BACKLOG_LIMIT)

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin. Raises UsageError for an impossible device."""
        global active
        self.device = detect_device(self.settings.device)
        self._pid = os.getpid()
        self._origin_ns = perf_counter_ns()
        self._created = datetime.now(UTC)
        self._tracker = StepTracker(self._origin_ns)
        self._sampler = Sampler(self._pid, self.device, self._origin_ns)
        self._sampler.start()
        self._peak_before = memory.gpu_peak_bytes(self.device)
        self._hook_torch()
        self._newly_compiled()
        self._outer, active = active, self
        if self._watcher is not None:
            self._watcher.begin(self)
        if self.settings.whole or self.source == "statement":
            self._phases.profile_whole()
        self._begins_ns = self.now()  # the user's code
        self._own_ns = self._begins_ns - self._phases.cost_ns  # before it, beside the profiler

    def finish(self, outcome: Outcome, detail: str = "") -> tuple[Run, Callable[[Path], None] | None]:
        """End: take every hook out, stop the sampling process, return the record and how to write its trace."""
        global active
        wall_ns = self.now()
        own_ns = self._own_ns + self._phases.cost_ns
        try:
            self._undo.close()
            if active is self:
                active = self._outer
            self._phases.finish(stepless=self._stepless())
            if self._watcher is not None:
                self._watcher.end()
        finally:
            samples, lost, extremes = self._sampler.stop()
        steps = self._tracker.finish(self._origin_ns + wall_ns)
        timeline = self._phases.timeline(self._origin_ns, len(steps))
        traced: tuple[int, ...] = ()
        if timeline is not None:
            self._judge_device(timeline)
            whole = set(steps.number[steps.end_ns <= timeline.window_ns[1]].tolist())
            traced = tuple(n for n in self._phases.traced if n in whole)
        fed = bool(steps.batch_count.any())
        self._note_workers(detail, wall_ns, loaded=fed and outcome == "completed")
        peaks, unknown_peaks = memory.peaks(self.device, self._peak_before, extremes)
        run = Run(
            id=new_id(self._created),
            created=self._created.isoformat(timespec="seconds"),
            source=self.source,
            settings=self.settings,
            device=self.device,
            environment=environment(),
            steps=steps,
            samples=_since(samples, self._begins_ns),
            timeline=timeline,
            wall_ns=wall_ns,
            outcome=outcome,
            outcome_detail=detail,
            step_source=self._tracker.source if len(steps) else "whole cell",
            code=self.code,
            loader=self._loaders.record if fed or not len(steps) else None,
            memory=peaks,
            observer=Observer(
                hooks_ns=self._hooks_ns,
                own_ns=own_ns,
                profiler_start_ns=self._phases.start_cost_ns or None,
                profiler_stop_ns=self._phases.stop_cost_ns or None,
                event_count=len(timeline) if timeline is not None else 0,
                window_truncated=self._phases.truncated,
            ),
            missing=(*self._missing, *lost, *self._phases.missing, *unknown_peaks),
            choices=(*self._phases.choices, *self._choices),
            traced_numbers=traced,
        )
        recording = self._phases.recording
        return run, recording.write if recording is not None and timeline is not None else None

    # -- what the user or a view may ask -------------------------------------------------------------------------

    def now(self) -> int:
        """Nanoseconds since the run began."""
        return perf_counter_ns() - self._origin_ns

    def request_stop(self) -> None:
        """End the run at the next step boundary."""
        self._stopping = True
        if self._stepless():
            self._hear_modules(True)

    def series(self) -> tuple[SeriesInfo, ...]:
        """The curves that are being sampled."""
        return self._sampler.series()

    def drain(self) -> Delta:
        """What is new since the last call."""
        fresh = [self._fresh.popleft() for _ in range(len(self._fresh))]
        start, end, wait, samples = np.array(fresh, dtype=np.int64).reshape(-1, 4).T
        wall = np.maximum(end - start, 1)
        rate = np.where(samples >= 0, samples / (wall / 1e9), np.nan)
        steps = np.stack([(end - self._origin_ns) / 1e9, wall / 1e6, np.minimum(wait, wall) / 1e6, rate], axis=1)
        return Delta(self._status(), steps.astype(np.float32), self._sampler.drain())

    @guarded
    def step(self) -> None:
        """A step ends here, says the user."""
        entered = perf_counter_ns()
        self._after_mark(self._tracker.manual(entered), entered)

    def give_up(self, error: Exception) -> None:
        """Stop measuring after a fault of our own; the run is kept as far as it went."""
        self.fault = error
        reason = f"gpulab failed while measuring ({type(error).__name__}: {error})"
        self._missing.append(Missing("steps", reason, self.now(), "steps"))
        self._phases.abandon()

    # -- marks from the hooks ------------------------------------------------------------------------------------

    @guarded
    def asked(self, loader: int, owner: Any, fresh: bool) -> None:
        """A loader is about to be asked."""
        entered = perf_counter_ns()
        if self._due:
            raise StopRun(self)
        if fresh or not self._loaders.met:
            self._meet_loader(loader, owner)
            self._hear_modules(False)
        if self._weights is not None:
            self._look_at_weights(self._weights)
        self._after_mark(self._tracker.loader_asked(loader, entered, fresh=fresh), entered)
        if self._stopping and not self._tracker.training:
            raise StopRun(self)
        if fresh:
            self._phases.loader_begins()

    @guarded
    def answered(self, answer: Answer, batch: Any) -> None:
        """A loader has answered."""
        entered = perf_counter_ns()
        if answer == "iterator":
            self._phases.loader_ends()
        self._tracker.loader_answered(entered, answer, samples_in(batch) if answer == "batch" else None)
        self._hooks_ns += perf_counter_ns() - entered

    @guarded
    def failed(self, owner: Any, error: RuntimeError) -> None:
        """An iterator has no batch but this: perhaps one of its workers died."""
        self._lose_worker(workers.death(str(error), owner), self.now())

    @guarded
    def optimizing(self) -> None:
        """An optimizer is about to step."""
        if self._due:
            raise StopRun(self)

    @guarded
    def optimized(self, optimizer: Any, start_ns: int) -> None:
        """An optimizer has stepped."""
        entered = perf_counter_ns()
        self._after_mark(self._tracker.optimized(id(optimizer), start_ns, entered), entered)

    @guarded
    def backward(self, root: Any) -> None:
        """A backward pass begins."""
        self._tracker.backward()
        if self._weights is None and self._tracker.undecided:
            self._weights = Watch.of(root)

    @guarded
    def called(self) -> None:
        """A module is called: before anything that makes steps this may be code without any, so trace it from here."""
        if self._due:
            raise StopRun(self)
        self._calls += 1
        self._hear_modules(False)
        if not self._stepless():
            return
        if self._stopping:
            raise StopRun(self)
        if self._calls == 1:
            self._phases.profile_whole()
        self._phases.end_overdue(stepless=True)

    def _stepless(self) -> bool:
        return not self._tracker.loader_seen and not self._counted

    def _hear_modules(self, wanted: bool) -> None:
        if self._modules is not None:
            (self._modules.on if wanted else self._modules.off)()

    # -- steps ---------------------------------------------------------------------------------------------------

    def _after_mark(self, closed: bool, entered: int) -> None:
        """See what a mark has made of the steps. Time in which the profiler was touched belongs to no step."""
        tracker, phases = self._tracker, self._phases
        if tracker.generation != self._generation:
            self._begin_again()
        touched = False
        count = tracker.count if closed else 0
        if count > self._counted:
            touched = self._boundary(count)
        elif phases.profiling:
            touched = phases.end_overdue(stepless=self._stepless())
        if touched:
            tracker.resume(perf_counter_ns(), profiler_edge=not phases.profiling)
            phases.step_begins()
        else:
            self._hooks_ns += perf_counter_ns() - entered

    def _boundary(self, count: int) -> bool:
        """Steps were closed: tell the view, end the run or go on. Returns whether the profiler was touched."""
        before, self._counted = self._counted, count
        self._note_step()
        phases = self._phases
        ending = self._stopping or self._enough()
        if count < phases.unchanged_until and not ending:
            return False
        touched = phases.closed(count)
        if ending:
            self._end_soon()
        else:
            touched = phases.begin(before, count) or touched
        self._tracker.phase = phases.next_phase()
        return touched

    @guarded
    def _overdue(self) -> None:
        """A window has been open for long, and the user's code has given no mark."""
        if self._phases.end_overdue(stepless=self._stepless()):
            self._tracker.resume(perf_counter_ns(), profiler_edge=True)

    def _enough(self) -> bool:
        """Whether so many steps were asked for. Batches before the training that the code announces do not count."""
        if self._wanted is None or self._counted < self._wanted:
            return False
        return self._tracker.trains or not self._will_train

    def _end_soon(self) -> None:
        """End the run here; inside of `Optimizer.step` at the next thing the loop does: a scheduler steps before."""
        self._due = True
        if not self._tracker.optimizer_ends_steps:
            raise StopRun(self)
        self._hear_modules(True)

    def _begin_again(self) -> None:
        """Steps counted so far were none (evaluation before training): the phases start over."""
        self._generation = self._tracker.generation
        self._counted, self._feeder = 0, None
        self._phases.begin_again()
        self._tracker.phase = Phase.WARMUP

    def _note_step(self) -> None:
        tracker = self._tracker
        if tracker.feeder != self._feeder or self._counted == 2:
            self._note_feeder(tracker.feeder)
        if self._newly_compiled():
            tracker.flag(StepFlag.COMPILE)
        if self._watcher is not None:
            self._fresh.append(tracker.last())

    def _newly_compiled(self) -> bool:
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo is None:
            return False
        graphs = dynamo.counters["stats"]["unique_graphs"] if "stats" in dynamo.counters else 0
        compiled, self._compiled = graphs > self._compiled, graphs
        return compiled

    def _look_at_weights(self, weights: Watch) -> None:
        if not self._tracker.undecided:
            self._weights = None
        elif weights.changed():
            self._tracker.by_hand()

    # -- loaders and their workers -------------------------------------------------------------------------------

    def _meet_loader(self, number: int, owner: Any) -> None:
        """A loader is asked for the first time, or anew: it may be the one that feeds the steps."""
        described = self._loaders.meet(number, owner, self._tracker.feeder)
        if described is not None and not self._counted:
            self._loaders.record = described
            self._expect(described.length)
        why = workers.cannot_start(owner)
        if why is not None and self._cannot_start is None:
            self._cannot_start = Missing("data from the DataLoader's workers", why, self.now(), "workers")
            with suppress(OSError, ValueError, AttributeError):  # a standard error that is closed or not there
                sys.stderr.write(f"gpulab: {why}.\n")

    def _expect(self, epoch_steps: int | None) -> None:
        """An epoch has so many steps, as far as the loader knows."""
        self._epoch_steps = epoch_steps
        self._phases.expect(epoch_steps)

    def _note_feeder(self, feeder: int | None) -> None:
        self._feeder = feeder
        loader = self._loaders.feeds(feeder) if feeder is not None else None
        if loader is not None and loader.length is not None and self._counted == 2:
            self._expect(loader.length // max(1, self._tracker.last_batches()))

    def _lose_worker(self, how: str | None, since_ns: int) -> None:
        if how is not None and not any(m.key == "loader" for m in self._missing):
            self._missing.append(Missing("data from a DataLoader worker", how, since_ns, "loader"))

    def _note_workers(self, detail: str, wall_ns: int, *, loaded: bool) -> None:
        """The run is over: what kept the workers from giving data, also where torch told the user's code, not us."""
        self._lose_worker(workers.death(detail), wall_ns)
        if self._cannot_start is not None and not loaded:
            self._missing.append(self._cannot_start)

    # -- details -------------------------------------------------------------------------------------------------

    def _hook_torch(self) -> None:
        if "torch" not in sys.modules:
            import importlib.util

            if importlib.util.find_spec("torch") is None:
                self._missing.append(Missing("steps", "torch is not installed", key="steps"))
                return
        self._modules = hooks.install(self, self._undo)

    def _new_window(self) -> Window:
        return Window(self.device.kind, self.device.index)

    def _status(self) -> Status:
        total, of = self.settings.steps, "run"
        if total is None and self._epoch_steps:
            total, of = self._epoch_steps, "epoch"
        name = self.device.name if self.device.kind == "cuda" else "CPU"
        return Status(
            phase=self._phases.label,
            step=self._counted,
            total=total,
            total_of=of,
            elapsed_s=self.now() / 1e9,
            device_label=f"device: {name}",
            stop_requested=self._stopping,
        )

    def _judge_device(self, timeline: Timeline) -> None:
        """A GPU is there: did the profiled code use it, and did its kernels come back?"""
        if self.device.kind != "cuda" or timeline.has_device_events:
            return
        if launches(timeline):
            reason = "CUDA work was launched and no kernel came back: CUPTI is refused or taken (see gpulab doctor)"
            self._missing.append(Missing("step breakdown and kernels", reason, key="breakdown"))
        elif self.settings.device == "auto":
            self.device = detect_device("cpu")
            self._choices.append(Choice("device", "CPU", "the profiled steps made no CUDA call"))


def _since(samples: Samples, begins_ns: int) -> Samples:
    """The readings from then on: before, gpulab itself was at work."""
    first = [int(np.searchsorted(s.t_ns, begins_ns)) for s in samples.series]
    kept = zip(samples.series, first, strict=True)
    return Samples(tuple(replace(s, t_ns=s.t_ns[i:], value=s.value[i:]) for s, i in kept if i < len(s.t_ns)))


def mark_step() -> None:
    """Mark the end of a step by hand, where neither a DataLoader nor an optimizer tells. Does nothing outside a run."""
    if active is not None:
        active.step()


__all__ = ["Capture", "StopRun", "mark_step"]
