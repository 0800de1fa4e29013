"""Ranks for the lessons: threads of this process for exercises, and the parts of lesson 12 that run in processes.

The threads offer calls of torch.distributed under the same names. Messages are not buffered: a message passes when one
rank sends and the other receives. A deadlock is detected at once, without a timeout. A process of lesson 12 passes what
it measures to the notebook in its trace, as the name of an annotation.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.distributed import ReduceOp

from gpulab.options import at_most
from gpulab.run import Run

Result = TypeVar("Result")


class Deadlock(Exception):
    """All running ranks wait for one another."""


class Handle:
    """A message in transit, and its tensor."""

    def __init__(self, ranks: _Ranks, rank: int, tensor: Tensor, what: str) -> None:
        self._ranks = ranks
        self._rank = rank
        self.tensor = tensor
        self.what = what
        self.is_done = False

    def wait(self) -> None:
        """Wait until the message has arrived. Raises Deadlock if it never can."""
        self._ranks.wait(self._rank, self)


class _Ranks:
    """The state that the threads share, under one lock."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.changed = threading.Condition()
        self.sends: dict[tuple[int, int], deque[Handle]] = defaultdict(deque)  # from one rank to another
        self.receives: dict[tuple[int, int], deque[Handle]] = defaultdict(deque)
        self.reductions: dict[int, list[Handle]] = defaultdict(list)
        self.waiting: dict[int, Handle] = {}
        self.running = set(range(count))
        self.deadlock = ""

    def wait(self, rank: int, handle: Handle) -> None:
        with self.changed:
            if not handle.is_done:
                self.waiting[rank] = handle
                self.detect_deadlock()
            while not handle.is_done and not self.deadlock:
                self.changed.wait()
            self.waiting.pop(rank, None)
            if not handle.is_done:
                raise Deadlock(self.deadlock)

    def detect_deadlock(self) -> None:
        """End all ranks if each running rank waits for another."""
        stuck = {rank: handle for rank, handle in self.waiting.items() if not handle.is_done}
        if stuck and set(stuck) == self.running:
            self.deadlock = "; ".join(f"rank {rank} {handle.what}" for rank, handle in sorted(stuck.items()))
            self.changed.notify_all()

    def ended(self, rank: int) -> None:
        with self.changed:
            self.running.discard(rank)
            self.detect_deadlock()


class ThreadRank:
    """One rank, with the functions of `torch.distributed`. `sent_bytes`: the bytes that it has sent to other ranks."""

    ReduceOp = ReduceOp

    def __init__(self, ranks: _Ranks, rank: int) -> None:
        self._ranks = ranks
        self._rank = rank
        self._reductions = 0
        self.sent_bytes = 0
        self.when_exchanging: Callable[[], object] = lambda: None  # called at each exchange that this rank begins

    def get_rank(self) -> int:
        return self._rank

    def get_world_size(self) -> int:
        return self._ranks.count

    def send(self, tensor: Tensor, dst: int) -> None:
        self.isend(tensor, dst).wait()

    def recv(self, tensor: Tensor, src: int) -> None:
        self.irecv(tensor, src).wait()

    def isend(self, tensor: Tensor, dst: int) -> Handle:
        """Raises ValueError for no other rank."""
        self._refuse(dst)
        self.when_exchanging()
        self.sent_bytes += tensor.nbytes
        sent = Handle(self._ranks, self._rank, tensor, f"waits in a send to rank {dst}")
        with self._ranks.changed:
            self._ranks.sends[self._rank, dst].append(sent)
            self._match(self._rank, dst)
        return sent

    def irecv(self, tensor: Tensor, src: int) -> Handle:
        """Raises ValueError for no other rank."""
        self._refuse(src)
        received = Handle(self._ranks, self._rank, tensor, f"waits to receive from rank {src}")
        with self._ranks.changed:
            self._ranks.receives[src, self._rank].append(received)
            self._match(src, self._rank)
        return received

    def all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> None:
        """Put the sum, or with `ReduceOp.AVG` the mean, into every rank's tensor. Raises ValueError for another
        `op`.
        """
        if op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise ValueError("only ReduceOp.SUM and ReduceOp.AVG are there")
        self.when_exchanging()
        handle = Handle(self._ranks, self._rank, tensor, "waits in all_reduce")
        with self._ranks.changed:
            posted = self._ranks.reductions[self._reductions]
            posted.append(handle)
            self._reductions += 1
            if len(posted) == self._ranks.count:
                with torch.no_grad():
                    total = torch.stack([one.tensor.detach() for one in posted]).sum(0)
                    for one in posted:
                        one.tensor.copy_(total / self._ranks.count if op == ReduceOp.AVG else total)
                        one.is_done = True
                self._ranks.changed.notify_all()
        handle.wait()

    def _refuse(self, other: int) -> None:
        if not 0 <= other < self._ranks.count or other == self._rank:
            raise ValueError(f"rank {self._rank} has no rank {other} to exchange with, among {self._ranks.count}")

    def _match(self, src: int, dst: int) -> None:
        sends, receives = self._ranks.sends[src, dst], self._ranks.receives[src, dst]
        while sends and receives:
            sent, received = sends.popleft(), receives.popleft()
            if sent.tensor.shape != received.tensor.shape:
                raise ValueError(
                    f"rank {src} sends {list(sent.tensor.shape)}, rank {dst} receives {list(received.tensor.shape)}"
                )
            with torch.no_grad():
                received.tensor.copy_(sent.tensor)
            sent.is_done = received.is_done = True
        self._ranks.changed.notify_all()


class Ended(Struct):
    """The results of the ranks, in order, and how many bytes each rank sent."""

    results: list[Any]
    sent_bytes: list[int]


