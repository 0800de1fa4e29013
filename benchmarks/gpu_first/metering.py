"""Hardware counters, power and energy under loads whose effect is certain, alone and beside CUPTI."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Self

import numpy as np
import torch
from msgspec import Struct, field

from benchmarks.gpu_first.answer import Answer
from benchmarks.gpu_first.stage import Stage
from gpulab.analysis.device_peaks import peaks_of
from gpulab.devices.machine import detect_device
from gpulab.devices.nvml import nvml_meter
from tests.support.fake_nvml import fake_nvml, h100

READ_EVERY_S = 0.1
SETTLE_S = 1.0  # the meters lag behind the load by up to a second
Curve = list[tuple[float, float]]  # seconds, value


class Load(Struct, frozen=True):
    """Something the GPU is kept at. `run` launches some of it and waits for it; `bytes` and `flop` are of one run."""

    name: str
    run: Callable[[], None]
    bytes: float = 0.0
    flop: float = 0.0


class Metered(Struct, frozen=True):
    """What the meters said while a load ran, and how often it ran."""

    curves: Mapping[str, Curve]
    runs: int
    seconds: float
    missing: Mapping[str, str] = field(default_factory=dict)  # what the meter does not read, and why

    def mean(self, name: str) -> float | None:
        """The mean of a curve; None where it was not read."""
        values = [value for _, value in self.curves.get(name, [])]
        return float(np.mean(values)) if values else None

    def gained(self, name: str) -> tuple[float, float, float] | None:
        """First time, last time and increase of a counter between them; None with fewer than two readings."""
        curve = self.curves.get(name, [])
        return (curve[0][0], curve[-1][0], curve[-1][1] - curve[0][1]) if len(curve) > 1 else None


class Reader:
    """Reads gpulab's own meter on a thread of its own while the block runs."""

    def __init__(self, stage: Stage) -> None:
        module = fake_nvml(h100()) if stage.simulated else None
        uuid = h100()["devices"][0]["uuid"] if stage.simulated else detect_device("cuda").uuid
        self._meter = nvml_meter(uuid, os.getpid(), module)
        self.missing = {why.what: why.reason for why in self._meter.missing()}
        self.curves: dict[str, Curve] = {series.name: [] for series in self._meter.series()}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._meter.close()

    def _read(self) -> None:
        while not self._over.wait(READ_EVERY_S):
            now = time.perf_counter()
            for curve, value in zip(self.curves.values(), self._meter.read(), strict=True):
                if value is not None:
                    curve.append((now, value))


def measure(answer: Answer, stage: Stage) -> None:
    """Each load alone, then beside CUPTI."""
    seconds = 2.5 if not stage.simulated else 0.4
    for make in (idle, products, copies, uploads):
        with answer.guarded(f"load: {make.__name__}", "the meters' figures"):
            _alone_and_beside_cupti(answer, stage, make(stage), seconds)
        stage.release()


def _alone_and_beside_cupti(answer: Answer, stage: Stage, load: Load, seconds: float) -> None:
    alone = metered(stage, load, seconds, nullcontext())
    _keep(answer, f"{load.name}, alone", load, alone)
    judge(answer, stage, load, alone)
    beside = metered(stage, load, seconds, torch.profiler.profile(activities=stage.activities))
    _keep(answer, f"{load.name}, beside CUPTI", load, beside)
    _same_beside_cupti(answer, load, alone, beside)


def metered(stage: Stage, load: Load, seconds: float, around: AbstractContextManager[object]) -> Metered:
    """Keep the load up, let the meters settle, then read them for so long."""
    with around:
        _kept_up(load, 0.0 if stage.simulated else SETTLE_S)
        with Reader(stage) as reader:
            runs, took_s = _kept_up(load, seconds)
    return Metered(reader.curves, runs, took_s, reader.missing)


def _kept_up(load: Load, seconds: float) -> tuple[int, float]:
    began, runs = time.perf_counter(), 0
    while (took_s := time.perf_counter() - began) < seconds:
        load.run()
        runs += 1
    return runs, took_s


def idle(stage: Stage) -> Load:
    """Nothing at all."""
    stage.synchronize()
    return Load("idle", lambda: time.sleep(0.05))


def products(stage: Stage) -> Load:
    """Matrix products in bf16."""
    n, count = stage.size(8192, 64), stage.size(50, 2)
    a = torch.randn(n, n, device=stage.device, dtype=torch.bfloat16)
    out = torch.empty_like(a)

    def run() -> None:
        for _ in range(count):
            torch.mm(a, a, out=out)
        stage.synchronize()

    return Load("matrix products in bf16", run, flop=2.0 * n**3 * count)


