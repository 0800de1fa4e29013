"""What a training loop does, as a list of small parts. All times are nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpulab.run import PauseKind

COMPUTE, SIDE, COPIES = 7, 20, 14  # stream numbers; the first is the one that PyTorch computes on


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel. `blocks_per_sm` below 1: it leaves multiprocessors empty."""

    name: str
    ns: int
    stream: int = COMPUTE
    blocks_per_sm: float = 4.0


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator that takes `host_ns` beside its launching calls. `node`: autograd's, on its own thread.

    `cured_by`: the key of the finding whose cure takes the operator out of the step.
    """

    name: str
    host_ns: int
    kernels: tuple[Kernel, ...] = ()
    node: str = ""
    cured_by: str = ""


@dataclass(frozen=True, slots=True)
class Graph:
    """A CUDA graph is replayed: one launch, these kernels one after the other on one stream."""

    host_ns: int
    kernels: tuple[Kernel, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """A value is read back with `.item()`: the host waits until the stream is empty."""

    operator: str = "aten::item"
    pinned: bool = False  # else the copying call itself waits


@dataclass(frozen=True, slots=True)
class Upload:
    """A batch goes to the GPU. It overlaps with the host only if it is pinned and `non_blocking`."""

    bytes: int
    pinned: bool = False
    non_blocking: bool = False
    stream: int = COMPUTE


@dataclass(frozen=True, slots=True)
class Synchronize:
    """The host waits until a stream is empty; None: until all are."""

    stream: int | None = None


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """The event has happened when all that was launched on the stream before it has ended."""

    event: str
    stream: int = COMPUTE


@dataclass(frozen=True, slots=True)
class AwaitEvent:
    """What is launched on the stream from now on begins after the event."""

    event: str
    stream: int


@dataclass(frozen=True, slots=True)
class LoadData:
    """The loop takes its next batch, which takes `ns` to make, here or in a worker."""

    ns: int


@dataclass(frozen=True, slots=True)
class HostWork:
    """Python code that launches nothing. `annotation`: the trace names it; `pause`: the run's hooks name it."""

    ns: int
    annotation: str = ""
    pause: PauseKind | None = None


@dataclass(frozen=True, slots=True)
class Allocate:
    """A call of the driver for memory. `cudaFree` waits for the device first."""

    ns: int
    call: Literal["cudaMalloc", "cudaFree"] = "cudaMalloc"


@dataclass(frozen=True, slots=True)
class Update:
    """`Optimizer.step` or `zero_grad` with what happens in it."""

    operators: tuple[Operator, ...]
    optimizer: str = "SGD"
    method: Literal["step", "zero_grad"] = "step"


Item = (
    Operator | Graph | Read | Upload | Synchronize | RecordEvent | AwaitEvent | LoadData | HostWork | Allocate | Update
)


@dataclass(frozen=True, slots=True)
class Loop:
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
