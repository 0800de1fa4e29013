"""What must act while the user's training loop runs: it ends the loop at a step boundary, and opens windows.

A pilot alone makes a short run, for a comparison: its steps, and no meters, no profiler, no record.
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

from gpulab.capture import hooks
from gpulab.capture.batch_clock import LoadingClock
from gpulab.capture.gpu import PeakMemory
from gpulab.capture.job import current_job
from gpulab.capture.loader_facts import Loaders, Workers, death
from gpulab.capture.loop_lines import LoopLines
from gpulab.capture.pauses import Pauses
from gpulab.capture.profiler import StepEvents, Window
from gpulab.capture.reader import Reader
from gpulab.capture.sampler import CoreReadings
from gpulab.capture.step_values import ModelInputs
from gpulab.capture.threads import StopRun, inside_generator, stop_behind
from gpulab.capture.training_facts import TrainingFactsReader
from gpulab.capture.windows import Phases
from gpulab.formatting import plural
from gpulab.knobs import preparation
from gpulab.run import Missing, Phase, Settings, Steps
from gpulab.tape.marks import NEVER, Kind, Tape, mark_cost_ns
from gpulab.tape.step_finder import StepFinder

# A cell that evaluates first will still train.
TRAINING = r"\.(backward|fit|learn|step)\(|trainer\.train\(|(?<![.\w])train\w*\("

BEFORE_STEPS = "before the first step"
PASSED_BY = 16  # requests inside of a generator that a run which is to end lets pass: code that only loads ends, too
RARE = frozenset((Kind.ITER, Kind.ITERATOR, Kind.END, Kind.HAND))  # marks that always need a look
LEARNED_AFTER = 8  # steps: until then each mark is looked at where the loop trains, to learn its lines
LONGEST = 3_000  # marks without a look: so much is read at once

_running: list[Pilot] = []  # those in this process, innermost last: `gpulab.step()` finds them here


def mark_step() -> None:
    """Mark the end of a step by hand, where neither a DataLoader nor an optimizer tells. Does nothing outside a run."""
    if _running:
        _running[-1].step()


class _Terminated(Exception):
    """The run was written when the process was asked to end; the user's code may go on, and nothing is measured."""


