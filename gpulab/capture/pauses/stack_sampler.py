"""Look at the training thread's stack every few milliseconds while the profiler runs: which line is it at?

The trace names operators and calls, not the line that made them; torch's own `with_stack` costs many times as much and
can hang beside DataLoader workers. A thread of ours needs the GIL for each look: it waits while the training thread
holds it in one long call, and then finds it at the line of that call, whose end it is. So each look stands for the time
since the one before (analysis/places.py). A frame is held for microseconds, never while this thread sleeps.
"""

from __future__ import annotations

import gc
import sys
import threading
from time import perf_counter_ns, thread_time_ns

from msgspec import Struct, field

from gpulab.capture.pauses.batch_lines import BatchLines
from gpulab.capture.pauses.source_lines import users_stack, whole_stack
from gpulab.capture.pauses.update_line import UpdateLine
from gpulab.capture.stacks.stack import Spot

PERIOD_S = 0.002
MOST_SAMPLES = 100_000
LONGEST_PERIOD_S = 0.05
DEAREST = 0.03  # share of the time that this thread may compute: where a look costs more it looks less often
_JUDGED_AFTER = 4  # looks: what they cost is known then


class Seen(Struct):
    """What was seen: `time.perf_counter_ns`, the line, None where none is the user's, and whether it comes after the
    line of the last update."""

    t_ns: list[int]
    spots: list[Spot | None]
    after: list[bool] = field(default_factory=list)
    preparing: list[bool] = field(default_factory=list)  # at a line that makes the next batch
    callers: set[Spot] = field(default_factory=set)  # lines that were seen calling others of the user's
    began_ns: int = 0
    exact: bool = False  # another process has looked
    libraries: list[str] = field(default_factory=list)  # what the line has called; empty: not known
    throughout: set[Spot] = field(default_factory=set)  # lines that were on the stack at nearly every look
    stacks: list[tuple[Spot, ...]] = field(default_factory=list)  # whole ones, where they were asked for


class LineSampler:
    """Watches the thread that calls `start` until `stop`. `seen` holds what was seen; nothing else is kept."""

    def __init__(
        self,
        update: UpdateLine | None = None,
        batches: BatchLines | None = None,
        *,
        period_s: float = PERIOD_S,
        most: int = MOST_SAMPLES,
        whole: bool = False,
    ) -> None:
        self._period_s, self._most, self._whole = period_s, most, whole
        self._update = update or UpdateLine()
        self._batches = batches or BatchLines()
        self._going = threading.Lock()  # held while it is to go on: waiting for it is the cheapest sleep there is
        self._thread: threading.Thread | None = None
        self.seen = Seen([], [])

    def start(self) -> None:
        """Begin to look. Where no thread can be started nothing is seen."""
        self.seen.began_ns = perf_counter_ns()
        self._going.acquire()
        watched = threading.get_ident()
        thread = threading.Thread(target=self._look, args=(watched,), name="gpulab-lines", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return
        self._thread = thread

    def stop(self) -> None:
        """Look no more, leave no thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._going.release()
            thread.join()

    def _look(self, watched: int) -> None:
        seen, frames, clock = self.seen, sys._current_frames, perf_counter_ns
        times, spots, after, passed = seen.t_ns, seen.spots, seen.after, self._update.passed
        preparing, makes_batch = seen.preparing, self._batches.at
        period_s, over, spent_ns = self._period_s, self._going.acquire, thread_time_ns()
        cost_ns: list[int] = []
        while not over(timeout=period_s) and len(times) < self._most:
            collects = gc.isenabled()
            gc.disable()  # a collection inside `_current_frames` blocks the whole process (cpython#106883)
            try:
                frame = frames().get(watched)
                stack = users_stack(frame)
                if self._whole:
                    seen.stacks.append(whole_stack(frame))
                del frame
            finally:
                if collects:
                    gc.enable()
            spots.append(stack[0] if stack else None)
            seen.callers.update(stack[1:])
            after.append(passed(stack))
            preparing.append(makes_batch(stack))
            times.append(clock())
            before_ns, spent_ns = spent_ns, thread_time_ns()
            cost_ns.append(spent_ns - before_ns)
            if len(cost_ns) == _JUDGED_AFTER:
                # files that are met for the first time cost a look many times what it costs from then on
                affordable_s = sorted(cost_ns)[_JUDGED_AFTER // 2 - 1] / 1e9 / DEAREST
                period_s = min(max(self._period_s, affordable_s), LONGEST_PERIOD_S)
                cost_ns.clear()
