"""A live profiler result as a Timeline, read from Kineto's events without a detour through JSON."""

from __future__ import annotations

import dataclasses
import gzip
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpulab.run import Category, Int64, Lane, Timeline

_CATEGORIES = {
    "cpu_op": Category.CPU_OP,
    "user_annotation": Category.USER_ANNOTATION,
    "gpu_user_annotation": Category.GPU_USER_ANNOTATION,
    "cuda_runtime": Category.CUDA_RUNTIME,
    "cuda_driver": Category.CUDA_DRIVER,
    "kernel": Category.KERNEL,
    "gpu_memcpy": Category.GPU_MEMCPY,
    "gpu_memset": Category.GPU_MEMSET,
    "cuda_sync": Category.CUDA_SYNC,
    "python_function": Category.PYTHON_FUNCTION,
    "overhead": Category.OVERHEAD,
}
_ON_DEVICE = {
    int(Category.KERNEL),
    int(Category.GPU_MEMCPY),
    int(Category.GPU_MEMSET),
    int(Category.GPU_USER_ANNOTATION),
    int(Category.CUDA_SYNC),
}


CLOCK_MARK = "gpulab.clock"


@dataclass(frozen=True, slots=True)
class Recording:
    """A finished torch.profiler session and what is needed to put it on the run's clock.

    All times are `time.perf_counter_ns`.
    """

    profile: Any  # torch.profiler.profile, stopped
    began_ns: int
    ended_ns: int
    clock_ns: int  # just before the last span named CLOCK_MARK

    def timeline(self, origin_ns: int, *, event_limit: int | None = None) -> Timeline:
        """The spans as columns, on the run's clock (`origin_ns` is the run's start in perf_counter_ns).

        Of more than `event_limit` spans the latest are left out; the window then ends where they begin.
        Kineto's clock is tied to ours by a marked span that began within microseconds of a reading of our clock.
        """
        columns = _Columns.read(self.profile.profiler.kineto_results.events())
        start = columns.start_ns + self._clock_offset_ns(columns) - origin_ns
        timeline = columns.timeline(start, (self.began_ns - origin_ns, self.ended_ns - origin_ns))
        return timeline if event_limit is None else cut(timeline, event_limit)

    def write(self, path: Path) -> None:
        """Write the trace in PyTorch's own Chrome-trace JSON, gzipped where the name ends in .gz."""
        if path.suffix != ".gz":
            self.profile.profiler.kineto_results.save(str(path))
            return
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".trace-") as folder:
            plain = Path(folder) / "trace.json"
            self.profile.profiler.kineto_results.save(str(plain))
            with plain.open("rb") as source, _gzip(path) as target:
                shutil.copyfileobj(source, target, 1 << 20)

    def _clock_offset_ns(self, columns: _Columns) -> int:
        """What to add to Kineto's time to get perf_counter_ns."""
        if CLOCK_MARK not in columns.names:
            return time.perf_counter_ns() - time.time_ns()
        rows = np.flatnonzero(columns.name_id == columns.names.index(CLOCK_MARK))
        return self.clock_ns - int(columns.start_ns[rows].max())


def cut(timeline: Timeline, limit: int) -> Timeline:
    """The first `limit` spans; the window ends where the first one left out begins."""
    if len(timeline) <= limit:
        return timeline
    return dataclasses.replace(
        timeline,
        start_ns=timeline.start_ns[:limit],
        duration_ns=timeline.duration_ns[:limit],
        name_id=timeline.name_id[:limit],
        category=timeline.category[:limit],
        lane_id=timeline.lane_id[:limit],
        correlation=timeline.correlation[:limit],
        window_ns=(timeline.window_ns[0], int(timeline.start_ns[limit])),
        extra={name: column[:limit] for name, column in timeline.extra.items()},
    )


def launches(timeline: Timeline) -> int:
    """Calls that start something on a GPU."""
    host = np.isin(timeline.category, [int(Category.CUDA_RUNTIME), int(Category.CUDA_DRIVER)])
    launching = np.array(["Launch" in n or "Memcpy" in n or "Memset" in n for n in timeline.names], dtype=bool)
    return int((host & launching[timeline.name_id]).sum()) if len(timeline) else 0


