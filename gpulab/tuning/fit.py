"""The largest value of a size that fits into memory: predicted from cheap runs, then proven by a run.

The peak of memory is fitted as m0 + m1·B over the batch size B (definitions.md, "Batch size"). It is the peak of what
the limit counts (`memory/peak.py`), so that it contains rounding, workspaces and what libraries keep. Libraries keep
something of each size that has run, as oneDNN keeps compiled code: that is no part of the slope, and the next size adds
as much.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from gpulab.capture import threads
from gpulab.devices.machine import detect_device
from gpulab.errors import UsageError
from gpulab.formatting import percent, plural
from gpulab.formatting import size as size_words
from gpulab.knobs.variables import Plain
from gpulab.memory.failure import memory_error
from gpulab.memory.peak import Peak, peak_of
from gpulab.memory.room import room_of
from gpulab.memory.survey import empty_caches
from gpulab.memory_record import Room
from gpulab.options import LEAST_FREE
from gpulab.run import Settings
from gpulab.tuning.arms import BATCH, failure_of
from gpulab.tuning.cell_code import on_interrupt
from gpulab.tuning.code import Code
from gpulab.tuning.execute import Execution, FullRun, Stopper, release, run_block, run_full
from gpulab.tuning.record import Block
from gpulab.tuning.resolve import Objects, ResolvedArm, observation_of, resolve
from gpulab.tuning.schedule import Arm, Listener, Progress, Size
from gpulab.tuning.snapshots import Start

KILLING_FREE = 0.2  # ours: room that stays free where the kernel kills, at least
STEPS = Size(warmup=1, steps=2)  # of a run: the optimizer's states come with the first step
FURTHER = Size(warmup=1, steps=4)  # of a run that proves
NOISE_FRACTION = 0.01  # ours: of what grows with the size, from run to run
NOISE_BYTES = 4 << 20  # ours: what allocators keep more or less
Z_975 = 1.96
ROOMY = 0.8  # ours: of a size that fits, which leaves room for one more copy of the gradients
LEAST_STEPS = 2  # after the first: with fewer the size has used up the data
HEADROOM_BYTES = 64 << 20  # ours: below RLIMIT_AS a thread that cannot start may hang
ATTEMPTS = 5  # runs of the predicted size and of corrected ones
CLOSE, RESOLUTION = 0.97, 0.03  # ours: of what is allowed; a larger size would gain less than this
FIRST_PART = 16  # of the present size, which may be far too large
FAR = 6  # times: a smaller size than this part of the largest is left out of the line
SMALL_PART, CAREFUL = 256, 2  # ours: where the kernel kills, the first size and its growth, for a peak up to its square
HALF, ENOUGH = 0.6, 0.4  # of the room: what the larger of the two cheap runs is meant to need, and needs at least
MOST_CHEAP, MOST_CAREFUL = 8, 16
COPY_FRACTION = 0.05  # ours: of the room, above which the copy is mentioned
LEAST_GROWTH_BYTES = 3 * NOISE_BYTES


Shortage = Literal["", "memory", "data", "time"]


class Probe(Struct, frozen=True):
    """One short run. `peak_bytes`: of the device's memory, None if unknown; `failure`: empty if it ran.

    `shortage`: what it lacked, "time" if it was stopped; empty if it ran, and for other errors. `base_bytes` are in use
    before it, `rest_bytes` after it.
    """

    settings: Mapping[str, Plain]
    size: int | None
    peak_bytes: int | None
    failure: str = ""
    samples_per_s: float | None = None
    base_bytes: int = 0
    rest_bytes: int = 0
    shortage: Shortage = ""

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
        off = self.error_at(middle) / self.m1_bytes
        return max(0, int(middle)), max(0, int(middle - off)), max(0, int(middle + off))

    def error_at(self, size: float) -> float:
        """How far a peak in bytes may be from the line: half the 95 % interval of a prediction."""
        mean = sum(self.sizes) / len(self.sizes)
        spread = sum((one - mean) ** 2 for one in self.sizes)
        return Z_975 * self.sd_bytes * math.sqrt(1 + 1 / len(self.sizes) + (size - mean) ** 2 / spread)


def line_through(peaks: Mapping[int, int]) -> MemoryLine:
    """The line through peaks in bytes at two or more sizes; without BLAS, which fails hard where memory is short."""
    m1, m0 = statistics.linear_regression(list(peaks), list(peaks.values()))
    off = max(abs(peak - m0 - m1 * size) for size, peak in peaks.items())
    sd = max(NOISE_BYTES, NOISE_FRACTION * (max(peaks.values()) - min(peaks.values())), off)
    return MemoryLine(m0, m1, tuple(sorted(peaks)), sd)


class Cure(Struct, frozen=True):
    """Settings with which the present size fits: as predicted, or as measured where that is too close to the limit."""

    settings: Mapping[str, Plain]
    peak_bytes: float
    is_measured: bool = False


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
    cheap: tuple[int, ...] = ()  # the sizes of the cheap runs
    cures: tuple[Cure, ...] = ()  # that are predicted to make the present size fit

    @property
    def best(self) -> int | None:
        """The largest size that surely fits: the proven one, else the largest of the cheap runs."""
        ran = (p.size for p in self.probes if p.fits and p.size and (p.peak_bytes or 0) <= self.allowed_bytes)
        return self.proven if self.proven is not None else max(ran, default=None)

    @property
    def is_short(self) -> bool:
        """Whether the present size needs more than is allowed, as runs up to it or the line say."""
        if self.line is None or (self.best or 0) >= self.before:
            return False
        ran = (p for p in self.probes if p.size and p.size <= self.before)
        lack = any(p.shortage == "memory" or (p.peak_bytes or 0) > self.allowed_bytes for p in ran)
        return lack or self.line.at(self.before) > self.allowed_bytes

    @property
    def base(self) -> int | None:
        """A size that fits with room to spare, at which settings are compared: short steps make more pairs."""
        sizes = sorted(self.cheap)
        return sizes[-2] if len(sizes) > 1 else self.best

    def peak_of(self, size: int) -> int | None:
        """The measured peak at that size, in bytes."""
        peaks = (probe.peak_bytes for probe in self.probes if probe.size == size and probe.fits)
        return next(filter(None, peaks), None)


class Prober:
    """Short runs of a cell from the same start, on one device, all of them within `within`."""

    def __init__(self, code: Code, tell: Listener = lambda progress: None, device: str = "auto") -> None:
        self.code, self.tell = code, tell
        self.device = detect_device(device)
        self.gpu = (self.device.index or 0) if self.device.kind == "cuda" else None
        self._stopper = Stopper()
        self._start: Start
        self._peak: Peak
        self.probes: list[Probe] = []
        self.error: BaseException | None = None
        self.notes: tuple[str, ...] = ()  # what could not be restored, once `within` has ended

    def stop(self) -> None:
        """End the current run at its next step, and begin no other."""
        self._stopper.stop()

    @property
    def halted(self) -> bool:
        return self._stopper.requested or self.error is not None

    def within(self, work: Callable[[], None]) -> None:
        """Do `work`, which probes; afterwards the user's state is restored. Raises the error of the user's code."""
        with threads.measuring(), on_interrupt(self.stop) as interrupt, peak_of(self.gpu) as self._peak:
            try:
                self._start = Start(self.code)
            except Exception as e:
                if memory_error(e) is None:
                    raise
                raise UsageError(
                    "Too little memory is free to save the state of your code. See %gpulab memory, then free the "
                    "traceback and names: %gpulab memory --free traceback,NAME."
                ) from None
            try:
                work()
            finally:
                start = self._start
                start.end()
                partly = not start.whole or start.used_up
                self.notes = (*([start.words] if partly else ()), *start.notes)
                empty_caches()
        if (error := self.error or interrupt.error) is not None:
            raise error

    def resolved(self, settings: Mapping[str, Plain]) -> ResolvedArm:
        """The settings in this cell. Raises UsageError if one cannot be set."""
        arm = resolve(Arm(settings), self.code, observation_of(self.code) or Objects(self.code, None))
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
    def copy_bytes(self) -> int:
        """What the saved copy of the user's state takes up."""
        return self._start.bytes

    @property
    def used_bytes(self) -> int:
        """What a peak counts before a run begins."""
        return self._peak.used_bytes

    def run(
        self, settings: Mapping[str, Plain], size: int | None = None, steps: Size = STEPS, *, is_trial: bool = False
    ) -> Probe:
        """One short run with these settings. `is_trial`: any error is only a failure of these settings.

        It contains an update and what follows it: the optimizer's states come with the first one.
        """
        arm, parts = self.resolved(settings), int(str(settings.get("accumulate", 1)))
        steps = Size(steps.warmup, max(steps.steps, parts + 1))
        least = max(LEAST_STEPS, parts)
        self.tell(Progress(f"a short run with {Arm(settings).label}", len(self.probes), len(self.probes) + 1, None))
        empty_caches()
        base = self.used_bytes
        self._peak.reset()
        result = run_block(Execution(self.code, arm), steps, self._stopper, on_gpu=self.gpu is not None)
        reached = self._peak.bytes
        if isinstance(result, Block):
            took_s = result.time_ns / 1e9
            speed = result.sample_count / took_s if result.sample_count and took_s else None
            ended = plural(result.step_count + result.dropped, "step")
            shortage: Shortage = "time" if self._stopper.requested else "data" if result.step_count < least else ""
            why = "stopped" if shortage == "time" else f"the data ended after {ended}" if shortage else ""
            probe = Probe(settings, size, reached, why, speed, shortage=shortage)
        else:
            ran_out = memory_error(result) is not None
            probe = Probe(settings, size, reached, failure_of(result, None), shortage="memory" if ran_out else "")
            if not isinstance(result, Exception) or not (ran_out or is_trial):
                self.error = result
            else:
                release(result)
        del result
        self._start.restore()
        empty_caches()
        probe = replace(probe, base_bytes=base, rest_bytes=self.used_bytes)
        self.probes.append(probe)
        return probe

    def full_run(self, settings: Mapping[str, Plain]) -> FullRun:
        """A run that also observes what the code uses, without a trace."""
        self._start.restore()
        requested = Settings(steps=STEPS.total, trace=False, live=False, save=False, knobs=Arm(settings).texts)
        return run_full(Execution(self.code, self.resolved(settings)), requested, self._stopper, None, quiet=True)


