"""What a training loop does, as a list of small parts. All times are nanoseconds."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from gpulab.run import PauseKind

COMPUTE, SIDE, COPIES = 7, 20, 14  # stream numbers; the first is the one that PyTorch computes on


class Kernel(Struct, frozen=True):
    """One kernel. `blocks_per_sm` below 1: it leaves multiprocessors empty."""

    name: str
    ns: int
    stream: int = COMPUTE
    blocks_per_sm: float = 4.0


class Operator(Struct, frozen=True):
    """An operator that takes `host_ns` beside its launching calls. `node`: autograd's, on its own thread.

    `cured_by`: the key of the finding whose cure takes the operator out of the step.
    """

    name: str
    host_ns: int
    kernels: tuple[Kernel, ...] = ()
    node: str = ""
    cured_by: str = ""


class Graph(Struct, frozen=True):
    """A CUDA graph is replayed: one launch, these kernels one after the other on one stream."""

    host_ns: int
    kernels: tuple[Kernel, ...]


class Read(Struct, frozen=True):
    """A value is read back with `.item()`: the host waits until the stream is empty."""

    operator: str = "aten::item"
    pinned: bool = False  # else the copying call itself waits


class Upload(Struct, frozen=True):
    """A batch goes to the GPU. It overlaps with the host only if it is pinned and `non_blocking`."""

    bytes: int
    pinned: bool = False
    non_blocking: bool = False
    stream: int = COMPUTE


class Synchronize(Struct, frozen=True):
    """The host waits until a stream is empty; None: until all are."""

    stream: int | None = None


class RecordEvent(Struct, frozen=True):
    """The event has happened when all that was launched on the stream before it has ended."""

    event: str
    stream: int = COMPUTE


class AwaitEvent(Struct, frozen=True):
    """What is launched on the stream from now on begins after the event."""

    event: str
    stream: int


class LoadData(Struct, frozen=True):
    """The loop takes its next batch, which takes `ns` to make, here or in a worker."""

    ns: int


class HostWork(Struct, frozen=True):
    """Python code that launches nothing. `annotation`: the trace names it; `pause`: the run's hooks name it."""

    ns: int
    annotation: str = ""
    pause: PauseKind | None = None


class Allocate(Struct, frozen=True):
    """A call of the driver for memory. `cudaFree` waits for the device first."""

    ns: int
    call: Literal["cudaMalloc", "cudaFree"] = "cudaMalloc"


class Update(Struct, frozen=True):
    """`Optimizer.step` or `zero_grad` with what happens in it."""

    operators: tuple[Operator, ...]
    optimizer: str = "SGD"
    method: Literal["step", "zero_grad"] = "step"


Item = (
    Operator | Graph | Read | Upload | Synchronize | RecordEvent | AwaitEvent | LoadData | HostWork | Allocate | Update
)


class Loop(Struct, frozen=True):
    """A training loop: the items of each step, and `(n, items)` at the end of every n-th step.

    `workers` processes make the batches, 0: the loop itself.
    """

    step: tuple[Item, ...]
    now_and_then: tuple[tuple[int, tuple[Item, ...]], ...] = ()
    workers: int = 0
    prefetch: int = 2

    def items(self, number: int) -> tuple[Item, ...]:
        """What step `number` does, counted from 0."""
        late = (item for every, items in self.now_and_then if (number + 1) % every == 0 for item in items)
        return (*self.step, *late)
