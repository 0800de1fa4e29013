"""What only the trace of a GPU can tell, beyond the breakdown: kernels, copies, and the peers' figures."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import numpy as np

from gpulab.analysis.breakdown import Breakdown
from gpulab.analysis.compat.hta import HtaView, hta
from gpulab.analysis.compat.tensorboard import TensorBoardView, tensorboard
from gpulab.analysis.gpu.kernels import CopyRow, Kernels, Launches, copies, kernels, launches
from gpulab.run import Run, Timeline


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """Figures of the profiled steps; None is "not measurable" or withheld by the integrity checks.

    `kernels`, `copies` and `launches` are those that the steps made. `devices` is the
    accounting of every GPU of the trace, the busiest first. `tensorboard` and `hta` follow those tools' definitions.
    """

    devices: tuple[Breakdown, ...]
    kernels: Kernels | None
    launches: Launches | None
    copies: tuple[CopyRow, ...]
    tensorboard: TensorBoardView | None
    hta: HtaView | None


def trace_facts(run: Run, devices: tuple[Breakdown, ...], withheld: Set[str] = frozenset()) -> TraceFacts | None:
    """The figures of a run whose trace holds a GPU's work, accounted in `devices`; None for any other run.

    `withheld` names the figures that the integrity checks do not allow.
    """
    timeline = run.timeline
    if timeline is None or not timeline.has_device_events:
        return None
    windows = _windows(devices, timeline)
    return TraceFacts(
        devices=devices,
        kernels=None if "kernels" in withheld else kernels(timeline, windows),
        launches=None if "launch_statistics" in withheld else launches(timeline, windows),
        copies=() if "kernels" in withheld else copies(timeline, windows),
        tensorboard=None if "tensorboard" in withheld else tensorboard(timeline),
        hta=None if "hta" in withheld else hta(timeline, _file_zero_ns(run)),
    )


def _windows(devices: tuple[Breakdown, ...], timeline: Timeline) -> np.ndarray:
    if not devices:
        return np.array([timeline.window_ns], dtype=np.int64)
    return devices[0].host_windows


def _file_zero_ns(run: Run) -> int:
    """The file's own time stamp at time 0 of the timeline."""
    return run.origin.zero_ns - (run.origin.base_time_ns or 0) if run.origin is not None else 0
