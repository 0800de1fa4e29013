"""Acts while the user's training loop runs: ends it at a step boundary, and opens and closes profiler windows.

`ShortRun` is a pilot alone, for comparisons: it finds steps, without meters, profiler and record.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter_ns
from types import FrameType, TracebackType
from typing import Any, Self

from msgspec.structs import replace

from gpulab.capture import torch_hooks
from gpulab.capture.batch_clock import LoadingClock
from gpulab.capture.gpu import PeakMemory
from gpulab.capture.job import current_job
from gpulab.capture.loader_facts import Loaders, Workers, death
from gpulab.capture.loop_lines import LoopLines
from gpulab.capture.memory_reader import MemoryReader
from gpulab.capture.pauses import Pauses
from gpulab.capture.profiler import StepEvents, Window
from gpulab.capture.reader import Reader
from gpulab.capture.sampler import CoreReadings
from gpulab.capture.threads import StopRun, inside_generator, stop_behind
from gpulab.capture.training_facts import ModelInputs, TrainingFactsReader
from gpulab.capture.windows import Phases
from gpulab.formatting import plural
from gpulab.knobs import preparation
from gpulab.patching.attributes import Hook
from gpulab.run import Missing, Phase, Settings, Steps
from gpulab.tape.marks import NEVER, Kind, Tape, mark_cost_ns
from gpulab.tape.step_finder import StepFinder

# Code that matches will train, even if it evaluates first.
TRAINING = r"\.(backward|fit|learn|step)\(|trainer\.train\(|(?<![.\w])train\w*\("

BEFORE_STEPS = "before the first step"
PASSED_BY = 16  # requests within a generator that an ending run lets pass; then even code that only loads ends
RARE = frozenset((Kind.ITER, Kind.ITERATOR, Kind.END, Kind.HAND))  # marks that are always acted on
LEARNED_AFTER = 8  # steps in which every mark is acted on, to learn the loop's lines
LONGEST = 3_000  # marks to wait at most, because all of them are then read at once

_running: list[Pilot] = []  # pilots of this process, innermost last: `gpulab.step()` finds them here


def mark_step() -> None:
    """Mark the end of a step by hand, if neither a DataLoader nor an optimizer shows it. Does nothing outside a run."""
    if _running:
        _running[-1].step()


class _Terminated(Exception):
    """The run was stored because the process must end; the user's code may go on without being measured."""


