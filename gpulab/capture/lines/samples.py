"""Where the training thread is, looked at again and again: from another process, or where none can, by a thread.

The trace names operators and calls, not the line that made them; torch's own `with_stack` costs many times as much and
can hang beside DataLoader workers. A thread of ours needs the GIL for each look: it waits while the training thread
holds it in one long call, and then finds it at the line of that call, whose end it is. So each of its looks stands for
the time since the one before, and sees no loop of Python's own (`StackSamples.exact`).
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from time import perf_counter_ns, thread_time_ns
from typing import NamedTuple

import numpy as np

from gpulab.capture.dataloader.worker import is_collating
from gpulab.capture.lines.batch_lines import BatchLines
from gpulab.capture.lines.places import Naming, Stack, whole_stack
from gpulab.capture.stacks.stack import Spot
from gpulab.capture.stacks.watcher import PERIOD_S, Looks, StackWatcher
from gpulab.devices.machine import usable_cores
from gpulab.run import LoadingLooks, StackSamples
from gpulab.user_code import Owner, owners

LONGEST_PERIOD_S = 0.05
DEAREST = 0.03  # share of the time that this thread may compute: where a look costs more it looks less often
EXCERPTS = 3  # lines whose surroundings are kept, of the loop and of the loading each
_JUDGED_AFTER = 4  # looks: what they cost is known then


class Pace(NamedTuple):
    """How often to look, and how many times at most."""

    period_s: float
    most: int | None = None


TRACED = Pace(PERIOD_S)
TRACED_WITHIN = Pace(PERIOD_S, 20_000)


class StackSampler:
    """A thread that looks at the one that calls `start` until `stop`."""

    def __init__(self, pace: Pace = TRACED_WITHIN) -> None:
        self._pace = pace
        self._going = threading.Lock()  # held while it is to go on: waiting for it is the cheapest sleep there is
        self._thread: threading.Thread | None = None
        self._times: list[int] = []
        self._numbers: list[int] = []
        self._stacks: dict[Stack, int] = {}
        self._spots: dict[Spot, Spot] = {}  # each once: stacks have most in common
        self._began_ns = 0

    def start(self) -> None:
        """Begin to look. Where no thread can be started nothing is seen."""
        self._began_ns = perf_counter_ns()
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

    @property
    def looks(self) -> Looks:
        """So far. From any thread."""
        count = len(self._numbers)
        return Looks(self._times[:count], self._numbers[:count], list(self._stacks), self._began_ns)

    def _look(self, watched: int) -> None:
        frames, clock, over = sys._current_frames, perf_counter_ns, self._going.acquire
        times, numbers, stacks = self._times, self._numbers, self._stacks
        period_s, most, spent_ns = self._pace.period_s, self._pace.most or sys.maxsize, thread_time_ns()
        cost_ns: list[int] = []
        while not over(timeout=period_s) and len(times) < most:
            collects = gc.isenabled()
            gc.disable()  # a collection inside `_current_frames` blocks the whole process (cpython#106883)
            try:
                stack = whole_stack(frames().get(watched))
            finally:
                if collects:
                    gc.enable()
            number = stacks.get(stack)
            if number is None:
                number = stacks[tuple(self._spots.setdefault(spot, spot) for spot in stack)] = len(stacks)
            times.append(clock())
            numbers.append(number)
            before_ns, spent_ns = spent_ns, thread_time_ns()
            cost_ns.append(spent_ns - before_ns)
            if len(cost_ns) == _JUDGED_AFTER:
                # files that are met for the first time cost a look many times what it costs from then on
                affordable_s = sorted(cost_ns)[_JUDGED_AFTER // 2 - 1] / 1e9 / DEAREST
                period_s = min(max(self._pace.period_s, affordable_s), LONGEST_PERIOD_S)
                cost_ns.clear()


class StackWatch:
    """Looks at the thread that calls `start`: another process does at the pace `outside`, else a thread of ours."""

    def __init__(
        self,
        watcher: StackWatcher | None,
        name: str,
        outside: Pace = TRACED,
        within: Pace = TRACED_WITHIN,
        *,
        on_cpu: bool = False,
    ) -> None:
        self._watcher, self._key = watcher, f"{name} {perf_counter_ns()}"
        self._on_cpu = on_cpu  # it computes there, so that operators may take all cores
        self._outside, self._within = outside, within
        self._sampler: StackSampler | None = None
        self._looks: Looks | None = None

    def start(self, *, at_once: bool = False) -> None:
        """Begin to look; `at_once`: return when somebody does."""
        channel = self._watcher.channel if self._watcher is not None else None
        fills = self._on_cpu and _fills_cores()
        pace = self._outside
        if channel is None or not channel.watch(self._key, pace.period_s, fills_cores=fills, most=pace.most):
            self._sampler = StackSampler(self._within)
            self._sampler.start()
        elif at_once and self._watcher is not None:
            self._watcher.wait_until_ready()

    def stop(self) -> None:
        """Look no more."""
        if self._sampler is not None:
            self._sampler.stop()
        elif self._watcher is not None and self._watcher.channel is not None:
            self._watcher.channel.rest(self._key)

    @property
    def is_exact(self) -> bool:
        """Whether another process has looked: what the thread did could not sway it."""
        return self._sampler is None

    @property
    def looks(self) -> Looks | None:
        """What was seen, once looking has stopped and before the watcher has; None where nothing is known."""
        if self._sampler is not None:
            return self._sampler.looks
        if self._looks is None and self._watcher is not None:
            self._looks = self._watcher.looks(self._key)
        return self._looks


def _fills_cores() -> bool:
    """Whether PyTorch's operators run on all cores that this process may use."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.get_num_threads() >= usable_cores()


