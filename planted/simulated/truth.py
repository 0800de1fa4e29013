"""What is true of a played loop, from the machine's own account and not from the rows of its trace.

A step on the device reaches from one boundary to the next; a boundary is when the host is there and the main stream has
ended all that was launched before. Where the device idles, the cause is what the host does at that moment; where the
host launches and a task is on its way already, the task is "queued", as are all but the first of a replayed graph.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from planted.simulated.machine import Gpu, Machine, Played, Stretch, Task
from planted.simulated.program import COMPUTE, Loop
from planted.simulated.record import Recorded

BEFORE_QUEUED = ("data_wait", "sync_wait", "blocking_copy", "allocator")


class StepTruth(Struct, frozen=True):
    """One step: `[start_ns, end_ns)` on the device, kernels that it launched, idle time by cause."""

    number: int
    start_ns: int
    end_ns: int
    kernels: int
    kernel_ns: int
    idle_ns: dict[str, int]

    @property
    def wall_ns(self) -> int:
        """Its length on the device."""
        return self.end_ns - self.start_ns


def truth_of(recorded: Recorded) -> list[StepTruth]:
    """Of each profiled step."""
    numbers = {step.number for step in recorded.traced}
    main = main_stream([t for t in recorded.tasks if t.step in numbers])
    return [_step(step, main, recorded.tasks, recorded.machine.host) for step in recorded.traced]


def main_stream(tasks: list[Task]) -> int:
    """The stream that computes most."""
    computed: Counter[int] = Counter({COMPUTE: 0})
    for task in tasks:
        if task.is_kernel and not task.kernel.startswith("nccl"):
            computed[task.stream] += task.end_ns - task.start_ns
    return computed.most_common(1)[0][0]


def _step(step: Played, main: int, tasks: list[Task], host: list[Stretch]) -> StepTruth:
    mine = [t for t in tasks if t.step == step.number and t.is_kernel]
    on_main = [t for t in tasks if t.stream == main]
    start = max(step.start_ns, *(t.end_ns for t in on_main if t.step < step.number), 0)
    end = max(step.end_ns, *(t.end_ns for t in on_main if t.step <= step.number), 0)
    computed = sum(t.end_ns - t.start_ns for t in mine)
    return StepTruth(step.number, start, end, len(mine), computed, _idle(start, end, tasks, host))


def _idle(start: int, end: int, tasks: list[Task], host: list[Stretch]) -> dict[str, int]:
    """Idle time in [start, end) by cause, moment by moment: between two edges nothing changes."""
    near = [t for t in tasks if t.end_ns > start and t.launched_ns < end]
    doing = [h for h in host if h.end_ns > start and h.start_ns < end]
    edges = {start, end} | {at for t in near for at in (t.launched_ns, t.start_ns, t.end_ns)}
    edges |= {at for h in doing for at in (h.start_ns, h.end_ns)}
    moments = sorted(at for at in edges if start <= at <= end)
    found: Counter[str] = Counter()
    running = _Counting([(t.start_ns, t.end_ns) for t in near])
    waiting = _Counting([(t.launched_ns, t.start_ns) for t in near])
    replaying = _Counting(_replays(near))
    at_host = iter(sorted(doing, key=lambda h: h.start_ns))
    current = next(at_host, None)
    for begin, until in pairwise(moments):
        while current is not None and current.end_ns <= begin:
            current = next(at_host, None)
        busy, queued, state = running.at(begin), waiting.at(begin), _state(current, begin)
        inside = replaying.at(begin)
        if not busy:
            found["queued" if inside or (queued and state not in BEFORE_QUEUED) else state] += until - begin
    return dict(found)


def _replays(tasks: list[Task]) -> list[tuple[int, int]]:
    """From the first to the last kernel of each graph: they share their launch."""
    by_launch: dict[tuple[int, int], list[Task]] = {}
    for task in tasks:
        if task.is_kernel:
            by_launch.setdefault((task.launched_ns, task.stream), []).append(task)
    graphs = [each for each in by_launch.values() if len(each) > 1]
    return [(min(t.start_ns for t in each), max(t.end_ns for t in each)) for each in graphs]


def _state(current: Stretch | None, at: int) -> str:
    return current.state if current is not None and current.start_ns <= at else "unknown"


class _Counting:
    """How many intervals hold a moment; asked in order of time."""

    def __init__(self, intervals: list[tuple[int, int]]) -> None:
        self._edges = sorted([(a, 1) for a, b in intervals if b > a] + [(b, -1) for a, b in intervals if b > a])
        self._next = self._count = 0

    def at(self, moment: int) -> int:
        while self._next < len(self._edges) and self._edges[self._next][0] <= moment:
            self._count += self._edges[self._next][1]
            self._next += 1
        return self._count


def steady_step_ns(loop: Loop, gpu: Gpu | None = None, steps: int = 24) -> float:
    """Mean time of a step on the device in the second half of so many steps, without the profiler."""
    machine = Machine(replace(gpu or Gpu(), profiler_ns=0), loop.workers, loop.prefetch)
    machine.run(loop, steps)
    half = steps // 2
    return (machine.steps[-1].device_end_ns - machine.steps[half].device_start_ns) / (steps - half)
