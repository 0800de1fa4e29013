"""A trace read the dumbest way, event by event with the standard library: the oracle of the fast reader.

Numbers are read as decimals, so that a time stamp keeps every digit that is in the file.
"""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from gpulab.run import Category, Lane, Timeline

CATEGORIES = {
    "cpu_op": Category.CPU_OP,
    "operator": Category.CPU_OP,
    "user_annotation": Category.USER_ANNOTATION,
    "gpu_user_annotation": Category.GPU_USER_ANNOTATION,
    "cuda_runtime": Category.CUDA_RUNTIME,
    "runtime": Category.CUDA_RUNTIME,
    "cuda_driver": Category.CUDA_DRIVER,
    "kernel": Category.KERNEL,
    "gpu_memcpy": Category.GPU_MEMCPY,
    "memcpy": Category.GPU_MEMCPY,
    "gpu_memset": Category.GPU_MEMSET,
    "memset": Category.GPU_MEMSET,
    "cuda_sync": Category.CUDA_SYNC,
    "python_function": Category.PYTHON_FUNCTION,
    "overhead": Category.OVERHEAD,
}
ON_DEVICE = {
    Category.KERNEL,
    Category.GPU_MEMCPY,
    Category.GPU_MEMSET,
    Category.CUDA_SYNC,
    Category.GPU_USER_ANNOTATION,
}
MARKS = ("ProfilerStep#", "enumerate(DataLoader)#", "Optimizer.step#", "Optimizer.zero_grad#")
EXTRA = {
    "bytes": "bytes",
    "blocks_per_sm": "blocks per SM",
    "occupancy_pct": "est. achieved occupancy %",
}


def events(path: Path) -> list[dict[str, Any]]:
    """Every row of `traceEvents`, as it stands in the file."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    found: list[dict[str, Any]] = json.loads(text, strict=False, parse_float=Decimal)["traceEvents"]
    return found


class SlowTrace(Struct, frozen=True):
    """The spans of a trace; time 0 is the start of the earliest one, which the file calls `zero_ns`."""

    timeline: Timeline
    zero_ns: int
    event_count: int


def read(path: Path) -> SlowTrace:
    """The spans of a trace file."""
    rows, every = [], events(path)
    for event in every:
        category = CATEGORIES.get(str(event.get("cat", "")).lower())
        if category == Category.CPU_OP and str(event.get("name", "")).startswith(MARKS):
            category = Category.USER_ANNOTATION  # up to torch 1.12 they are in the file as operators
        if event.get("ph") == "X" and category is not None and "ts" in event:
            rows.append((nanoseconds(event["ts"]), nanoseconds(event.get("dur", 0)), category, event))
    zero = min((start for start, _, _, _ in rows), default=0)
    return SlowTrace(timeline(rows, zero), zero, len(every))


def nanoseconds(microseconds: Any) -> int:
    """A time of the file, rounded to the nanosecond."""
    return round(Decimal(str(microseconds)) * 1000)


def timeline(rows: list[tuple[int, int, Category, dict[str, Any]]], zero: int) -> Timeline:
    """Sorted columns of (start, duration, category, event)."""
    rows = sorted(rows, key=lambda row: (row[0], -row[1]))
    names: dict[str, int] = {}
    lanes: dict[Lane, int] = {}
    name_id = [names.setdefault(str(e.get("name", "")), len(names)) for _, _, _, e in rows]
    lane_id = [lanes.setdefault(lane(category, e), len(lanes)) for _, _, category, e in rows]
    starts = np.array([start - zero for start, _, _, _ in rows], dtype=np.int64)
    durations = np.array([max(0, duration) for _, duration, _, _ in rows], dtype=np.int64)
    return Timeline(
        start_ns=starts,
        duration_ns=durations,
        name_id=np.array(name_id, dtype=np.int32),
        category=np.array([int(category) for _, _, category, _ in rows], dtype=np.uint8),
        lane_id=np.array(lane_id, dtype=np.int32),
        correlation=np.array([int(args(e).get("correlation", 0)) for _, _, _, e in rows], dtype=np.int64),
        names=tuple(names),
        lanes=tuple(lanes),
        window_ns=(0, int((starts + durations).max(initial=0))),
        training_lane=training_lane(rows, lane_id),
        extra={
            column: np.array(
                [float(args(e).get(spelled, "nan")) if c in ON_DEVICE else np.nan for _, _, c, e in rows],
                dtype=np.float64,
            )
            for column, spelled in EXTRA.items()
        },
    )


def args(event: dict[str, Any]) -> dict[str, Any]:
    """The event's arguments; an empty dictionary where it has none."""
    found = event.get("args")
    return found if isinstance(found, dict) else {}


def lane(category: Category, event: dict[str, Any]) -> Lane:
    """A stream of a device or a thread of a process."""
    more = args(event)
    if category in ON_DEVICE:
        stream = more.get("stream", str(event.get("tid", 0)).rpartition(" ")[2])
        return Lane("stream", int(more.get("device", event.get("pid", 0))), int(stream))
    return Lane("thread", int(event.get("pid", 0)), int(event.get("tid", 0)))


def training_lane(rows: list[tuple[int, int, Category, dict[str, Any]]], lane_id: list[int]) -> int | None:
    """The thread with the step marks, else the one with the most operators."""
    operators: dict[int, int] = {}
    for (_, _, category, event), number in zip(rows, lane_id, strict=True):
        if category in (Category.USER_ANNOTATION, Category.CPU_OP):
            if str(event.get("name", "")).startswith("ProfilerStep#"):
                return number
            operators[number] = operators.get(number, 0) + 1
    return max(operators, key=lambda number: operators[number], default=None)
