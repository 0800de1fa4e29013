"""A PyTorch profiler trace file as columns: any torch from 1.8 on, NVIDIA or AMD, gzipped or not, whole or broken.

    trace = read_trace(Path("rank0.pt.trace.json.gz"))

Spans are kept unless their times are broken; faults are counted in `trace.origin.damage`. Only the training thread is
inferred here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from gpulab.errors import TraceError
from gpulab.run import Category, DeviceProperties, Int32, Int64, Lane, MemoryEvents, Timeline, TraceOrigin
from gpulab.trace.columns import Columns, Key, Table, integer, is_annotation, is_kept, resolve_accelerator
from gpulab.trace.event_decoder import DamageCount, EventDecoder, Label, Value
from gpulab.trace.text_pieces import TraceText

_LAST_NUMBER = re.compile(r"(-?\d+)\D*$")
FAR_NS = 24 * 3600 * 10**9  # no profiled window lasts a day: a span so far from the others has a broken time


class Trace(Struct, frozen=True):
    """The content of one file. Times count from the earliest span, which is at `origin.zero_ns` by the file's clock."""

    timeline: Timeline
    memory_events: MemoryEvents | None
    origin: TraceOrigin


def read_trace(path: Path, tell: Callable[[float], None] = lambda _: None) -> Trace:
    """Read a trace file. `tell` is called with the fraction that has been read.

    Raises TraceError, naming the file, the position and the next step, if it is not a trace or has no span.
    """
    path = Path(path)
    text = TraceText(path, tell)
    read, damage = _decoded(text)
    spans = read.joined()
    keep = _plausible(spans, damage) if spans else np.empty(0, bool)
    if not keep.any():
        raise TraceError(_nothing(path, text, read, damage))
    zero = int(spans["start_ns"][keep].min())
    spans["start_ns"] -= zero
    timeline = timeline_of(spans, keep, read)
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
    return Trace(timeline, _memory(read, zero), replace(origin, damage=(*text.damage, *damage.kinds.values())))


def _decoded(text: TraceText) -> tuple[Columns, DamageCount]:
    decoder, columns = EventDecoder(text), Columns()
    for offset, piece in text.pieces():
        where = f"first in the events from byte {offset:,} of the text"
        for decoded, events in decoder.decode(offset, piece):
            columns.add(decoded, events, decoder.damage, where)
    return columns, decoder.damage


