"""A scripted `torch.cuda` for tests on a CPU build: streams, timing events, graph captures, memory, errors that stay.

It plays the few calls that gpulab makes. The test is the user: `start` uses CUDA, `enqueue` gives the GPU work,
`capture` captures a graph, `allocate` takes memory, `fail` makes an error that stays. What gpulab must not do is
written down: `violations` (waits inside a graph capture), `captured` (work that became part of the user's graph),
`contexts` (GPUs that nobody else uses), `started_by` (the call that started CUDA).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from msgspec import Struct

ASSERT = "device-side assert triggered"
ILLEGAL_ACCESS = "an illegal memory access was encountered"
OVERWRITTEN = "Error: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run."


class FakeStream:
    """A queue of work. `end_ns`: host time at which all of it is done."""

    def __init__(self, fake: FakeCuda, index: int) -> None:
        self._fake, self.device_index, self.end_ns = fake, index, 0

    def query(self) -> bool:
        self._fake.call("Stream.query", self.device_index, context=True, waits=True)
        return self._fake.now_ns >= self.end_ns

    def synchronize(self) -> None:
        self._fake.call("Stream.synchronize", self.device_index, context=True, waits=True)
        self._fake.wait_until(self.end_ns)


class FakeEvent:
    """A mark in a stream: its time is when all work before it is done."""

    fake: ClassVar[FakeCuda]

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.enable_timing, self.time_ns = enable_timing, -1

    def record(self, stream: FakeStream | None = None) -> None:
        fake = self.fake
        stream = stream or fake.stream_of(fake.current)
        fake.call("Event.record", stream.device_index, context=True)
        fake.launched("Event.record")
        self.time_ns = -1 if fake.capturing else max(fake.now_ns, stream.end_ns)
        fake.event_count += 1

    def query(self) -> bool:
        self.fake.call("Event.query", waits=True)
        return self.fake.now_ns >= self.time_ns

    def synchronize(self) -> None:
        self.fake.call("Event.synchronize", waits=True)
        self.fake.wait_until(self.time_ns)

    def elapsed_time(self, other: FakeEvent) -> float:
        """Milliseconds from this event to the other."""
        self.fake.call("Event.elapsed_time", waits=True)
        if not (self.enable_timing and other.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if min(self.time_ns, other.time_ns) < 0:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if self.fake.now_ns < max(self.time_ns, other.time_ns):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (other.time_ns - self.time_ns) / 1e6


class FakeGpuTensor(torch.Tensor):
    """A tensor on the CPU that says it is on the fake's current GPU. Reading it waits; cloning it launches a kernel."""

    fake: ClassVar[FakeCuda]
    overwritten: bool = False  # the output of a CUDA graph that was replayed since

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)

    def detach(self) -> FakeGpuTensor:
        same = torch.Tensor.detach(self).as_subclass(FakeGpuTensor)
        same.__dict__ = self.__dict__  # the same memory, so they are overwritten together
        return same

    def clone(self, **options: Any) -> FakeGpuTensor:
        self.fake.call("Tensor.clone", 0)
        self.fake.launched("Tensor.clone")
        return torch.Tensor.clone(self, **options).as_subclass(FakeGpuTensor)

    def item(self) -> float:
        self.fake.call("Tensor.item", 0, waits=True)
        if self.overwritten:
            raise RuntimeError(OVERWRITTEN)
        self.fake.wait_until(self.fake.stream_of(0).end_ns)
        return float(torch.Tensor.item(self))

    __float__ = item


class FakeBlock(Struct, eq=False, weakref=True):
    """Memory of a GPU."""

    size_bytes: int


