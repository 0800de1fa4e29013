"""Plans when a run warms up, measures and profiles, and opens and closes its profiler windows accordingly."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter

from msgspec import Struct
from msgspec.structs import replace

from gpulab.capture.profiler import (
    MIB,
    ProfilerUnavailable,
    SessionMemory,
    Window,
    WindowRecording,
    in_backward,
    return_free_memory,
)
from gpulab.capture.threads import Deadline
from gpulab.devices import gpus
from gpulab.formatting import duration, plural, size
from gpulab.live_feed import CapturePhase
from gpulab.run import Choice, Missing, Phase, Settings, Timeline
from gpulab.tape.marks import NEVER

BREAKDOWN = "step breakdown, operators and kernels"
NO_STEP = "no step was found to profile; mark steps with gpulab.step(), or add --whole to trace from the start"
UNBOUNDED = 1.5  # times its limit: if a window is longer, it could not be ended, which the record says
WARMUP = 3  # definitions.md, "Honest comparison"
MEASURED = 12
TRACED = 5
EARLY_TRACED = 2
SECOND_WINDOW_AT = 40  # steps: a run of unknown length that gets so far has a full window instead of its early one
ROOM_FOR_TWO = 20  # steps of an epoch that has room for measured steps between an early window and a full one
TRACE_LIMIT_S = 3.0  # after that, the window ends at the next boundary
TRACE_HARD_LIMIT_S = 30.0  # after that, it ends within a step
TRACE_EVENT_LIMIT = 1_000_000
# 32 MiB are 150,000 events, which need 250 MiB at the end of the session. On a GPU each operator has three rows, and
# CUPTI has buffers of its own.
TRACE_LIMIT_BYTES, GPU_TRACE_LIMIT_BYTES = 32 * MIB, 128 * MIB
# CUPTI may stay after a session and slow CUDA calls as long as the process lives (pitfalls.md, "torch.profiler"). So on
# a GPU at least this many steps are measured before the first session, and at most this many if an epoch is long.
GPU_MEASURED, GPU_MOST_MEASURED = 8, 30
GPU_FEWEST_MEASURED = 3  # steps that suffice after `GPU_PATIENCE_S` if steps are long
GPU_PATIENCE_S = 10.0
# The profiler waits for the GPU before it starts, so a window's first step finds an empty queue: it does not count.
GPU_LEAD_IN = 1
TRACE_STEPLESS_LIMIT_S = 10.0  # for code without steps, which nothing else bounds: at 100,000 events per second

_PROFILER = re.compile(
    r"profiler\.(profile|emit_nvtx|emit_itt)\s*\("
    r"|from\s+torch\.(autograd\.)?profiler\s+import[^\n]*\b(profile|emit_nvtx|emit_itt)\b"
    r"|PyTorchProfiler|profiler\s*=\s*['\"]pytorch"
)
_PROFILES_ITSELF = "your code uses torch's profiler itself, and only one can be active"


class Phases:
    """Opens and closes profiler windows as steps end, on the training thread.

    `new_window` makes a profiler session. If a window has lasted long and no step ends it, `overdue` is called on the
    main thread or, if the training runs on another one, `unreachable` on a separate thread. Methods that return a bool
    return whether they started or stopped the profiler: that time belongs to no step.
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
        self._no_profiler = _PROFILES_ITSELF if _PROFILER.search(code) else None  # why the profiler can never run
        self._obstacle: str | None = None  # why it could not run at some time
        self._on_gpu = on_gpu
        self._warm_s: float | None = None  # when the warm-up was over
        self._schedule = plan(settings, settings.steps, certain=False, on_gpu=on_gpu)
        self._window: Window | None = None
        self._planned: PlannedWindow | None = None  # None while the whole code is profiled
        self._postponed: PlannedWindow | None = None  # was due when the profiler could not be started
        self._deadline: Deadline | None = None
        self._memory: SessionMemory | None = None  # of the newest window
        self._limit_bytes = GPU_TRACE_LIMIT_BYTES if on_gpu else TRACE_LIMIT_BYTES
        self._whole = False
        self._done = 0  # complete steps
        self.epoch_steps: int | None = None  # as far as its loader knows
        self.unchanged_until = 0  # the number of complete steps before which there is nothing to do here
        self._deviations: list[Choice] = []
        self.recording: WindowRecording | None = None  # the recording to keep
        self.traced: tuple[int, ...] = ()  # steps that may lie wholly inside the recording
        self.truncated: str | None = None  # why it ended early
        self.missing: list[Missing] = []
        self.label: CapturePhase = "warm-up"
        self.start_cost_ns = 0
        self.stop_cost_ns = 0

    @property
    def profiling(self) -> bool:
        return self._window is not None

    @property
    def cost_ns(self) -> int:
        """Time spent in starting and stopping the profiler so far."""
        return self.start_cost_ns + self.stop_cost_ns

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The plan with its reasons, and deviations from it."""
        return (*self._schedule.choices, *self._deviations)

    # -- what happens in the loop --------------------------------------------------------------------------------

    def expect(self, epoch_steps: int | None) -> None:
        """An epoch has that many steps, as its loader says. `--steps` is certain if it fits into one epoch."""
        self.epoch_steps, step_limit = epoch_steps, self._settings.steps
        certain = step_limit is not None and epoch_steps is not None and step_limit <= epoch_steps
        total = step_limit or epoch_steps
        self._schedule = plan(self._settings, total, certain=certain, on_gpu=self._on_gpu)
        self.unchanged_until = 0

    def profile_whole(self) -> None:
        """Profile from here: code that may have no steps."""
        if self._settings.trace and not self._whole and self._window is None:
            self._whole = self._start(TRACE_STEPLESS_LIMIT_S)

    def advance(self, done: int) -> bool:
        """`done` steps are complete: continue the open window, or end it."""
        self._done = done
        if self._window is not None and not _can_switch_profiler():
            return False
        if self._whole and not self._settings.whole:  # there are steps: the trace from the first call is of no use
            self._whole = False
            self._discard()
            return True
        return self._window is not None and self._continue(done)

    def begin(self, before: int, done: int) -> bool:
        """Open the window that is due, if any, at `done` complete steps (`before` at the last call)."""
        planned = self._due(before, done) if self._window is None else None
        self._postponed = planned if planned is not None and not _can_switch_profiler() else None
        if planned is None or not self._start(TRACE_HARD_LIMIT_S):
            return False
        self._planned = replace(planned, after=done)
        return True

    def _due(self, before: int, done: int) -> PlannedWindow | None:
        """The window that is due; the first one also earlier if long steps would make it late."""
        planned = self._schedule.window_at(before, done) or self._postponed
        if self._warm_s is None and done >= self._schedule.warmup:
            self._warm_s = perf_counter()
        if planned is None and self.recording is None and self._schedule.sooner_after <= done:
            late = perf_counter() - (self._warm_s or 0.0) > GPU_PATIENCE_S
            return self._schedule.windows[0] if late and done < self._schedule.windows[0].after else None
        return planned

    def next_phase(self) -> Phase:
        """The phase of the next step."""
        waits = self._postponed is not None or self._schedule.sooner_after < NEVER
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
        """The next step begins: annotate it if steps are profiled."""
        if self._window is not None and self._planned is not None:
            self._window.step_begins(self._done + 1)

    def loader_begins(self) -> None:
        if self._window is not None:
            self._window.loader_begins()

    def loader_ends(self) -> None:
        if self._window is not None:
            self._window.loader_ends()

    def end_overdue(self, *, stepless: bool) -> bool:
        """End a window that is too long or too large. `stepless`: nothing that makes steps has happened so far."""
        if self._window is None or not _can_switch_profiler():
            return False
        limit_s, why = self._limit(stepless)
        late = self._window.age_s > limit_s
        assert self._memory is not None
        if not late and self._memory.event_bytes <= self._limit_bytes:
            return False
        self._end(self._complete(), why if late else f"its events took {size(self._memory.event_bytes)}")
        return True

    def begin_again(self) -> None:
        """The steps so far were evaluation before the training: everything starts over."""
        self._done = self.unchanged_until = 0
        self._discard()

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
            self._deviations.append(Choice("traced window", duration(age_s * 1e6), why))
        self._end(self._complete())

    def abandon(self) -> None:
        """Stop the profiler and ignore its errors, after an error in gpulab."""
        window, self._window = self._window, None
        with suppress(Exception):
            if self._deadline is not None:
                self._deadline.cancel()
            if window is not None:
                window.stop()

    def timeline(self, origin_ns: int, step_count: int) -> Timeline | None:
        """The recording, on the run's clock; None without a recording, as `missing` then explains."""
        if self.recording is None:
            if self._settings.trace:
                none = f"the run ended after {step_count} steps, before the traced window" if step_count else NO_STEP
                self._add_missing(self._no_profiler or self._obstacle or none)
            return None
        timeline = self.recording.timeline(origin_ns, event_limit=TRACE_EVENT_LIMIT)
        if len(timeline) == 0:
            self._add_missing("the profiler recorded no event; another profiler may have taken its place")
            return None
        if timeline.window_ns[1] < self.recording.ended_ns - origin_ns:
            self.truncated = f"more than {TRACE_EVENT_LIMIT:,} events were recorded: the rest was left out"
        return timeline

    # -- windows -------------------------------------------------------------------------------------------------

    def _start(self, limit_s: float) -> bool:
        if self._no_profiler is not None:
            return False
        if in_backward():
            self._obstacle = "its steps end within backward passes, where torch's profiler cannot be started"
            return False
        if gpus.in_graph_capture():
            self._obstacle = "the code captured a CUDA graph just then, which the profiler's start would have broken"
            return False
        window = self._new_window()
        try:
            window.start()
        except ProfilerUnavailable as e:
            self._no_profiler = str(e)
            return False
        self._window, self._planned = window, None
        self.start_cost_ns += window.start_cost_ns
        self._memory = SessionMemory()
        full = partial(self._memory.exceeds, self._limit_bytes)
        self._deadline = Deadline(limit_s, self._overdue, self._unreachable, full)
        self._deadline.start()
        return True

    def _continue(self, done: int) -> bool:
        """Another profiled step is complete: continue the window, or end it."""
        assert self._window is not None
        if self._planned is None:
            return self.end_overdue(stepless=False)
        planned = self._planned
        traced = done - planned.after
        whole = traced >= planned.lead_in + planned.length
        if not whole and self._window.age_s <= TRACE_LIMIT_S:
            self._window.step_begins(done + 1)
            return False
        why = None if whole else f"ended after {plural(traced, 'step')}: longer than {TRACE_LIMIT_S:g} s"
        self._end(self._without_lead_in(range(planned.after + 1, done + 1)), why)
        return True

    def _limit(self, stepless: bool) -> tuple[float, str]:
        """How long the open window may last (s), and the words for a window that reached that limit."""
        if self._planned is not None:
            return TRACE_HARD_LIMIT_S, f"one step ran longer than {TRACE_HARD_LIMIT_S:g} s"
        limit_s = TRACE_STEPLESS_LIMIT_S if stepless else TRACE_HARD_LIMIT_S
        what = "code without steps" if stepless else "the whole code"
        return limit_s, f"{what} is traced for {limit_s:g} s at most"

    def _complete(self) -> tuple[int, ...]:
        """The complete steps of a window that is cut short."""
        assert self._window is not None
        begun = range(1, self._done + 1) if self._whole else (n for n, _ in self._window.marks)
        return self._without_lead_in([n for n in begun if n <= self._done])

    def _without_lead_in(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """The steps after the lead-in; if there are none, the lead-in itself."""
        lead_in = self._planned.lead_in if self._planned is not None else 0
        return tuple(numbers[lead_in:] or numbers)

    def _end(self, traced: tuple[int, ...], truncated: str | None = None) -> None:
        """Stop the profiler. A window without a whole step only counts if there is no better one and will be none."""
        window, self._window, self._planned = self._window, None, None
        assert window is not None and self._deadline is not None
        self._deadline.cancel()
        recording = window.stop()
        self.stop_cost_ns += window.stop_cost_ns
        if traced or self._whole or (self.recording is None and truncated is not None):
            self.recording, self.traced, self.truncated = recording, traced, truncated
        del recording
        self._return_memory()

    def _discard(self) -> None:
        """Drop everything recorded so far."""
        if self._window is not None:
            self._end(())
        self.recording, self.traced, self.truncated = None, (), None
        self._return_memory()

    def _return_memory(self) -> None:
        if self._memory is not None and self._memory.event_bytes > self._limit_bytes // 4:
            return_free_memory()  # for less memory that is not worth it

    def _add_missing(self, reason: str) -> None:
        self.missing.append(Missing(BREAKDOWN, reason, key="breakdown"))


def _can_switch_profiler() -> bool:
    """Whether the profiler may be started or stopped here: not inside a backward pass nor a graph capture."""
    return not in_backward() and not gpus.in_graph_capture()


class PlannedWindow(Struct, frozen=True):
    """Profile `lead_in` steps, which do not count, and then `length` steps, after `after` complete steps."""

    after: int
    length: int
    lead_in: int = 0


class Schedule(Struct, frozen=True):
    """The phases of one run: `warmup` steps are dropped, windows are profiled, everything else is measured."""

    warmup: int
    windows: tuple[PlannedWindow, ...]
    choices: tuple[Choice, ...]
    sooner_after: int = NEVER  # steps after which the first window on a GPU may begin if steps are long

    def window_at(self, before: int, completed: int) -> PlannedWindow | None:
        """The window that begins at `completed` steps, which were `before` at the last call."""
        return next((w for w in reversed(self.windows) if before < w.after <= completed), None)

    def next_change(self, completed: int) -> int:
        """The number of steps at which the next phase ends or window begins."""
        return min((n for n in (self.warmup, *(w.after for w in self.windows)) if n > completed), default=NEVER)


def plan(settings: Settings, total: int | None, *, certain: bool = True, on_gpu: bool = False) -> Schedule:
    """The schedule for a run of `total` steps (None: unknown).

    A short run is divided so that each phase gets some steps. A run of unknown length is profiled early for two steps,
    so that even six steps give a breakdown, and once more if it turns out to be long. So is one whose length is not
    `certain`, because the loop may leave a loader in the middle of its epoch. On a GPU the first window comes later.
    """
    if total is not None and total < 3:
        total = None
    long = certain and total is not None and total >= 12
    warmup = settings.warmup if settings.warmup is not None else WARMUP if long else 1
    windows = _windows(settings.trace_steps, total, warmup, certain, on_gpu) if settings.trace else ()
    if total is None:
        length = "the number of steps is unknown"
    elif certain or settings.steps is not None:
        length = f"{'' if certain else 'at most '}{plural(total, 'step')} {'runs' if total == 1 else 'run'}"
    else:
        length = f"an epoch has {plural(total, 'step')}"
    reason = f"chosen for a run in which {length}"
    choices = [Choice("warm-up", plural(warmup, "step"), reason if settings.warmup is None else "asked for")]
    if windows:
        first, *later = (f"{plural(w.length, 'step')} after step {w.after}" for w in windows)
        words = f"{first}; in their place {later[0]}, if the loop comes that far" if later else first
        choices.append(Choice("traced window", words, reason if settings.trace_steps is None else "asked for"))
    sooner_after = warmup + GPU_FEWEST_MEASURED if on_gpu and windows else NEVER
    return Schedule(warmup, windows, tuple(choices), sooner_after)


def _windows(
    trace_steps: int | None, total: int | None, warmup: int, certain: bool, on_gpu: bool
) -> tuple[PlannedWindow, ...]:
    """One window if the length is certain; else an early one, and a better one if the loop gets that far."""
    lead_in, length = GPU_LEAD_IN if on_gpu else 0, trace_steps or TRACED
    main = None if total is None else _window_within(total, warmup, length, lead_in)
    if certain and main is not None:
        return (main,)
    early = PlannedWindow(warmup + (GPU_MEASURED if on_gpu else 2), min(length, EARLY_TRACED), lead_in)
    late = PlannedWindow(max(SECOND_WINDOW_AT, warmup + 20), length, lead_in)
    if total is None or main is None:
        return early, late
    if on_gpu:  # after a tenth of an epoch; sooner if the epoch is short
        measured = min(
            max(GPU_MEASURED, total // 10), GPU_MOST_MEASURED, total - early.lead_in - early.length - 1 - warmup
        )
        early = replace(early, after=warmup + max(2, measured))
    if total < ROOM_FOR_TWO:
        fits = trace_steps is not None and early.after + trace_steps <= total
        return replace(early, length=length) if fits else early, late
    return (early, main) if early.after + early.lead_in + early.length < main.after else (main,)


def _window_within(total: int, warmup: int, length: int, lead_in: int) -> PlannedWindow:
    """The window of a run of `total` steps: about a third of the steps come before it, and one after it."""
    room = max(1, total - warmup)
    length = min(length, max(1, room // 2))
    lead_in = min(lead_in, max(0, room - length - GPU_FEWEST_MEASURED - 1))
    rest = room - lead_in - length
    measured = min(max(MEASURED, rest // 3), 60, max(1, rest - (1 if rest > 2 else 0)))
    return PlannedWindow(warmup + measured, length, lead_in)
