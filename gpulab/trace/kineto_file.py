"""A PyTorch profiler trace file as columns: any torch from 1.8 on, NVIDIA or AMD, gzipped or not, whole or broken.

    trace = read_trace(Path("rank0.pt.trace.json.gz"))

What the file holds is kept, what was wrong with it is counted in `trace.origin.damage`; nothing is concluded here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import asdict, replace

from gpulab.errors import TraceError
from gpulab.run import Category, Damage, Float64, Int64, Lane, MemoryEvents, Timeline, TraceOrigin
from gpulab.trace import metadata, other_processes
from gpulab.trace.columns import Lanes, SpanColumns, is_annotation, is_kept
from gpulab.trace.damage import DamageCount
from gpulab.trace.json_text import TraceText
from gpulab.trace.parts import Part, decode, together

FAR_NS = 24 * 3600 * 10**9  # no profiled window lasts a day: a span that far from the others has a broken time


class Trace(Struct, frozen=True):
    """What one file holds. Times count from the earliest span; `origin.zero_ns` says where that is."""

    timeline: Timeline
    memory_events: MemoryEvents | None
    origin: TraceOrigin


def read_trace(path: Path, tell: Callable[[float], None] = lambda _: None, parts: int | None = None) -> Trace:
    """Read a trace file. `tell` hears which fraction of it is read; `parts`: processes, chosen where None.

    Raises TraceError, naming the file, the place and the next step, where it is no trace or holds no span at all.
    """
    path = Path(path)
    text = TraceText(path, tell)
    with other_processes.reading(path, parts) as others:
        own = decode(text, 0, 1 + len(others))
        pieces = [own, *(other.part() for other in others)]
        if None in pieces:  # one was killed, or had no memory
            text = TraceText(path, tell)
            pieces = [decode(text)]
    return _assemble(path, text, together([piece for piece in pieces if piece is not None]))


def _assemble(path: Path, text: TraceText, part: Part) -> Trace:
    damage = DamageCount(part.damage)
    if not part.spans:
        raise TraceError(_nothing(path, text, part, damage))
    spans = _joined([columns for _, columns in part.spans])
    part.spans.clear()
    keep = _plausible(spans, damage)
    if not keep.any():
        raise TraceError(_nothing(path, text, part, damage))
    zero = int(spans.start_ns[keep].min())
    names = tuple(part.names)
    used = np.flatnonzero(np.bincount(spans.lane_key[keep])).tolist()
    timeline = _timeline(spans, keep, zero, names, Lanes(part.lane_keys, used, [label for _, label in part.labels]))
    if not (timeline.category != Category.UNKNOWN).any():
        raise TraceError(
            f"{path} is a Chrome trace of another program: none of its {len(timeline):,} spans has a category that "
            "PyTorch writes. Record one with torch.profiler and export_chrome_trace."
        )
    copies = np.array([n.startswith("ProfilerStep#") for n in names], bool)[timeline.name_id]
    origin = TraceOrigin(
        path=str(path),
        size_bytes=text.file_bytes,
        text_bytes=text.text_bytes,
        clock="ns" if part.fractional else "us",
        zero_ns=zero,
        events_read=part.events_read,
        flow_events=part.flow_events,
        step_marks_duplicated=int((copies & (timeline.category == Category.GPU_USER_ANNOTATION)).sum()),
    )
    origin = metadata.complete(origin, text.head, text.tail, damage)
    return Trace(timeline, _memory(part, zero), replace(origin, damage=_damage(text, damage)))


def _joined(pieces: list[SpanColumns]) -> SpanColumns:
    lengths = [len(p.start_ns) for p in pieces]
    offsets = np.cumsum([0, *lengths[:-1]])
    names = dict.fromkeys(name for p in pieces for name in p.extra)

    def column(piece: SpanColumns, name: str) -> Float64:
        return piece.extra[name] if name in piece.extra else np.full(len(piece.extra_rows), np.nan)

    return SpanColumns(
        start_ns=np.concatenate([p.start_ns for p in pieces]),
        duration_ns=np.concatenate([p.duration_ns for p in pieces]),
        name_id=np.concatenate([p.name_id for p in pieces]),
        category=np.concatenate([p.category for p in pieces]),
        lane_key=np.concatenate([p.lane_key for p in pieces]),
        correlation=np.concatenate([p.correlation for p in pieces]),
        extra_rows=np.concatenate([p.extra_rows + o for p, o in zip(pieces, offsets, strict=True)]),
        extra={name: np.concatenate([column(p, name) for p in pieces]) for name in names},
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


def _timeline(
    spans: SpanColumns, keep: npt.NDArray[np.bool_], zero: int, names: tuple[str, ...], lanes: Lanes
) -> Timeline:
    start, duration = spans.start_ns - zero, spans.duration_ns
    order = _parents_first(start, duration, np.flatnonzero(keep))
    name_id = spans.name_id[order]
    category = spans.category[order]
    marks = np.array([is_annotation(n) for n in names], bool)
    category[marks[name_id] & (category == Category.CPU_OP)] = Category.USER_ANNOTATION
    lane_id = lanes.of_key[spans.lane_key[order]]
    start, duration = start[order], duration[order]
    training = _training_lane(names, name_id, category, lane_id, duration, lanes.lanes)
    return Timeline(
        start_ns=start,
        duration_ns=duration,
        name_id=name_id,
        category=category,
        lane_id=lane_id,
        correlation=np.maximum(spans.correlation[order], 0),
        names=names,
        lanes=_labelled(lanes.lanes, training),
        window_ns=(0, int((start + duration).max())),
        training_lane=training,
        extra={name: _spread(values, spans.extra_rows, len(keep), order) for name, values in spans.extra.items()},
    )


def _parents_first(start: Int64, duration: Int64, rows: Int64) -> Int64:
    """The rows by start, ties longest first; only ties are compared twice, for most files are nearly sorted."""
    order = rows[np.argsort(start[rows], kind="stable")]
    equal = np.flatnonzero(np.diff(start[order]) == 0)
    tied = np.union1d(equal, equal + 1)
    among = order[tied]
    order[tied] = among[np.lexsort((-duration[among], start[among]))]
    return order


def _spread(values: Float64, rows: Int64, total: int, order: Int64) -> Float64:
    column = np.full(total, np.nan)
    column[rows] = values
    return np.asarray(column[order])


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


def _labelled(lanes: list[Lane], training: int | None) -> tuple[Lane, ...]:
    return tuple(
        Lane(lane.kind, lane.process, lane.number, "training thread") if i == training else lane
        for i, lane in enumerate(lanes)
    )


def _memory(part: Part, zero: int) -> MemoryEvents | None:
    if not part.memory:
        return None
    pieces = [asdict(columns) for _, columns in part.memory]
    whole = {name: np.concatenate([piece[name] for piece in pieces]) for name in MemoryEvents.__struct_fields__}
    whole["t_ns"] = whole["t_ns"] - zero
    order = np.argsort(whole["t_ns"], kind="stable")
    return MemoryEvents(**{name: column[order] for name, column in whole.items()})


def _damage(text: TraceText, damage: DamageCount) -> tuple[Damage, ...]:
    of_file = [Damage(name, 1, detail) for name, detail in text.damage]
    return (*of_file, *(Damage(name, noted.count, noted.where) for name, noted in damage.noted.items()))


def _nothing(path: Path, text: TraceText, part: Part, damage: DamageCount) -> str:
    broken = "; ".join(f"{d.name}: {d.count:,}, {d.detail}" for d in _damage(text, damage))
    return (
        f"{path} holds no span: {part.events_read:,} events were read from {text.text_bytes:,} bytes of text"
        f"{f' ({broken})' if broken else ''}. Record the trace again, and let the profiler stop before it is exported."
    )
