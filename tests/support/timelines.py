"""Timelines written out span by span, for tests of the analysis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field
from msgspec.structs import replace

from gpulab.run import Category, Lane, Phase, Run, Steps, Timeline

MAIN, BACKWARD, STREAM, STREAM_2, OTHER_GPU = range(5)
LANES = (
    Lane("thread", 4000, 1),
    Lane("thread", 4000, 2),
    Lane("stream", 0, 7),
    Lane("stream", 0, 20),
    Lane("stream", 1, 7),
)
DEVICE = (Category.KERNEL, Category.GPU_MEMCPY, Category.GPU_MEMSET)


class Span(Struct, frozen=True):
    """One span; times in nanoseconds."""

    name: str
    category: Category
    lane: int
    start: int
    duration: int
    correlation: int = 0
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + self.duration

    @property
    def gpu(self) -> int:
        return LANES[self.lane].process


def in_order(spans: Sequence[Span]) -> list[Span]:
    """Sorted as the record demands."""
    return sorted(spans, key=lambda s: (s.start, -s.duration))


def timeline(spans: Sequence[Span]) -> Timeline:
    """The spans as columns; row i is `in_order(spans)[i]`."""
    spans = in_order(spans)
    names = sorted({s.name for s in spans})
    return Timeline(
        start_ns=np.array([s.start for s in spans], dtype=np.int64),
        duration_ns=np.array([s.duration for s in spans], dtype=np.int64),
        name_id=np.array([names.index(s.name) for s in spans], dtype=np.int32),
        category=np.array([s.category for s in spans], dtype=np.uint8),
        lane_id=np.array([s.lane for s in spans], dtype=np.int32),
        correlation=np.array([s.correlation for s in spans], dtype=np.int64),
        names=tuple(names),
        lanes=LANES,
        window_ns=(min((s.start for s in spans), default=0), max((s.end for s in spans), default=0)),
        training_lane=MAIN,
        extra={
            name: np.array([s.extra.get(name, np.nan) for s in spans], dtype=np.float64)
            for name in ("bytes", "blocks_per_sm", "occupancy_pct")
        },
    )


def spans_of(recorded: Timeline) -> list[Span]:
    """The other way round, without further columns."""
    columns = (recorded.name_id, recorded.category, recorded.lane_id, recorded.start_ns, recorded.duration_ns)
    rows = zip(*(column.tolist() for column in columns), recorded.correlation.tolist(), strict=True)
    return [Span(recorded.names[n], Category(c), lane, s, d, key) for n, c, lane, s, d, key in rows]


def steps_between(start_ns: npt.ArrayLike, end_ns: npt.ArrayLike, *, first: int = 0, **columns: npt.ArrayLike) -> Steps:
    """Steps with these bounds, profiled unless told otherwise; each of the other columns is 0 or as given."""
    count = len(np.atleast_1d(start_ns))
    given = {"number": np.arange(first, first + count), "start_ns": start_ns, "end_ns": end_ns, **columns}
    given.setdefault("phase", int(Phase.TRACED))
    kinds = {"phase": np.uint8, "flags": np.uint8}
    needed = Steps.__struct_fields__[: -len(Steps.__struct_defaults__)]
    rows: Any = {n: np.broadcast_to(given.get(n, 0), count).astype(kinds.get(n, np.int64)) for n in needed}
    return Steps(**rows)


def ran(base: Run, recorded: Timeline, bounds_ns: Sequence[tuple[int, int]]) -> Run:
    """The run with this timeline and profiled steps between these bounds, numbered from 1."""
    steps = steps_between(*np.array(bounds_ns, np.int64).reshape(-1, 2).T, first=1, sample_count=-1)
    return replace(base, steps=steps, timeline=recorded, traced_numbers=tuple(steps.number.tolist()))
