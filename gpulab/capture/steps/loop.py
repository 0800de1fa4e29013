"""The user's training loop as its marks tell it: counts its steps, ends it at a step boundary when asked to."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import traceback
from collections import deque
from collections.abc import Callable
from time import perf_counter_ns
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVarTuple

from msgspec.structs import replace

from gpulab.capture.dataloader.batch_clock import LoadingClock
from gpulab.capture.dataloader.description import Loaders, samples_in
from gpulab.capture.dataloader.wait_hooks import Answer
from gpulab.capture.dataloader.worker_faults import Workers, death
from gpulab.capture.meters.core_watch import CoreWatch
from gpulab.capture.meters.memory_peaks import PeakWatch
from gpulab.capture.pauses.batch_lines import BatchLines
from gpulab.capture.pauses.batch_times import BatchTimes
from gpulab.capture.pauses.pauses import Pauses
from gpulab.capture.pauses.update_line import UpdateLine
from gpulab.capture.steps.device_events import StepEvents
from gpulab.capture.steps.model_inputs import ModelInputs
from gpulab.capture.steps.profiler_schedule import Phases
from gpulab.capture.steps.profiler_window import Window
from gpulab.capture.steps.step_boundaries import StepTracker
from gpulab.capture.steps.weights import UpdateWatch, WeightWatch
from gpulab.capture.tape.marks import Kind, Tape
from gpulab.formatting import plural
from gpulab.knobs import preparation
from gpulab.run import Missing, Phase, Settings, StepFlag, Steps

if TYPE_CHECKING:
    from gpulab.capture.steps.module_hook import ModuleHook

TRAINING = (
    r"\.(backward|fit|step)\(|trainer\.train\(|(?<![.\w])train\w*\("  # a cell that evaluates first will still train
)

BEFORE_STEPS = "before the first step"
GENERATORS = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
PASSED_BY = 16  # requests inside of a generator that a run which is to end lets pass: code that only loads ends, too

Closed = tuple[int, int, int, int]  # of a step: start, end, data wait (ns), samples (-1 unknown)


_running: list[Loop] = []  # those in this process, innermost last: `gpulab.step()` finds them here


def mark_step() -> None:
    """Mark the end of a step by hand, where neither a DataLoader nor an optimizer tells. Does nothing outside a run."""
    if _running:
        _running[-1].step()


class StopRun(BaseException):
    """Ends the user's code at a step boundary. No Exception, so that `except Exception` lets it pass."""

    def __init__(self, capture: object) -> None:
        super().__init__()
        self.capture = capture


def stop_behind(error: BaseException | None) -> StopRun | None:
    """What ended the code: the error itself, or the StopRun in whose place it came.

    A library may clean up what was only half there when the run ended, and fail at it.
    """
    while isinstance(error, Exception):
        error = error.__context__
    return error if isinstance(error, StopRun) else None


class _Terminated(Exception):
    """The run was written when the process was asked to end; the user's code may go on, and nothing is measured."""


Given = TypeVarTuple("Given")


def guarded(mark: Callable[[Loop, *Given], None]) -> Callable[[Loop, *Given], None]:
    """A fault of ours must not become the user's: it ends the measuring, not the cell.

    The marks of each step do the same by themselves: one call more for each is a tenth of what they cost.
    """

    @functools.wraps(mark)
    def careful(self: Loop, *args: *Given) -> None:
        if self.fault is not None:
            return
        try:
            mark(self, *args)
        except Exception as e:
            self.give_up_or_raise(e)

    return careful


