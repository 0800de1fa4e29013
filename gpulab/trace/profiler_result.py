"""A live profiler result as a Timeline, read from Kineto's events without a detour through JSON."""

from __future__ import annotations

import gzip
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from gpulab.run import DEVICE_CATEGORIES, Category, Float64, Int32, Int64, Lane, Timeline, UInt8
from gpulab.trace.columns import ON_DEVICE, category_of, extra_columns
from gpulab.trace.events import Args

_DECODE = msgspec.json.Decoder(Args).decode
CLOCK_MARK = "gpulab.clock"
_STEP_MARK = re.compile(r"ProfilerStep#\d+")


class Recording(Struct, frozen=True):
    """A finished torch.profiler session and what is needed to put it on the run's clock.

    All times are `time.perf_counter_ns`.
    """

    profile: Any  # torch.profiler.profile, stopped
    began_ns: int
    ended_ns: int
    clock_ns: int  # just before the last span named CLOCK_MARK

    def timeline(self, origin_ns: int, *, event_limit: int | None = None) -> Timeline:
        """The spans as columns, on the run's clock (`origin_ns` is the run's start in perf_counter_ns).

        Of more than `event_limit` spans the latest are left out; the window then ends where they begin. What ran before
        the recording began was ours. Kineto's clock is tied to ours by a marked span that began within microseconds of
        a reading of our clock.
        """
        columns = _Columns.read(self.profile.profiler.kineto_results.events())
        start = columns.start_ns + self._clock_offset_ns(columns) - origin_ns
        # the profiler waits for the device before it stops, so the window ends when the device has
        device_end = (start + columns.duration_ns)[columns.on_device].max(initial=0)
        ended = max(self.ended_ns - origin_ns, int(device_end))
        timeline = _since(columns.timeline(start, (self.began_ns - origin_ns, ended)))
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
    end_ns = int(timeline.start_ns[limit])
    return msgspec.structs.replace(_rows(timeline, slice(limit)), window_ns=(timeline.window_ns[0], end_ns))


def _since(timeline: Timeline) -> Timeline:
    """The spans from the begin of the window on."""
    first = int(np.searchsorted(timeline.start_ns, timeline.window_ns[0]))
    return _rows(timeline, slice(first, None)) if first else timeline


def _rows(timeline: Timeline, kept: slice) -> Timeline:
    return msgspec.structs.replace(
        timeline,
        start_ns=timeline.start_ns[kept],
        duration_ns=timeline.duration_ns[kept],
        name_id=timeline.name_id[kept],
        category=timeline.category[kept],
        lane_id=timeline.lane_id[kept],
        correlation=timeline.correlation[kept],
        extra={name: column[kept] for name, column in timeline.extra.items()},
    )


def _gzip(path: Path) -> Any:
    try:
        from isal import igzip
    except ImportError:
        return gzip.open(path, "wb", compresslevel=1)
    return igzip.open(path, "wb", compresslevel=1)  # type: ignore[no-untyped-call]


