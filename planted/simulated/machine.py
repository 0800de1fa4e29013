"""Host thread, launch queues, streams, events, graphs and copies: a loop is played, and all that happened is kept.

The host does one thing after the other (autograd's thread works while the training thread waits for it). A task of
the device begins when its launch has reached the device, its stream is free and the events it waits for have happened.
A stream holds `queue_depth` launches that have not ended; the next launch waits for room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal

from msgspec import Struct, field

from gpulab.run import Category, PauseKind
from planted.simulated.program import (
    COMPUTE,
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

TRAINING, AUTOGRAD = 4711, 4720  # thread numbers
State = Literal["data_wait", "sync_wait", "blocking_copy", "allocator", "optimizer", "launch", "other", "unknown"]
DATA = "enumerate(DataLoader)#_{}ProcessDataLoaderIter.__next__"
UNNAMED_GAP_NS = 100_000  # definitions.md, "Step accounting": Python between two operators, up to so long


class Gpu(Struct, frozen=True):
    """The costs of one machine, in ns; defaults are between those of the A100 and the H100 in recorded traces."""

    launch_ns: int = 6_000  # the host in cudaLaunchKernel
    graph_launch_ns: int = 12_000
    latency_ns: int = 3_000  # from the end of that call to the kernel's start on an idle stream
    gap_ns: int = 800  # between two kernels of one stream
    graph_gap_ns: int = 400
    python_ns: int = 2_000  # between two operators
    return_ns: int = 2_000  # of a waiting call, after what it waited for
    event_ns: int = 1_000
    copy_ns: int = 1_500  # of any copy, beside its bytes
    pageable_bytes_per_us: int = 5_000
    pinned_bytes_per_us: int = 20_000
    hand_off_ns: int = 2_000_000  # of a batch from a worker: definitions.md, "Feeding"
    profiler_ns: int = 0  # that the profiler adds to each operator
    queue_depth: int = 1_024


class Span(Struct, frozen=True):
    """A row of the trace."""

    name: str
    category: Category
    place: int  # thread or stream number
    start_ns: int
    end_ns: int
    correlation: int = 0
    bytes: float = float("nan")
    blocks_per_sm: float = float("nan")


class Task(Struct, frozen=True):
    """What the device did, and the step that launched it."""

    step: int
    stream: int
    launched_ns: int  # end of the launching call
    start_ns: int
    end_ns: int
    kernel: str  # its name; "": a copy

    @property
    def is_kernel(self) -> bool:
        """Whether it computes or communicates."""
        return bool(self.kernel)


class Stretch(Struct, frozen=True):
    """What the host did for a while."""

    state: State
    start_ns: int
    end_ns: int


class Stall(Struct, frozen=True):
    """A pause that hooks would have heard of."""

    kind: PauseKind
    start_ns: int
    end_ns: int


class Played(Struct, frozen=True):
    """One step on the host's clock; `device_end_ns`: the main stream has ended all that was launched before."""

    number: int
    start_ns: int
    end_ns: int
    data_wait_ns: int
    optimizer_ns: int
    device_start_ns: int
    device_end_ns: int


class _Workers(Struct):
    """Batches made ahead: each worker makes every n-th, as soon as it is asked for."""

    count: int
    prefetch: int
    ready: deque[int] = field(default_factory=deque)
    free: list[int] = field(default_factory=list)
    asked: int = 0

    def ask(self, now: int, ns: int) -> None:
        worker = self.asked % self.count
        self.free = self.free or [now] * self.count
        self.free[worker] = max(self.free[worker], now) + ns
        self.ready.append(self.free[worker])
        self.asked += 1

    def next_ready(self, now: int, ns: int) -> int:
        while len(self.ready) < self.count * self.prefetch:
            self.ask(now, ns)
        return self.ready.popleft()


