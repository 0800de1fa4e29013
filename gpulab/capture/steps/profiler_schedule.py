"""The profiler's part of a run: when a window opens and ends, which recording is kept. Knows steps by number only."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter

from msgspec.structs import replace

from gpulab.capture.steps import schedule
from gpulab.capture.steps.deadline import Deadline
from gpulab.capture.steps.profiler_window import ProfilerUnavailable, Watched, Window, in_backward
from gpulab.devices import gpus_in_use
from gpulab.formatting import duration
from gpulab.live_feed import CapturePhase
from gpulab.run import Choice, Missing, Phase, Settings, Timeline

BREAKDOWN = "step breakdown, operators and kernels"
UNBOUNDED = 1.5  # times its limit: from there on the record says that a window could not be ended


class Phases:
    """Opens and closes profiler windows while steps are counted, on the training thread.

    `new_window` makes a profiler session. When a window has lasted long and no step ends it, `overdue` is called on the
    main thread; `unreachable`, on a thread of ours, where the training does not run on the main one. Methods that
    return a bool say whether they started or stopped the profiler: that time belongs to no step.
    """

    def __init__(
        self,
        settings: Settings,
        code: str,
        new_window: Callable[[], Window],
        overdue: Callable[[], None],
        unreachable: Callable[[], None],
        *,
        on_gpu: bool = False,
    ) -> None:
        self._settings = settings
        self._new_window = new_window
        self._overdue, self._unreachable = overdue, unreachable
        self._refused = _profiler_in_code(code)  # why the profiler cannot run at all
        self._hindered: str | None = None  # why it could not at some time
        self._on_gpu = on_gpu
        self._warm_s: float | None = None  # when the warm-up was over
        self._schedule = schedule.plan(settings, settings.steps, certain=False, on_gpu=on_gpu)
        self._window: Window | None = None
        self._planned: schedule.Window | None = None  # None while the whole code is profiled
        self._postponed: schedule.Window | None = None  # it was due, and the profiler must not be touched just then
        self._deadline: Deadline | None = None
        self._whole = False
        self._done = 0  # complete steps
        self.unchanged_until = 0  # complete steps: before so many there is nothing to do here
        self._notes: list[Choice] = []
        self.recording: Watched | None = None  # the one that is kept
        self.traced: tuple[int, ...] = ()  # steps that may lie wholly inside it
        self.truncated: str | None = None  # why it ended early
        self.missing: list[Missing] = []
        self.label: CapturePhase = "warm-up"
        self.start_cost_ns = 0
        self.stop_cost_ns = 0

    @property
    def profiling(self) -> bool:
        return self._window is not None

    @property
    def profiled(self) -> bool:
        """Whether a recording is kept and no window is open: what runs now is not profiled."""
        return self.recording is not None and self._window is None

    @property
    def cost_ns(self) -> int:
        """Time spent in starting and stopping the profiler so far."""
        return self.start_cost_ns + self.stop_cost_ns

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What was planned and why, and what could not be kept to."""
        return (*self._schedule.choices, *self._notes)

    # -- what happens in the loop --------------------------------------------------------------------------------

    def expect(self, epoch_steps: int | None) -> None:
        """An epoch has so many steps, as far as its loader knows. `--steps` is certain where one epoch has them."""
        asked = self._settings.steps
        certain = asked is not None and epoch_steps is not None and asked <= epoch_steps
        total = asked or epoch_steps
        self._schedule = schedule.plan(self._settings, total, certain=certain, on_gpu=self._on_gpu)
        self.unchanged_until = 0

    def profile_whole(self) -> None:
        """Profile from here: code that may have no steps."""
        if self._settings.trace and not self._whole and self._window is None:
            self._whole = self._start(schedule.TRACE_STEPLESS_LIMIT_S)

    def closed(self, done: int) -> bool:
        """`done` steps are complete: go on with the open window, or end it."""
        self._done = done
        if self._window is not None and not _may_touch():
            return False
        if self._whole and not self._settings.whole:
            self._forget_whole()
            return True
        return self._window is not None and self._continue(done)

    def begin(self, before: int, done: int) -> bool:
        """Open the window that is due now that `done` steps are complete (`before` at the last look), if one is."""
        planned = self._due(before, done) if self._window is None else None
        self._postponed = planned if planned is not None and gpus_in_use.in_graph_capture() else None
        if planned is None or self._postponed is not None or not self._start(schedule.TRACE_HARD_LIMIT_S):
            return False
        self._planned = replace(planned, after=done)
        return True

    def _due(self, before: int, done: int) -> schedule.Window | None:
        """The window that is due; the first one also where steps take so long that it would come late."""
        planned = self._schedule.window_at(before, done) or self._postponed
        if self._warm_s is None and done >= self._schedule.warmup:
            self._warm_s = perf_counter()
        if planned is None and self.recording is None and self._schedule.sooner_after <= done:
            late = perf_counter() - (self._warm_s or 0.0) > schedule.GPU_PATIENCE_S
            return self._schedule.windows[0] if late and done < self._schedule.windows[0].after else None
        return planned

    def next_phase(self) -> Phase:
        """In which phase the next step runs."""
        waits = self._postponed is not None or self._schedule.sooner_after < schedule.NEVER
        idle = self._window is None and not self._whole and not (waits and self.recording is None)
        self.unchanged_until = self._schedule.next_change(self._done) if idle else 0
        if self._window is not None:
            self.label = "profiling"
            return Phase.TRACED
        if self._done < self._schedule.warmup:
            self.label = "warm-up"
            return Phase.WARMUP
        self.label = "after profiling" if self.recording is not None else "measuring"
        return Phase.MEASURED

    def step_begins(self) -> None:
        """The next step begins now: annotate it, where steps are profiled."""
        if self._window is not None and self._planned is not None:
            self._window.step_begins(self._done + 1)

    def loader_begins(self) -> None:
        if self._window is not None:
            self._window.loader_begins()

    def loader_ends(self) -> None:
        if self._window is not None:
            self._window.loader_ends()

    def end_overdue(self, *, stepless: bool) -> bool:
        """End a window that has lasted too long. `stepless`: nothing that makes steps was seen so far."""
        if self._window is None or not _may_touch():
            return False
        limit_s, why = self._limit(stepless)
        if self._window.age_s <= limit_s:
            return False
        self._end(self._complete(), why)
        return True

    def begin_again(self) -> None:
        """Steps counted so far were none (evaluation before training): everything starts over."""
        self._done = self.unchanged_until = 0
        if self._window is not None:
            self._end(())
        self.recording, self.traced, self.truncated = None, (), None

    # -- the end of the run --------------------------------------------------------------------------------------

    def finish(self, *, stepless: bool) -> None:
        """The run is over: stop the profiler."""
        self.label = "ending"
        if self._window is None:
            return
        limit_s, _ = self._limit(stepless)
        age_s = self._window.age_s
        if age_s > UNBOUNDED * limit_s:
            why = f"it could not be ended after {limit_s:g} s: the code ran on another thread or in one long call"
            self._notes.append(Choice("traced window", duration(age_s * 1e6), why))
        self._end(self._complete())

    def abandon(self) -> None:
        """Stop the profiler, whatever it says: something of ours has failed."""
        window, self._window = self._window, None
        with suppress(Exception):
            if self._deadline is not None:
                self._deadline.cancel()
            if window is not None:
                window.stop()

    def timeline(self, origin_ns: int, step_count: int) -> Timeline | None:
        """The kept recording, on the run's clock; None where there is none, which `missing` then explains."""
        if self.recording is None:
            if self._settings.trace:
                self._lack(self._refused or self._hindered or _why_none(step_count))
            return None
        timeline = self.recording.timeline(origin_ns, event_limit=schedule.TRACE_EVENT_LIMIT)
        if len(timeline) == 0:
            self._lack("the profiler recorded no event; another profiler may have taken its place")
            return None
        if timeline.window_ns[1] < self.recording.ended_ns - origin_ns:
            self.truncated = f"more than {schedule.TRACE_EVENT_LIMIT:,} events were recorded: the rest was left out"
        return timeline

    # -- windows -------------------------------------------------------------------------------------------------

    def _start(self, limit_s: float) -> bool:
        if self._refused is not None:
            return False
        if in_backward():
            self._hindered = "its steps end within backward passes, where torch's profiler cannot be started"
            return False
        if gpus_in_use.in_graph_capture():
            self._hindered = "the code captured a CUDA graph just then, which the profiler's start would have broken"
            return False
        window = self._new_window()
        try:
            window.start()
        except ProfilerUnavailable as e:
            self._refused = str(e)
            return False
        self._window, self._planned = window, None
        self.start_cost_ns += window.start_cost_ns
        self._deadline = Deadline(limit_s, self._overdue, self._unreachable)
        self._deadline.start()
        return True

    def _continue(self, done: int) -> bool:
        """One more profiled step is complete: go on, or end the window."""
        assert self._window is not None
        if self._planned is None:
            return self.end_overdue(stepless=False)
        planned = self._planned
        traced = done - planned.after
        whole = traced >= planned.lead_in + planned.length
        if not whole and self._window.age_s <= schedule.TRACE_LIMIT_S:
            self._window.step_begins(done + 1)
            return False
        why = None if whole else f"ended after {traced} steps: longer than {schedule.TRACE_LIMIT_S:g} s"
        self._end(self._without_lead_in(range(planned.after + 1, done + 1)), why)
        return True

    def _limit(self, stepless: bool) -> tuple[float, str]:
        """How long the open window may last, in s, and what to say where it did."""
        if self._planned is not None:
            return schedule.TRACE_HARD_LIMIT_S, f"one step ran longer than {schedule.TRACE_HARD_LIMIT_S:g} s"
        limit_s = schedule.TRACE_STEPLESS_LIMIT_S if stepless else schedule.TRACE_HARD_LIMIT_S
        what = "code without steps" if stepless else "the whole code"
        return limit_s, f"{what} is traced for {limit_s:g} s at most"

    def _complete(self) -> tuple[int, ...]:
        """The steps complete in a window that is cut short."""
        assert self._window is not None
        begun = range(1, self._done + 1) if self._whole else (n for n, _ in self._window.marks)
        return self._without_lead_in([n for n in begun if n <= self._done])

    def _without_lead_in(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """The steps that count; without any, those that lead in."""
        lead_in = self._planned.lead_in if self._planned is not None else 0
        return tuple(numbers[lead_in:] or numbers)

    def _end(self, traced: tuple[int, ...], truncated: str | None = None) -> None:
        """Stop the profiler. A window in which no step is whole is kept only where nothing better can come or is."""
        window, self._window, self._planned = self._window, None, None
        assert window is not None and self._deadline is not None
        self._deadline.cancel()
        recording = window.stop()
        self.stop_cost_ns += window.stop_cost_ns
        if traced or self._whole or (self.recording is None and truncated is not None):
            self.recording, self.traced, self.truncated = recording, traced, truncated

    def _forget_whole(self) -> None:
        """Steps were found after all: the trace from the first call is of no use."""
        self._whole = False
        if self._window is not None:
            self._end(())
        self.recording, self.traced, self.truncated = None, (), None

    def _lack(self, reason: str) -> None:
        self.missing.append(Missing(BREAKDOWN, reason, key="breakdown"))


def _why_none(step_count: int) -> str:
    if step_count == 0:
        return "no step was found to profile; mark steps with gpulab.step(), or add --whole to trace from the start"
    return f"the run ended after {step_count} steps, before the traced window"


def _may_touch() -> bool:
    """Whether the profiler may be started or stopped here: not inside a backward pass nor a graph capture."""
    return not in_backward() and not gpus_in_use.in_graph_capture()


_PROFILER = re.compile(
    r"profiler\.(profile|emit_nvtx|emit_itt)\s*\("
    r"|from\s+torch\.(autograd\.)?profiler\s+import[^\n]*\b(profile|emit_nvtx|emit_itt)\b"
    r"|PyTorchProfiler|profiler\s*=\s*['\"]pytorch"
)


def _profiler_in_code(code: str) -> str | None:
    """Torch allows one profiler at a time: leave it to a cell that brings its own."""
    if _PROFILER.search(code):
        return "your code uses torch's profiler itself, and only one can be active"
    return None