def run_ranks(work: Callable[[ThreadRank], Result], ranks: int) -> Ended:
    """Call `work` in so many threads, each with its rank, and wait for all.

    Raises the error of the first rank that failed, or Deadlock if all wait. An interrupt ends the threads.
    """
    shared = _Ranks(ranks)
    each = [ThreadRank(shared, rank) for rank in range(ranks)]
    results: list[Any] = [None] * ranks
    failures: list[Exception] = []

    over = threading.Event()  # for a thread that has not begun yet

    def run(rank: int) -> None:
        try:
            if not over.is_set():
                results[rank] = work(each[rank])
        except Exception as e:
            failures.append(e)
        except SystemExit:  # from `_end` or from the answer
            failures.append(RuntimeError(f"rank {rank} was ended"))
        finally:
            shared.ended(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:  # a time limit: an answer that never ends must not go on
        over.set()
        _end(threads)
        raise
    own = [e for e in failures if not isinstance(e, Deadlock)]
    if failures:
        raise (own or failures)[0]
    return Ended(results, [rank.sent_bytes for rank in each])


def _end(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        if thread.ident is not None and thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


WIDTH = 64
SAMPLE_MS = 3.0  # the stand-in's time per sample in the forward pass; backward takes twice as long
QUICK_SAMPLE_MS = 0.8
FORWARD, BACKWARD = "lesson::forward", "lesson::backward"  # as named in the report
_NOTE = "lesson notes "


@torch.library.custom_op(FORWARD, mutates_args=())
def _forward(x: Tensor, ms: float) -> Tensor:
    time.sleep(ms / 1e3)
    return x.clone()


@torch.library.custom_op(BACKWARD, mutates_args=())
def _backward(x: Tensor, ms: float) -> Tensor:
    time.sleep(ms / 1e3)
    return x.clone()


@_forward.register_fake
@_backward.register_fake
def _shape(x: Tensor, ms: float) -> Tensor:
    return torch.empty_like(x)


class _DeviceWork(torch.autograd.Function):
    """The time in which the stage's device is busy. The values pass through unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sample_ms: float) -> Tensor:
        ctx.ms = len(x) * sample_ms
        result: Tensor = _forward(x, ctx.ms)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _backward(gradients[0], 2 * ctx.ms), None


class Stage(nn.Module):
    """Two small layers, whose work takes as long as on a device that needs `sample_ms` for each sample.

    The layers are really computed: weights, gradients and loss are those of a training. A fixed sleep replaces the
    device's time, because two processes seldom have two cores to themselves.
    """

    def __init__(self, width: int = WIDTH, sample_ms: float = SAMPLE_MS) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.sample_ms = at_most(sample_ms, QUICK_SAMPLE_MS)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, width] → the same shape."""
        worked: Tensor = _DeviceWork.apply(self.layers(x), self.sample_ms)  # type: ignore[no-untyped-call]
        return worked


class SavedActivations:
    """How many bytes autograd saves in forward passes for backward passes; `peak_bytes`: the most at once.

    A tensor that several operators save, such as an output that is the next operator's input, counts once.
    """

    def __init__(self) -> None:
        self.now_bytes = self.peak_bytes = 0
        self._holders: Counter[tuple[int, int]] = Counter()  # by piece of memory: its address and size

    def keep(self, tensor: Tensor) -> _Saved:
        """Count one more operator that saves the tensor, until autograd drops the returned object."""
        saved, piece = _Saved(tensor), (tensor.data_ptr(), tensor.numel() * tensor.element_size())
        if not self._holders[piece]:
            self.now_bytes += piece[1]
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        self._holders[piece] += 1
        weakref.finalize(saved, self._release, piece)
        return saved

    def _release(self, piece: tuple[int, int]) -> None:
        self._holders[piece] -= 1
        if not self._holders[piece]:
            self.now_bytes -= piece[1]


class _Saved(Struct, weakref=True, eq=False):
    tensor: Tensor


@contextmanager
def saved_activations(model: nn.Module) -> Iterator[SavedActivations]:
    """Count the bytes that the block saves for backward passes, without the model's parameters."""
    saved = SavedActivations()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> _Saved | Tensor:
        return tensor if tensor.untyped_storage().data_ptr() in parameters else saved.keep(tensor)

    def unpack(packed: _Saved | Tensor) -> Tensor:
        return packed.tensor if isinstance(packed, _Saved) else packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield saved


def local_bytes(tensors: Iterable[Tensor | None]) -> int:
    """The bytes of these tensors in this process; for a tensor sharded over ranks, of this rank's shard."""
    parts = (getattr(tensor, "to_local", lambda tensor=tensor: tensor)() for tensor in tensors if tensor is not None)
    return sum(part.numel() * part.element_size() for part in parts)


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor | None]:
    """Weights, their gradients, and the optimizer's tensors of the same shapes."""
    for parameter in model.parameters():
        yield parameter
        yield parameter.grad
        state = optimizer.state.get(parameter, {})
        yield from (v for v in state.values() if isinstance(v, Tensor) and v.shape == parameter.shape)


def note(name: str, count: int) -> None:
    """Write a figure into the trace, from which `latest_note` reads it; `name` is one word."""
    with torch.profiler.record_function(f"{_NOTE}{name}={count}"):
        pass


def latest_note(run: Run, name: str) -> int | None:
    """The largest figure of that name in a run's trace; None if there is none."""
    beginning = f"{_NOTE}{name}="
    names = run.timeline.names if run.timeline is not None else ()
    return max((int(n.removeprefix(beginning)) for n in names if n.startswith(beginning)), default=None)