class Machine:
    """Plays loops. `profiled` decides whether rows of a trace are kept (and whether the profiler slows the host)."""

    def __init__(self, gpu: Gpu | None = None, workers: int = 0, prefetch: int = 2) -> None:
        self.gpu = gpu or Gpu()
        self.now = 0
        self.profiled = False
        self.spans: list[Span] = []
        self.tasks: list[Task] = []
        self.host: list[Stretch] = []
        self.stalls: list[Stall] = []
        self.steps: list[Played] = []
        self._free: dict[int, int] = {COMPUTE: 0}
        self._after: dict[int, int] = {}  # stream: what an awaited event holds back
        self._queue: dict[int, deque[int]] = {}
        self._events: dict[str, int] = {}
        self._copying = 0  # until when the copy engine works
        self._correlation = 0
        self._thread = TRAINING
        self._updating = False
        self._data_ns = self._optimizer_ns = 0
        self._workers = _Workers(workers, prefetch) if workers else None
        self._play: dict[type, Callable[..., None]] = {
            Operator: self._operator,
            Graph: self._graph,
            Read: self._read,
            Upload: self._upload,
            Synchronize: self._synchronize,
            RecordEvent: self._record,
            AwaitEvent: self._await,
            LoadData: self._load,
            HostWork: self._work,
            Allocate: self._allocate,
            Update: self._update,
        }

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self, loop: Loop, steps: int) -> None:
        """Play so many steps more."""
        for _ in range(steps):
            self.step(loop.items(len(self.steps)))

    def step(self, items: tuple[Item, ...]) -> None:
        """Play one step."""
        begun, device_begun = self.now, self.drained_ns(COMPUTE)
        self._data_ns = self._optimizer_ns = 0
        for item in items:
            self._play[type(item)](item)
        number = len(self.steps)
        self._span(f"ProfilerStep#{number}", Category.USER_ANNOTATION, begun)
        done = self.drained_ns(COMPUTE)
        self.steps.append(Played(number, begun, self.now, self._data_ns, self._optimizer_ns, device_begun, done))

    def drain(self) -> None:
        """Wait for everything, as a profiler does before it starts and when it stops."""
        self._wait("cudaDeviceSynchronize", max(self._free.values()))

    def idle(self, ns: int) -> None:
        """Nothing of the loop's happens."""
        self._pass("unknown", ns)

    def drained_ns(self, stream: int) -> int:
        """When the stream has ended all that was launched so far; not before now."""
        return max(self.now, self._free.get(stream, 0))

    # -- the host ------------------------------------------------------------------------------------------------------

    def _operator(self, item: Operator) -> None:
        thread, self._thread = self._thread, AUTOGRAD if item.node else self._thread
        begun, calls = self.now, len(item.kernels) or 1
        rest = item.host_ns + self.gpu.profiler_ns * self.profiled
        before = rest // (2 * calls)
        for kernel in item.kernels:
            self._pass("launch", before)
            self._launch("cudaLaunchKernel", self.gpu.launch_ns, (kernel,))
        self._pass("launch", rest - before * len(item.kernels))
        self._span(item.name, Category.CPU_OP, begun)
        if item.node:
            self._span(item.node, Category.CPU_OP, begun)
            self._span(f"autograd::engine::evaluate_function: {item.node}", Category.CPU_OP, begun)
        self._thread = thread
        self._pass("launch", self.gpu.python_ns)

    def _graph(self, item: Graph) -> None:
        self._pass("launch", item.host_ns)
        self._launch("cudaGraphLaunch", self.gpu.graph_launch_ns, item.kernels)
        self._pass("launch", self.gpu.python_ns)

    def _update(self, item: Update) -> None:
        begun, self._updating = self.now, True
        for operator in item.operators:
            self._operator(operator)
        self._updating = False
        self._span(f"Optimizer.{item.method}#{item.optimizer}.{item.method}", Category.USER_ANNOTATION, begun)
        self._optimizer_ns += self.now - begun

    def _work(self, item: HostWork) -> None:
        begun = self.now
        unnamed: State = "unknown" if item.ns > UNNAMED_GAP_NS else "launch"
        self._pass("other" if item.annotation or item.pause else unnamed, item.ns)
        if item.annotation:
            self._span(item.annotation, Category.USER_ANNOTATION, begun)
        if item.pause is not None:
            self.stalls.append(Stall(item.pause, begun, self.now))

    def _load(self, item: LoadData) -> None:
        begun = self.now
        if self._workers is None:
            self._pass("data_wait", item.ns)
        else:
            ready = self._workers.next_ready(self.now, item.ns)
            self._pass("data_wait", max(0, ready - self.now) + self.gpu.hand_off_ns)
            self._workers.ask(self.now, item.ns)
        self._span(DATA.format("Multi" if self._workers else "Single"), Category.USER_ANNOTATION, begun)
        self._data_ns += self.now - begun

    def _allocate(self, item: Allocate) -> None:
        begun = self.now
        until = max(self._free.values()) if item.call == "cudaFree" else self.now
        self._pass("allocator", max(0, until - self.now) + item.ns)
        self._span(item.call, Category.CUDA_RUNTIME, begun)

    # -- waiting for the device ----------------------------------------------------------------------------------------

    def _synchronize(self, item: Synchronize) -> None:
        if item.stream is None:
            self._wait("cudaDeviceSynchronize", max(self._free.values()))
        else:
            self._wait("cudaStreamSynchronize", self._free.get(item.stream, 0))

    def _wait(self, call: str, until_ns: int) -> None:
        begun = self.now
        self._pass("sync_wait", max(0, until_ns - self.now) + self.gpu.return_ns)
        self._span(call, Category.CUDA_RUNTIME, begun)

    def _read(self, item: Read) -> None:
        begun = self.now
        self._pass("launch", self.gpu.python_ns)
        self._copy("Memcpy DtoH (Device -> {})", 4, COMPUTE, item.pinned, waits=not item.pinned)
        self._wait("cudaStreamSynchronize", self._free[COMPUTE])
        if item.operator == "aten::item":
            self._span("aten::_local_scalar_dense", Category.CPU_OP, begun)
        self._span(item.operator, Category.CPU_OP, begun)
        self._pass("launch", self.gpu.python_ns)

    def _upload(self, item: Upload) -> None:
        begun = self.now
        self._pass("launch", self.gpu.python_ns)
        self._copy("Memcpy HtoD ({} -> Device)", item.bytes, item.stream, item.pinned, waits=not item.pinned)
        if not item.non_blocking:
            self._wait("cudaStreamSynchronize", self._free[item.stream])
        for name in ("aten::copy_", "aten::_to_copy", "aten::to"):
            self._span(name, Category.CPU_OP, begun)
        self._pass("launch", self.gpu.python_ns)

    def _copy(self, name: str, size: int, stream: int, pinned: bool, *, waits: bool) -> None:
        """One copy. Pageable memory goes through the driver, which keeps the call until the bytes are out of it."""
        begun, gpu = self.now, self.gpu
        rate = gpu.pinned_bytes_per_us if pinned else gpu.pageable_bytes_per_us
        length = gpu.copy_ns + size * 1_000 // rate
        self._room(stream)
        self._correlation += 1
        asked = self.now + gpu.launch_ns
        start = max(self._earliest(stream, asked), self._copying)
        end = self._copying = start + length
        self._task(stream, asked, start, end)
        self._pass("blocking_copy", (end - self.now) if waits else gpu.launch_ns)
        kind = name.format("Pinned" if pinned else "Pageable")
        self._span("cudaMemcpyAsync", Category.CUDA_RUNTIME, begun, self._correlation)
        self._device_span(Span(kind, Category.GPU_MEMCPY, stream, start, end, self._correlation, size))

    # -- the device ----------------------------------------------------------------------------------------------------

    def _launch(self, call: str, call_ns: int, kernels: tuple[Kernel, ...]) -> None:
        begun, stream = self.now, kernels[0].stream
        self._room(stream)
        self._pass("launch", call_ns)
        self._correlation += 1
        self._span(call, Category.CUDA_RUNTIME, begun, self._correlation)
        start = self._earliest(stream, self.now)
        for kernel in kernels:
            end = start + kernel.ns
            self._task(stream, self.now, start, end, kernel.name, queued=kernel is kernels[-1])
            row = Span(kernel.name, Category.KERNEL, stream, start, end, self._correlation)
            self._device_span(row, kernel.blocks_per_sm)
            start = end + self.gpu.graph_gap_ns

    def _room(self, stream: int) -> None:
        """Wait until the stream's queue takes one more."""
        waiting = self._queue.setdefault(stream, deque())
        while waiting and waiting[0] <= self.now:
            waiting.popleft()
        if len(waiting) >= self.gpu.queue_depth:
            self._pass("launch", waiting[len(waiting) - self.gpu.queue_depth] - self.now)

    def _earliest(self, stream: int, launched_ns: int) -> int:
        free = self._free.get(stream)
        behind = free + self.gpu.gap_ns if free is not None and free > 0 else 0
        return max(launched_ns + self.gpu.latency_ns, behind, self._after.get(stream, 0))

    def _task(
        self, stream: int, launched_ns: int, start: int, end: int, kernel: str = "", *, queued: bool = True
    ) -> None:
        self.tasks.append(Task(len(self.steps), stream, launched_ns, start, end, kernel))
        self._free[stream] = end
        if queued:
            self._queue.setdefault(stream, deque()).append(end)

    def _record(self, item: RecordEvent) -> None:
        begun = self.now
        self._pass("launch", self.gpu.event_ns)
        self._events[item.event] = self._free.get(item.stream, 0)
        self._span("cudaEventRecord", Category.CUDA_RUNTIME, begun)

    def _await(self, item: AwaitEvent) -> None:
        begun = self.now
        self._pass("launch", self.gpu.event_ns)
        held = max(self._after.get(item.stream, 0), self._events[item.event] + self.gpu.event_ns)
        self._after[item.stream] = held
        self._span("cudaStreamWaitEvent", Category.CUDA_RUNTIME, begun)

    # -- the record ----------------------------------------------------------------------------------------------------

    def _pass(self, state: State, ns: int) -> None:
        if ns <= 0:
            return
        if self._updating and state == "launch":
            state = "optimizer"
        self.host.append(Stretch(state, self.now, self.now + ns))
        self.now += ns

    def _span(self, name: str, category: Category, start: int, correlation: int = 0) -> None:
        if self.profiled:
            self.spans.append(Span(name, category, self._thread, start, self.now, correlation))

    def _device_span(self, span: Span, blocks_per_sm: float = float("nan")) -> None:
        if self.profiled:
            fields = (span.name, span.category, span.place, span.start_ns, span.end_ns, span.correlation, span.bytes)
            self.spans.append(Span(*fields, blocks_per_sm=blocks_per_sm))