def present_size(prober: Prober, name: str, loader_size: int | None) -> int:
    """The present value of the size. Raises UsageError if the cell has no such size."""
    arm = prober.resolved({name: 1})
    setting = arm.settings[0]
    before = setting.current if isinstance(setting.current, int) else loader_size if name == BATCH else None
    if isinstance(before, bool) or not before:
        raise UsageError(
            f"The present value of {name} is not known: assign it a number in the cell, for example {name} = 64."
        )
    return before


def fit(prober: Prober, name: str, *, least_free: float = LEAST_FREE, loader_size: int | None = None) -> Fit:
    """Find the largest value of `name` that fits. Call it within `Prober.within`. Raises UsageError.

    `least_free`: share of the room that stays free. `loader_size`: the batch size of an earlier run's loader.
    """
    before = present_size(prober, name, loader_size)
    room = prober.room()
    kills = room.kills
    reserve = KILLING_FREE if kills else HEADROOM_BYTES / max(1, room.free_bytes)
    free = min(1.0, max(least_free, 0.0 if room.limit == "GPU" else reserve))
    first = min(before, max(2, before // (SMALL_PART if kills else FIRST_PART)))  # batch normalization needs two
    cheap = _cheap_runs(prober, name, first, (1 - free) * room.free_bytes, careful=kills)
    room, used = prober.room(), prober.used_bytes
    allowed, peaks = used + (1 - free) * room.free_bytes, peaks_from(cheap, used + kept_by(cheap))
    notes = []
    if free > least_free:
        why = "below it the kernel kills the process" if kills else "for threads and libraries"
        notes.append(f"{percent(free)} of the free memory stays free ({why}).")
    if prober.copy_bytes > COPY_FRACTION * room.free_bytes:
        notes.append(
            f"The search keeps a copy of your state, {size_words(prober.copy_bytes)}: your own run has more room."
        )
    line = line_through(peaks) if len(peaks) > 1 else None
    predicted = line.largest(allowed) if line is not None else None
    base = used if kills else None
    proven = _prove(prober, name, predicted[0], allowed, peaks, base) if predicted is not None else None
    runs = tuple(prober.probes)
    if ends := [probe.size for probe in runs if probe.shortage == "data" and probe.size]:
        notes.append(f"With {name}={min(ends):,} the data end too soon for a run.")
    answer = Fit(name, before, room, allowed, free, runs, line, predicted, proven, tuple(notes), tuple(peaks))
    return replace(answer, cures=cures(prober, name, answer))


def kept_by(probes: Mapping[int, Probe]) -> int:
    """What libraries keep of a new size, in bytes: as of the largest that ran."""
    last = probes[max(probes)] if probes else Probe({}, None, None)
    return max(0, last.rest_bytes - last.base_bytes)


def peaks_from(probes: Mapping[int, Probe], rest: int = 0) -> dict[int, int]:
    """Peaks by size as they would be with `rest` bytes in use after the run."""
    return {size: rest + p.peak_bytes - p.rest_bytes for size, p in probes.items() if p.peak_bytes}


def _cheap_runs(
    prober: Prober,
    name: str,
    first: int,
    room: float,
    settings: Mapping[str, Plain] | None = None,
    *,
    careful: bool,
    largest: float = math.inf,
) -> dict[int, Probe]:
    """Runs of two sizes or more, the largest of which is meant to take up a good part of the room in bytes.

    `settings`: of a cure, which is given up when it fails. `careful`: each size would fit even if memory grew with its
    square. No size is above `largest`.
    """
    runs: dict[int, Probe] = {}
    size, most_probes = first, len(prober.probes) + (MOST_CAREFUL if careful else MOST_CHEAP)
    while size and not prober.halted and len(prober.probes) < most_probes and size not in runs:
        probe = prober.run({**(settings or {}), name: size}, None if settings else size, is_trial=bool(settings))
        if probe.peak_bytes is None or not (probe.fits or settings is None):
            break
        if probe.shortage == "data":
            if len(runs) > 1:
                break
            largest, size = size - 1, (max(runs, default=0) + size) // 2
            continue
        if not probe.fits:
            runs, size = {}, size // 4
            continue
        runs[size] = probe
        most = max(peaks_from(runs).values())
        last = peaks_from({one: runs[one] for one in sorted(runs)[-2:]})
        line = line_through(last) if len(last) > 1 else None
        steep = line is not None and max(last.values()) - min(last.values()) >= LEAST_GROWTH_BYTES
        if len(runs) > 1 and most >= ENOUGH * room:
            break
        goal = line.largest(HALF * room) if line is not None and steep else None
        # without a slope only the order of magnitude is known, and part of what is added does not grow with the size
        aim = goal[0] if goal is not None else max(3 * size, int(HALF * room / max(1, most) * size))
        if goal is None and most >= ENOUGH * room:
            aim = max(1, size // 3)
        # a small run may not grow at all: it has memory that others have freed
        growth = min(CAREFUL, math.sqrt(room / max(1, most))) if careful else FAR
        size = int(min(aim, growth * size, largest))
    far = max(runs, default=0) // FAR
    return {one: probe for one, probe in runs.items() if one >= far}


def _prove(
    prober: Prober, name: str, first: int, allowed: float, peaks: Mapping[int, int], base: int | None
) -> int | None:
    """Run the predicted size and correct it by its own peak; returns the largest size that ran within the room.

    Each run is one more point, and the next size comes from the line through the two points nearest to what is allowed.
    `base`: what is in use before a run, if the kernel kills at the limit. Then no size is run that would not fit if
    memory grew with its square.
    """

    def safe(size: float) -> int:
        best = max(fits, default=0)
        if base is None or not best:
            return int(size)
        return min(int(size), int(best * math.sqrt((allowed - base) / max(1, points[best] - base))))

    points, fits = dict(peaks), [size for size, peak in peaks.items() if peak <= allowed]
    fails: float = min((p.size for p in prober.probes if p.size and p.shortage == "data"), default=math.inf)
    size = safe(first if first < fails else (max(fits, default=0) + fails) / 2)
    for _ in range(ATTEMPTS):
        if size < 1 or size in points or prober.halted:
            break
        probe = prober.run({name: size}, size, FURTHER, is_trial=True)  # smaller sizes ran: it is the size that fails
        if probe.fits and probe.peak_bytes is not None:
            points[size] = probe.peak_bytes
        if probe.fits and (probe.peak_bytes or 0) <= allowed:
            fits.append(size)
            if (probe.peak_bytes or 0) >= CLOSE * allowed:
                break
        else:
            fails = min(fails, size)
        nearest = sorted(points, key=lambda one: abs(points[one] - allowed))[:2]
        largest = line_through({one: points[one] for one in nearest}).largest(allowed) if len(nearest) > 1 else None
        best = max(fits, default=0)
        size = largest[0] if largest is not None else (best + size) // 2
        if not best < size < fails:
            size = int((best + fails) / 2) if fails < math.inf else 2 * best
        size = safe(min(size, (1 - RESOLUTION / 2) * fails))
        if fails - best <= RESOLUTION * best:
            break
    return max(fits, default=None)


# -- cures -------------------------------------------------------------------------------------------------------------


class Proof(Struct, frozen=True):
    """A cure at the size that did not fit: `probe` shows whether it fits now. `notes`: what could not be restored."""

    settings: Mapping[str, Plain]
    probe: Probe
    notes: tuple[str, ...] = ()


def candidates(code: Code, name: str, before: int, fits: int | None) -> list[dict[str, Plain]]:
    """Settings that may make the present size fit, those that leave the training unchanged first.

    `fits`: a size that fits, None if unknown. Accumulation keeps the effective batch: the size must be divisible.
    """
    settings: list[dict[str, Plain]] = [{"checkpointing": True}]
    parts = next((k for k in (2, 4, 8, 16, 32) if fits and before % k == 0 and before // k <= ROOMY * fits), None)
    if parts is not None:
        settings.append({name: before // parts, "accumulate": parts})
    settings.append({"amp": "bf16"})
    objects = observation_of(code) or Objects(code, None)
    return [one for one in settings if not resolve(Arm(one), code, objects).refusal]


def cures(prober: Prober, name: str, answer: Fit) -> tuple[Cure, ...]:
    """The settings with which the present size fits, as cheap runs of each predict it.

    Where the limit is within the prediction's interval, a run of the present size tells. Call it within
    `Prober.within`. Empty if the present size fits as it is.
    """
    if not answer.is_short:
        return ()
    result = []
    kept = kept_by({probe.size: probe for probe in prober.probes if probe.fits and probe.size in answer.cheap})
    for settings in candidates(prober.code, name, answer.before, answer.best):
        # of accumulation two parts show what it costs: gradients stay during the next forward pass
        cheap = {**settings, "accumulate": 2} if "accumulate" in settings else settings
        first, room = max(answer.cheap), answer.allowed_bytes - prober.used_bytes
        runs = _cheap_runs(prober, name, first, room, cheap, careful=answer.room.kills, largest=answer.before)
        if len(runs) > 1:
            line = line_through(peaks_from(runs, prober.used_bytes + max(kept, kept_by(runs))))
            size = float(str(settings.get(name, answer.before)))
            cure, off = Cure(settings, line.at(size)), line.error_at(size)
            is_close = abs(answer.allowed_bytes - cure.peak_bytes) < off
            if is_close and not answer.room.kills and not prober.halted:
                probe = prober.run({name: answer.before, **settings}, is_trial=True)
                cure, off = Cure(settings, probe.peak_bytes if probe.fits and probe.peak_bytes else math.inf, True), 0
            if cure.peak_bytes + off <= answer.allowed_bytes:
                result.append(cure)
    return tuple(result)


def prove_cure(prober: Prober, settings: Mapping[str, Plain]) -> Proof:
    """Run the cell with a cure. Call it within `Prober.within`."""
    return Proof(settings, prober.run(settings, None, FURTHER, is_trial=True))