# -- what was seen, as the record keeps it -----------------------------------------------------------------------------


def stack_samples(watch: StackWatch | None, origin_ns: int, batches: BatchLines, naming: Naming) -> StackSamples | None:
    """The looks on the run's clock, which starts at `origin_ns`."""
    looks = watch.looks if watch is not None else None
    if watch is None or looks is None or not len(looks.t_ns):
        return None
    users = [users_lines(stack) for stack in looks.stacks]
    spots = [lines[0] if lines else None for lines in users]
    keep_excerpts([spots[i] for i in looks.stack], naming)

    def column(each: Iterable[int], dtype: type[np.integer]) -> np.ndarray:
        return np.array(list(each), dtype)[np.asarray(looks.stack, np.int64)]

    return StackSamples(
        t_ns=np.array(looks.t_ns, np.int64) - origin_ns,
        place=column(map(naming.number, spots), np.int32),
        began_ns=looks.began_ns - origin_ns,
        exact=watch.is_exact,
        prepares_batch=column(map(batches.at, users), np.uint8),
    )


def loading_looks_of(seen: Sequence[Looks], naming: Naming) -> LoadingLooks | None:
    """How often each line was met by those who make the batches; None where nobody has looked at them."""
    if not any(len(looks.t_ns) for looks in seen):
        return None
    counts: Counter[tuple[Spot | None, bool]] = Counter()
    for looks in seen:
        lines = [users_lines(stack) for stack in looks.stacks]
        rows = [(line[0] if line else None, is_collating(s)) for line, s in zip(lines, looks.stacks, strict=True)]
        counts.update(rows[i] for i in looks.stack if not is_ours(looks.stacks[i]))
    keep_excerpts([spot for spot, _ in counts.elements()], naming)
    return LoadingLooks(
        place=np.array([naming.number(spot) for spot, _ in counts], np.int32),
        collating=np.array([collating for _, collating in counts], np.uint8),
        count=np.array(list(counts.values()), np.int64),
    )


def keep_excerpts(spots: Iterable[Spot | None], naming: Naming) -> None:
    """Of the lines that most looks have met."""
    for spot, _ in Counter(spot for spot in spots if spot is not None).most_common(EXCERPTS):
        naming.excerpt(spot)


def users_lines(stack: Stack) -> Stack:
    """The user's own lines of a whole stack; what is outside of what runs the user's code is not profiled."""
    lines: list[Spot] = []
    if is_ours(stack):
        return ()
    for spot in stack:
        owner = owners[spot[0]]
        if owner is Owner.USER:
            lines.append(spot)
        elif owner is Owner.RUNNER:
            break
    return tuple(lines)


def is_ours(stack: Stack) -> bool:
    """Whether gpulab itself is at work there."""
    return bool(stack) and owners[stack[0][0]] is Owner.GPULAB
