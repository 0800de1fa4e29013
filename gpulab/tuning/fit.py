"""The largest value of a size that fits into memory: predicted from two cheap runs, then proven by a run.

The peak of memory is fitted as m0 + m1·B over the batch size B (definitions.md, "Batch size"). On a GPU the peak is the
allocator's, on the host the kernel's, so that it contains rounding, workspaces and what libraries keep.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping

from msgspec import Struct

from gpulab.capture import threads
from gpulab.devices.machine import detect_device
from gpulab.errors import UsageError
from gpulab.knobs.catalogue import KNOBS
from gpulab.knobs.variables import Plain
from gpulab.memory.failure import memory_error
from gpulab.memory.room import Peak, room_of, status_bytes
from gpulab.memory.survey import empty_caches
from gpulab.memory_record import Room
from gpulab.options import LEAST_FREE
from gpulab.run import Settings
from gpulab.tuning.arms import BATCH, failure_of
from gpulab.tuning.cell_code import on_interrupt
from gpulab.tuning.code import Code
from gpulab.tuning.execute import Execution, FullRun, Stopper, release, run_block, run_full
from gpulab.tuning.record import Block
from gpulab.tuning.resolve import Objects, ResolvedArm, Setting, observation_of, resolve
from gpulab.tuning.schedule import Arm, Listener, Progress, Size
from gpulab.tuning.snapshots import Start

KILLING = ("control group", "machine")  # limits at which the kernel kills the process, without an exception
KILLING_FREE = 0.2  # ours: room that stays free below such a limit, at least
STEPS = Size(warmup=1, steps=2)  # of a run: the optimizer's states come with the first step
FURTHER = Size(warmup=1, steps=4)  # of a run that proves
NOISE_FRACTION = 0.01  # ours: of a peak from run to run
NOISE_BYTES = 4 << 20  # ours: what allocators keep more or less
Z_975 = 1.96
ATTEMPTS = 4  # runs of the predicted size and of smaller ones
SPREAD = (4, 2)  # of the present size: the two cheap runs


class Probe(Struct, frozen=True):
    """One short run. `peak_bytes`: of the device's memory, None if unknown; `failure`: empty if it ran."""

    settings: Mapping[str, Plain]
    size: int | None
    peak_bytes: int | None
    failure: str = ""
    ran_out: bool = False
    samples_per_s: float | None = None
    losses: tuple[float, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether it ran to its end."""
        return not self.failure


class MemoryLine(Struct, frozen=True):
    """Peak memory over a size: m0 + m1 · size, from runs at `sizes`; `sd_bytes` is the noise of one peak."""

    m0_bytes: float
    m1_bytes: float
    sizes: tuple[int, ...]
    sd_bytes: float

    def at(self, size: float) -> float:
        return self.m0_bytes + self.m1_bytes * size

    def largest(self, allowed_bytes: float) -> tuple[int, int, int] | None:
        """The largest size within these bytes, with its 95 % interval; None if memory does not grow with the size."""
        if self.m1_bytes <= 0:
            return None
        middle = (allowed_bytes - self.m0_bytes) / self.m1_bytes
        mean = sum(self.sizes) / len(self.sizes)
        spread = sum((size - mean) ** 2 for size in self.sizes)
        of_line = self.sd_bytes * math.sqrt(1 / len(self.sizes) + (middle - mean) ** 2 / spread)
        off = Z_975 * math.hypot(of_line, self.sd_bytes) / self.m1_bytes
        return max(0, int(middle)), max(0, int(middle - off)), max(0, int(middle + off))


def line_through(peaks: Mapping[int, int]) -> MemoryLine:
    """The line through peaks in bytes at two or more sizes; without BLAS, which fails hard where memory is short."""
    m1, m0 = statistics.linear_regression(list(peaks), list(peaks.values()))
    off = max(abs(peak - m0 - m1 * size) for size, peak in peaks.items())
    sd = max(NOISE_BYTES, NOISE_FRACTION * max(peaks.values()), off)
    return MemoryLine(m0, m1, tuple(sorted(peaks)), sd)


class Fit(Struct, frozen=True):
    """The search for the largest size. `proven`: the largest that ran within the room; None if none did.

    `allowed_bytes`: what a peak may reach, with `free_fraction` of the room left free.
    """

    name: str
    before: int
    room: Room
    allowed_bytes: float
    free_fraction: float
    probes: tuple[Probe, ...]
    line: MemoryLine | None
    predicted: tuple[int, int, int] | None  # with the ends of its interval
    proven: int | None
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> int | None:
        """The largest size that surely fits: the proven one, else the largest of the cheap runs."""
        ran = (p.size for p in self.probes if p.fits and p.size and (p.peak_bytes or 0) <= self.allowed_bytes)
        return self.proven if self.proven is not None else max(ran, default=None)

    def peak_of(self, size: int) -> int | None:
        """The measured peak at that size, in bytes."""
        peaks = (probe.peak_bytes for probe in self.probes if probe.size == size and probe.fits)
        return next(filter(None, peaks), None)


class Prober:
    """Short runs of a cell from the same start, on one device. Use as a context: at the end the state is restored."""

    def __init__(self, code: Code, tell: Listener = lambda progress: None, device: str = "auto") -> None:
        self._code, self.tell = code, tell
        self.device = detect_device(device)
        self.gpu = (self.device.index or 0) if self.device.kind == "cuda" else None
        self._stopper = Stopper()
        self._start: Start
        self.probes: list[Probe] = []
        self.error: BaseException | None = None

    def stop(self) -> None:
        """End the current run at its next step, and begin no other."""
        self._stopper.stop()

    @property
    def halted(self) -> bool:
        return self._stopper.requested or self.error is not None

    def within(self, work: Callable[[], None]) -> None:
        """Do `work`, which probes; afterwards the user's state is restored. Raises the error of the user's code."""
        with threads.measuring(), on_interrupt(self.stop) as interrupt:
            self._start = Start(self._code)
            try:
                work()
            finally:
                self._start.end()
                empty_caches()
        if (error := self.error or interrupt.error) is not None:
            raise error

    def resolved(self, settings: Mapping[str, Plain]) -> ResolvedArm:
        """The settings in this cell. Raises UsageError if one cannot be set."""
        arm = resolve(Arm(settings), self._code, observation_of(self._code) or Objects(self._code, None))
        if arm.refusal:
            raise UsageError(f"{arm.refusal}.")
        return arm

    def room(self) -> Room:
        """What is free on the device now. Raises UsageError if that cannot be read."""
        empty_caches()
        room = room_of(self.gpu)
        if room is None:
            raise UsageError("How much memory is free cannot be read here, so no size can be predicted to fit.")
        return room

    @property
    def used_bytes(self) -> int:
        """What a peak counts before a run begins."""
        if self.gpu is None:
            return status_bytes("VmRSS") or 0
        import torch

        return int(torch.cuda.memory_allocated(self.gpu))

    def run(self, settings: Mapping[str, Plain], size: int | None = None, steps: Size = STEPS) -> Probe:
        """One short run with these settings."""
        arm = self.resolved(settings)
        self.tell(Progress(f"a short run with {Arm(settings).label}", len(self.probes), len(self.probes) + 1, None))
        self._start.restore()
        empty_caches()
        peak = Peak(self.gpu)
        result = run_block(Execution(self._code, arm), steps, self._stopper, on_gpu=self.gpu is not None)
        reached = peak.bytes
        if isinstance(result, Block):
            took_s = result.time_ns / 1e9
            speed = result.sample_count / took_s if result.sample_count and took_s else None
            probe = Probe(settings, size, reached, samples_per_s=speed, losses=result.losses)
        else:
            ran_out = memory_error(result) is not None
            if not ran_out or not isinstance(result, Exception):
                self.error = result
            probe = Probe(settings, size, reached, failure_of(result, None), ran_out)
            release(result)
        self.probes.append(probe)
        return probe

    def full_run(self, settings: Mapping[str, Plain]) -> FullRun:
        """A run that also observes what the code uses, without a trace."""
        self._start.restore()
        requested = Settings(steps=STEPS.total, trace=False, live=False, save=False, knobs=Arm(settings).texts)
        return run_full(Execution(self._code, self.resolved(settings)), requested, self._stopper, None, quiet=True)


def size_setting(prober: Prober, name: str, loader_size: int | None) -> tuple[Setting, int]:
    """The setting and its present value. Raises UsageError if the cell has no such size."""
    arm = prober.resolved({name: 1})
    setting = arm.settings[0]
    before = setting.current if isinstance(setting.current, int) else loader_size if name == BATCH else None
    if isinstance(before, bool) or not before:
        raise UsageError(
            f"The present value of {name} is not known: assign it a number in the cell, for example {name} = 64."
        )
    return setting, before


def fit(
    prober: Prober, name: str, *, least_free: float = LEAST_FREE, loader_size: int | None = None, prove: bool = True
) -> Fit:
    """Find the largest value of `name` that fits. Call it within `Prober.within`. Raises UsageError.

    `least_free`: share of the room that stays free. `loader_size`: the batch size of an earlier run's loader.
    """
    _, before = size_setting(prober, name, loader_size)
    room = prober.room()
    free = max(least_free, KILLING_FREE) if room.limit in KILLING else least_free
    allowed = prober.used_bytes + (1 - free) * room.free_bytes
    peaks: dict[int, int] = {}
    size = before
    for divisor in SPREAD:
        size = max(1, before // divisor)
        while not prober.halted and size not in peaks:
            probe = prober.run({name: size}, size)
            if probe.fits and probe.peak_bytes is not None:
                peaks[size] = probe.peak_bytes
            if probe.fits or size == 1:
                break
            size //= 2
    notes = []
    if free > least_free:
        notes.append(
            f"{free:.0%} of the free memory are left, because at this limit ({room.limit}) the kernel kills the process"
        )
    line = line_through(peaks) if len(peaks) > 1 else None
    predicted = line.largest(allowed) if line is not None else None
    proven = _prove(prober, name, predicted, allowed, peaks) if predicted is not None and prove else None
    return Fit(name, before, room, allowed, free, tuple(prober.probes), line, predicted, proven, tuple(notes))


def _prove(
    prober: Prober, name: str, predicted: tuple[int, int, int], allowed: float, peaks: Mapping[int, int]
) -> int | None:
    """Run the predicted size, and smaller ones as long as none fits; returns the largest that did."""
    size, low, _ = predicted
    for attempt in range(ATTEMPTS):
        if size < 1 or prober.halted:
            break
        probe = prober.run({name: size}, size, FURTHER)
        if probe.fits and (probe.peak_bytes is None or probe.peak_bytes <= allowed * (1 + NOISE_FRACTION)):
            return size
        size = min(size - 1, low if not attempt else int(size * 0.9))
    return max((size for size, peak in peaks.items() if peak <= allowed), default=None)


# -- cures -------------------------------------------------------------------------------------------------------------


class Proof(Struct, frozen=True):
    """A cure at the size that did not fit: `probe` shows whether it fits now."""

    settings: Mapping[str, Plain]
    probe: Probe
    room: Room


def cures(code: Code, name: str, before: int, fits: int | None) -> list[dict[str, Plain]]:
    """The settings that may make the present size fit, those that leave the training unchanged first.

    `fits`: a size that fits. Accumulation keeps the effective batch: it needs a size that divides the present one.
    """
    candidates: list[dict[str, Plain]] = [{"checkpointing": True}]
    parts = next((k for k in (2, 4, 8, 16) if fits and before % k == 0 and before // k <= fits), None)
    if parts is not None:
        candidates.append({name: before // parts, "accumulate": parts})
    candidates.append({"amp": "bf16"})
    objects = observation_of(code) or Objects(code, None)
    candidates = [s for s in candidates if s.keys() <= KNOBS.keys() | {name}]
    return [settings for settings in candidates if not resolve(Arm(settings), code, objects).refusal]


def prove_cure(prober: Prober, settings: Mapping[str, Plain]) -> Proof:
    """Run the cell with a cure. Call it within `Prober.within`."""
    room = prober.room()
    return Proof(settings, prober.run(settings, None, FURTHER), room)
