"""Records a loop with torch: sessions of its profiler between step boundaries, and timing events of a GPU.

The host may be hundreds of launches ahead of the GPU, so its own clock says little about a step. An event recorded at a
boundary completes when the GPU has finished all earlier launches, which is how a trace defines a step too
(`timeline.launches`). The time between two events is that of the steps between them, and nothing waits for the GPU.

torch does not report the number of events while it records, so a session's memory is estimated from that of the
process.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
import time
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import perf_counter_ns
from typing import Any

import numpy as np
from msgspec import field

from gpulab.capture.stack_sampler import SamplingProcess, StackSampler
from gpulab.devices import gpus
from gpulab.errors import DeviceLost
from gpulab.patching.attributes import replaced
from gpulab.run import Int64
from gpulab.trace.profiler_result import CLOCK_MARK, Recording

ITERATOR_MARK = "enumerate(DataLoader)#DataLoader.__iter__"  # next to torch's "enumerate(DataLoader)#….__next__"
# What torch 2.13 writes to fd 2 about a session of gpulab, the second line if the user's profiler has replaced it.
_KINETO_LINE = re.compile(
    rb"^(?:USDT:.*profiler_(?:start|stop)|\[W.*disableProfiler called but no active profiling"
    rb"|ERROR: External init callback must run in same thread).*\n?",
    re.MULTILINE,
)
# CUPTI of CUDA 12.6u2–13.0 loses or corrupts the first kernels of a session, one more with each session of the process
# (pytorch#192021). So this many dummy kernels run before the first step, and one more for each earlier session.
SACRIFICED = 64
TEARDOWN = "TEARDOWN_CUPTI"  # of Kineto: "1" detaches CUPTI at the end of a session
SAFE_TEARDOWN = "12.6"  # before, a process with CUDA graphs may crash at the next session (torch/profiler/profiler.py)
UNKNOWN = -1.0  # ms between two events of a GPU
_stays = False  # whether CUPTI has stayed attached after a session
_sessions = 0  # sessions on a GPU that gpulab has begun in this process


def stays() -> bool:
    """Whether CUPTI has stayed in this process after an earlier session, and slows each CUDA call."""
    return _stays


class ProfilerUnavailable(Exception):
    """The profiler cannot run now; the message says why."""


def in_backward() -> bool:
    """Whether autograd's engine runs on this thread: on return it restores the profiler's earlier state."""
    torch = sys.modules.get("torch")
    return torch is not None and torch._C._current_graph_task_id() != -1


class WindowRecording(Recording, frozen=True):
    """A finished session, with samples of the training thread's lines."""

    lines: StackSampler = field(default_factory=lambda: StackSampler(None, "training"))


