"""The simulated GPU against a dumber one that looks at every microsecond, and against what is known of real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from gpulab.analysis.integrity import integrity
from gpulab.run import Category
from planted.simulated.machine import AUTOGRAD, Gpu, Machine
from planted.simulated.program import (
    COMPUTE,
    COPIES,
    SIDE,
    Allocate,
    AwaitEvent,
    Graph,
    HostWork,
    Item,
    Kernel,
    LoadData,
    Loop,
    Operator,
    Read,
    RecordEvent,
    Synchronize,
    Update,
    Upload,
)
from planted.simulated.record import Plan, record
from planted.simulated.truth import steady_step_ns, truth_of

US = 1_000
SMALL = Gpu(
    launch_ns=2 * US,
    graph_launch_ns=4 * US,
    latency_ns=3 * US,
    gap_ns=1 * US,
    graph_gap_ns=1 * US,
    python_ns=1 * US,
    return_ns=2 * US,
    event_ns=1 * US,
    copy_ns=1 * US,
    pageable_bytes_per_us=1,
    pinned_bytes_per_us=2,
    queue_depth=3,
)


# -- a machine that looks at every microsecond -------------------------------------------------------------------------


class Waiting(Struct):
    """A task that was launched; times in µs, -1: not yet."""

    length: int
    launched: int
    after: tuple[Waiting, ...]  # that an awaited event stands for
    from_graph: bool = False
    start: int = -1
    end: int = -1


STREAMS = (COMPUTE, SIDE)


class Ticking:
    """The GPU; what is on its streams, and what fills their queues: a graph is one."""

    def __init__(self) -> None:
        self.now = 0
        self.every: list[Waiting] = []
        self.on: dict[int, list[Waiting]] = {stream: [] for stream in STREAMS}
        self.slots: dict[int, list[Waiting]] = {stream: [] for stream in STREAMS}
        self.events: dict[str, tuple[Waiting, ...]] = {}
        self.held: dict[int, tuple[Waiting, ...]] = dict.fromkeys(STREAMS, ())

    def unfinished(self, tasks: Iterable[Waiting]) -> int:
        return sum(not 0 <= task.end <= self.now for task in tasks)

    def launch(self, stream: int, kernels: Iterable[Kernel]) -> None:
        for i, kernel in enumerate(kernels):
            self.every.append(Waiting(kernel.ns // US, self.now, self.held[stream], from_graph=i > 0))
            self.on[stream].append(self.every[-1])
        self.slots[stream].append(self.every[-1])

    def advance(self) -> None:
        """The next task of each stream begins 1 µs behind the one before it, if nothing holds it."""
        for tasks in self.on.values():
            i = next((i for i, task in enumerate(tasks) if task.start < 0), None)
            if i is None:
                continue
            task = tasks[i]
            free = i == 0 or 0 <= tasks[i - 1].end <= self.now - 1
            arrived = task.launched + 3 <= self.now or task.from_graph
            if free and arrived and all(0 <= t.end <= self.now - 1 for t in task.after):
                task.start, task.end = self.now, self.now + task.length


def host(gpu: Ticking, items: list[Item]) -> Iterator[Callable[[], bool]]:
    """What the host waits for, one after the other, of the items that the oracle knows."""

    def passes(us: int) -> Callable[[], bool]:
        end = gpu.now + us
        return lambda: gpu.now >= end

    def launch(us: int, stream: int, kernels: Iterable[Kernel]) -> Iterator[Callable[[], bool]]:
        yield lambda: gpu.unfinished(gpu.slots[stream]) < 3
        yield passes(us)
        gpu.launch(stream, kernels)

    for item in items:
        match item:
            case Operator():
                before = item.host_ns // (2 * (len(item.kernels) or 1)) // US
                for kernel in item.kernels:
                    yield passes(before)
                    yield from launch(2, kernel.stream, [kernel])
                yield passes(item.host_ns // US - before * len(item.kernels) + 1)
            case Graph():
                yield passes(item.host_ns // US)
                yield from launch(4, item.kernels[0].stream, item.kernels)
                yield passes(1)
            case HostWork() | LoadData():
                yield passes(item.ns // US)
            case RecordEvent():
                yield passes(1)
                gpu.events[item.event] = tuple(gpu.on[item.stream])
            case AwaitEvent():
                yield passes(1)
                gpu.held[item.stream] += gpu.events[item.event]
            case Synchronize():
                streams = STREAMS if item.stream is None else (item.stream,)
                yield partial(lambda streams: not any(gpu.unfinished(gpu.on[s]) for s in streams), streams)
                yield passes(2)


def ticked(items: list[Item]) -> tuple[list[tuple[int, int]], int]:
    """Begin and end of every task in order of launch, and when the host has ended; all in µs."""
    gpu, host_end = Ticking(), 0
    waits = host(gpu, items)
    over = next(waits, None)
    while over or gpu.unfinished(gpu.every):
        gpu.advance()
        while over and over():
            over, host_end = next(waits, None), gpu.now
        gpu.now += 1
    return [(w.start, w.end) for w in gpu.every], host_end


whole_us = st.integers(1, 30).map(lambda us: us * US)
kernels = st.builds(Kernel, name=st.just("k"), ns=whole_us, stream=st.sampled_from(STREAMS))
operators = st.builds(
    lambda us, k: Operator("aten::mm", us * len(k) * 2 * US, k),
    us=st.integers(0, 5),
    k=st.lists(kernels, min_size=1, max_size=2).map(tuple),
)
graphs = st.builds(
    lambda us, lengths, stream: Graph(us * US, tuple(Kernel("k", ns, stream) for ns in lengths)),
    us=st.integers(0, 5),
    lengths=st.lists(whole_us, min_size=1, max_size=4),
    stream=st.sampled_from(STREAMS),
)
waits = st.builds(Synchronize, stream=st.sampled_from([None, *STREAMS]))
others = st.builds(HostWork, ns=whole_us) | st.builds(LoadData, ns=whole_us)
events = st.sampled_from(
    [
        (RecordEvent("e", COMPUTE), AwaitEvent("e", SIDE)),
        (RecordEvent("f", SIDE), AwaitEvent("f", COMPUTE)),
        (RecordEvent("e", COMPUTE),),
        (AwaitEvent("e", SIDE),),
    ]
)
programs = st.lists(
    (operators | graphs | waits | others).map(lambda item: (item,)) | events, min_size=3, max_size=25
).map(lambda groups: [RecordEvent("e", COMPUTE), *(item for group in groups for item in group)])


@settings(derandomize=True, max_examples=300)
@given(programs)
def test_it_acts_as_a_machine_simulated_by_microseconds(program: list[Item]) -> None:
    machine = Machine(SMALL)
    machine.step(tuple(program))
    tasks, host_end = ticked(program)
    assert [(t.start_ns // US, t.end_ns // US) for t in machine.tasks] == tasks
    assert machine.now == host_end * US


# -- what is known of real ones ----------------------------------------------------------------------------------------


def mm(kernel_us: float, host_us: float = 10, stream: int = COMPUTE) -> Operator:
    return Operator("aten::mm", round(host_us * US), (Kernel("gemm", round(kernel_us * US), stream),))


def test_the_window_begins_with_an_empty_queue_and_is_whole() -> None:
    recorded = record(Loop((mm(500),) * 50), plan=Plan(traced=4))
    timeline = recorded.run.timeline
    assert timeline is not None
    begun, ended = timeline.window_ns
    host_ended = recorded.traced[-1].end_ns
    assert all(t.end_ns <= begun for t in recorded.tasks if t.step < recorded.traced[0].number)
    rows = timeline.category == Category.KERNEL
    assert rows.sum() == 200 and timeline.end_ns[rows].max() == ended > host_ended  # the host left long before
    true = truth_of(recorded)
    assert [step.kernels for step in true] == [50] * 4
    assert (timeline.end_ns[rows] <= host_ended).sum() < 20  # all that steps on the host's clock would see


def test_the_simulated_trace_passes_the_integrity_checks() -> None:
    items = (
        LoadData(300 * US),
        Upload(100_000),
        mm(50),
        Operator("aten::mm", 10 * US, (Kernel("k", 40 * US),), node="MmBackward0"),
        Graph(5 * US, (Kernel("a", 20 * US), Kernel("b", 20 * US))),
        Read(),
        Update((mm(30),)),
    )
    recorded = record(Loop(items))
    found = integrity(recorded.run)
    assert found is not None
    assert {c.name for c in found.checks if c.count} == {"graph_replays"}
    timeline = recorded.run.timeline
    assert timeline is not None
    named = timeline.names.index("autograd::engine::evaluate_function: MmBackward0")
    assert {timeline.lanes[i].number for i in timeline.lane_id[timeline.name_id == named]} == {AUTOGRAD}
    of_graph = timeline.correlation[timeline.name_id == timeline.names.index("a")]
    assert np.isin(of_graph, timeline.correlation[timeline.name_id == timeline.names.index("b")]).all()


def test_a_copy_blocks_unless_pinned_and_non_blocking() -> None:
    def host_ns(pinned: bool, non_blocking: bool) -> int:
        machine = Machine()
        machine.step((Upload(50_000_000, pinned, non_blocking),))
        return machine.now

    pageable, pinned, free = host_ns(False, True), host_ns(True, False), host_ns(True, True)
    assert pageable > 10_000 * US > pinned > 2_500 * US > 20 * US > free
    assert host_ns(False, False) >= pageable  # non_blocking without pinning does nothing


def test_a_copy_on_its_own_stream_runs_beside_the_kernels() -> None:
    beside = Upload(20_000_000, True, True, COPIES)
    step: tuple[Item, ...] = (
        beside,
        RecordEvent("batch", COPIES),
        AwaitEvent("batch", COMPUTE),
        *(mm(100) for _ in range(50)),
    )
    assert steady_step_ns(Loop(step)) < 1.01 * 50 * (100 * US + Gpu().gap_ns)
    after = (replace(beside, stream=COMPUTE), *step[3:])
    assert steady_step_ns(Loop(after)) > 1.15 * steady_step_ns(Loop(step))


def test_each_worker_makes_one_batch_at_a_time() -> None:
    compute = tuple(mm(100) for _ in range(100))

    def step_ms(workers: int) -> float:
        return steady_step_ns(Loop((LoadData(40_000 * US), *compute, Read()), workers=workers)) / 1e6

    alone, two, eight = step_ms(0), step_ms(2), step_ms(8)
    assert 50 < alone < 52 and 19.5 < two < 21 and 12 < eight < 13  # 10 ms of computing, 2 ms of handing over


def test_a_release_of_memory_waits_for_the_gpu() -> None:
    machine = Machine()
    machine.step((mm(5_000), Allocate(100 * US, "cudaFree")))
    assert machine.now == machine.tasks[-1].end_ns + 100 * US


def test_the_truth_accounts_for_every_nanosecond() -> None:
    loop = Loop((LoadData(300 * US), *(mm(70), Read(), HostWork(400 * US)) * 5, Update((mm(20),))))
    recorded = record(loop)
    for step in truth_of(recorded):
        copied = sum(t.end_ns - t.start_ns for t in recorded.tasks if t.step == step.number and not t.is_kernel)
        assert step.wall_ns == sum(step.idle_ns.values()) + step.kernel_ns + copied
        assert step.idle_ns["unknown"] > 5 * 380 * US > step.idle_ns["data_wait"] > 280 * US