class Pilot:
    """Acts on the marks of a tape, on the training thread; the run began at `origin_ns` (`time.perf_counter_ns`).

    It sleeps until there may be something to do: each mark asks in one comparison. Raises `StopRun(capture)` through
    the hooks into the user's code where the run is to end. `new_window` makes a profiler session.
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
        self._wanted = settings.steps
        self._will_train = re.search(TRAINING, code) is not None
        self._origin_ns = origin_ns
        self._process = os.getpid()
        self._workers = Workers()
        self._asking = 0  # the loader that was asked last
        self._owner: Callable[[], Any] = lambda: None  # it, or its iterator
        self._feeder: int | None = None
        self._modules: hooks.ModuleHook | None = None
        self.model_inputs = ModelInputs()
        self._calls = 0
        self._due = False  # the run ends at the next chance
        self._due_at = 0  # marks: before so many there is nothing to do
        self._ends: int | None = None  # the kind of mark that ended the newest step
        self._expects_batch = False
        self._terminate: Callable[[], None] | None = None  # called at the next step boundary, once
        self._passed_by = 0  # chances not taken: they were inside of a generator
        self._outside: frozenset[FrameType] = frozenset()  # what called the user's code
        self._generation = 0
        self.fault: Exception | None = None
        self.phases = Phases(settings, code, new_window, self.overdue, lambda: self._hear_modules(True), on_gpu=on_gpu)
        self.loaders = Loaders()
        self.pauses = Pauses()
        self.compilations = hooks.Compilations(self.tape, self.pauses)
        self.reader = Reader(self.tape, origin_ns, self.pauses, mark_cost_ns())
        self.loop = LoopLines(code)
        self.clock: LoadingClock | None = None
        self.facts: TrainingFactsReader | None = None
        self.missing: list[Missing] = []
        self.stopping = False  # the run ends at the next step boundary
        self.counted = 0  # steps, at the last look
        self._starting_workers = 0  # of the loader that has given no batch yet
        self.events = StepEvents() if on_gpu else None
        self.peaks: PeakMemory | None = None  # of a GPU's memory
        self.cores: CoreReadings | None = None
        self.tape.subscribe(RARE, self.act)

    @property
    def step_count(self) -> int:
        """Steps so far. From any thread."""
        return self.reader.read().count if self.counted else 0

    @property
    def beside_steps(self) -> str:
        """What goes on now and is no step, as far as it is known; empty while there are steps. From any thread."""
        if preparation.status.words or self.counted:
            return preparation.status.words
        count = self._starting_workers
        return f"starting {plural(count, 'worker')}" if count else BEFORE_STEPS

    def evidence(self) -> StepFinder:
        """What is known of the steps by the last look."""
        return self.reader.finder

    def install(self, undo: ExitStack) -> None:
        """Hear the user's code, on this thread. Needs torch to be imported."""
        job = current_job()
        self._modules = hooks.install(self, undo, in_ranks=job is not None and (job.world_size or 1) > 1)

    def begin(self) -> None:
        """The user's code is about to run."""
        self._outside = frozenset(frame for frame, _ in traceback.walk_stack(sys._getframe()))
        _running.append(self)
        self.tape.wake_at(0)

    def starts(self) -> int:
        """It runs from here on; when that is, after the run began (ns)."""
        begins_ns = self.tape.note(Kind.BEGIN, 0)
        self.pauses.begin(begins_ns)
        return begins_ns - self._origin_ns

    def ends(self, end_ns: int) -> None:
        """The user's code has ended, `end_ns` after the run began."""
        self.pauses.end()
        self._mark_device(self._origin_ns + end_ns)
        if self.cores is not None:
            self.cores.end()

    def finish(self, end_ns: int, error: str) -> Steps:
        """The run is over, `end_ns` after it began, with this error, if any: its steps."""
        _running[:] = [pilot for pilot in _running if pilot is not self]
        self._outside = frozenset()
        self.tape.subscribe(frozenset(), lambda *_: None)  # whoever still marks wakes nobody
        steps = self.reader.finish(self._origin_ns + end_ns)
        if self.reader.fault is not None and self.fault is None:
            self.give_up(self.reader.fault)
        if self.events is not None:
            device_ns = self.events.finish(steps.start_ns + self._origin_ns, steps.end_ns + self._origin_ns)
            steps = replace(steps, device_ns=device_ns)
        self._workers.fail(error, end_ns)  # torch may have told the user's code and not us
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
        """Call that at the next step boundary, in the user's code; from then on nothing is measured."""
        self._terminate = write
        self._act_soon()

    def _act_soon(self) -> None:
        self.tape.wake_at(0)
        if self.stepless:
            self._hear_modules(True)

    def terminate(self) -> None:
        """Do it now, on the training thread."""
        write, self._terminate = self._terminate, None
        if write is not None and self.fault is None:
            self.tape.note(Kind.STOP, 0)
            self.fault = _Terminated()
            write()

    def step(self) -> None:
        """A step ends here, says the user."""
        if self.fault is not None:
            return
        try:
            self.tape.mark(Kind.HAND, 0)
        except Exception as e:
            self.give_up_or_raise(e)

    def give_up_or_raise(self, error: Exception) -> None:
        """A mark has raised this, which is being handled. A fault of ours must not become the user's."""
        if death(str(error)) is not None:  # torch's signal handler raises wherever the main thread is
            raise error
        if self.fault is None:
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """Stop measuring after a fault of our own; the run is kept as far as it went."""
        self.tape.note(Kind.STOP, 0)
        self.fault = error
        reason = f"gpulab failed while measuring ({type(error).__name__}: {error})"
        self.missing.append(Missing("steps", reason, self._now(), "steps"))
        self.phases.abandon()

    def _now(self) -> int:
        return perf_counter_ns() - self._origin_ns

    # -- marks from the hooks ------------------------------------------------------------------------------------

    def act(self, t_ns: int, kind: int, argument: int, subject: Any) -> None:
        """A mark was made, and there may be something to do. `subject`: the call's arguments, its result or error."""
        if self.fault is not None or os.getpid() != self._process:
            self.tape.wake_at(NEVER)
        elif self._due:
            self._stop_at(kind)
        elif kind in RARE or self._must_act() or self.tape.count >= self._due_at:
            self._act(t_ns, kind, argument, subject, in_time=self.tape.count >= self._due_at)
        else:  # somebody else has read, or a GPU's clock wants to know
            if kind == Kind.STEPPED and self.events is not None:
                self.events.updated(subject)
            if kind == self._ends:
                self._at_boundary(t_ns)
            elif kind == Kind.BACKWARD and self.peaks is not None:
                self.peaks.at_backward()
            self._sleep()

    def _act(self, t_ns: int, kind: int, argument: int, subject: Any, *, in_time: bool) -> None:
        """`in_time`: a step that has ended since the last look ended at this mark."""
        match kind:
            case Kind.ITER | Kind.ASK:
                self._asked(t_ns, argument, subject[0], fresh=kind == Kind.ITER)
            case Kind.GOT:
                self._starting_workers, self._expects_batch = 0, False
                self.loaders.gave(self._asking, subject)
            case Kind.ITERATOR:
                self.phases.loader_ends()
            case Kind.END:
                self._ended(subject)
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
            if self.stopping and not self._due and not self.reader.finder.training:
                self._leave()
            if kind == Kind.ITER and not self._due:
                self.phases.loader_begins()
        self.tape.note(Kind.OWN, perf_counter_ns() - since_ns)
        self._plan()

    def _must_act(self) -> bool:
        return self.stopping or self._terminate is not None or self._expects_batch or self.phases.profiling

    def _plan(self) -> None:
        """Sleep until there may be something to do: after so many marks, as each ends one step at most."""
        finder = self.reader.finder
        learns = finder.trains and (finder.without_optimizer or self.counted < LEARNED_AFTER)
        until = min(self.phases.unchanged_until, NEVER if self._wanted is None else self._wanted)
        self._due_at = self.tape.count + (0 if learns else min(LONGEST, finder.marks_until(until)))
        if self.events is not None or self.peaks is not None:
            self.tape.subscribe(RARE | {Kind.BACKWARD, Kind.STEPPED, self._ends or Kind.ASK}, self.act)
        self._sleep()

    def _sleep(self) -> None:
        self.tape.wake_at(self._due_at - self.tape.packed_count)
        if self._must_act():  # another thread may just have asked for it
            self.tape.wake_at(0)

    def _asked(self, t_ns: int, loader: int, owner: Any, *, fresh: bool) -> None:
        self.compilations.poll()
        self._asking, self._owner = loader, weakref.ref(owner)
        if fresh:
            self.pauses.place(t_ns, sys._getframe())  # a frame in a variable of its own is a cycle
            self.loop.asked(sys._getframe())
        if fresh or not self.loaders.met:
            self._mark_device(t_ns)  # a step may begin here without an end of one before it
            self._expects_batch = True
            self._meet_loader(loader, owner)
            self._hear_modules(False)

    def _ended(self, error: object) -> None:
        """An iterator has no batch but this: perhaps one of its workers died."""
        self._expects_batch = False
        self.loaders.ended(self._asking)
        if isinstance(error, RuntimeError):
            self._workers.fail(str(error), self._now(), self._owner())

    def _stop_at(self, kind: int) -> None:
        if kind in (Kind.ITER, Kind.ASK):
            self._leave()
        elif kind in (Kind.BACKWARD, Kind.GRAD, Kind.STEP, Kind.HAND):
            raise StopRun(self._capture)

    def called(self) -> None:
        """A module is called: before anything that makes steps this may be code without any, so trace it from here."""
        if self.fault is not None:
            return
        try:
            if self._due:
                raise StopRun(self._capture)
            self._calls += 1
            self.compilations.poll()
            self._hear_modules(False)
            if not self.stepless:
                return
            if self.stopping:
                raise StopRun(self._capture)
            if self._terminate is not None:
                return self.terminate()
            if self._calls == 1 and not self._will_train:  # else steps will come, and this trace will be of no use
                self.phases.profile_whole()
            self.phases.end_overdue(stepless=True)
        except Exception as e:
            self.give_up_or_raise(e)

    @property
    def stepless(self) -> bool:
        """Whether nothing that makes steps was seen so far."""
        return not self.reader.finder.has_loader and not self.counted

    def _hear_modules(self, wanted: bool) -> None:
        if self._modules is not None:
            (self._modules.on if wanted else self._modules.off)()

    # -- steps ---------------------------------------------------------------------------------------------------

    def _read(self, t_ns: int, kind: int, *, in_time: bool) -> int:
        """See what the marks make of the steps. Time in which the profiler was touched belongs to no step.

        Returns since when gpulab is at work in the open step.
        """
        finder, phases = self.reader.read(), self.phases
        if self.reader.fault is not None:
            raise self.reader.fault
        if finder.generation != self._generation:
            self._begin_again()
        touched = False
        if finder.count > self.counted and (in_time or finder.end_ns == t_ns):
            self._ends = kind
            self._at_boundary(t_ns)
            touched = self._boundary(finder)
        elif finder.count > self.counted:  # amid a step that nobody waits for
            self.counted = finder.count
        elif phases.profiling:
            touched = phases.end_overdue(stepless=self.stepless)
        if not touched:
            return t_ns
        self._resume(profiler_edge=not phases.profiling)
        phases.step_begins()
        return perf_counter_ns()

    def _at_boundary(self, t_ns: int) -> None:
        """A step may end here: what is read of the devices at its end."""
        self._mark_device(t_ns)
        if self.peaks is not None:
            self.peaks.at_step()

    def _boundary(self, finder: StepFinder) -> bool:
        """Steps were closed: end the run or go on. Returns whether the profiler was touched."""
        before, self.counted = self.counted, finder.count
        if finder.feeder != self._feeder or self.counted == 2:
            self._note_feeder(finder)
        if self._terminate is not None:
            self.terminate()
            return False
        phases = self.phases
        ending = self.stopping or (self._wanted is not None and self._enough(self._wanted))
        if self.counted < phases.unchanged_until and not ending:
            return False
        touched = phases.advance(self.counted)
        if ending:
            self._end_soon()
        else:
            touched = phases.begin(before, self.counted) or touched
        self.tape.note(Kind.PHASE, phases.next_phase())
        return touched

    def overdue(self) -> None:
        """A window has been open for long, and the user's code has given no mark."""
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
        """A step ends or begins: an event tells later when the GPU was there."""
        if self.events is not None:
            self.events.mark(t_ns)

    def _enough(self, wanted: int) -> bool:
        """Whether there are so many steps. Batches before the training that the code announces do not count."""
        return self.counted >= wanted and (self.reader.finder.trains or not self._will_train)

    def _end_soon(self) -> None:
        """End the run here; inside of `Optimizer.step` at the next thing the loop does: a scheduler steps before."""
        self._due = True
        self.tape.note(Kind.STOP, 0)
        if not self.reader.finder.optimizer_ends_steps:
            self._leave()
        self._hear_modules(True)

    def _leave(self) -> None:
        """End the run here; where that would end a generator of the user's, at the next thing the loop does."""
        self._due = True
        self.tape.note(Kind.STOP, 0)
        if self._passed_by == PASSED_BY or not inside_generator(self._outside):
            raise StopRun(self._capture)
        self._passed_by += 1
        self._hear_modules(True)

    def _begin_again(self) -> None:
        """Steps counted so far were none (evaluation before training): the phases start over."""
        self._generation = self.reader.finder.generation
        self.counted, self._feeder = 0, None
        self.phases.begin_again()
        self.tape.note(Kind.PHASE, Phase.WARMUP)

    def _meet_loader(self, number: int, owner: Any) -> None:
        """A loader is asked for the first time, or anew: it may be the one that feeds the steps."""
        described = self.loaders.meet(number, owner, self.reader.finder.feeder)
        if described is not None and not self.counted:
            self.loaders.record = described
            self.phases.expect(described.length)
        self._workers.meet(owner, self._now())
        self._starting_workers = getattr(owner, "num_workers", 0)  # an iterator has started its own

    def _note_feeder(self, finder: StepFinder) -> None:
        self._feeder = finder.feeder
        loader = self.loaders.feeds(finder.feeder)
        if loader is not None and loader.length is not None and self.counted == 2:
            self.phases.expect(loader.length // max(1, finder.last_batches()))


class ShortRun(Pilot):
    """Counts the steps of the code of a `with` block and ends it after `step_limit` of them.

    `on_gpu`: its steps are timed there, too, and the GPU is waited for at the end. Afterwards `steps` are all steps,
    unless there is a `fault` of ours; other exceptions than our own end of the run pass.
    """

    def __init__(self, step_limit: int, code: str = "", *, on_gpu: bool = False) -> None:
        settings = Settings(steps=step_limit, trace=False, live=False, save=False)
        self.origin_ns = perf_counter_ns()
        # never traced, so no window is made
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
