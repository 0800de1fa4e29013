"""A PyTorch profiler trace file as columns: any torch from 1.8 on, NVIDIA or AMD, gzipped or not, whole or broken.

    trace = read_trace(Path("rank0.pt.trace.json.gz"))

What the file holds is kept, what was wrong with it is counted in `trace.origin.damage`; nothing is concluded here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import asdict, replace

from gpulab.errors import TraceError
from gpulab.run import Category, Damage, DeviceProperties, Float64, Int64, Lane, MemoryEvents, Timeline, TraceOrigin
from gpulab.trace.columns import Columns, Lanes, SpanColumns, is_annotation, is_kept, resolve_accelerator
from gpulab.trace.events import DamageCount, EventDecoder
from gpulab.trace.json_text import TraceText

FAR_NS = 24 * 3600 * 10**9  # no profiled window lasts a day: a span that far from the others has a broken time


class Trace(Struct, frozen=True):
    """What one file holds. Times count from the earliest span; `origin.zero_ns` says where that is."""

    timeline: Timeline
    memory_events: MemoryEvents | None
    origin: TraceOrigin


def read_trace(path: Path, tell: Callable[[float], None] = lambda _: None) -> Trace:
    """Read a trace file. `tell` hears which fraction of it is read.

    Raises TraceError, naming the file, the place and the next step, where it is no trace or holds no span at all.
    """
    path = Path(path)
    text = TraceText(path, tell)
    read, damage = _decoded(text)
    if not read.spans:
        raise TraceError(_nothing(path, text, read, damage))
    spans = _joined(read)
    resolve_accelerator(spans.category, spans.correlation)
    keep = _plausible(spans, damage)
    if not keep.any():
        raise TraceError(_nothing(path, text, read, damage))
    zero = int(spans.start_ns[keep].min())
    spans.start_ns[:] -= zero
    columns = asdict(spans)
    del spans  # each column is let go when it is in order
    timeline = timeline_of(columns, keep, read)
    if not (timeline.category != Category.UNKNOWN).any():
        raise TraceError(
            f"{path} is a Chrome trace of another program: none of its {len(timeline):,} spans has a category that "
            "PyTorch writes. Record one with torch.profiler and export_chrome_trace."
        )
    copies = np.array([n.startswith("ProfilerStep#") for n in read.names], bool)[timeline.name_id]
    origin = TraceOrigin(
        path=str(path),
        size_bytes=text.file_bytes,
        text_bytes=text.text_bytes,
        clock="ns" if read.fractional else "us",
        zero_ns=zero,
        events_read=read.events_read,
        flow_events=read.flow_events,
        step_marks_duplicated=int((copies & (timeline.category == Category.GPU_USER_ANNOTATION)).sum()),
    )
    origin = complete(origin, text.head, text.tail, damage)
    return Trace(timeline, _memory(read, zero), replace(origin, damage=_damage(text, damage)))


def _decoded(text: TraceText) -> tuple[Columns, DamageCount]:
    decoder, columns = EventDecoder(text), Columns()
    for offset, piece in text.pieces():
        where = f"first in the events from byte {offset:,} of the text"
        for decoded, events in decoder.decode(offset, piece):
            columns.add(decoded, events, decoder.damage, where)
    return columns, decoder.damage


def _joined(read: Columns) -> SpanColumns:
    """All pieces as one. `read` has none afterwards: a column's pieces are let go as soon as it is whole."""
    pieces = [asdict(columns) for columns in read.spans]
    read.spans.clear()
    offsets = np.cumsum([0, *(len(p["start_ns"]) for p in pieces)])
    extra = [p.pop("extra") for p in pieces]
    rows = [p.pop("extra_rows") for p in pieces]
    names = dict.fromkeys(name for columns in extra for name in columns)

    def column(name: str) -> Float64:
        given = (columns.pop(name, None) for columns in extra)
        return np.concatenate([np.full(len(r), np.nan) if c is None else c for c, r in zip(given, rows, strict=True)])

    return SpanColumns(
        **{name: np.concatenate([p.pop(name) for p in pieces]) for name in list(pieces[0])},
        extra_rows=np.concatenate([r + o for r, o in zip(rows, offsets[:-1], strict=True)]),
        extra={name: column(name) for name in names},
    )