class Pilot:
    """Acts on the marks of a tape, on the training thread; the run began at `origin_ns` (`time.perf_counter_ns`).

    Between two actions it sleeps: a mark then only tests its kind and how many marks wait. To end the run it raises
    `StopRun(capture)` through the hooks into the user's code. `new_window` makes a profiler session.
    """

    def __init__(
        self,
        capture: object,
        settings: Settings,
        code: str,
        new_window: Callable[[], Window],
        origin_ns: int,
        *,
        on_gpu: bool = False,
    ) -> None:
        self._capture = capture
        self.tape = Tape()
        self._step_limit = settings.steps
        self._will_train = re.search(TRAINING, code) is not None
        self._origin_ns = origin_ns
        self._process = os.getpid()
        self._workers = Workers()
        self._loader = 0  # the number of the loader that got the last request
        self._owner: Callable[[], Any] = lambda: None  # that loader, or its iterator
        self._feeder: int | None = None
        self._modules: Hook | None = None
        self.model_inputs = ModelInputs()
        self._calls = 0
        self._ending = False  # the run ends at the next chance
        self._wake_at = 0  # the number of marks before which there is nothing to do
        self._ends: int | None = None  # the kind of mark that ended the newest step
        self._expects_batch = False
        self._terminate: Callable[[], None] | None = None  # called at the next step boundary, once
        self._passed_by = 0  # chances to end that were inside a generator
        self._outside: frozenset[FrameType] = frozenset()  # the frames that called the user's code
        self._generation = 0
        self.fault: Exception | None = None
        self.phases = Phases(settings, code, new_window, self.overdue, lambda: self._hook_modules(True), on_gpu=on_gpu)
        self.loaders = Loaders()
        self.pauses = Pauses()
        self.compilations = torch_hooks.Compilations(self.tape, self.pauses)
        self.reader = Reader(self.tape, origin_ns, self.pauses, mark_cost_ns())
        self.loop = LoopLines(code)
        self.clock: LoadingClock | None = None
        self.facts: TrainingFactsReader | None = None
        self.memory: MemoryReader | None = None
        self.missing: list[Missing] = []
        self.stopping = False  # the run ends at the next step boundary
        self.steps_done = 0  # number of steps at the last action
        self._starting_workers = 0  # of a loader that has returned no batch yet
        self.events = StepEvents() if on_gpu else None
        self.peaks: PeakMemory | None = None  # of a GPU's memory
        self.cores: CoreReadings | None = None
        self.tape.subscribe(RARE, self.act)

    @property
    def step_count(self) -> int:
        """Steps so far. From any thread."""
        return self.reader.read().count if self.steps_done else 0

    @property
    def beside_steps(self) -> str:
        """What happens now, before the first step; empty once there are steps. From any thread."""
        if preparation.status.words or self.steps_done:
            return preparation.status.words
        count = self._starting_workers
        return f"starting {plural(count, 'worker')}" if count else BEFORE_STEPS

    def evidence(self) -> StepFinder:
        """The steps as they were read last."""
        return self.reader.finder

    def install(self, undo: ExitStack) -> None:
        """Install the hooks, for this thread. Needs torch to be imported."""
        job = current_job()
        self._modules = torch_hooks.install(self, undo, in_ranks=job is not None and (job.world_size or 1) > 1)

    def begin(self) -> None:
        """Get ready, in the frame that will run the user's code."""
        self._outside = frozenset(frame for frame, _ in traceback.walk_stack(sys._getframe()))
        _running.append(self)
        self.tape.wake_at(0)

    def starts(self) -> int:
        """The user's code starts now; returns the time since the run began (ns)."""
        begins_ns = self.tape.note(Kind.BEGIN, 0)
        self.pauses.begin(begins_ns)
        return begins_ns - self._origin_ns

    def ends(self, end_ns: int) -> None:
        """The user's code ended `end_ns` after the run began."""
        self.pauses.end()
        self._mark_device(self._origin_ns + end_ns)
        if self.cores is not None:
            self.cores.end()

    def finish(self, end_ns: int, error: str) -> Steps:
        """End the run, `end_ns` after it began and with this error, if any; returns its steps."""
        _running[:] = [pilot for pilot in _running if pilot is not self]
        self._outside = frozenset()
        self.tape.subscribe(frozenset(), lambda *_: None)  # later marks call nothing
        steps = self.reader.finish(self._origin_ns + end_ns)
        if self.reader.fault is not None and self.fault is None:
            self.give_up(self.reader.fault)
        if self.events is not None:
            device_ns = self.events.finish(steps.start_ns + self._origin_ns, steps.end_ns + self._origin_ns)
            steps = replace(steps, device_ns=device_ns)
        self._workers.fail(error, end_ns)  # torch may have raised it outside all hooks
        self.missing += self._workers.missing(fed=bool(steps.batch_count.any()))
        if self.loaders.emptiness and not len(steps):
            reason = f"the DataLoader yielded 0 batches: {self.loaders.emptiness}"
            self.missing.append(Missing("steps", reason, key="empty_loader"))
        return steps

    def stop(self) -> None:
        """End the run at the next step boundary. From any thread."""
        self.stopping = True
        self._act_soon()

    def terminate_soon(self, write: Callable[[], None]) -> None:
        """Call `write` at the next step boundary, within the user's code; from then on nothing is measured."""
        self._terminate = write
        self._act_soon()

    def _act_soon(self) -> None:
        self.tape.wake_at(0)
        if self.stepless:
            self._hook_modules(True)

    def terminate(self) -> None:
        """Call the function of `terminate_soon` now, on the training thread."""
        write, self._terminate = self._terminate, None
        if write is not None and self.fault is None:
            self.tape.note(Kind.STOP, 0)
            self.fault = _Terminated()
            write()

    def step(self) -> None:
        """The user's code marks the end of a step."""
        if self.fault is not None:
            return
        try:
            self.tape.mark(Kind.HAND, 0)
        except Exception as e:
            self.give_up_or_raise(e)

    def note_own(self, own_ns: int) -> None:
        """gpulab's own work in the open step, outside an action: one more mark, which must not wake too early."""
        self.tape.note(Kind.OWN, own_ns)
        self._wake_at += 1
        self._sleep()

    def give_up_or_raise(self, error: Exception) -> None:
        """Handle an error that a mark raised: an error in gpulab must not reach the user's code."""
        if death(str(error)) is not None:  # torch's signal handler raises at any line of the main thread
            raise error
        if self.fault is None:
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """Stop measuring after an error in gpulab; the run ends with what was measured before."""
        self.tape.note(Kind.STOP, 0)
        self.fault = error
        reason = f"gpulab failed while measuring ({type(error).__name__}: {error})"
        self.missing.append(Missing("steps", reason, self._now(), "steps"))
        self.phases.abandon()

    def _now(self) -> int:
        return perf_counter_ns() - self._origin_ns

    # -- marks from the hooks ------------------------------------------------------------------------------------

    def act(self, t_ns: int, kind: int, argument: int, subject: Any) -> None:
        """Called by a mark when there may be something to do. `subject`: the call's arguments, its result or error."""
        if self.fault is not None or os.getpid() != self._process:
            self.tape.wake_at(NEVER)
        elif self._ending:
            self._stop_at(kind)
        elif kind in RARE or self._must_act() or self.tape.count >= self._wake_at:
            self._act(t_ns, kind, argument, subject, in_time=self.tape.count >= self._wake_at)
        else:  # another thread has packed marks, or a GPU's clock needs this kind of mark
            if kind == Kind.STEPPED and self.events is not None:
                self.events.updated(subject)
            if kind == self._ends:
                self._at_boundary(t_ns)
            elif kind == Kind.BACKWARD and self.peaks is not None:
                self.peaks.at_backward()
            self._sleep()

    def _act(self, t_ns: int, kind: int, argument: int, subject: Any, *, in_time: bool) -> None:
        """`in_time`: the planned wake-up has been reached, so steps that have ended since may need action."""
        match kind:
            case Kind.ITER | Kind.ASK:
                self._request(t_ns, argument, subject[0], fresh=kind == Kind.ITER)
            case Kind.GOT:
                self._starting_workers, self._expects_batch = 0, False
                self.loaders.add_batch(self._loader, subject)
            case Kind.ITERATOR:
                self.phases.loader_ends()
            case Kind.END:
                self._exhausted(subject)
            case Kind.BACKWARD:
                self.compilations.poll()
                self.pauses.begin_training()
                self.loop.backward(sys._getframe())
                if self.peaks is not None:
                    self.peaks.at_backward()
            case Kind.STEPPED:
                self.pauses.begin_training()
                self.loop.updated(sys._getframe())
                if self.events is not None:
                    self.events.updated(subject)
        since_ns = self._read(t_ns, kind, in_time=in_time)
        if kind in (Kind.ITER, Kind.ASK):
            if self.stopping and not self._ending and not self.reader.finder.training:
                self._leave()
            if kind == Kind.ITER and not self._ending:
                self.phases.loader_begins()
        self.tape.note(Kind.OWN, perf_counter_ns() - since_ns)
        self._plan()

    def _must_act(self) -> bool:
        return self.stopping or self._terminate is not None or self._expects_batch or self.phases.profiling

    def _plan(self) -> None:
        """Sleep until the earliest mark that may need action, as if each further mark ended a step."""
        finder = self.reader.finder
        learns = finder.trains and (finder.without_optimizer or self.steps_done < LEARNED_AFTER)
        until = min(self.phases.unchanged_until, NEVER if self._step_limit is None else self._step_limit)
        self._wake_at = self.tape.count + (0 if learns else min(LONGEST, finder.marks_until(until)))
        if self.events is not None or self.peaks is not None:
            self.tape.subscribe(RARE | {Kind.BACKWARD, Kind.STEPPED, self._ends or Kind.ASK}, self.act)
        self._sleep()

    def _sleep(self) -> None:
        self.tape.wake_at(self._wake_at - self.tape.packed_count)
        if self._must_act():  # another thread may just have requested it
            self.tape.wake_at(0)

    def _request(self, t_ns: int, loader: int, owner: Any, *, fresh: bool) -> None:
        self.compilations.poll()
        self._loader, self._owner = loader, weakref.ref(owner)
        if fresh:
            self.pauses.place(t_ns, sys._getframe())  # a frame that holds itself in a variable is a cycle
            self.loop.add_request(sys._getframe())
        if fresh or not self.loaders.is_described:
            self._mark_device(t_ns)  # a step may begin here without the end of another
            self._expects_batch = True
            self._meet_loader(loader, owner)
            self._hook_modules(False)

    def _exhausted(self, error: object) -> None:
        """An iterator raised `error` in place of a batch: StopIteration, or the error of a dead worker."""
        self._expects_batch = False
        self.loaders.exhausted(self._loader)
        if isinstance(error, RuntimeError):
            self._workers.fail(str(error), self._now(), self._owner())

    def _stop_at(self, kind: int) -> None:
        if kind in (Kind.ITER, Kind.ASK):
            self._leave()
        elif kind in (Kind.BACKWARD, Kind.GRAD, Kind.STEP, Kind.HAND):
            raise StopRun(self._capture)

    def module_call(self, module: object) -> None:
        """A module is called before anything that makes steps: perhaps the code has none, and is traced from here."""
        if self.fault is not None:
            return
        try:
            if self._ending:
                raise StopRun(self._capture)
            self._calls += 1
            self.compilations.poll()
            self._hook_modules(False)
            if not self.stepless:
                return
            if self.stopping:
                raise StopRun(self._capture)
            if self._terminate is not None:
                return self.terminate()
            if self._calls == 1 and not self._will_train:  # otherwise steps will follow, which is better to trace
                self.phases.profile_whole()
            self.phases.end_overdue(stepless=True)
        except Exception as e:
            self.give_up_or_raise(e)

    @property
    def stepless(self) -> bool:
        """Whether nothing that makes steps has happened so far."""
        return not self.reader.finder.has_loader and not self.steps_done

    def _hook_modules(self, on: bool) -> None:
        if self._modules is not None:
            (self._modules.on if on else self._modules.off)()

    # -- steps ---------------------------------------------------------------------------------------------------

    def _read(self, t_ns: int, kind: int, *, in_time: bool) -> int:
        """Read the new marks and act on steps that have ended. Starting and stopping the profiler belongs to no step.

        Returns since when gpulab's own work counts in the open step.
        """
        finder, phases = self.reader.read(), self.phases
        if self.reader.fault is not None:
            raise self.reader.fault
        if finder.generation != self._generation:
            self._begin_again()
        touched = False
        ends_here = finder.count > self.steps_done and finder.end_ns == t_ns
        if ends_here:
            self._ends = kind
            self._at_boundary(t_ns)
        if finder.count > self.steps_done and (in_time or ends_here):
            touched = self._boundary(finder)
        elif finder.count > self.steps_done:  # the boundary has passed, and there was nothing to do at it
            self.steps_done = finder.count
        elif phases.profiling:
            touched = phases.end_overdue(stepless=self.stepless)
        if not touched:
            return t_ns
        self._resume(profiler_edge=not phases.profiling)
        phases.step_begins()
        return perf_counter_ns()

    def _at_boundary(self, t_ns: int) -> None:
        """A step may end here: read the devices at its end."""
        self._mark_device(t_ns)
        if self.peaks is not None:
            self.peaks.at_step()

    def _boundary(self, finder: StepFinder) -> bool:
        """Steps have ended: end the run or go on. Returns whether the profiler was started or stopped."""
        before, self.steps_done = self.steps_done, finder.count
        if finder.feeder != self._feeder or self.steps_done == 2:
            self._note_feeder(finder)
        if self._terminate is not None:
            self.terminate()
            return False
        phases = self.phases
        ending = self.stopping or (self._step_limit is not None and self._enough(self._step_limit))
        if self.steps_done < phases.unchanged_until and not ending:
            return False
        touched = phases.advance(self.steps_done)
        if ending:
            self._end_soon()
        else:
            touched = phases.begin(before, self.steps_done) or touched
        self.tape.note(Kind.PHASE, phases.next_phase())
        return touched

    def overdue(self) -> None:
        """End a window that has been open for long while the user's code has made no mark."""
        if self.fault is not None:
            return
        try:
            if self.phases.end_overdue(stepless=self.stepless):
                self._resume(profiler_edge=True)
        except Exception as e:
            self.give_up_or_raise(e)

    def _resume(self, *, profiler_edge: bool) -> None:
        """The open step begins now."""
        self._mark_device(self.tape.note(Kind.RESUME, profiler_edge))
        if self.cores is not None:
            self.cores.after_profiler()

    def _mark_device(self, t_ns: int) -> None:
        """A step ends or begins here: an event records when the GPU arrives."""
        if self.events is not None:
            self.events.mark(t_ns)

    def _enough(self, limit: int) -> bool:
        """Whether there are enough steps. If the code will train, batches before the training do not count."""
        return self.steps_done >= limit and (self.reader.finder.trains or not self._will_train)

    def _end_soon(self) -> None:
        """End the run here or, if steps end within `Optimizer.step`, at the next call, so that a scheduler can step."""
        self._ending = True
        self.tape.note(Kind.STOP, 0)
        if not self.reader.finder.optimizer_ends_steps:
            self._leave()
        self._hook_modules(True)

    def _leave(self) -> None:
        """End the run here or, if that would end a generator of the user's code, at the loop's next call."""
        self._ending = True
        self.tape.note(Kind.STOP, 0)
        if self._passed_by == PASSED_BY or not inside_generator(self._outside):
            raise StopRun(self._capture)
        self._passed_by += 1
        self._hook_modules(True)

    def _begin_again(self) -> None:
        """The steps so far were evaluation before the training: the phases start over."""
        self._generation = self.reader.finder.generation
        self.steps_done, self._feeder = 0, None
        self.phases.begin_again()
        self.tape.note(Kind.PHASE, Phase.WARMUP)

    def _meet_loader(self, number: int, owner: Any) -> None:
        """A loader gets its first request, or begins anew: it may be the loader that feeds the steps."""
        described = self.loaders.add(number, owner, self.reader.finder.feeder)
        if described is not None and not self.steps_done:
            self.loaders.record = described
            self.phases.expect(described.length)
        self._workers.check(owner, self._now())
        self._starting_workers = getattr(owner, "num_workers", 0)  # an iterator has already started its workers

    def _note_feeder(self, finder: StepFinder) -> None:
        self._feeder = finder.feeder
        loader = self.loaders.feeds(finder.feeder)
        if loader is not None and loader.length is not None and self.steps_done == 2:
            self.phases.expect(loader.length // max(1, finder.last_batches()))


class ShortRun(Pilot):
    """Finds the steps of a `with` block and ends it after `step_limit` of them.

    `on_gpu`: its steps are also timed on the GPU, which is synchronized at the end. Afterwards `steps` are all steps,
    unless gpulab failed (`fault`). Exceptions propagate, except the one that ends the block.
    """

    def __init__(self, step_limit: int, code: str = "", *, on_gpu: bool = False) -> None:
        settings = Settings(steps=step_limit, trace=False, live=False, save=False)
        self.origin_ns = perf_counter_ns()
        # not traced, so that no window is ever made
        super().__init__(self, settings, code, lambda: Window("cpu"), self.origin_ns, on_gpu=on_gpu)
        self._undo = ExitStack()
        self.steps = Steps.empty()

    def __enter__(self) -> Self:
        self.install(self._undo)
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        end_ns = perf_counter_ns() - self.origin_ns
        self.ends(end_ns)
        self._undo.close()
        self.steps = self.finish(end_ns, "")
        stop = stop_behind(error)
        return stop is not None and stop.capture is self