class Window:
    """One profiler session. Marks each step as `ProfilerStep#N`, as torch's own schedule does."""

    def __init__(self, device_kind: str, stacks: SamplingProcess | None = None) -> None:
        self._device_kind = device_kind
        self._lines = StackSampler(stacks, "training")
        self._profile: Any = None
        self._step: Any = None
        self._iterator: Any = None
        self.marks: list[tuple[int, int]] = []  # (step number, perf_counter_ns just before its annotation begins)
        self.start_cost_ns = 0
        self.stop_cost_ns = 0
        self._began_ns = 0
        self._clock_ns = 0
        self._asks_teardown = False

    @property
    def age_s(self) -> float:
        return (time.perf_counter_ns() - self._began_ns) / 1e9

    def start(self) -> None:
        """Begin to record. Raises ProfilerUnavailable if another profiler is active, or if torch raises."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        if torch._C._autograd._profiler_enabled():
            raise ProfilerUnavailable("another torch.profiler is active in this process")
        before = time.perf_counter_ns()
        activities = [ProfilerActivity.CPU]
        if self._device_kind == "cuda":
            activities.append(ProfilerActivity.CUDA)
            self._asks_teardown = _ask_teardown()
        try:
            gpus.synchronize()
            with _quiet():
                self._profile = profile(
                    activities=activities,
                    experimental_config=_with_arguments() if self._device_kind == "cuda" else None,
                )
                with _unwarned(), _without_inductor():
                    self._profile.start()
            if self._device_kind == "cuda":
                _sacrifice()
        except (RuntimeError, DeviceLost) as e:
            if self._profile is not None:
                with suppress(Exception):
                    _end(self._profile)
            self._profile = None
            self._settle()
            raise ProfilerUnavailable(f"torch.profiler refused to start: {e}") from e
        self._mark_clock()
        self._lines.start(at_once=True)
        self._began_ns = time.perf_counter_ns()
        self.start_cost_ns = self._began_ns - before

    def _settle(self) -> None:
        """The session has ended: remember whether CUPTI stays, and restore the environment."""
        global _stays
        if self._device_kind == "cuda":
            _stays = os.environ.get(TEARDOWN) != "1"  # torch itself prevents it if it is not safe
            if self._asks_teardown:
                os.environ.pop(TEARDOWN, None)
            self._asks_teardown = False

    def _mark_clock(self) -> None:
        """Write a mark of known time into the trace, to relate its clock to ours."""
        import torch

        for _ in range(3):  # the first call is slow
            self._clock_ns = time.perf_counter_ns()
            with torch.profiler.record_function(CLOCK_MARK):
                pass

    def step_begins(self, number: int) -> None:
        """Open the annotation of a step and close the previous one."""
        import torch

        self.step_ends()
        self._step = torch.profiler.record_function(f"ProfilerStep#{number}")
        self.marks.append((number, time.perf_counter_ns()))
        self._step.__enter__()

    def step_ends(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def loader_begins(self) -> None:
        """A DataLoader makes an iterator and starts its workers; torch itself annotates only later batches."""
        import torch

        self._iterator = torch.profiler.record_function(ITERATOR_MARK)
        self._iterator.__enter__()

    def loader_ends(self) -> None:
        if self._iterator is not None:
            self._iterator.__exit__(None, None, None)
            self._iterator = None

    def stop(self) -> WindowRecording:
        """End the session and return its recording. The profiler is stopped even on errors."""
        end_ns = time.perf_counter_ns()
        self.loader_ends()
        self.step_ends()
        self._lines.stop()
        profile, self._profile = self._profile, None
        try:
            _end(profile)
        finally:
            self._settle()
        self.stop_cost_ns = time.perf_counter_ns() - end_ns
        return WindowRecording(profile, self._began_ns, end_ns, self._clock_ns, self._lines)


def _ask_teardown() -> bool:
    """Request that Kineto detach CUPTI after a session, if that is safe and the user has not set it.

    On an H100 with CUDA 13.0 a loop of launches took 69 to 76 % longer after a session, and 5 % longer after a teardown
    (benchmarks/results/gpu_first.json).
    """
    import torch
    from torch.torch_version import TorchVersion

    cuda = TorchVersion(torch.version.cuda or "0")  # None: AMD's GPUs have no CUPTI
    asks = cuda >= SAFE_TEARDOWN and TEARDOWN not in os.environ
    if asks:
        os.environ[TEARDOWN] = "1"
    return asks


def _with_arguments() -> Any:
    """Have Kineto record sizes of copies and occupancy; None if this PyTorch cannot (pytorch#161624)."""
    from torch._C._profiler import _ExperimentalConfig

    try:
        return _ExperimentalConfig(expose_kineto_event_metadata=True)
    except TypeError:
        return None


@contextmanager
def _unwarned() -> Iterator[None]:
    """Suppress torch 2.11's warning about a session without earlier events, without touching `warnings`' own state."""
    from torch.profiler import profiler

    if not hasattr(profiler, "_warn_once"):  # an older PyTorch
        yield
        return
    with replaced(profiler, "_warn_once", lambda original: lambda *message: None):
        yield


class _TorchWithoutInductor:
    """Replaces `torch` in torch.profiler while a session starts and looks up `_inductor`.

    The look-up would import `_inductor` in the middle of the user's loop, which takes 1 s or more and leaves 100,000
    objects to the next garbage collection.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        if name == "_inductor":
            raise AttributeError(name)
        return getattr(self._torch, name)


@contextmanager
def _without_inductor() -> Iterator[None]:
    """Hide `torch._inductor` unless it is imported: the profiler only checks whether something is compiled with it."""
    from torch.profiler import profiler

    if "torch._inductor.config" in sys.modules:
        yield
        return
    with replaced(profiler, "torch", _TorchWithoutInductor):
        yield


def _end(profile: Any) -> None:
    """End a session of the profiler, also on a broken GPU."""
    with _quiet():
        gpus.lost()  # waits for the GPUs in use
        profile.profiler.use_device = None  # the profiler's own wait starts CUDA, and raises on a broken GPU
        profile.stop()


def _sacrifice() -> None:
    """Run dummy kernels that a session may lose, on each GPU in use, outside of the user's torch modes."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    global _sessions
    _sessions += 1
    with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
        for index in gpus.in_use():
            lost = torch.zeros(1, device=f"cuda:{index}")
            for _ in range(SACRIFICED + _sessions):
                lost.add_(1)
    gpus.synchronize()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Kineto's lines about our own session out of the user's output; all other output passes.

    KINETO_LOG_LEVEL does not help: it is read once per process, so it would be too late after a profiler of the user,
    and would silence every later profiler.
    """
    try:
        stderr = os.dup(2)
    except OSError:  # this process has no standard error
        yield
        return
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            caught.seek(0)
            others = _KINETO_LINE.sub(b"", caught.read())
            if others:
                os.write(2, others)


class StepEvents:
    """Records one event for each mark, on the GPU and the stream of the step's update, else on the current stream.

    Only on the training thread. A mark costs microseconds. Completed events are reused, so that there are only as many
    as the host is steps ahead. After a CUDA error nothing more is recorded: the user's code gets the error, too.
    """

    def __init__(self) -> None:
        self.index: int | None = None  # number of the GPU; None: unknown so far
        self._stream: Any = None  # stream of the open step's update
        self._tries = 0  # to find the GPU in use
        self._pending: deque[Any] = deque()
        self._unused: list[Any] = []
        self._latest: Any = None  # the newest event that has completed
        self._host_ns = array("q")  # of each mark
        self._since_ms = array("d")  # from the previous mark, on the GPU; or UNKNOWN
        self._broken = False

    def updated(self, optimizer: Any) -> None:
        """An optimizer has stepped: the step's events belong on the GPU of its parameters."""
        index = gpu_of(optimizer)
        if index is None or self._broken or gpus.in_graph_capture():
            return
        if index != self.index:  # events of two GPUs cannot be compared
            self._pending.clear()
            self._unused.clear()
            self._latest = None
            del self._host_ns[:], self._since_ms[:]
            self.index = index
        self._stream = sys.modules["torch"].cuda.current_stream(index)

    def mark(self, t_ns: int) -> None:
        """Record a boundary, at `t_ns` of the host's clock."""
        if self._broken or gpus.in_graph_capture():
            return
        try:
            if self._ready():
                self._record(t_ns)
                self._collect()
        except RuntimeError:
            self._broken = True

    def finish(self, start_ns: Int64, end_ns: Int64) -> Int64:
        """The time of each step on the GPU (ns); -1 if a boundary has no event. Waits for the events.

        `start_ns`, `end_ns`: the host's times of the boundaries. Empty if nothing was marked.
        """
        if not self._host_ns:
            return np.empty(0, np.int64)
        try:
            if not self._broken:
                for event in self._pending:
                    event.synchronize()
                self._collect()
        except RuntimeError:
            self._broken = True
        count = len(self._since_ms)
        mark_of = {t: i for i, t in enumerate(self._host_ns[:count])}
        first = np.array([mark_of.get(t, -1) for t in start_ns.tolist()], np.int64)
        last = np.array([mark_of.get(t, -1) for t in end_ns.tolist()], np.int64)
        since_ms = np.array(self._since_ms, np.float64)
        at_ns = np.cumsum(np.maximum(since_ms, 0.0)) * 1e6
        gaps = np.cumsum(since_ms == UNKNOWN)
        measured = (first >= 0) & (last >= first)
        measured[measured] = gaps[first[measured]] == gaps[last[measured]]
        device_ns = np.full(len(start_ns), -1, np.int64)
        device_ns[measured] = np.rint(at_ns[last[measured]] - at_ns[first[measured]]).astype(np.int64)
        return device_ns

    def _ready(self) -> bool:
        """Whether the GPU in use is known: an event on another GPU would create a context, or mean nothing.

        The query takes tens of microseconds, so it is made more and more rarely.
        """
        if self.index is None:
            self._tries += 1
            used = gpus.in_use() if self._tries & (self._tries - 1) == 0 else []
            self.index = used[0] if len(used) == 1 else None
        return self.index is not None

    def _record(self, t_ns: int) -> None:
        cuda = sys.modules["torch"].cuda
        event = self._unused.pop() if self._unused else cuda.Event(enable_timing=True)
        event.record(self._stream or cuda.current_stream(self.index))
        self._stream = None
        self._pending.append(event)
        self._host_ns.append(t_ns)

    def _collect(self) -> None:
        while self._pending and self._pending[0].query():
            event, before = self._pending.popleft(), self._latest
            since_ms = UNKNOWN if before is None else before.elapsed_time(event)
            self._since_ms.append(since_ms if since_ms >= 0 else UNKNOWN)  # streams need not end in order
            self._latest = event
            if before is not None:
                self._unused.append(before)


def gpu_of(optimizer: Any) -> int | None:
    """The GPU that holds the parameters of an optimizer; None if no GPU does."""
    try:
        device = optimizer.param_groups[0]["params"][0].device
        return device.index if device.type == "cuda" else None
    except (AttributeError, IndexError, KeyError, TypeError):
        return None


MIB = 1 << 20
# An event of torch 2.13 takes 228 bytes while it is recorded, and 1.5 KiB more when the session ends. A core made
# 400,000 of them per second, 90 MiB (small CPU operators, no gradients): faster growth is memory of the user's code.
EVENTS_BYTES_PER_S = 128 * MIB


def resident_bytes() -> int:
    """Resident memory of this process; 0 if unknown."""
    import psutil

    with suppress(psutil.Error):
        return int(psutil.Process().memory_info().rss)
    return 0


def return_free_memory() -> None:
    """Return freed memory to the system; the C library keeps what lies between small objects."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # only the GNU library has this function
            ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


class SessionMemory:
    """The memory of a session that begins now. `event_bytes`: estimated memory of its events, at the last check."""

    def __init__(self) -> None:
        self.event_bytes = 0
        self._resident_bytes = resident_bytes()
        self._at_ns = perf_counter_ns()

    def exceeds(self, limit_bytes: int) -> bool:
        """Check again, from one thread. Larger jumps of memory are tensors and do not count."""
        before, since_ns = self._resident_bytes, self._at_ns
        self._resident_bytes, self._at_ns = resident_bytes(), perf_counter_ns()
        growth = self._resident_bytes - before
        if abs(growth) <= EVENTS_BYTES_PER_S * (self._at_ns - since_ns) / 1e9:
            self.event_bytes = max(0, self.event_bytes + growth)
        return self.event_bytes > limit_bytes