def _plausible(spans: SpanColumns, damage: DamageCount) -> npt.NDArray[np.bool_]:
    """Rows to keep. Times a day away from the others, or longer, are broken."""
    keep = is_kept(spans.category)
    if not keep.any():
        return keep
    middle = int(np.median(spans.start_ns[keep]))
    near = (np.abs(spans.start_ns // 2 - middle // 2) < FAR_NS // 2) & (spans.duration_ns < FAR_NS)
    damage.note("broken times", "a day or more away from the other spans", int((keep & ~near).sum()))
    return keep & near


def timeline_of(columns: dict[str, Any], keep: npt.NDArray[np.bool_], numbering: Columns) -> Timeline:
    """The rows to keep in order, from the begin of the clock to the last end; `numbering` is of names and lanes.

    `columns`, those of SpanColumns, are empty afterwards.
    """
    names = tuple(numbering.names)
    used = np.flatnonzero(np.bincount(columns["lane_key"][keep])).tolist()
    lanes = Lanes(list(numbering.lane_keys), used, numbering.labels)
    order = _parents_first(columns["start_ns"], columns["duration_ns"], np.flatnonzero(keep))
    name_id = columns.pop("name_id")[order]
    category = columns.pop("category")[order]
    marks = np.array([is_annotation(n) for n in names], bool)
    category[marks[name_id] & (category == Category.CPU_OP)] = Category.USER_ANNOTATION
    lane_id = lanes.of_key[columns.pop("lane_key")[order]]
    start, duration = columns.pop("start_ns")[order], columns.pop("duration_ns")[order]
    training = _training_lane(names, name_id, category, lane_id, duration, lanes.lanes)
    return Timeline(
        start_ns=start,
        duration_ns=duration,
        name_id=name_id,
        category=category,
        lane_id=lane_id,
        correlation=np.maximum(columns.pop("correlation")[order], 0),
        names=names,
        lanes=tuple(
            Lane(lane.kind, lane.process, lane.number, "training thread") if i == training else lane
            for i, lane in enumerate(lanes.lanes)
        ),
        window_ns=(0, int((start + duration).max(initial=0))),
        training_lane=training,
        extra=_spread(columns.pop("extra"), columns.pop("extra_rows"), len(keep), order),
    )


def _parents_first(start: Int64, duration: Int64, rows: Int64) -> Int64:
    """The rows by start, ties longest first; only ties are compared twice, for most files are nearly sorted."""
    order = rows[np.argsort(start[rows], kind="stable")]
    equal = np.flatnonzero(np.diff(start[order]) == 0)
    tied = np.union1d(equal, equal + 1)
    among = order[tied]
    order[tied] = among[np.lexsort((-duration[among], start[among]))]
    return order


def _spread(extra: dict[str, Float64], rows: Int64, total: int, order: Int64) -> dict[str, Float64]:
    """A value for every span, NaN where it has none."""
    place = np.full(total, -1, np.int32)
    place[rows] = np.arange(len(rows), dtype=np.int32)
    given = place[order]
    has = given >= 0
    columns = {}
    for name in list(extra):
        columns[name] = np.full(len(order), np.nan)
        columns[name][has] = extra.pop(name)[given[has]]
    return columns


def _training_lane(
    names: tuple[str, ...],
    name_id: npt.NDArray[np.int32],
    category: npt.NDArray[np.uint8],
    lane_id: npt.NDArray[np.int32],
    duration: Int64,
    lanes: list[Lane],
) -> int | None:
    """The thread with the step marks, else the loader's, else the optimizer's, else the one with the most operators."""
    threads = np.array([lane.kind == "thread" for lane in lanes], bool)
    host = threads[lane_id]
    for prefix in ("ProfilerStep#", "enumerate(DataLoader)", "Optimizer.step#"):
        marks = np.array([n.startswith(prefix) for n in names], bool)
        rows = marks[name_id] & host & (category == Category.USER_ANNOTATION)
        if rows.any():
            time = np.bincount(lane_id[rows], weights=duration[rows], minlength=len(lanes))
            count = np.bincount(lane_id[rows], minlength=len(lanes))
            return int(np.lexsort((count, time))[-1])
    for wanted in (Category.CPU_OP, Category.CUDA_RUNTIME, Category.PYTHON_FUNCTION):
        rows = host & (category == wanted)
        if rows.any():
            return int(np.bincount(lane_id[rows], minlength=len(lanes)).argmax())
    return None


def _memory(read: Columns, zero: int) -> MemoryEvents | None:
    if not read.memory:
        return None
    pieces = [asdict(columns) for columns in read.memory]
    whole = {name: np.concatenate([piece[name] for piece in pieces]) for name in MemoryEvents.__struct_fields__}
    whole["t_ns"] = whole["t_ns"] - zero
    order = np.argsort(whole["t_ns"], kind="stable")
    return MemoryEvents(**{name: column[order] for name, column in whole.items()})


def _damage(text: TraceText, damage: DamageCount) -> tuple[Damage, ...]:
    of_file = [Damage(name, 1, detail) for name, detail in text.damage]
    return (*of_file, *(Damage(name, noted.count, noted.where) for name, noted in damage.noted.items()))


def _nothing(path: Path, text: TraceText, read: Columns, damage: DamageCount) -> str:
    broken = "; ".join(f"{d.name}: {d.count:,}, {d.detail}" for d in _damage(text, damage))
    return (
        f"{path} holds no span: {read.events_read:,} events were read from {text.text_bytes:,} bytes of text"
        f"{f' ({broken})' if broken else ''}. Record the trace again, and let the profiler stop before it is exported."
    )


_OPTIONS = ("record_shapes", "with_stack", "profile_memory", "with_flops", "with_modules")
_VERSIONS = ("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "cupti", "roctracer", "torch", "pytorch")


def complete(origin: TraceOrigin, head: bytes, tail: bytes, damage: DamageCount) -> TraceOrigin:
    """The origin with what stands before and after the events; what is broken there is noted and left out."""
    head = head.strip().removeprefix(b"\xef\xbb\xbf").lstrip()
    if not head.startswith(b"{"):
        return origin
    fields = _parsed(head + b"]" + tail)
    if fields is None:
        if tail:
            damage.note("unreadable metadata", "after the events")
        fields = _parsed(head + b"]}")
    return _completed(origin, fields or {})


def _parsed(text: bytes) -> dict[str, object] | None:
    try:
        value, _ = json.JSONDecoder(strict=False).raw_decode(text.decode("utf-8", "replace").strip())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _completed(origin: TraceOrigin, fields: Mapping[str, object]) -> TraceOrigin:
    job = _mapping(fields.get("distributedInfo"))
    devices = fields.get("deviceProperties")
    base_time_ns = _whole(fields.get("baseTimeNanoseconds"))
    versions = {}
    for name in _VERSIONS:
        value = fields.get(f"{name}_version")
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            versions[name] = _spelled(name, value)
    return replace(
        origin,
        zero_ns=origin.zero_ns + (base_time_ns or 0),
        base_time_ns=base_time_ns,
        schema_version=_whole(fields.get("schemaVersion")),
        rank=_whole(job.get("rank")),
        world_size=_whole(job.get("world_size")),
        backend=_text(job.get("backend")),
        versions=versions,
        options=tuple(o for o in _OPTIONS if fields.get(o) in (1, True, "1")),
        device_properties=tuple(_device(_mapping(d), i) for i, d in enumerate(devices))
        if isinstance(devices, list)
        else (),
    )


def _spelled(name: str, value: int | float | str) -> str:
    """CUDA counts 12.4 as 12040, HIP 6.4.43483 as 60443483."""
    if isinstance(value, int) and name.startswith("cuda"):
        return f"{value // 1000}.{value % 1000 // 10}"
    if isinstance(value, int) and name.startswith("hip"):
        return f"{value // 10_000_000}.{value // 100_000 % 100}.{value % 100_000}"
    return str(value)[:100]


def _device(given: Mapping[str, object], position: int) -> DeviceProperties:
    major, minor = _whole(given.get("computeMajor")), _whole(given.get("computeMinor"))
    number = _whole(given.get("id"))
    return DeviceProperties(
        id=position if number is None else number,
        name=_text(given.get("name")),
        total_memory_bytes=_whole(given.get("totalGlobalMem")),
        sm_count=_whole(given.get("numSms")),
        compute_capability=None if major is None or minor is None else f"{major}.{minor}",
        warp_size=_whole(given.get("warpSize")),
        max_threads_per_sm=_whole(given.get("maxThreadsPerMultiprocessor")),
        max_threads_per_block=_whole(given.get("maxThreadsPerBlock")),
        registers_per_sm=_whole(given.get("regsPerMultiprocessor")),
        shared_memory_per_sm_bytes=_whole(
            given.get("sharedMemPerMultiprocessor", given.get("maxSharedMemoryPerMultiProcessor"))
        ),
    )


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _whole(value: object) -> int | None:
    """A whole number, also one written as text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        whole = int(value)
    except (ValueError, OverflowError):
        return None
    return whole if abs(whole) < 1 << 63 else None


def _text(value: object) -> str | None:
    return value.encode("utf-8", "replace").decode()[:500] if isinstance(value, str) and value else None
