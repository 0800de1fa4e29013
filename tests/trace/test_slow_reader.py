"""The fast reader gives the columns that the slowest one gives, for every real trace."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from gpulab.run import Category, Timeline
from tests.support import loaded_traces, real_traces, slow_reader

Row = tuple[object, ...]


def rows(timeline: Timeline) -> Counter[Row]:
    """Every span with everything that is known of it."""
    lanes = [(lane.kind, lane.process if lane.kind == "stream" else 0, lane.number) for lane in timeline.lanes]
    columns = [timeline.extra.get(c, np.full(len(timeline), np.nan)) for c in slow_reader.EXTRA]
    extra = np.nan_to_num(np.stack(columns, axis=1), nan=-1.0)
    return Counter(
        (*times, timeline.names[name], category, lanes[lane], max(correlation, 0), *more)
        for *times, name, category, lane, correlation, more in zip(
            timeline.start_ns.tolist(),
            timeline.duration_ns.tolist(),
            timeline.name_id.tolist(),
            timeline.category.tolist(),
            timeline.lane_id.tolist(),
            timeline.correlation.tolist(),
            extra.tolist(),
            strict=True,
        )
    )


@pytest.mark.parametrize("name", loaded_traces.ALL)
def test_the_fast_reader_reads_what_the_slow_one_reads(name: str) -> None:
    slow = slow_reader.read(real_traces.path(name))
    fast = loaded_traces.trace(name)
    assert fast.origin.zero_ns - (fast.origin.base_time_ns or 0) == slow.zero_ns
    assert (fast.origin.events_read, fast.origin.damage) == (slow.event_count, ())
    assert Category.UNKNOWN not in fast.timeline.category
    found, expected = rows(fast.timeline), rows(slow.timeline)
    assert not expected - found, f"missing: {(expected - found).most_common(3)}"
    assert not found - expected, f"too many: {(found - expected).most_common(3)}"
    assert fast.timeline.training_lane is not None and slow.timeline.training_lane is not None
    training = fast.timeline.lanes[fast.timeline.training_lane]
    assert training.number == slow.timeline.lanes[slow.timeline.training_lane].number