class FakeCuda:
    """The GPUs of a script. `clock_ns` sets the host's time by hand; None: `time.perf_counter_ns`."""

    def __init__(self, count: int = 1, memory_bytes: int = 80 * 2**30) -> None:
        self.count, self.memory_bytes, self.current = count, memory_bytes, 0
        self.clock_ns: int | None = None
        self.initialized = False
        self.started_by: str | None = None  # the call of ours that started CUDA
        self.in_use: set[int] = set()  # GPUs on which this process has a context
        self.taken: set[int] = set()  # GPUs in EXCLUSIVE_PROCESS mode that another process holds
        self.contexts: list[tuple[int, str]] = []  # made by calls, not by the script
        self.calls: list[str] = []
        self.violations: list[str] = []
        self.captured: list[str] = []
        self.launches: list[str] = []
        self.capturing = False
        self.capture_is_valid = True
        self.error: str | None = None
        self.event_count = 0
        self.allocated, self.reserved = [0] * count, [0] * count
        self.peak_allocated, self.peak_reserved = [0] * count, [0] * count
        self.random_states = [torch.full((16,), i, dtype=torch.uint8) for i in range(count)]
        self._streams = [FakeStream(self, i) for i in range(count)]

    # -- the script: what the user's code does -------------------------------------------------------------------

    def start(self, index: int = 0) -> None:
        """Use a GPU, so that it has a context and the allocator holds memory there."""
        self.initialized, self.current = True, index
        self.in_use.add(index)
        self.reserved[index] = max(self.reserved[index], 2 * 2**20)

    def enqueue(self, ns: int, stream: FakeStream | None = None) -> None:
        """Launch work of that length."""
        self.call("launch", self.current)
        stream = stream or self.stream_of(self.current)
        stream.end_ns = max(self.now_ns, stream.end_ns) + ns

    def tensor(self, value: float) -> Any:
        """A scalar on the GPU."""
        return torch.tensor(value).as_subclass(FakeGpuTensor)

    def fail(self, error: str = ASSERT) -> None:
        """A kernel fails: from now on every call raises."""
        self.error = error
        self.call("launch")

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture a graph, as `torch.cuda.graph` does. Raises where something inside made it invalid."""
        self.capturing = self.capture_is_valid = True
        try:
            yield
        finally:
            self.capturing = False
        if not self.capture_is_valid:
            raise self.cuda_error("operation failed due to a previous error during capture")

    def allocate(self, size_bytes: int, index: int = 0) -> FakeBlock:
        """Memory that is free again once the object is gone. Raises OutOfMemoryError."""
        if self.allocated[index] + size_bytes > self.memory_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a lot.")
        self._take(index, size_bytes)
        block = FakeBlock(size_bytes)
        weakref.finalize(block, self._take, index, -size_bytes).atexit = False
        return block

    # -- the rules -----------------------------------------------------------------------------------------------

    @property
    def now_ns(self) -> int:
        """The host's time."""
        return time.perf_counter_ns() if self.clock_ns is None else self.clock_ns

    def wait_until(self, ns: int) -> None:
        """The host waits."""
        if self.clock_ns is not None:
            self.clock_ns = max(self.clock_ns, ns)
        else:
            time.sleep(max(0, ns - time.perf_counter_ns()) / 1e9)

    def call(self, name: str, index: int | None = None, *, context: bool = False, waits: bool = False) -> None:
        """A call of the CUDA library. `context`: it makes one on GPU `index`; `waits`: no graph capture allows it."""
        self.calls.append(name)
        if not self.initialized:
            self.initialized, self.started_by = True, name
        if self.error is not None:
            raise self.cuda_error(self.error)
        if context and index is not None and index not in self.in_use:
            self.contexts.append((index, name))
            if index in self.taken:
                raise self.cuda_error("CUDA-capable device(s) is/are busy or unavailable")
            self.in_use.add(index)
        if waits and self.capturing:
            self.violations.append(name)
            self.capture_is_valid = False
            raise self.cuda_error("operation not permitted when stream is capturing")

    def launched(self, name: str) -> None:
        """Something was put into the current stream: inside a capture it is a part of the graph."""
        (self.captured if self.capturing else self.launches).append(name)

    def cuda_error(self, text: str) -> RuntimeError:
        """As torch words it; a PyTorch before 2.8 raises a plain RuntimeError."""
        kind: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)
        return kind(f"CUDA error: {text}\nCUDA kernel errors might be asynchronously reported at some other API call.")

    def stream_of(self, index: int) -> FakeStream:
        return self._streams[index]

    def _take(self, index: int, size_bytes: int) -> None:
        self.allocated[index] += size_bytes
        self.reserved[index] = max(self.reserved[index], self.allocated[index])
        self.peak_allocated[index] = max(self.peak_allocated[index], self.allocated[index])
        self.peak_reserved[index] = max(self.peak_reserved[index], self.reserved[index])

    # -- what torch.cuda answers ---------------------------------------------------------------------------------

    def index(self, device: Any = None) -> int:
        chosen = torch.device(device).index if isinstance(device, str) else getattr(device, "index", device)
        return self.current if chosen is None else int(chosen)

    def synchronize(self, device: Any = None) -> None:
        index = self.index(device)
        self.call("synchronize", index, context=True, waits=True)
        self.wait_until(self._streams[index].end_ns)

    def current_device(self) -> int:
        self.call("current_device")
        return self.current

    def current_stream(self, device: Any = None) -> FakeStream:
        self.call("current_stream")
        return self._streams[self.index(device)]

    def is_current_stream_capturing(self) -> bool:
        self.call("is_current_stream_capturing")
        return self.capturing

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """Asks torch's allocator only."""
        if not self.initialized:
            return {}
        i = self.index(device)
        of = {"allocated": (self.allocated, self.peak_allocated), "reserved": (self.reserved, self.peak_reserved)}
        kinds = {"current": 0, "peak": 1}
        return {f"{name}_bytes.all.{kind}": of[name][at][i] for name in of for kind, at in kinds.items()}

    def memory_stats_as_nested_dict(self, device: Any = None) -> dict[str, Any]:
        """The same as torch keeps it."""
        nested: dict[str, Any] = {}
        for name, value in self.memory_stats(device).items():
            kind, pool, moment = name.split(".")
            nested.setdefault(kind, {}).setdefault(pool, {})[moment] = value
        return nested

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        index = self.index(device)
        self.call("mem_get_info", index, context=True, waits=True)
        return self.memory_bytes - self.reserved[index], self.memory_bytes

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        index = self.index(device)
        self.peak_allocated[index], self.peak_reserved[index] = self.allocated[index], self.reserved[index]

    def empty_cache(self) -> None:
        if self.initialized:
            self.call("empty_cache", waits=True)
            self.reserved = list(self.allocated)

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        self.call("get_device_properties")
        of = {"total_memory": self.memory_bytes, "multi_processor_count": 132, "major": 9, "minor": 0}
        return SimpleNamespace(name="Fake H100", uuid=f"0000-{self.index(device)}", **of)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        self.initialized = True
        return [state.clone() for state in self.random_states]

    def zeros(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """torch.zeros, also on a GPU."""

        def zeros(*size: Any, device: Any = None, **options: Any) -> torch.Tensor:
            if device is None or torch.device(device).type != "cuda":
                return original(*size, device=device, **options)
            self.call("zeros", self.index(device), context=True)
            self.launched("zeros")
            return original(*size, **options).as_subclass(FakeGpuTensor)

        return zeros

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        self.call("set_rng_state_all", waits=True)
        self.random_states = [state.clone() for state in states]


def install(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Put the fake in the place of `torch.cuda`'s own functions until the test ends."""
    FakeEvent.fake = FakeGpuTensor.fake = fake
    calls = ("synchronize", "current_device", "current_stream", "is_current_stream_capturing")
    memory = ("memory_stats", "memory_stats_as_nested_dict", "mem_get_info", "reset_peak_memory_stats", "empty_cache")
    for name in (*calls, *memory, "get_device_properties", "get_rng_state_all", "set_rng_state_all"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    answers = {
        "is_available": lambda: fake.count > 0,
        "is_initialized": lambda: fake.initialized,
        "device_count": lambda: fake.count,
        "get_device_name": lambda device=None: fake.get_device_properties(device).name,
        "memory_allocated": lambda device=None: fake.memory_stats(device).get("allocated_bytes.all.current", 0),
        "memory_reserved": lambda device=None: fake.memory_stats(device).get("reserved_bytes.all.current", 0),
        "max_memory_allocated": lambda device=None: fake.memory_stats(device).get("allocated_bytes.all.peak", 0),
        "manual_seed_all": lambda seed: None,
        "Event": FakeEvent,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch, "zeros", fake.zeros(torch.zeros))
    both = {torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA}
    monkeypatch.setattr("torch.autograd.profiler._supported_activities", lambda: both)  # the profiler waits as on a GPU
    return fake
