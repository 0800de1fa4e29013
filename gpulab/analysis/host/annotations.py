"""Time that no operator and no cause accounts for, by the innermost annotation of the program that it lies in.

An annotation (`record_function("forward")`, Lightning's, FSDP's) is structure, not work: what it encloses is accounted
as what it is. Only where nothing else is known its name says where to look.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from gpulab.analysis.breakdown import Breakdown, layers
from gpulab.intervals import Intervals, intersect, joined, paint, subtract, union_of
from gpulab.run import Run, Timeline
from gpulab.timeline import spans

_OWNERS = (  # by how a library begins the names of its annotations
    ("[pl]", "Lightning's"),
    ("FullyShardedDataParallel", "FSDP's"),
    ("FSDP::", "FSDP's"),
    ("DistributedDataParallel", "DistributedDataParallel's"),
    ("nccl:", "torch.distributed's"),
    ("gloo:", "torch.distributed's"),
    ("c10d::", "torch.distributed's"),
    ("## Call CompiledFxGraph", "torch.compile's"),
)


class Annotated(Struct, frozen=True):
    """`name` as the program gave it; `share`: median over the steps of what lies in it without an operator."""

    name: str
    share: float

    @property
    def words(self) -> str:
        """As it is called in a sentence: `your annotation "forward"`."""
        owner = next((owner for prefix, owner in _OWNERS if self.name.startswith(prefix)), "your")
        return f'{owner} annotation "{self.name}"'


def unknown_by_annotation(run: Run, account: Breakdown, *, idle_causes: bool = True) -> tuple[Annotated, ...]:
    """The largest first. Empty where the causes of idle time are withheld: then all of it is unknown anyway."""
    timeline = run.timeline
    if timeline is None or not account.steps or not idle_causes:
        return ()
    rows = np.flatnonzero(spans.structure(timeline) & spans.on_training_thread(timeline))
    if not len(rows):
        return ()
    claims = layers(timeline, account)
    bare = subtract(account.covered, joined(*claims.values()))
    within: dict[int, list[tuple[int, int]]] = {}
    for name_id, start, end in _innermost(timeline, rows):
        within.setdefault(name_id, []).append((start, end))
    shares = {name_id: _share(account.windows, intersect(bare, union_of(times))) for name_id, times in within.items()}
    largest = sorted(shares, key=lambda name_id: -shares[name_id])
    return tuple(Annotated(timeline.names[i], shares[i]) for i in largest if shares[i] > 0)


def _share(windows: Intervals, times: Intervals) -> float:
    wall = np.maximum(1, windows[:, 1] - windows[:, 0])
    return float(np.median(paint(windows, [times])[:, 0] / wall))


def _innermost(timeline: Timeline, rows: spans.Rows) -> Iterator[tuple[int, int, int]]:
    """Name, start and end of the pieces in which a row is the innermost of these, which are in order of time."""
    opened: list[tuple[int, int]] = []  # name, end
    at = 0
    columns = (timeline.name_id[rows], timeline.start_ns[rows], timeline.end_ns[rows])
    for name_id, start, end in [*zip(*(c.tolist() for c in columns), strict=True), (-1, 1 << 62, 1 << 62)]:
        while opened and opened[-1][1] <= start:
            closed, until = opened.pop()
            yield closed, at, until
            at = max(at, until)
        if opened:
            yield opened[-1][0], at, start
        at = max(at, start)
        opened.append((name_id, end))