def _gzip(path: Path) -> Any:
    try:
        from isal import igzip
    except ImportError:
        return gzip.open(path, "wb", compresslevel=1)
    return igzip.open(path, "wb", compresslevel=1)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Columns:
    """Kineto's events, still on Kineto's clock."""

    start_ns: Int64
    duration_ns: Int64
    category: np.ndarray
    correlation: Int64
    lane_key: list[tuple[str, int, int]]
    names: tuple[str, ...]
    name_id: np.ndarray

    @classmethod
    def read(cls, events: list[Any]) -> _Columns:
        n = len(events)
        category = _categories(events)
        name_ids: dict[str, int] = {}
        name_id = np.fromiter((name_ids.setdefault(e.name(), len(name_ids)) for e in events), np.int32, n)
        start = np.fromiter((e.start_ns() for e in events), np.int64, n)
        duration = np.fromiter((e.duration_ns() for e in events), np.int64, n)
        correlation = np.fromiter((e.correlation_id() for e in events), np.int64, n)
        resource = [e.device_resource_id() for e in events]
        on_device = np.isin(category, list(_ON_DEVICE))
        index = [e.device_index() if d else 0 for e, d in zip(events, on_device.tolist(), strict=True)]
        keys = [
            ("stream" if d else "thread", i, r) for d, i, r in zip(on_device.tolist(), index, resource, strict=True)
        ]
        return cls(start, duration, category, correlation, keys, tuple(name_ids), name_id)

    def profiler_steps(self) -> list[tuple[int, int]]:
        """(row, step number) of each host annotation ProfilerStep#N."""
        found = {}
        for i, name in enumerate(self.names):
            prefix, _, number = name.partition("#")
            if prefix == "ProfilerStep" and number.isdigit():
                found[i] = int(number)
        if not found:
            return []
        rows = np.flatnonzero(np.isin(self.name_id, list(found)) & (self.category == Category.USER_ANNOTATION))
        return [(int(r), found[int(self.name_id[r])]) for r in rows]

    def timeline(self, start_ns: Int64, window_ns: tuple[int, int]) -> Timeline:
        lane_ids: dict[tuple[str, int, int], int] = {}
        lane_id = np.fromiter(
            (lane_ids.setdefault(k, len(lane_ids)) for k in self.lane_key), np.int32, len(self.lane_key)
        )
        duration = np.maximum(self.duration_ns, 0)
        order = np.lexsort((-duration, start_ns))
        rows = self.profiler_steps()
        training = int(lane_id[rows[0][0]]) if rows else _busiest_thread(lane_ids, lane_id, self.category)
        return Timeline(
            start_ns=start_ns[order],
            duration_ns=duration[order],
            name_id=self.name_id[order],
            category=self.category[order],
            lane_id=lane_id[order],
            correlation=self.correlation[order],
            names=self.names,
            lanes=tuple(_lane(k, i == training) for k, i in lane_ids.items()),
            window_ns=window_ns,
            training_lane=training,
        )


def _categories(events: list[Any]) -> np.ndarray:
    """Kineto's activity names as numbers. torch < 2.6 has no `activity_type`: there the device tells."""
    n = len(events)
    if n and hasattr(events[0], "activity_type"):
        table = {k: int(v) for k, v in _CATEGORIES.items()}
        return np.fromiter((table.get(e.activity_type(), 0) for e in events), np.uint8, n)
    return np.fromiter((_old_category(e) for e in events), np.uint8, n)


def _old_category(event: Any) -> int:
    on_device = "CPU" not in str(event.device_type())
    name = event.name()
    if on_device:
        if name.startswith("Memcpy"):
            return int(Category.GPU_MEMCPY)
        if name.startswith("Memset"):
            return int(Category.GPU_MEMSET)
        return int(Category.GPU_USER_ANNOTATION if event.is_user_annotation() else Category.KERNEL)
    if event.is_user_annotation():
        return int(Category.USER_ANNOTATION)
    return int(Category.CUDA_RUNTIME if name.startswith(("cuda", "cu")) else Category.CPU_OP)


def _busiest_thread(lanes: dict[tuple[str, int, int], int], lane_id: np.ndarray, category: np.ndarray) -> int | None:
    """Without step marks: the host thread with the most operators."""
    threads = [i for (kind, _, _), i in lanes.items() if kind == "thread"]
    if not threads:
        return None
    ops = lane_id[category == Category.CPU_OP]
    return max(threads, key=lambda i: int((ops == i).sum()))


def _lane(key: tuple[str, int, int], training: bool) -> Lane:
    kind, device, number = key
    if kind == "stream":
        return Lane("stream", device, number, f"GPU {device} stream {number}")
    return Lane("thread", 0, number, "training thread" if training else f"thread {number}")
