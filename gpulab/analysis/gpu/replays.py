"""Work that replayed graphs (CUDA's and HIP's) did: one launch starts many kernels, each waits for those it needs.

An idle device inside a replay waits for the graph's own order of work, not for the program.
"""

from __future__ import annotations

from gpulab.analysis.gpu.device_work import DeviceWork
from gpulab.intervals import intersect
from gpulab.timeline.launches import replay_of, replay_times


def replayed_fraction(work: DeviceWork) -> float:
    """Of the time in kernels what replayed graphs ran."""
    rows = work.rows[work.kernel]
    duration_ns = work.timeline.duration_ns[rows]
    total_ns = int(duration_ns.sum())
    replayed_ns = int(duration_ns[replay_of(work.timeline, rows) >= 0].sum())
    return replayed_ns / total_ns if total_ns else 0.0


def idle_within_us(work: DeviceWork) -> float:
    """How long the device idles per step inside replays."""
    if not len(work.rows):
        return 0.0
    of_device = work.timeline.lanes[int(work.timeline.lane_id[work.rows[0]])].process
    return work.per_step_us(intersect(work.idle, replay_times(work.timeline, of_device)))
