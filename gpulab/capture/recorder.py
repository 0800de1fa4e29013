"""One measured execution: hears the loop's marks, walks through the phases, ends the run when asked to."""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal, TypeVar, cast

import numpy as np

from gpulab.capture import hooks, schedule
from gpulab.capture.feed import CapturePhase, Delta, SeriesInfo, Status, Watcher
from gpulab.capture.loader import describe_loader, samples_in
from gpulab.capture.sampler import Sampler
from gpulab.capture.tracker import Answer, StepTracker
from gpulab.capture.weights import Watch
from gpulab.capture.window import ProfilerUnavailable, Window
from gpulab.run import (
    Choice,
    Loader,
    Memory,
    Missing,
    Observer,
    Outcome,
    Phase,
    Run,
    Settings,
    StepFlag,
    Timeline,
)
from gpulab.sources.kineto import Recording, launches
from gpulab.sources.machine import detect_device, environment

RunSource = Literal["cell", "statement", "block", "script"]

active: Capture | None = None  # the capture that runs in this process: `gpulab.step()` finds it here

LOADERS_KEPT = 32
TRAINING = (
    r"\.(backward|fit|step)\(|trainer\.train\(|(?<![.\w])train\w*\("  # a cell that evaluates first will still train
)
BACKLOG_LIMIT = 200_000  # steps kept for a live view that has stopped reading


class StopRun(BaseException):
    """Ends the user's code at a step boundary. No Exception, so that `except Exception` lets it pass."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self.capture = capture


Marked = TypeVar("Marked", bound=Callable[..., None])


def guarded(mark: Marked) -> Marked:
    """A fault of ours must not become the user's: it ends the measuring, not the cell."""

    @functools.wraps(mark)
    def careful(self: Capture, *args: Any, **kwargs: Any) -> None:
        if self.fault is not None:
            return
        try:
            mark(self, *args, **kwargs)
        except Exception as e:
            self.give_up(e)

    return cast(Marked, careful)