def copies(stage: Stage) -> Load:
    """Copies within the GPU's memory: each byte is read once and written once."""
    size, count = stage.size(8 * 10**9, 10**6), stage.size(10, 2)
    source = torch.zeros(size, device=stage.device, dtype=torch.uint8)
    target = torch.empty_like(source)

    def run() -> None:
        for _ in range(count):
            target.copy_(source)
        stage.synchronize()

    return Load("copies within the GPU", run, bytes=2.0 * size * count)


def uploads(stage: Stage) -> Load:
    """Copies from pinned memory of the host."""
    size, count = stage.size(10**9, 10**6), stage.size(5, 2)
    source = torch.zeros(size, dtype=torch.uint8, pin_memory=not stage.simulated)
    target = torch.empty(size, device=stage.device, dtype=torch.uint8)

    def run() -> None:
        for _ in range(count):
            target.copy_(source, non_blocking=True)
        stage.synchronize()

    return Load("copies from pinned host memory", run, bytes=1.0 * size * count)


def _keep(answer: Answer, name: str, load: Load, metered: Metered) -> None:
    means = {series: metered.mean(series) for series in metered.curves}
    rate = metered.runs / metered.seconds
    figures = {"mean": means, "readings": {series: len(curve) for series, curve in metered.curves.items()}}
    figures["missing"] = dict(metered.missing)
    answer.figure(name, {**figures, "gb_per_s": load.bytes * rate / 1e9, "tflop_per_s": load.flop * rate / 1e12})


def judge(answer: Answer, stage: Stage, load: Load, metered: Metered) -> None:
    """Against what the load must do to the GPU."""
    rate = metered.runs / metered.seconds
    peaks = None if stage.simulated else peaks_of(stage.name)
    if load.name == "idle":
        between(answer, "SM active, idle", metered.mean("sm_active_fraction"), 0.0, 0.05)
    elif load.flop:
        between(answer, "tensor active, matrix products", metered.mean("tensor_active_fraction"), 0.7, 1.0)
        between(answer, "SM active, matrix products", metered.mean("sm_active_fraction"), 0.8, 1.0)
        between(answer, "GPU utilization, matrix products", metered.mean("gpu_utilization_pct"), 95, 100)
    elif "within" in load.name:
        dram = metered.mean("dram_active_fraction")
        between(answer, "DRAM active, copies", dram, 0.8, 1.0)
        share = None if peaks is None else load.bytes * rate / 1e9 / peaks.bandwidth_gb_s
        answer.near("DRAM active, copies, against bytes/s over the peak bandwidth", dram, share, 0.1)
    else:
        answer.near("PCIe to the GPU", metered.mean("pcie_rx_mb_per_s"), load.bytes * rate / 1e6, 0.1, " MB/s")
    if load.name != "idle":
        answer.near(f"energy against power over time, {load.name}", *energies_j(metered), 0.1, " J")


def energies_j(metered: Metered) -> tuple[float | None, float | None]:
    """The counter's increase, and the power integrated over the same time."""
    counter, power = metered.gained("energy_j"), metered.curves.get("power_w", [])
    if counter is None or len(power) < 2:
        return None, None
    times, watts = np.array(power).T
    grid = np.linspace(counter[0], counter[1], 200)
    return counter[2], float(np.interp(grid, times, watts).mean() * (counter[1] - counter[0]))


def between(answer: Answer, what: str, value: float | None, low: float, high: float) -> None:
    """A value that must lie in this range."""
    expected = f"{low:g} to {high:g}"
    if value is None:
        answer.unmeasured(what, expected, "the meter gave no value")
    else:
        answer.check(what, expected, f"{value:.3g}", agrees=low <= value <= high)


def _same_beside_cupti(answer: Answer, load: Load, alone: Metered, beside: Metered) -> None:
    """The meters work beside the profiler, and tell the same of the same load."""
    names = ("sm_active_fraction", "tensor_active_fraction", "dram_active_fraction", "pcie_rx_mb_per_s")
    for name in names:
        before, after = alone.mean(name), beside.mean(name)
        what = f"{name} beside CUPTI, {load.name}"
        if before is not None and (after is None or load.name == "idle" or before < 0.05):
            answer.check(
                what, "read as well", "not read" if after is None else f"{after:.3g}", agrees=after is not None
            )
        else:
            answer.near(what, after, before, 0.15)
