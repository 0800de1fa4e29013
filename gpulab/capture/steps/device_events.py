"""When a GPU passes the boundaries of the steps: a timing event at each, read later, so nothing waits for the GPU.

The host may be hundreds of launches ahead of the GPU, so its own clock says little about a step. An event recorded at a
boundary completes when the GPU has finished all that was launched before: the same definition of a step as in a trace
(`analysis.device_steps`). The distance of two events is what the steps between them took.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from typing import Any

import numpy as np

from gpulab.devices import gpus_in_use
from gpulab.run import Int64

UNKNOWN = -1.0


class StepEvents:
    """One event for each mark, on the GPU and the stream on which the step's update ran; else on the current stream.

    Training thread only. Marks cost microseconds. Events that have completed are used again, so that there are as many
    as the host is steps ahead. After an error of CUDA nothing more is recorded: the error belongs to the user's code,
    which meets it too.
    """

    def __init__(self) -> None:
        self.index: int | None = None  # of the GPU; None: not known yet
        self._stream: Any = None  # of the open step's update
        self._tries = 0  # to find out which GPU is in use
        self._pending: deque[Any] = deque()
        self._unused: list[Any] = []
        self._latest: Any = None  # the newest event that has completed
        self._host_ns = array("q")  # of each mark
        self._since_ms = array("d")  # from the mark before it, on the GPU; UNKNOWN
        self._broken = False

    def updated(self, optimizer: Any) -> None:
        """An optimizer has stepped: the step's events belong where its parameters are."""
        index = gpu_of(optimizer)
        if index is None or self._broken or gpus_in_use.in_graph_capture():
            return
        if index != self.index:
            self._forget()
            self.index = index
        self._stream = sys.modules["torch"].cuda.current_stream(index)

    def mark(self, t_ns: int) -> None:
        """A boundary is here, at `t_ns` of the host's clock."""
        if self._broken or gpus_in_use.in_graph_capture():
            return
        try:
            if self._ready():
                self._record(t_ns)
                self._collect()
        except RuntimeError:
            self._broken = True

    def finish(self, start_ns: Int64, end_ns: Int64) -> Int64:
        """What each of these steps took on the GPU, in ns; -1 where a boundary has no event. Waits for the events.

        The columns are times of the host's clock, as they were marked. Empty where nothing was marked at all.
        """
        if not self._host_ns:
            return np.empty(0, np.int64)
        try:
            if not self._broken:
                for event in self._pending:
                    event.synchronize()
                self._collect()
        except RuntimeError:
            self._broken = True
        return self._between(start_ns, end_ns)

    def _ready(self) -> bool:
        """Whether it is known which GPU works: an event on any other would open a context there, or mean nothing.

        Asking takes tens of microseconds, so it is done more and more seldom.
        """
        if self.index is None:
            self._tries += 1
            used = gpus_in_use.in_use() if self._tries & (self._tries - 1) == 0 else []
            self.index = used[0] if len(used) == 1 else None
        return self.index is not None

    def _record(self, t_ns: int) -> None:
        cuda = sys.modules["torch"].cuda
        event = self._unused.pop() if self._unused else cuda.Event(enable_timing=True)
        event.record(self._stream or cuda.current_stream(self.index))
        self._stream = None
        self._pending.append(event)
        self._host_ns.append(t_ns)

    def _collect(self) -> None:
        while self._pending and self._pending[0].query():
            event, before = self._pending.popleft(), self._latest
            since_ms = UNKNOWN if before is None else before.elapsed_time(event)
            self._since_ms.append(since_ms if since_ms >= 0 else UNKNOWN)  # streams need not end in order
            self._latest = event
            if before is not None:
                self._unused.append(before)

    def _forget(self) -> None:
        """Events of another GPU cannot be set against those to come."""
        self._pending.clear()
        self._unused.clear()
        self._latest = None
        del self._host_ns[:], self._since_ms[:]

    def _between(self, start_ns: Int64, end_ns: Int64) -> Int64:
        count = len(self._since_ms)
        mark_of = {t: i for i, t in enumerate(self._host_ns[:count])}
        first = np.array([mark_of.get(t, -1) for t in start_ns.tolist()], np.int64)
        last = np.array([mark_of.get(t, -1) for t in end_ns.tolist()], np.int64)
        since_ms = np.array(self._since_ms, np.float64)
        at_ns = np.cumsum(np.maximum(since_ms, 0.0)) * 1e6
        gaps = np.cumsum(since_ms == UNKNOWN)
        measured = (first >= 0) & (last >= first)
        measured[measured] = gaps[first[measured]] == gaps[last[measured]]
        device_ns = np.full(len(start_ns), -1, np.int64)
        device_ns[measured] = np.rint(at_ns[last[measured]] - at_ns[first[measured]]).astype(np.int64)
        return device_ns


def gpu_of(optimizer: Any) -> int | None:
    """The GPU that holds the parameters of an optimizer; None where they lie elsewhere."""
    try:
        device = optimizer.param_groups[0]["params"][0].device
        return device.index if device.type == "cuda" else None
    except (AttributeError, IndexError, KeyError, TypeError):
        return None
