"""How spans are drawn in the timeline: their sorts and colours, their lanes, their nesting."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from gpulab.run import Category, Int64, Lane, Timeline
from gpulab.timeline import spans
from gpulab.views import wording


class Key(Struct, frozen=True):
    """A sort of span: what it is called and its colour."""

    label: str
    colour: str


_DATA = Key(wording.PARTS["data_wait"].label, wording.PARTS["data_wait"].colour)
_OPTIMIZER = Key(wording.PARTS["optimizer"].label, wording.PARTS["optimizer"].colour)
_OPERATOR_ON_CPU = Key("operators", wording.PARTS["compute"].colour)
_OPERATOR = Key("operators (host)", "#A6BDDB")
_CALL = Key("CUDA calls", wording.PARTS["launch"].colour)
_SYNC = Key("CUDA calls that wait", wording.PARTS["sync_wait"].colour)
_KERNEL = Key("kernels", wording.PARTS["compute"].colour)
_NCCL = Key("communication kernels", wording.PARTS["communication"].colour)
_COPY = Key("copies", wording.PARTS["memcpy"].colour)
_SET = Key("memsets", wording.PARTS["memset"].colour)
_NOTE = Key("annotations", "#BDBDBD")
_PYTHON = Key("Python functions", "#CBB9A4")
_STREAM_SYNC = Key("streams that wait", "#E3B7D0")
KINDS = (
    _DATA, _OPTIMIZER, _OPERATOR_ON_CPU, _OPERATOR, _CALL, _SYNC, _NOTE, _PYTHON,
    _KERNEL, _NCCL, _COPY, _SET, _STREAM_SYNC,
)  # fmt: skip


def kinds_of(timeline: Timeline, rows: Int64, device_kind: str) -> Int64:
    """The kind of each span, as an index into `KINDS`; decided once per (category, name)."""
    category, name_id = timeline.category[rows].astype(np.int64), timeline.name_id[rows].astype(np.int64)
    pairs, where = np.unique(category * len(timeline.names) + name_id, return_inverse=True)
    split = (divmod(pair, len(timeline.names)) for pair in pairs.tolist())
    decided = [KINDS.index(_kind(Category(c), timeline.names[n], device_kind)) for c, n in split]
    return np.array(decided, dtype=np.int64)[where]


def _kind(category: Category, name: str, device_kind: str) -> Key:
    if category == Category.KERNEL:
        return _NCCL if spans.is_communication(name) else _KERNEL
    if category in (Category.GPU_MEMCPY, Category.GPU_MEMSET):
        return _COPY if category == Category.GPU_MEMCPY else _SET
    if spans.is_loader(name):
        return _DATA
    if spans.is_optimizer(name):
        return _OPTIMIZER
    if category in (Category.CUDA_RUNTIME, Category.CUDA_DRIVER):
        return _SYNC if name.startswith(spans.SYNCHRONIZING) else _CALL
    if category == Category.CPU_OP:
        return _OPERATOR_ON_CPU if device_kind == "cpu" else _OPERATOR
    return {Category.PYTHON_FUNCTION: _PYTHON, Category.CUDA_SYNC: _STREAM_SYNC}.get(category, _NOTE)


def lane_name(lane: Lane, *, training: bool) -> str:
    """What a lane is called on screen; `training`: it is the thread that trains."""
    if lane.label:
        return lane.label
    if lane.kind == "stream":
        return f"GPU {lane.process} stream {lane.number}"
    return "training thread" if training else f"thread {lane.number}"


def nesting(start: Int64, end: Int64) -> Int64:
    """How many spans of a lane are open when each begins; `start` is sorted, parents come before their children.

    Where two overlap without one holding the other, the later one stands above the last that is still open.
    """
    depth = np.empty(len(start), np.int64)
    open_ends: list[int] = []
    for i, (begin, finish) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        depth[i] = len(open_ends)
        open_ends.append(finish)
    return depth
