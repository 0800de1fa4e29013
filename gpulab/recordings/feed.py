"""A recording as the live view sees a running capture: its steps and readings come again, at the speed of a clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

import numpy as np

from gpulab.live_feed import CapturePhase, Delta, SeriesInfo, Status
from gpulab.run import Phase, Run

_PHASES: dict[Phase, CapturePhase] = {
    Phase.WARMUP: "warm-up",
    Phase.MEASURED: "measuring",
    Phase.TRACED: "profiling",
}


class RecordedFeed:
    """Gives what the run had done by now, where a second of the clock is `speed` seconds of the run."""

    def __init__(self, run: Run, title: str, speed: float, clock: Callable[[], float] = monotonic) -> None:
        self._run = run
        self._title = title
        self._speed = speed
        self._clock = clock
        self._began_s = clock()
        self._drained_s = -1.0  # of the run: what lies before has been given
        self._stop = threading.Event()
        steps = run.steps
        seconds = np.maximum(steps.wall_ns, 1) / 1e9
        rate = np.where(steps.sample_count >= 0, steps.sample_count / seconds, np.nan)
        columns = (steps.end_ns / 1e9, seconds * 1e3, np.minimum(steps.data_wait_ns / 1e6, seconds * 1e3), rate)
        self._steps = np.stack(columns, axis=1).astype(np.float32)
        self._end_s = steps.end_ns / 1e9
        self._series = {s.name: np.stack((s.t_ns / 1e9, s.value), axis=1) for s in run.samples.series}

    @property
    def is_over(self) -> bool:
        """Whether all has been given, or somebody has asked to stop."""
        return self._stop.is_set() or self._now_s() >= self._run.wall_ns / 1e9

    def _now_s(self) -> float:
        """How far the run has come, in its own seconds."""
        return min(self._run.wall_ns / 1e9, (self._clock() - self._began_s) * self._speed)

    def series(self) -> tuple[SeriesInfo, ...]:
        """The curves of the recording."""
        return tuple(SeriesInfo(s.name, s.unit, s.label, s.source) for s in self._run.samples.series)

    def drain(self) -> Delta:
        """What has happened since the last call."""
        since_s, now_s = self._drained_s, self._now_s()
        self._drained_s = now_s
        fresh = (self._end_s > since_s) & (self._end_s <= now_s)
        samples = {
            name: rows[chosen].astype(np.float32)
            for name, rows in self._series.items()
            if (chosen := (rows[:, 0] > since_s) & (rows[:, 0] <= now_s)).any()
        }
        return Delta(self._status(now_s), self._steps[fresh], samples)

    def request_stop(self) -> None:
        """End the replay."""
        self._stop.set()

    def _status(self, now_s: float) -> Status:
        run = self._run
        done = int(np.searchsorted(self._end_s, now_s, side="right"))
        alerts = [
            a for a in run.alerts if a.since_ns <= now_s * 1e9 < (run.wall_ns if a.until_ns is None else a.until_ns)
        ]
        return Status(
            phase=self._phase(done, now_s),
            step=done,
            total=len(run.steps),
            total_of="run",
            elapsed_s=now_s,
            device_label=f"device: {'CPU' if run.device.kind == 'cpu' else run.device.name}",
            stop_requested=self._stop.is_set(),
            message=f"recording {self._title}, {self._speed:g} times as fast as it was",
            alert=alerts[-1].words if alerts else "",
        )

    def _phase(self, done: int, now_s: float) -> CapturePhase:
        """Of the step that is under way."""
        phases = self._run.steps.phase
        if done >= len(phases) or now_s >= self._run.wall_ns / 1e9:
            return "ending"
        phase = Phase(int(phases[done]))
        if phase is Phase.MEASURED and (phases[:done] == Phase.TRACED).any():
            return "after profiling"
        return _PHASES[phase]