class _Columns(Struct, frozen=True):
    """Kineto's events, still on Kineto's clock."""

    start_ns: Int64
    duration_ns: Int64
    category: UInt8
    correlation: Int64
    on_device: npt.NDArray[np.bool_]
    device_index: Int64  # 0 on the host
    resource: Int64  # thread or stream
    names: tuple[str, ...]
    name_id: Int32
    extra: dict[str, Float64] = field(default_factory=dict)

    @classmethod
    def read(cls, events: list[Any]) -> _Columns:
        n = len(events)
        if n == 0:
            none = np.empty(0, np.int64)
            i, u = none.astype(np.int32), none.astype(np.uint8)
            return cls(none, none, u, none, none.astype(bool), none, none, (), i)
        event = type(events[0])  # its methods, called without a look-up per event

        def column(method: Callable[[Any], int]) -> Int64:
            return np.fromiter(map(method, events), np.int64, n)

        category = _categories(events)
        on_device = np.isin(category, ON_DEVICE)
        device_index = np.zeros(n, np.int64)
        for row in np.flatnonzero(on_device).tolist():
            device_index[row] = events[row].device_index()
        spelled = list(map(event.name, events))
        name_ids = {name: i for i, name in enumerate(dict.fromkeys(spelled))}
        return cls(
            start_ns=column(event.start_ns),
            duration_ns=column(event.duration_ns),
            category=category,
            correlation=column(event.correlation_id),
            on_device=on_device,
            device_index=device_index,
            resource=column(event.device_resource_id),
            names=tuple(name_ids),
            name_id=np.fromiter(map(name_ids.__getitem__, spelled), np.int32, n),
            extra=_device_columns(events, np.flatnonzero(np.isin(category, DEVICE_CATEGORIES))),
        )

    def step_marks(self) -> Int64:
        """Rows of the host annotations ProfilerStep#N."""
        marks = [i for i, name in enumerate(self.names) if _STEP_MARK.fullmatch(name)]
        return np.flatnonzero(np.isin(self.name_id, marks) & (self.category == Category.USER_ANNOTATION))

    def lanes(self) -> tuple[list[tuple[str, int, int]], Int32]:
        """Each thread and stream as (kind, device, number), and every event's index into them."""
        numbers, number = np.unique(self.resource, return_inverse=True)
        devices = int(self.device_index.max(initial=0)) + 1
        code = (number.reshape(-1) * devices + self.device_index) * 2 + self.on_device
        distinct, lane_id = np.unique(code, return_inverse=True)
        lanes = [
            ("stream" if c % 2 else "thread", int(c // 2 % devices), int(numbers[c // 2 // devices])) for c in distinct
        ]
        return lanes, lane_id.reshape(-1).astype(np.int32)

    def timeline(self, start_ns: Int64, window_ns: tuple[int, int]) -> Timeline:
        lanes, lane_id = self.lanes()
        duration = np.maximum(self.duration_ns, 0)
        order = np.lexsort((-duration, start_ns))
        marks = self.step_marks()
        training = int(lane_id[marks[0]]) if len(marks) else _busiest_thread(lanes, lane_id, self.category)
        return Timeline(
            start_ns=start_ns[order],
            duration_ns=duration[order],
            name_id=self.name_id[order],
            category=self.category[order],
            lane_id=lane_id[order],
            correlation=self.correlation[order],
            names=self.names,
            lanes=tuple(_lane(k, i == training) for i, k in enumerate(lanes)),
            window_ns=window_ns,
            training_lane=training,
            extra={name: column[order] for name, column in self.extra.items()},
        )


def _device_columns(events: list[Any], rows: Int64) -> dict[str, Float64]:
    """The columns that a trace file has, too: one value per event, NaN off `rows`. No column where Kineto wrote none.

    Empty where the events of this PyTorch have no `metadata_json`, or the session did not ask for it.
    """
    if not len(rows) or not hasattr(events[0], "metadata_json"):
        return {}
    written = extra_columns([_arguments(events[row].metadata_json()) for row in rows.tolist()])
    columns = {name: np.full(len(events), np.nan) for name in written}
    for name, values in written.items():
        columns[name][rows] = values
    return columns


def _arguments(members: str) -> Args:
    """The members of a JSON object, written without its braces; nothing of it where it is no JSON."""
    try:
        return _DECODE(f"{{{members}}}")
    except (msgspec.DecodeError, UnicodeEncodeError):
        return Args()


def _categories(events: list[Any]) -> UInt8:
    """Kineto's activity names as numbers. Events of PyTorch 2.9 and older have none: see `_category_by_name`."""
    n, event = len(events), type(events[0])
    if not hasattr(event, "activity_type"):
        return np.fromiter(map(_category_by_name, events), np.uint8, n)
    spelled = list(map(event.activity_type, events))
    table = {name: category_of(name) for name in set(spelled)}
    return np.fromiter(map(table.__getitem__, spelled), np.uint8, n)


def _category_by_name(event: Any) -> int:
    """The category as the device and the name tell it."""
    name = event.name()
    if "CPU" not in str(event.device_type()):
        if name.startswith("Memcpy"):
            return int(Category.GPU_MEMCPY)
        if name.startswith("Memset"):
            return int(Category.GPU_MEMSET)
        return int(Category.GPU_USER_ANNOTATION if event.is_user_annotation() else Category.KERNEL)
    if event.is_user_annotation():
        return int(Category.USER_ANNOTATION)
    return int(Category.CUDA_RUNTIME if name.startswith(("cuda", "cu")) else Category.CPU_OP)


def _busiest_thread(lanes: list[tuple[str, int, int]], lane_id: Int32, category: UInt8) -> int | None:
    """Without step marks: the host thread with the most operators."""
    threads = [i for i, (kind, _, _) in enumerate(lanes) if kind == "thread"]
    if not threads:
        return None
    ops = np.bincount(lane_id[category == Category.CPU_OP], minlength=len(lanes))
    return max(threads, key=lambda i: int(ops[i]))


def _lane(key: tuple[str, int, int], training: bool) -> Lane:
    kind, device, number = key
    if kind == "stream":
        return Lane("stream", device, number, f"GPU {device} stream {number}")
    return Lane("thread", 0, number, "training thread" if training else f"thread {number}")