class Loop:
    """Hears the marks of the hooks, on the training thread; the run began at `origin_ns` (`time.perf_counter_ns`).

    Raises `StopRun(capture)` through the hooks into the user's code where the run is to end. `new_window` makes a
    profiler session. `fresh` is given each step as it is closed, for a live view. On a `tape` it marks what it does.
    """

    def __init__(
        self,
        capture: object,
        settings: Settings,
        code: str,
        new_window: Callable[[], Window],
        origin_ns: int,
        fresh: deque[Closed] | None,
        *,
        on_gpu: bool = False,
        tape: Tape | None = None,
    ) -> None:
        self._capture = capture
        self.tape = tape
        self._mark = tape.mark if tape is not None else _unmarked
        self._wanted = settings.steps
        self._will_train = re.search(TRAINING, code) is not None
        self._origin_ns = origin_ns
        self._fresh = fresh
        self._workers = Workers()
        self._feeder: int | None = None
        self._weights: WeightWatch | None = None
        self._updates = UpdateWatch()
        self._modules: ModuleHook | None = None
        self.model_inputs = ModelInputs()
        self._calls = 0
        self._due = False  # the run ends at the next chance
        self._terminate: Callable[[], None] | None = None  # called at the next step boundary, once
        self._passed_by = 0  # chances not taken: they were inside of a generator
        self._outside: frozenset[FrameType] = frozenset()  # what called the user's code
        self._generation = 0
        self._compiled = 0
        self.fault: Exception | None = None
        self.phases = Phases(settings, code, new_window, self.overdue, lambda: self._hear_modules(True), on_gpu=on_gpu)
        self.tracker = StepTracker(origin_ns)
        self.loaders = Loaders()
        self.pauses = Pauses()
        self.update_line = UpdateLine()
        self.batch_lines = BatchLines(code)
        self.own_batches = BatchTimes(self.batch_lines)
        self._asked = 0  # the loader
        self.look: Callable[[], None] = _nothing  # for what was imported meanwhile
        self.clock: LoadingClock | None = None
        self.missing: list[Missing] = []
        self.stopping = False  # the run ends at the next step boundary
        self.counted = 0  # steps
        self.epoch_steps: int | None = None
        self._starting_workers = 0  # of the loader that has given no batch yet
        self.hooks_ns = 0  # time inside our marks
        self.events = StepEvents() if on_gpu else None
        self.peaks: PeakWatch | None = None  # of a GPU's memory
        self.cores: CoreWatch | None = None

    @property
    def beside_steps(self) -> str:
        """What goes on now and is no step, as far as it is known; empty while there are steps. From any thread."""
        if preparation.doing.words or self.counted:
            return preparation.doing.words
        count = self._starting_workers
        return f"starting {plural(count, 'worker')}" if count else BEFORE_STEPS

    def begin(self, modules: ModuleHook | None) -> None:
        """The user's code is about to run. What is compiled by now is not its doing."""
        self._modules = modules
        self._outside = _frames()
        self._newly_compiled()
        _running.append(self)

    def ends(self, end_ns: int) -> None:
        """The user's code has ended, `end_ns` after the run began."""
        self.pauses.end()
        self._mark_device(self._origin_ns + end_ns)
        if self.cores is not None:
            self.cores.end()

    def finish(self, end_ns: int, error: str) -> Steps:
        """The run is over, `end_ns` after it began, with this error, if any: its steps."""
        _running[:] = [loop for loop in _running if loop is not self]
        self._outside = frozenset()
        steps = self.tracker.finish(self._origin_ns + end_ns)
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
        if self.stepless:
            self._hear_modules(True)

    def terminate_soon(self, write: Callable[[], None]) -> None:
        """Call that at the next step boundary, in the user's code; from then on nothing is measured."""
        self._terminate = write
        if self.stepless:
            self._hear_modules(True)

    def terminate(self) -> None:
        """Do it now, on the training thread."""
        write, self._terminate = self._terminate, None
        if write is not None and self.fault is None:
            self._mark(Kind.STOP, 0)
            self.fault = _Terminated()
            write()

    @guarded
    def step(self) -> None:
        """A step ends here, says the user."""
        self._mark(Kind.HAND, 0)
        entered = perf_counter_ns()
        if self._due:
            raise StopRun(self._capture)
        self._spent(self._after_mark(self.tracker.manual(entered), entered))

    def give_up_or_raise(self, error: Exception) -> None:
        """A mark has raised this, which is being handled."""
        if death(str(error)) is not None:  # torch's signal handler raises wherever the main thread is
            raise error
        self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """Stop measuring after a fault of our own; the run is kept as far as it went."""
        self._mark(Kind.STOP, 0)
        self.fault = error
        reason = f"gpulab failed while measuring ({type(error).__name__}: {error})"
        self.missing.append(Missing("steps", reason, self._now(), "steps"))
        self.phases.abandon()

    def _now(self) -> int:
        return perf_counter_ns() - self._origin_ns

    # -- marks from the hooks ------------------------------------------------------------------------------------

    def asked(self, loader: int, owner: Any, fresh: bool) -> None:
        if self.fault is not None:
            return
        try:
            since = perf_counter_ns()
            if self._due:
                self._leave()
                return
            self._asked = loader
            if self.clock is not None:
                self.clock.asked = loader
            self.look()
            self.pauses.asked(loader, sys._getframe() if fresh else None, since, fresh=fresh)
            if fresh:
                self.update_line.asked(sys._getframe())
            if fresh or not self.loaders.met:
                self._mark_device(since)  # a step may begin here without an end of one before it
                self._meet_loader(loader, owner)
                self._hear_modules(False)
            if self._weights is not None:
                self._look_at_weights(self._weights)
            since = self._after_mark(self.tracker.loader_asked(loader, since, fresh=fresh), since)
            if self.stopping and not self.tracker.training:
                since = self._spent(since)
                self._leave()
            if fresh and not self._due:
                self.phases.loader_begins()
            now = perf_counter_ns()
            self.hooks_ns += now - since
            self.tracker.waits_from(now, now - since)
        except Exception as e:
            self.give_up_or_raise(e)

    def answered(self, answer: Answer, batch: Any) -> None:
        if self._due or self.fault is not None:  # a batch that comes after the end belongs to no step
            return
        try:
            entered, samples = perf_counter_ns(), None
            if answer == "batch":
                self._starting_workers = 0
                self.loaders.gave(self._asked, batch)
                samples = samples_in(batch)
            elif answer == "iterator":
                self.phases.loader_ends()
            elif answer == "end":
                self.loaders.ended(self._asked)
            self.pauses.passes.answered(entered, batch=answer == "batch", end=answer == "end")
            waited_ns = 0
            if self.clock is not None:
                waited_ns, self.clock.own_ns = self.clock.own_ns, 0
            self.tracker.loader_answered(entered, answer, samples, waited_ns)
            now = perf_counter_ns()
            self.hooks_ns += waited_ns + now - entered
            self.tracker.spent(now - entered)
        except Exception as e:
            self.give_up_or_raise(e)

    @guarded
    def failed(self, owner: Any, error: RuntimeError) -> None:
        """An iterator has no batch but this: perhaps one of its workers died."""
        self._workers.fail(str(error), self._now(), owner)

    def optimizing(self) -> None:
        if self._due and self.fault is None:
            raise StopRun(self._capture)

    def optimized(self, optimizer: Any, start_ns: int) -> None:
        if self.fault is not None:
            return
        try:
            entered = perf_counter_ns()
            if not self.update_line.learned:
                self.update_line.met(sys._getframe())
            self.pauses.trained()
            if self.events is not None:
                self.events.updated(optimizer)
            since = self._after_mark(self.tracker.optimized(id(optimizer), start_ns, entered), entered)
            now = perf_counter_ns()
            self.hooks_ns += now - since
            self.tracker.spent(now - since)
        except Exception as e:
            self.give_up_or_raise(e)

    def backward(self, root: Any) -> None:
        if self.fault is not None:
            return
        try:
            if self._due:
                raise StopRun(self._capture)
            since = begins = perf_counter_ns()
            self.look()
            self.pauses.trained()
            self.batch_lines.met(sys._getframe())
            tracker = self.tracker
            without_optimizer = tracker.without_optimizer
            if without_optimizer:
                begins = self._spent(since)
                since = self._look_for_update(root, begins)
            tracker.backward(begins)
            if self.peaks is not None:
                self.peaks.at_backward()
            if without_optimizer and self._weights is None and tracker.undecided:
                self._weights = WeightWatch.of(root)
            now = perf_counter_ns()
            self.hooks_ns += now - since
            tracker.spent(now - since)
        except Exception as e:
            self.give_up_or_raise(e)

    @guarded
    def differentiated(self, outputs: Any) -> None:
        """`torch.autograd.grad`: where weights are updated by hand it may stand for a backward pass."""
        if self._due:
            raise StopRun(self._capture)
        if self.tracker.without_optimizer:
            self._spent(self._look_for_update(outputs, perf_counter_ns()))

    def _look_for_update(self, root: Any, entered: int) -> int:
        """Whether weights have changed since the last backward pass and no optimizer did it: a step ends here.

        Returns since when a mark of ours runs in the open step.
        """
        if not self._updates.before(root):
            return entered
        return self._after_mark(self.tracker.updated(entered), entered)

    @guarded
    def called(self) -> None:
        """A module is called: before anything that makes steps this may be code without any, so trace it from here."""
        if self._due:
            raise StopRun(self._capture)
        self._calls += 1
        self.look()
        self._hear_modules(False)
        if not self.stepless:
            return
        if self.stopping:
            raise StopRun(self._capture)
        if self._terminate is not None:
            self.terminate()
            return
        if self._calls == 1:
            self.phases.profile_whole()
        self.phases.end_overdue(stepless=True)

    @property
    def stepless(self) -> bool:
        """Whether nothing that makes steps was seen so far."""
        return not self.tracker.loader_seen and not self.counted

    def _hear_modules(self, wanted: bool) -> None:
        if self._modules is not None:
            (self._modules.on if wanted else self._modules.off)()

    # -- steps ---------------------------------------------------------------------------------------------------

    def _after_mark(self, closed: bool, entered: int) -> int:
        """See what a mark has made of the steps. Time in which the profiler was touched belongs to no step.

        Returns since when a mark of ours runs in the open step.
        """
        tracker, phases = self.tracker, self.phases
        if tracker.generation != self._generation:
            self._begin_again()
        touched = False
        count = tracker.count if closed else 0
        if count > self.counted:
            if self.events is not None:
                self.events.mark(entered)
            if self.cores is not None:
                self.cores.at_step(entered)
            touched = self._boundary(count)
        elif phases.profiling:
            touched = phases.end_overdue(stepless=self.stepless)
        if not touched:
            return entered
        self._resume(profiler_edge=not phases.profiling)
        phases.step_begins()
        return perf_counter_ns()

    def _spent(self, since_ns: int) -> int:
        """Since then a mark of ours has run: that is no part of the step. Returns until when."""
        now = perf_counter_ns()
        self.hooks_ns += now - since_ns
        self.tracker.spent(now - since_ns)
        return now

    def _boundary(self, count: int) -> bool:
        """Steps were closed: tell the view, end the run or go on. Returns whether the profiler was touched."""
        before, self.counted = self.counted, count
        self._note_step()
        if self._terminate is not None:
            self.terminate()
            return False
        if self.peaks is not None:
            self.peaks.at_step()
        phases = self.phases
        ending = self.stopping or (self._wanted is not None and self._enough(self._wanted))
        if count < phases.unchanged_until and not ending:
            return False
        touched = phases.closed(count)
        if ending:
            self._end_soon()
        else:
            touched = phases.begin(before, count) or touched
        self.tracker.phase = phases.next_phase()
        self._mark(Kind.PHASE, self.tracker.phase)
        if phases.profiled and not ending:
            self.own_batches.begin(fed=bool(self.loaders.met))
        return touched

    @guarded
    def overdue(self) -> None:
        """A window has been open for long, and the user's code has given no mark."""
        if self.phases.end_overdue(stepless=self.stepless):
            self._resume(profiler_edge=True)

    def _resume(self, *, profiler_edge: bool) -> None:
        """The open step begins now."""
        self._mark(Kind.RESUME, profiler_edge)
        now = perf_counter_ns()
        self.tracker.resume(now, profiler_edge=profiler_edge)
        self._mark_device(now)
        if self.cores is not None:
            self.cores.after_profiler()

    def _mark_device(self, t_ns: int) -> None:
        """A step ends or begins: an event tells later when the GPU was there."""
        if self.events is not None:
            self.events.mark(t_ns)

    def _enough(self, wanted: int) -> bool:
        """Whether there are so many steps. Batches before the training that the code announces do not count."""
        if self.counted < wanted:
            return False
        return self.tracker.trains or not self._will_train

    def _end_soon(self) -> None:
        """End the run here; inside of `Optimizer.step` at the next thing the loop does: a scheduler steps before."""
        self._due = True
        self._mark(Kind.STOP, 0)
        if not self.tracker.optimizer_ends_steps:
            self._leave()
        self._hear_modules(True)

    def _leave(self) -> None:
        """End the run here; where that would end a generator of the user's, at the next thing the loop does."""
        self._due = True
        self._mark(Kind.STOP, 0)
        if self._passed_by == PASSED_BY or not _inside_generator(self._outside):
            raise StopRun(self._capture)
        self._passed_by += 1
        self._hear_modules(True)

    def _begin_again(self) -> None:
        """Steps counted so far were none (evaluation before training): the phases start over."""
        self._generation = self.tracker.generation
        self.counted, self._feeder = 0, None
        self.phases.begin_again()
        self.tracker.phase = Phase.WARMUP
        self._mark(Kind.PHASE, Phase.WARMUP)

    def _note_step(self) -> None:
        tracker = self.tracker
        if tracker.feeder != self._feeder or self.counted == 2:
            self._note_feeder(tracker.feeder)
        if self._newly_compiled():
            tracker.flag(StepFlag.COMPILE)
            self._mark(Kind.COMPILE, 0)
        if self._fresh is not None:
            self._fresh.append(tracker.last())

    def _newly_compiled(self) -> bool:
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo is None:
            return False
        graphs = dynamo.counters["stats"]["unique_graphs"] if "stats" in dynamo.counters else 0
        compiled, self._compiled = graphs > self._compiled, graphs
        return compiled

    def _look_at_weights(self, weights: WeightWatch) -> None:
        if not self.tracker.undecided:
            self._weights = None
        elif weights.changed():
            self.tracker.by_hand()

    # -- loaders -------------------------------------------------------------------------------------------------

    def _meet_loader(self, number: int, owner: Any) -> None:
        """A loader is asked for the first time, or anew: it may be the one that feeds the steps."""
        described = self.loaders.meet(number, owner, self.tracker.feeder)
        if described is not None and not self.counted:
            self.loaders.record = described
            self._expect(described.length)
        self._workers.meet(owner, self._now())
        self._starting_workers = getattr(owner, "num_workers", 0)  # an iterator has started its own

    def _expect(self, epoch_steps: int | None) -> None:
        """An epoch has so many steps, as far as the loader knows."""
        self.epoch_steps = epoch_steps
        self.phases.expect(epoch_steps)

    def _note_feeder(self, feeder: int | None) -> None:
        self._feeder = feeder
        loader = self.loaders.feeds(feeder) if feeder is not None else None
        if loader is not None and loader.length is not None and self.counted == 2:
            self._expect(loader.length // max(1, self.tracker.last_batches()))


def _frames() -> frozenset[FrameType]:
    """All that run on this thread now: those of the caller, its caller and so on."""
    return frozenset(frame for frame, _ in traceback.walk_stack(sys._getframe(1)))


def _inside_generator(outside: frozenset[FrameType]) -> bool:
    """Whether a generator runs between the caller and the frames `outside`. What is raised here would end it.

    `batches = cycle(loader)` in one cell and `next(batches)` in the next is common, and so is a loader within `tqdm`:
    a generator of an earlier cell that has ended gives nothing more.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame not in outside:
        if frame.f_code.co_flags & GENERATORS:
            return True
        frame = frame.f_back
    return False


def _nothing() -> None:
    pass


def _unmarked(kind: int, argument: int) -> None:
    """There is no tape."""
