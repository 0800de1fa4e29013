"""A feed that plays a training run from a script: the live view's tests need no training and no GPU.

Time is the caller's: `advance(s)` plays so many seconds of the run at once, `play(s)` plays them as they pass.
"""

from __future__ import annotations

import math
import threading
import time

import numpy as np

from gpulab.live_feed import CapturePhase, Delta, SeriesInfo, SoFar, Status

CPU_SERIES = (
    SeriesInfo("cpu_pct", "%", "CPU (100 % = 8 usable cores)", "psutil"),
    SeriesInfo("rss_bytes", "bytes", "memory of the process tree", "psutil"),
    SeriesInfo("process_count", "processes", "processes in the tree", "psutil"),
)
GPU_SERIES = (
    SeriesInfo("gpu_utilization_pct", "%", "GPU utilization", "NVML"),
    SeriesInfo("gpu_memory_used_bytes", "bytes", "GPU memory used (all processes)", "NVML"),
    SeriesInfo("power_w", "W", "power", "NVML"),
    SeriesInfo("temperature_c", "°C", "temperature", "NVML"),
    SeriesInfo("sm_active_fraction", "fraction", "SM active", "NVML GPM"),
    SeriesInfo("sm_occupancy_fraction", "fraction", "SM occupancy", "NVML GPM"),
    SeriesInfo("tensor_active_fraction", "fraction", "tensor active", "NVML GPM"),
    SeriesInfo("dram_active_fraction", "fraction", "DRAM active", "NVML GPM"),
    *CPU_SERIES,
)
LEVELS = {
    "cpu_pct": 62.0,
    "rss_bytes": 1.4e9,
    "process_count": 5.0,
    "temperature_c": 58.0,
    "gpu_utilization_pct": 88.0,
    "sm_active_fraction": 0.61,
    "sm_occupancy_fraction": 0.33,
    "tensor_active_fraction": 0.22,
    "dram_active_fraction": 0.41,
    "gpu_memory_used_bytes": 21.4e9,
    "power_w": 412.0,
}
FIRST_STEP_MS = 640.0


class ScriptedFeed:
    """Steps of `step_ms` of which `wait_ms` is data wait, a slow first step, meters at 5 Hz."""

    def __init__(
        self,
        device_label: str = "device: CPU",
        series: tuple[SeriesInfo, ...] = CPU_SERIES,
        step_ms: float = 40.0,
        wait_ms: float = 16.0,
        total: int | None = 113,
        batch_size: int | None = 64,
    ) -> None:
        self.stop_requested = threading.Event()
        self.message = ""
        self.alert = ""
        self.now_s = 0.0
        self.step = 0
        self._device_label, self._series, self._total = device_label, series, total
        self._step_ms, self._wait_ms, self._batch_size = step_ms, wait_ms, batch_size
        self._next_end_s = FIRST_STEP_MS / 1e3
        self._next_reading_s = 0.1
        self._steps: list[tuple[float, float, float, float]] = []
        self._samples: dict[str, list[tuple[float, float]]] = {info.name: [] for info in series}
        self._lock = threading.Lock()

    def advance(self, seconds: float) -> None:
        """Play so many seconds of the run."""
        with self._lock:
            self.now_s += seconds
            while self._next_end_s <= self.now_s:
                self._take_step()
            while self._next_reading_s <= self.now_s:
                self._read_meters()

    def _take_step(self) -> None:
        wobble = 1 + 0.12 * math.sin(self.step * 1.7) + 0.05 * math.sin(self.step * 0.31)
        first = self.step == 0
        profiled = 1.6 if self._phase() == "profiling" else 1.0
        wall = FIRST_STEP_MS if first else self._step_ms * wobble * profiled
        wait = wall * 0.8 if first else self._wait_ms * wobble**2
        rate = math.nan if self._batch_size is None else 1e3 * self._batch_size / wall
        self.step += 1
        self._steps.append((self._next_end_s, wall, wait, rate))
        self._next_end_s += (self._step_ms * wobble * profiled) / 1e3

    def _read_meters(self) -> None:
        t = self._next_reading_s
        for k, (name, rows) in enumerate(self._samples.items()):
            swing = 0.02 if name.endswith("_bytes") else 0.11
            ramp = 1 - math.exp(-t / 0.8)
            rows.append((t, LEVELS[name] * ramp * (1 + swing * math.sin(1.3 * t + k) * math.sin(0.37 * t))))
        self._next_reading_s += 0.2

    def play(self, seconds: float) -> bool:
        """Play in real time, busy as a training loop is; True where Stop ended it."""
        start = last = time.monotonic()
        while last - start < seconds and not self.stop_requested.is_set():
            sum(i * i for i in range(20_000))
            now = time.monotonic()
            self.advance(now - last)
            last = now
        return self.stop_requested.is_set()

    def _phase(self) -> CapturePhase:
        if self.step < 5:
            return "warm-up"
        if self.step < 60:
            return "measuring"
        return "profiling" if self.step < 72 else "after profiling"

    def series(self) -> tuple[SeriesInfo, ...]:
        return self._series

    def drain(self) -> Delta:
        with self._lock:
            steps, self._steps = self._steps, []
            samples = {name: np.array(rows, np.float32).reshape(-1, 2) for name, rows in self._samples.items() if rows}
            for rows in self._samples.values():
                rows.clear()
            status = Status(
                self._phase(), self.step, self._total, "epoch", self.now_s, self._device_label,
                self.stop_requested.is_set(), self.message, self.alert,
            )  # fmt: skip
        return Delta(status, np.array(steps, np.float32).reshape(-1, 4), samples)

    def so_far(self) -> SoFar | None:
        return None

    def request_stop(self) -> None:
        self.stop_requested.set()