class Capture:
    """Measures what runs between `start` and `finish`, on the thread that called `start`."""

    def __init__(self, settings: Settings, source: RunSource, code: str = "", watcher: Watcher | None = None) -> None:
        self.settings = settings
        self.source = source
        self.code = code
        self._watcher = watcher
        self._undo = ExitStack()
        self._missing: list[Missing] = []
        self._choices: list[Choice] = []
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._fresh_steps: list[tuple[float, float, float, float]] = []
        self._window: Window | None = None
        self._window_plan: schedule.Window | None = None
        self._recording: Recording | None = None
        self._traced: tuple[int, ...] = ()
        self._truncated: str | None = None
        self._whole_trace = False
        self._schedule = schedule.plan(settings, settings.steps)
        self._loader: Loader | None = None
        self._loaders: dict[int, Loader] = {}  # by the hooks' number; the newest only
        self._epoch_steps: int | None = None
        self._weights: Watch | None = None
        self._modules: hooks.ModuleHook | None = None
        self._calls = 0
        self._will_train = re.search(TRAINING, code) is not None
        self._due = False  # the run ends at the next chance
        self._hooks_ns = 0
        self._generation = 0
        self._counted = 0
        self._phase: CapturePhase = "warm-up"
        self._compiled = 0
        self._profiler_ns = [0, 0]
        self.fault: Exception | None = None

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin. Raises UsageError for an impossible device."""
        global active
        self.device = detect_device(self.settings.device)
        self._pid = os.getpid()
        self._origin_ns = time.perf_counter_ns()
        self._created = datetime.now(UTC)
        self._tracker = StepTracker(0)
        self._sampler = Sampler(self._pid, self.device, self._origin_ns)
        self._sampler.start()
        self._peak_before = self._gpu_peak()
        self._hook_torch()
        self._newly_compiled()
        self._outer, active = active, self
        if self._watcher is not None:
            self._watcher.begin(self)
        if self.settings.trace and (self.settings.whole or self.source == "statement"):
            self._start_whole_trace()

    def finish(self, outcome: Outcome, detail: str = "") -> tuple[Run, Callable[[Path], None] | None]:
        """End: take every hook out, stop the sampling process, return the record and how to write its trace."""
        global active
        wall_ns = self.now()
        self._phase = "ending"
        try:
            self._undo.close()
            if active is self:
                active = self._outer
            if self._window is not None:
                self._end_window(None)
            if self._watcher is not None:
                self._watcher.end()
        finally:
            samples, lost, peaks = self._sampler.stop()
        self._missing += lost
        steps = self._tracker.finish(wall_ns)
        timeline = self._read_timeline(len(steps))
        traced: tuple[int, ...] = ()
        if timeline is not None:
            whole = steps.number[steps.end_ns <= timeline.window_ns[1]].tolist()
            traced = tuple(n for n in self._traced if n in set(whole))
        run = Run(
            id=f"{self._created:%Y%m%d-%H%M%S}-{token_hex(3)}",
            created=self._created.isoformat(timespec="seconds"),
            source=self.source,
            settings=self.settings,
            device=self.device,
            environment=environment(),
            steps=steps,
            samples=samples,
            timeline=timeline,
            wall_ns=wall_ns,
            outcome=outcome,
            outcome_detail=detail,
            step_source=self._tracker.source if len(steps) else "whole cell",
            code=self.code,
            loader=self._loader if not len(steps) or steps.batch_count.any() else None,
            memory=self._memory(peaks),
            observer=Observer(
                hooks_ns=self._hooks_ns,
                profiler_start_ns=self._profiler_ns[0] or None,
                profiler_stop_ns=self._profiler_ns[1] or None,
                event_count=len(timeline) if timeline is not None else 0,
                window_truncated=self._truncated,
            ),
            missing=tuple(self._missing),
            choices=(*self._schedule.choices, *self._choices),
            traced_numbers=traced,
        )
        recording = self._recording
        return run, recording.write if recording is not None and timeline is not None else None

    # -- what the user or a view may ask -------------------------------------------------------------------------

    def now(self) -> int:
        """Nanoseconds since the run began."""
        return time.perf_counter_ns() - self._origin_ns

    def request_stop(self) -> None:
        """End the run at the next step boundary."""
        self._stop.set()
        if self._stepless():
            self._hear_modules(True)

    def series(self) -> tuple[SeriesInfo, ...]:
        """The curves that are being sampled."""
        return self._sampler.series()

    def drain(self) -> Delta:
        """What is new since the last call."""
        with self._lock:
            fresh, self._fresh_steps = self._fresh_steps, []
        steps = np.array(fresh, dtype=np.float32).reshape(-1, 4)
        return Delta(self._status(), steps, self._sampler.drain())

    @guarded
    def step(self) -> None:
        """A step ends here, says the user."""
        entered = self.now()
        closed = self._tracker.manual(entered)
        self._after_mark(closed, entered)

    def give_up(self, error: Exception) -> None:
        """Stop measuring after a fault of our own; the run is kept as far as it went."""
        self.fault = error
        reason = f"gpulab failed while measuring ({type(error).__name__}: {error})"
        self._missing.append(Missing("steps", reason, self.now()))
        window, self._window = self._window, None
        if window is not None:
            with suppress(Exception):
                window.stop()

    # -- marks from the hooks ------------------------------------------------------------------------------------

    @guarded
    def asked(self, loader: int, owner: Any, *, fresh: bool) -> None:
        """A loader is about to be asked."""
        entered = self.now()
        self._end_if_due()
        if fresh or not self._loaders:
            self._meet_loader(loader, owner)
            self._hear_modules(False)
        if self._tracker.undecided and self._weights is not None and self._weights.changed():
            self._tracker.by_hand()
        closed = self._tracker.loader_asked(loader, entered, fresh=fresh)
        self._after_mark(closed, entered)
        if self._stop.is_set() and not self._tracker.training:
            raise StopRun(self)
        if fresh and self._window is not None:
            self._window.loader_begins()

    @guarded
    def answered(self, answer: Answer, batch: Any) -> None:
        """A loader has answered."""
        entered = self.now()
        if answer == "iterator" and self._window is not None:
            self._window.loader_ends()
        self._tracker.loader_answered(entered, answer, samples_in(batch) if answer == "batch" else None)
        self._hooks_ns += self.now() - entered

    @guarded
    def optimized(self, optimizer: Any, start_ns: int) -> None:
        """An optimizer has stepped."""
        entered = self.now()
        closed = self._tracker.optimized(id(optimizer), start_ns, entered)
        self._after_mark(closed, entered)

    @guarded
    def optimizing(self) -> None:
        """An optimizer is about to step."""
        self._end_if_due()

    @guarded
    def backward(self, root: Any) -> None:
        """A backward pass begins."""
        self._tracker.backward()
        if self._weights is None and self._tracker.undecided:
            self._weights = Watch.of(root)

    @guarded
    def called(self) -> None:
        """A module is called: before anything that makes steps this may be code without any, so trace it from here."""
        self._end_if_due()
        self._calls += 1
        self._hear_modules(False)
        if not self._stepless():
            return
        if self._stop.is_set():
            raise StopRun(self)
        if self._whole_trace and self._window is not None:
            if self._window.age_s > schedule.TRACE_STEPLESS_LIMIT_S:
                self._truncate(f"code without steps is profiled for {schedule.TRACE_STEPLESS_LIMIT_S:g} s at most")
        elif self._calls == 1 and self._window is None and self.settings.trace:
            self._start_whole_trace()

    def _stepless(self) -> bool:
        return not self._tracker.loader_seen and not self._counted

    def _hear_modules(self, wanted: bool) -> None:
        if self._modules is not None:
            (self._modules.on if wanted else self._modules.off)()

    # -- phases --------------------------------------------------------------------------------------------------

    def _after_mark(self, closed: bool, entered: int) -> None:
        if self._tracker.generation != self._generation:
            self._begin_again()
        worked = False
        if closed and self._tracker.count > self._counted:
            before, self._counted = self._counted, self._tracker.count
            worked = self._boundary(before)
        elif self._window is not None and self._window.age_s > schedule.TRACE_HARD_LIMIT_S:
            self._truncate(f"one step ran longer than {schedule.TRACE_HARD_LIMIT_S:g} s")
            worked = True
        now = self.now()
        if worked:
            self._tracker.resume(now, profiler_edge=self._window is None)
            if self._window_plan is not None and self._window is not None:
                self._window.step_begins(self._counted + 1)
        else:
            self._hooks_ns += now - entered

    def _truncate(self, reason: str) -> None:
        self._truncated = reason
        self._end_window(None)

    def _end_if_due(self) -> None:
        if self._due:
            raise StopRun(self)

    def _boundary(self, before: int) -> bool:
        """A step was closed (`before` were known): tell the view, end or begin a phase.

        Returns whether the profiler was touched.
        """
        self._note_step()
        done = self._counted
        touched = False
        if self._whole_trace and not self.settings.whole:
            self._drop_whole_trace()
            touched = True
        elif self._window is not None:
            touched = self._continue_window(done)
        if self._stop.is_set() or self._enough(done):
            self._end_soon()
        elif self._window is None:
            upcoming = self._schedule.window_at(before, done)
            if upcoming is not None:
                touched = self._start_window(upcoming) or touched
        self._tracker.phase = self._next_phase(done)
        return touched

    def _enough(self, done: int) -> bool:
        """Whether so many steps were asked for. Batches before the training that the code announces do not count."""
        evaluating = self._will_train and not self._tracker.trains
        return self.settings.steps is not None and done >= self.settings.steps and not evaluating

    def _end_soon(self) -> None:
        """End the run here; inside of `Optimizer.step` at the next thing the loop does: a scheduler steps before."""
        self._due = True
        if not self._tracker.optimizer_ends_steps:
            raise StopRun(self)
        self._hear_modules(True)

    def _next_phase(self, done: int) -> Phase:
        if self._window is not None:
            self._phase = "profiling"
            return Phase.TRACED
        if done < self._schedule.warmup:
            self._phase = "warm-up"
            return Phase.WARMUP
        self._phase = "after profiling" if self._recording is not None else "measuring"
        return Phase.MEASURED

    def _begin_again(self) -> None:
        """Steps counted so far were none (evaluation before training): the phases start over."""
        self._generation = self._tracker.generation
        self._counted = 0
        if self._window is not None:
            self._end_window(None)
        self._recording, self._traced = None, ()
        self._tracker.phase = Phase.WARMUP

    def _start_window(self, planned: schedule.Window) -> bool:
        if not self._start_profiler():
            return False
        self._window_plan = planned
        return True

    def _continue_window(self, done: int) -> bool:
        """One more profiled step is complete: go on, or end the window."""
        assert self._window is not None
        if self._window_plan is None:
            if self._window.age_s <= schedule.TRACE_HARD_LIMIT_S:
                return False
            self._truncate(f"the whole code is profiled for {schedule.TRACE_HARD_LIMIT_S:g} s at most")
            return True
        traced = done - self._window_plan.after
        too_long = self._window.age_s > schedule.TRACE_LIMIT_S
        if traced < self._window_plan.length and not too_long:
            self._window.step_begins(done + 1)
            return False
        if traced < self._window_plan.length:
            self._truncated = f"ended after {traced} steps: longer than {schedule.TRACE_LIMIT_S:g} s"
        self._end_window(tuple(range(self._window_plan.after + 1, done + 1)))
        return True

    def _start_profiler(self) -> bool:
        window = Window(self.device.kind, self.device.index)
        reason = _profiler_in_code(self.code)
        if reason is None:
            try:
                window.start()
            except ProfilerUnavailable as e:
                reason = str(e)
        if reason is not None:
            self._missing.append(Missing("step breakdown, operators and kernels", reason))
            self._schedule = replace(self._schedule, windows=())
            return False
        self._window = window
        return True

    def _start_whole_trace(self) -> None:
        """Profile from here; without steps nothing but the next module call after a while can end it."""
        if not self._start_profiler():
            return
        self._whole_trace = True
        limit = threading.Timer(schedule.TRACE_STEPLESS_LIMIT_S, self._hear_modules, (True,))
        limit.name, limit.daemon = "gpulab-limit", True
        limit.start()
        self._undo.callback(limit.join)
        self._undo.callback(limit.cancel)

    def _drop_whole_trace(self) -> None:
        """Steps were found after all: the trace from the first call is of no use."""
        self._whole_trace = False
        self._hear_modules(False)
        if self._window is not None:
            self._end_window(())
        self._recording, self._traced, self._truncated = None, (), None

    def _end_window(self, traced: tuple[int, ...] | None) -> None:
        """Stop the profiler. `traced`: the steps wholly inside; None: the window was cut short, find out which."""
        window, self._window, self._window_plan = self._window, None, None
        assert window is not None
        if traced is None:
            begun = range(1, self._counted + 1) if self._whole_trace else (n for n, _ in window.marks)
            traced = tuple(n for n in begun if n <= self._counted)
        recording = window.stop()
        self._profiler_ns[0] += window.start_cost_ns
        self._profiler_ns[1] += window.stop_cost_ns
        nothing_better = self._recording is None and self._truncated is not None
        if traced or self._whole_trace or nothing_better:
            self._recording, self._traced = recording, traced

    # -- details -------------------------------------------------------------------------------------------------

    def _hook_torch(self) -> None:
        if "torch" not in sys.modules:
            import importlib.util

            if importlib.util.find_spec("torch") is None:
                self._missing.append(Missing("steps", "torch is not installed"))
                return
        self._modules = hooks.install(self, self._undo)

    def _meet_loader(self, key: int, owner: Any) -> None:
        """A loader is asked for the first time, or anew: it may be the one that feeds the steps."""
        described = describe_loader(owner)
        if described is None:
            return
        if len(self._loaders) >= LOADERS_KEPT:
            self._loaders = {k: v for k, v in self._loaders.items() if k == self._tracker.feeder}
        self._loaders[key] = described
        if not self._counted:
            self._loader = described
            self._expect(described.length)

    def _expect(self, epoch_steps: int | None) -> None:
        """An epoch has so many steps, as far as the loader knows."""
        self._epoch_steps = epoch_steps
        if not self.settings.steps:
            self._schedule = schedule.plan(self.settings, epoch_steps, certain=False)

    def _note_feeder(self) -> None:
        feeder = self._tracker.feeder
        if feeder is None or feeder not in self._loaders:
            return
        self._loader = self._loaders[feeder]
        if self._counted == 2 and self._loader.length is not None:
            self._expect(self._loader.length // max(1, self._tracker.last_batches()))

    def _note_step(self) -> None:
        self._note_feeder()
        start, end, wait, samples = self._tracker.last()
        if self._newly_compiled():
            self._tracker.flag(StepFlag.COMPILE)
        wall = max(1, end - start)
        rate = samples / (wall / 1e9) if samples >= 0 else float("nan")
        with self._lock:
            if self._watcher is not None and len(self._fresh_steps) < BACKLOG_LIMIT:
                self._fresh_steps.append((end / 1e9, wall / 1e6, min(wait, wall) / 1e6, rate))

    def _newly_compiled(self) -> bool:
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo is None:
            return False
        graphs = dynamo.counters["stats"]["unique_graphs"] if "stats" in dynamo.counters else 0
        compiled, self._compiled = graphs > self._compiled, graphs
        return compiled

    def _status(self) -> Status:
        total, of = self.settings.steps, "run"
        if total is None and self._epoch_steps:
            total, of = self._epoch_steps, "epoch"
        name = self.device.name if self.device.kind == "cuda" else "CPU"
        return Status(
            phase=self._phase,
            step=self._counted,
            total=total,
            total_of=of,
            elapsed_s=self.now() / 1e9,
            device_label=f"device: {name}",
            stop_requested=self._stop.is_set(),
        )

    def _read_timeline(self, step_count: int) -> Timeline | None:
        if self._recording is None:
            if self.settings.trace and not any(m.what.startswith("step breakdown") for m in self._missing):
                self._missing.append(Missing("step breakdown, operators and kernels", self._why_no_trace(step_count)))
            return None
        timeline = self._recording.timeline(self._origin_ns, event_limit=schedule.TRACE_EVENT_LIMIT)
        if len(timeline) == 0:
            self._missing.append(
                Missing(
                    "step breakdown, operators and kernels",
                    "the profiler recorded no event; another profiler may have taken its place",
                )
            )
            return None
        if timeline.window_ns[1] < self._recording.ended_ns - self._origin_ns:
            self._truncated = f"more than {schedule.TRACE_EVENT_LIMIT:,} events were recorded: the rest was left out"
        self._judge_device(timeline)
        return timeline

    def _judge_device(self, timeline: Timeline) -> None:
        """A GPU is there: did the profiled code use it, and did its kernels come back?"""
        if self.device.kind != "cuda" or timeline.has_device_events:
            return
        if launches(timeline):
            reason = "CUDA work was launched and no kernel came back: CUPTI is refused or taken (see gpulab doctor)"
            self._missing.append(Missing("step breakdown and kernels", reason))
        elif self.settings.device == "auto":
            self.device = detect_device("cpu")
            self._choices.append(Choice("device", "CPU", "the profiled steps made no CUDA call"))

    def _why_no_trace(self, step_count: int) -> str:
        if step_count == 0:
            return "no step was found to profile; mark steps with gpulab.step(), or add --whole to trace from the start"
        return f"the run ended after {step_count} steps, before the profiled window"

    def _gpu_peak(self) -> int:
        """Most memory that tensors held on the GPU so far in this process, without waking CUDA up."""
        torch = sys.modules.get("torch")
        if self.device.kind != "cuda" or torch is None or not torch.cuda.is_initialized():
            return 0
        return int(torch.cuda.max_memory_allocated(self.device.index))

    def _memory(self, peaks: dict[str, float]) -> Memory:
        peak_rss = peaks.get("peak_rss_bytes")
        allocated = reserved = None
        if self.device.kind == "cuda":
            import torch

            peak = torch.cuda.max_memory_allocated(self.device.index)
            if self._peak_before and peak <= self._peak_before:
                reason = f"this process had reached {peak / 2**30:.2f} GiB before the run, and the run stayed below"
                self._missing.append(Missing("peak of the GPU memory allocated by tensors", reason))
            else:
                allocated = peak
                reserved = torch.cuda.max_memory_reserved(self.device.index)
        return Memory(
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=reserved,
            peak_rss_bytes=int(peak_rss) if peak_rss is not None else None,
            total_bytes=self.device.memory_total_bytes,
        )


_PROFILER = re.compile(
    r"profiler\.(profile|emit_nvtx|emit_itt)\s*\("
    r"|from\s+torch\.(autograd\.)?profiler\s+import[^\n]*\b(profile|emit_nvtx|emit_itt)\b"
    r"|PyTorchProfiler|profiler\s*=\s*['\"]pytorch"
)


def _profiler_in_code(code: str) -> str | None:
    """Torch allows one profiler at a time: leave it to a cell that brings its own."""
    if _PROFILER.search(code):
        return "the cell uses torch's profiler itself, and only one can be active"
    return None


def mark_step() -> None:
    """Mark the end of a step by hand, where neither a DataLoader nor an optimizer tells. Does nothing outside a run."""
    if active is not None:
        active.step()


__all__ = ["Capture", "StopRun", "mark_step"]