def _plausible(spans: Table, damage: DamageCount) -> npt.NDArray[np.bool_]:
    """The rows to keep. Times at least a day away from the others are broken."""
    resolve_accelerator(spans["category"], spans["correlation"])
    keep, start = is_kept(spans["category"]), spans["start_ns"]
    if not keep.any():
        return keep
    middle = int(np.median(start[keep]))
    near = (np.abs(start // 2 - middle // 2) < FAR_NS // 2) & (spans["duration_ns"] < FAR_NS)
    damage.note("broken times", "a day or more away from the other spans", int((keep & ~near).sum()))
    return np.asarray(keep & near)


def timeline_of(columns: Table, keep: npt.NDArray[np.bool_], read: Columns) -> Timeline:
    """A timeline of the rows to keep, in order, from the begin of the clock to the last end.

    `columns` hold all spans of `read` and are empty afterwards: each column is freed once it is in order.
    """
    names = tuple(read.names)
    used = np.flatnonzero(np.bincount(columns["lane_key"][keep])).tolist()
    lanes, of_key = _lanes(list(read.lane_keys), used, read.labels)
    order = _parents_first(columns["start_ns"], columns["duration_ns"], np.flatnonzero(keep))
    name_id, category, start, duration, correlation, lane_key = (
        columns.pop(name)[order]
        for name in ("name_id", "category", "start_ns", "duration_ns", "correlation", "lane_key")
    )
    marks = np.array([is_annotation(n) for n in names], bool)
    category[marks[name_id] & (category == Category.CPU_OP)] = Category.USER_ANNOTATION
    lane_id = of_key[lane_key]
    training = _training_lane(names, name_id, category, lane_id, duration, lanes)
    if training is not None:
        lanes[training] = replace(lanes[training], label="training thread")
    return Timeline(
        start_ns=start,
        duration_ns=duration,
        name_id=name_id,
        category=category,
        lane_id=lane_id,
        correlation=np.maximum(correlation, 0),
        names=names,
        lanes=tuple(lanes),
        window_ns=(0, int((start + duration).max(initial=0))),
        training_lane=training,
        extra=read.extra(order),
    )


def _lanes(keys: Sequence[Key], used: Sequence[int], labels: Sequence[Label]) -> tuple[list[Lane], Int32]:
    """The threads and streams behind the used keys, and the lane of each key: files spell numbers in several ways."""
    nameless: dict[str, int] = {}  # texts without a number ("Spans") are numbered below -1

    def number(value: Value) -> int:
        plain = _identifier(value)
        return nameless.setdefault(str(value), -2 - len(nameless)) if plain is None else plain

    titles = [(e, str(e.args.name).strip()) for e in labels if e.name == "thread_name" and e.args and e.args.name]
    names = {(number(e.pid), number(e.tid)): name for e, name in titles}
    lanes: dict[tuple[str, int, int], tuple[int, Lane]] = {}
    of_key = np.zeros(len(keys), np.int32)
    for i in used:
        *device, process, thread = keys[i]
        p, n = number(process), number(thread)
        if device:
            lane = Lane("stream", p, n, f"GPU {p} stream {n}")
        else:
            text = thread if isinstance(thread, str) and not thread.isdigit() else f"thread {n}"
            lane = Lane("thread", p, n, names.get((p, n)) or text)
        of_key[i], _ = lanes.setdefault((lane.kind, p, n), (len(lanes), lane))
    return [lane for _, lane in lanes.values()], of_key


def _identifier(value: Value) -> int | None:
    """A process, thread, device or stream number, also from the last number in a text ("stream 7", "0x7f…")."""
    if not isinstance(value, str):
        return -1 if value is None else integer(value, -1)
    text = value.strip()
    if re.fullmatch(r"0[xX][0-9a-fA-F]+", text):
        return integer(text, -1)
    number = _LAST_NUMBER.search(text)
    return integer(number[1], -1) if number else None


def _parents_first(start: Int64, duration: Int64, rows: Int64) -> Int64:
    """The rows by start, ties longest first; only ties are compared twice, because most files are nearly sorted."""
    order = rows[np.argsort(start[rows], kind="stable")]
    equal = np.flatnonzero(np.diff(start[order]) == 0)
    tied = np.union1d(equal, equal + 1)
    among = order[tied]
    order[tied] = among[np.lexsort((-duration[among], start[among]))]
    return order


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
    for kind in (Category.CPU_OP, Category.CUDA_RUNTIME, Category.PYTHON_FUNCTION):
        rows = host & (category == kind)
        if rows.any():
            return int(np.bincount(lane_id[rows], minlength=len(lanes)).argmax())
    return None


def _memory(read: Columns, zero: int) -> MemoryEvents | None:
    if not read.memory:
        return None
    fields = MemoryEvents.__struct_fields__
    whole = {name: np.concatenate([getattr(piece, name) for piece in read.memory]) for name in fields}
    whole["t_ns"] = whole["t_ns"] - zero
    order = np.argsort(whole["t_ns"], kind="stable")
    return MemoryEvents(**{name: column[order] for name, column in whole.items()})


def _nothing(path: Path, text: TraceText, read: Columns, damage: DamageCount) -> str:
    broken = "; ".join(f"{d.name}: {d.count:,}, {d.detail}" for d in (*text.damage, *damage.kinds.values()))
    return (
        f"{path} holds no span: {read.events_read:,} events were read from {text.text_bytes:,} bytes of text"
        f"{f' ({broken})' if broken else ''}. Record the trace again, and let the profiler stop before it is exported."
    )


_OPTIONS = ("record_shapes", "with_stack", "profile_memory", "with_flops", "with_modules")
_FIGURES = {  # properties of a device, by the names that profilers give them
    "total_memory_bytes": ("totalGlobalMem",),
    "sm_count": ("numSms",),
    "warp_size": ("warpSize",),
    "max_threads_per_sm": ("maxThreadsPerMultiprocessor",),
    "max_threads_per_block": ("maxThreadsPerBlock",),
    "registers_per_sm": ("regsPerMultiprocessor",),
    "shared_memory_per_sm_bytes": ("sharedMemPerMultiprocessor", "maxSharedMemoryPerMultiProcessor"),
}
_VERSIONS = ("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "cupti", "roctracer", "torch", "pytorch")


def complete(origin: TraceOrigin, head: bytes, tail: bytes, damage: DamageCount) -> TraceOrigin:
    """The origin, completed from the text before and after the events; broken parts are noted and left out."""
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
    """A version number in words: CUDA writes 12.4 as 12040, HIP 6.4.43483 as 60443483."""
    if isinstance(value, int) and name.startswith("cuda"):
        return f"{value // 1000}.{value % 1000 // 10}"
    if isinstance(value, int) and name.startswith("hip"):
        return f"{value // 10_000_000}.{value // 100_000 % 100}.{value % 100_000}"
    return str(value)[:100]


def _device(fields: Mapping[str, object], position: int) -> DeviceProperties:
    major, minor = _whole(fields.get("computeMajor")), _whole(fields.get("computeMinor"))
    number = _whole(fields.get("id"))
    return DeviceProperties(
        id=position if number is None else number,
        name=_text(fields.get("name")),
        compute_capability=None if major is None or minor is None else f"{major}.{minor}",
        **{ours: _whole(fields.get(next((n for n in names if n in fields), ""))) for ours, names in _FIGURES.items()},
    )


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _whole(value: object) -> int | None:
    """A whole number, also if written as text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        whole = int(value)
    except (ValueError, OverflowError):
        return None
    return whole if abs(whole) < 1 << 63 else None


def _text(value: object) -> str | None:
    return value.encode("utf-8", "replace").decode()[:500] if isinstance(value, str) and value else None
