"""A live profiler result as a Timeline, read from Kineto's events without a detour through JSON."""

from __future__ import annotations

import gzip
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from gpulab.run import DEVICE_CATEGORIES, Category, Int64, Timeline, UInt8
from gpulab.trace.columns import ON_DEVICE, Columns, Table, category_of, extra_columns, is_kept
from gpulab.trace.event_decoder import Args
from gpulab.trace.kineto_file import timeline_of

_DECODE = msgspec.json.Decoder(Args).decode
CLOCK_MARK = "gpulab.clock"


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

        Of more than `event_limit` spans the latest are left out; the window then ends where they begin. Spans before
        the recording began are gpulab's own. Kineto's clock is aligned with the run's clock by a marked span that began
        within microseconds of a reading of that clock.
        """
        read = _read(self.profile.profiler.kineto_results.events())
        spans = read.joined()
        spans["start_ns"] += self._clock_offset_ns(spans, read.names) - origin_ns
        on_device = np.isin(spans["category"], ON_DEVICE)
        # the profiler waits for the device before it stops, so the window ends with the device's work
        device_end = (spans["start_ns"] + spans["duration_ns"])[on_device].max(initial=0)
        window_ns = self.began_ns - origin_ns, max(self.ended_ns - origin_ns, int(device_end))
        keep = is_kept(spans["category"]) & (spans["start_ns"] >= window_ns[0])
        timeline = replace(timeline_of(spans, keep, read), window_ns=window_ns)
        return timeline if event_limit is None else cut(timeline, event_limit)

    def write(self, path: Path) -> None:
        """Write the trace in PyTorch's own Chrome-trace JSON, gzipped if the name ends in .gz."""
        if path.suffix != ".gz":
            self.profile.profiler.kineto_results.save(str(path))
            return
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".trace-") as folder:
            plain = Path(folder) / "trace.json"
            self.profile.profiler.kineto_results.save(str(plain))
            with plain.open("rb") as source, _gzip(path) as target:
                shutil.copyfileobj(source, target, 1 << 20)

    def _clock_offset_ns(self, spans: Table, names: Mapping[str, int]) -> int:
        """The offset from Kineto's time to perf_counter_ns."""
        if CLOCK_MARK not in names:
            return time.perf_counter_ns() - time.time_ns()
        return self.clock_ns - int(spans["start_ns"][spans["name_id"] == names[CLOCK_MARK]].max())


def cut(timeline: Timeline, limit: int) -> Timeline:
    """The first `limit` spans; the window ends where the first omitted span begins."""
    if len(timeline) <= limit:
        return timeline
    end_ns = int(timeline.start_ns[limit])
    return replace(
        timeline,
        **{name: column[:limit] for name, column in timeline.columns().items()},
        extra={name: column[:limit] for name, column in timeline.extra.items()},
        window_ns=(timeline.window_ns[0], end_ns),
    )


def _gzip(path: Path) -> Any:
    try:
        from isal import igzip
    except ImportError:
        return gzip.open(path, "wb", compresslevel=1)
    return igzip.open(path, "wb", compresslevel=1)  # type: ignore[no-untyped-call]


def _read(events: list[Any]) -> Columns:
    """Kineto's events as columns, still on Kineto's clock."""
    read, n = Columns(), len(events)
    event = type(events[0]) if events else None  # unbound methods, to avoid a look-up per event

    def column(method: str) -> Int64:
        return np.fromiter(map(getattr(event, method), events) if events else (), np.int64, n)

    category, resource = _categories(events), column("device_resource_id")
    lane = np.fromiter(map(read.lane_keys.__getitem__, [(0, number) for number in resource.tolist()]), np.int32, n)
    for row in np.flatnonzero(np.isin(category, ON_DEVICE)).tolist():
        lane[row] = read.lane_keys["device", events[row].device_index(), int(resource[row])]
    work = np.flatnonzero(np.isin(category, DEVICE_CATEGORIES))
    read.append_extra(work, extra_columns(_arguments(events, work)))
    read.append(
        start_ns=column("start_ns"),
        duration_ns=np.maximum(column("duration_ns"), 0),
        name_id=np.fromiter(map(read.names.__getitem__, [e.name() for e in events]), np.int32, n),
        category=category,
        lane_key=lane,
        correlation=column("correlation_id"),
    )
    return read


def _arguments(events: list[Any], rows: Int64) -> list[Args]:
    """The arguments of these events in a trace file. Empty if PyTorch has no `metadata_json` or recorded none."""
    if not len(rows) or not hasattr(events[0], "metadata_json"):
        return [Args()] * len(rows)
    return [_decoded(events[row].metadata_json()) for row in rows.tolist()]


def _decoded(members: str) -> Args:
    """The arguments from the members of a JSON object without its braces; empty if it is not JSON."""
    try:
        return _DECODE(f"{{{members}}}")
    except (msgspec.DecodeError, UnicodeEncodeError):
        return Args()


def _categories(events: list[Any]) -> UInt8:
    """Kineto's activity names as numbers. Events of PyTorch 2.9 and older have none: see `_category_by_name`."""
    n = len(events)
    if not events or not hasattr(events[0], "activity_type"):
        return np.fromiter(map(_category_by_name, events), np.uint8, n)
    return np.fromiter(map(category_of, map(type(events[0]).activity_type, events)), np.uint8, n)


def _category_by_name(event: Any) -> int:
    """The category by device and name."""
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
