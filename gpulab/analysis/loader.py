"""Computes where the time to make a batch goes, in the process that makes it: read, transform, collate, hand over.

Of many short batches only some are timed: each row is weighted by the number of batches that it represents. A loop that
makes its own batches has no such rows; samples of its stack show the time instead.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from gpulab.analysis.steps import loaded_ahead, select
from gpulab.formatting import duration, percent
from gpulab.intervals import clip, covers, measure, union
from gpulab.run import Batches, Float64, Int64, Run, StepFlag
from gpulab.timeline.labels import What, labels

LEAST_PART = 0.01  # ours, of a batch's time: how much of a smaller part was waiting is unknown
_MOSTLY = 0.5  # ours: what takes half of a batch's time decides what its workers need
FEWEST = 3  # ours: batches that a median needs
SMALLEST_PART, SMALLEST_WAIT = (
    0.01,
    0.05,
)  # ours, of a batch: smaller ones are not mentioned

Rows = np.ndarray  # of bool, one per batch
_READ, _TRANSFORM, _COLLATE = range(3)


class WorkerRow(Struct, frozen=True):
    """One worker's batches: medians per batch. `idle_fraction`: share of the time in which it made no batch.

    `waited_fraction`: share of its batches' time in which it used no CPU though a core was free. `hand_over_us`,
    `pin_us`: as in `LoadingFacts`.
    """

    worker: int  # -1: the training process
    batches: int
    batch_us: float
    items_per_s: float | None
    idle_fraction: float | None = None
    read_us: float = 0.0
    transform_us: float = 0.0
    collate_us: float = 0.0
    waited_fraction: float | None = None
    hand_over_us: float | None = None
    pin_us: float | None = None


class WaitParts(Struct, frozen=True):
    """The loop's wait for a batch, in µs, by what was done to the batch meanwhile. Parts sum to the typical wait.

    Until the batch is made, the wait is divided in proportion to the batch's own times; after that it is handing over
    and pinning. Other work of the training process for the batch, such as its sampler, counts as handing over.
    """

    read_us: float
    transform_us: float
    collate_us: float
    hand_over_us: float
    pin_us: float

    @property
    def total_us(self) -> float:
        return self.read_us + self.transform_us + self.collate_us + self.hand_over_us + self.pin_us


class LoadingFacts(Struct, frozen=True):
    """Times per batch, in µs, over the batches of the counted steps (without the first ones, made at the start).

    `batches` of them were timed; they represent `of_batches`. `batch_us` is the median time to make one batch in its
    process. `read_us`, `transform_us`, `collate_us` divide it in proportion to the summed times of all batches, so that
    the parts never exceed the batch. `hand_over_us`: from the end of making a batch until the loop has it, over batches
    that the loop was already waiting for; None if it never was, and without workers. `copy_us`: host-to-device copies
    per step from the trace; None without a GPU. `*_waited_fraction`: share of that part's wall time in which the
    process slept, waiting for storage, a lock or a network; None if the part takes too little time (`LEAST_PART`), or
    if the system does not report the wait for a core. `core_wait_fraction`: share of a batch's time in which the
    process was ready and all cores were taken; None likewise. `wait`: the parts of the loop's wait for a batch; None if
    unknown.
    """

    batches: int
    of_batches: int
    items_per_batch: float | None
    batch_us: float
    read_us: float
    transform_us: float
    collate_us: float
    hand_over_us: float | None
    pin_us: float | None
    copy_us: float | None
    read_waited_fraction: float | None
    transform_waited_fraction: float | None
    workers: tuple[WorkerRow, ...]
    core_wait_fraction: float | None = None
    wait: WaitParts | None = None

    @property
    def handing_over(self) -> float:
        """Share of the loop's wait in which no process makes the batch; 0 if unknown."""
        return 0.0 if self.wait is None else self.wait.hand_over_us / max(self.wait.total_us, 1e-9)


def loading(run: Run) -> LoadingFacts | None:
    """The facts of a run whose batches were timed where they were made; None for any other."""
    batches = run.batches
    if batches is None or not len(batches):
        return None
    rows = _counted(run, batches)
    wall, items, weight = (batches.end_ns - batches.start_ns)[rows], batches.item_count[rows], batches.weight[rows]
    batch_us, parts = _median_us(wall, weight), _Parts.of(batches, rows)
    read_us, transform_us, collate_us = (share * batch_us for share in parts.shares)
    return LoadingFacts(
        batches=int(rows.sum()),
        of_batches=int(weight.sum()),
        items_per_batch=_median(items, weight) if len(items) else None,
        batch_us=batch_us,
        read_us=read_us,
        transform_us=transform_us,
        collate_us=collate_us,
        hand_over_us=_hand_over_us(batches, rows),
        pin_us=_pin_us(batches, rows),
        copy_us=_copy_us(run),
        read_waited_fraction=parts.waited_fraction(_READ),
        transform_waited_fraction=parts.waited_fraction(_TRANSFORM),
        workers=tuple(_worker(batches, rows, w) for w in np.unique(batches.worker[rows]).tolist()),
        core_wait_fraction=parts.core_wait_fraction,
        wait=_wait(batches, rows),
    )


def _median(values: Int64, weight: Int64) -> float:
    """The median of a table in which each value occurs `weight` times."""
    order = np.argsort(values)
    below = np.cumsum(weight[order])
    middle = np.searchsorted(below * 2, [below[-1], below[-1] + 1])
    return float(values[order][middle].mean())


def _median_us(values: Int64, weight: Int64) -> float:
    return _median(values, weight) / 1e3


def _counted(run: Run, batches: Batches) -> Rows:
    """Batches that the loop got in the steps that count, else in any step; if too few, all but the first batches."""
    steps = run.steps
    arrived = np.where(batches.answered_ns >= 0, batches.answered_ns, batches.end_ns)
    counted = select(run).rows
    for candidates in (counted, np.arange(len(steps))):
        inside = covers(union(steps.start_ns[candidates], steps.end_ns[candidates] + 1), arrived)
        if inside.sum() >= FEWEST:
            return inside
    first = 1 if run.loader is None else max(1, loaded_ahead(run.loader))
    rank = np.arange(len(batches))
    return rank >= first if len(batches) >= first + FEWEST else rank >= 0


class _Parts(Struct, frozen=True):
    """Time of batches by part, [3, batches] with rows for reading, transforming and collating, in weighted ns.

    A thread is on a core, ready without a core, or asleep: these three times of a part sum to its wall time.
    """

    whole: Int64  # of each batch; at least the sum of its parts
    wall: Int64
    core_wait: Float64
    sleeping: Float64
    has_core_wait: Rows  # batches whose wait for a core the system reports

    @classmethod
    def of(cls, batches: Batches, rows: Rows) -> _Parts:
        columns = ((batches.read_ns, batches.read_cpu_ns), (batches.transform_ns, batches.transform_cpu_ns),
                   (batches.collate_ns, batches.collate_cpu_ns))  # fmt: skip
        weight = batches.weight[rows]
        wall = np.stack([wall[rows] for wall, _ in columns]) * weight
        cpu = np.clip(np.stack([cpu[rows] for _, cpu in columns]) * weight, 0, wall)
        whole = np.maximum((batches.end_ns - batches.start_ns)[rows] * weight, wall.sum(axis=0))
        core_wait = _shared_out(np.maximum(batches.core_wait_ns[rows], 0) * weight, cpu, wall - cpu)
        return cls(whole, wall, core_wait, wall - cpu - core_wait, batches.core_wait_ns[rows] >= 0)

    @property
    def shares(self) -> list[float]:
        """The share of each part in the time of all batches."""
        return [float(part.sum()) / max(1, int(self.whole.sum())) for part in self.wall]

    @property
    def core_wait_fraction(self) -> float | None:
        whole_ns = int(self.whole[self.has_core_wait].sum())
        return float(self.core_wait[:, self.has_core_wait].sum()) / whole_ns if whole_ns > 0 else None

    def waited_fraction(self, *parts: int) -> float | None:
        """Share of these parts' time asleep; None if they take too little time, or if waits for a core are unknown."""
        candidates = list(parts)
        if self.wall[candidates].sum() <= LEAST_PART * int(self.whole.sum()):
            return None
        part_ns = int(self.wall[candidates][:, self.has_core_wait].sum())
        return float(self.sleeping[candidates][:, self.has_core_wait].sum()) / part_ns if part_ns > 0 else None


def _shared_out(core_wait: Int64, cpu: Int64, idle: Int64) -> Float64:
    """Divide a batch's wait for a core among its parts by their CPU time, for the scheduler preempts running threads.

    No part gets more than its time without CPU; the excess goes to the others.
    """
    rest_ns = np.minimum(core_wait, idle.sum(axis=0)).astype(np.float64)
    share_ns = np.minimum(rest_ns * cpu / np.maximum(cpu.sum(axis=0), 1), idle)
    room = idle - share_ns
    rest_ns = np.maximum(rest_ns - share_ns.sum(axis=0), 0)
    return np.asarray(share_ns + room * np.minimum(1, rest_ns / np.maximum(room.sum(axis=0), 1)))


def _hand_over_us(batches: Batches, rows: Rows) -> float | None:
    """Median over the batches that the loop was waiting for; None without any."""
    waiting = rows & (batches.worker >= 0) & (batches.asked_ns >= 0) & (batches.asked_ns < batches.end_ns)
    took = (batches.answered_ns - batches.end_ns - np.maximum(batches.pin_ns, 0))[waiting]
    return _median_us(np.maximum(took, 0), batches.weight[waiting]) if waiting.any() else None


def _pin_us(batches: Batches, rows: Rows) -> float | None:
    """Median over pinned batches; 0 if no batch is pinned, None if unknown."""
    pinned = rows & (batches.pin_ns > 0)
    if pinned.any():
        return _median_us(batches.pin_ns[pinned], batches.weight[pinned])
    return None if (batches.pin_ns[rows] < 0).any() else 0.0


def _worker(batches: Batches, rows: Rows, worker: int) -> WorkerRow:
    mine = rows & (batches.worker == worker)
    wall, weight = (batches.end_ns - batches.start_ns)[mine], batches.weight[mine]
    seconds = float((wall * weight).sum()) / 1e9
    return WorkerRow(
        worker=worker,
        batches=int(weight.sum()),
        batch_us=_median_us(wall, weight),
        items_per_s=float((batches.item_count[mine] * weight).sum()) / seconds if seconds > 0 else None,
        idle_fraction=_idle(batches.start_ns[mine], batches.end_ns[mine], weight) if worker >= 0 else None,
        read_us=_median_us(batches.read_ns[mine], weight),
        transform_us=_median_us(batches.transform_ns[mine], weight),
        collate_us=_median_us(batches.collate_ns[mine], weight),
        waited_fraction=_Parts.of(batches, mine).waited_fraction(_READ, _TRANSFORM, _COLLATE),
        hand_over_us=_hand_over_us(batches, mine),
        pin_us=_pin_us(batches, mine),
    )


def _idle(start: Int64, end: Int64, weight: Int64) -> float | None:
    """Idle share from the start of the first batch to that of the last. Untimed batches are as long as timed ones."""
    if len(start) < FEWEST:
        return None
    span = int(start.max() - start.min())
    working = measure(clip(union(start, end), int(start.min()), int(start.max())))
    timed_ns = int((end - start)[1:].sum())
    if timed_ns and weight[1:].max() > 1:
        working = min(span, working * int(((end - start) * weight)[1:].sum()) // timed_ns)
    return 1 - working / span if span > 0 else None


def _wait(batches: Batches, rows: Rows) -> WaitParts | None:
    rows = rows & (batches.asked_ns >= 0) & (batches.answered_ns >= 0)
    if not rows.any():
        return None
    wait_start, end, answered = batches.asked_ns[rows], batches.end_ns[rows], batches.answered_ns[rows]
    weight = batches.weight[rows]
    total = np.maximum(answered - wait_start, 0)
    begun = batches.start_ns[rows]  # the training process may choose items for longer than it makes a batch
    begun = np.where((batches.worker[rows] < 0) & (begun - wait_start > end - begun), begun, wait_start)
    making_ns = np.clip(np.minimum(end, answered) - begun, 0, None)
    pin = np.clip(batches.pin_ns[rows], 0, total - making_ns)
    parts = np.stack([batches.read_ns[rows], batches.transform_ns[rows], batches.collate_ns[rows]]).astype(np.float64)
    of_batch = parts / np.maximum(parts.sum(axis=0), 1)
    each = np.stack([*(of_batch * making_ns), total - making_ns - pin, pin])
    sums: Float64 = (each * weight).sum(axis=1)
    typical_us = _median_us(total, weight)
    read, transform, collate, hand_over, pinning = (sums / max(sums.sum(), 1) * typical_us).tolist()
    return WaitParts(read, transform, collate, hand_over, pinning)


def _copy_us(run: Run) -> float | None:
    """Median per profiled step; overlapping copies count once."""
    timeline = run.timeline
    if timeline is None or not timeline.has_device_events or not run.traced_numbers:
        return None
    spans = labels(timeline)
    busy = spans.times(spans.of(What.COPY) & spans.named(lambda name: "HtoD" in name))
    each = [measure(clip(busy, int(run.steps.start_ns[i]), int(run.steps.end_ns[i]))) for i in run.traced_rows]
    return float(np.median(np.array(each, np.int64))) / 1e3


def times_by_cause(inside: LoadingFacts) -> dict[str, float]:
    """Time per batch (µs) by cause, without waits for a core. Waiting for I/O or a lock needs no core."""
    waited = inside.read_us * (inside.read_waited_fraction or 0.0)
    waited += inside.transform_us * (inside.transform_waited_fraction or 0.0)
    working, free = inside.read_us + inside.transform_us - waited, 1 - (inside.core_wait_fraction or 0.0)
    return {
        "cpu_preprocessing": working * free,
        "storage_bound": waited,
        "slow_collate": inside.collate_us * free,
    }


def waiting_for_core_us(inside: LoadingFacts) -> float:
    """Time per batch (µs) in which it was ready to compute but had no core."""
    waited_us = times_by_cause(inside)["storage_bound"]
    computing_us = inside.read_us + inside.transform_us - waited_us + inside.collate_us
    return computing_us * (inside.core_wait_fraction or 0.0)


def mostly_waits(inside: LoadingFacts) -> bool:
    """Whether at least half of a batch's time is waiting for a disk, a network or a lock, which needs no core."""
    return times_by_cause(inside)["storage_bound"] >= _MOSTLY * inside.batch_us


def making(inside: LoadingFacts) -> str:
    """How long a batch takes to make, and its parts, in words."""
    parts = {
        "read": inside.read_us,
        "transform": inside.transform_us,
        "collate": inside.collate_us,
        "pin memory": inside.pin_us or 0.0,
    }
    waits = {
        "blocked on I/O or locks": times_by_cause(inside)["storage_bound"],
        "waiting for a free core": waiting_for_core_us(inside),
    }
    whole_us = inside.batch_us
    split = ", ".join(f"{name} {duration(us)}" for name, us in parts.items() if us >= SMALLEST_PART * whole_us)
    waiting = [f"{percent(us / whole_us)} is {what}" for what, us in waits.items() if us >= SMALLEST_WAIT * whole_us]
    of_this = f". Of this, {' and '.join(waiting)}" if waiting else ""
    return f"loading one batch takes {duration(whole_us)} (median of {sampled(inside)}): {split}{of_this}"


def sampled(inside: LoadingFacts) -> str:
    """The number of timed batches, and out of how many, in words."""
    few = f" timed, out of {inside.of_batches:,}" if inside.batches < inside.of_batches else ""
    return f"{inside.batches:,}{few}"


class EpochStarts(Struct, frozen=True):
    """Rows of the steps that begin an epoch, without the very first, and how much longer each waits than other steps.

    `begins`: number of all steps that begin an epoch, including partial ones.
    """

    begins: int
    rows: Int64
    longer_us: Float64


def epoch_starts(run: Run, inside: LoadingFacts | None) -> EpochStarts | None:
    """None without a second epoch. The time to make an epoch's first batch is not counted in the longer wait."""
    steps = run.steps
    fresh = np.flatnonzero((steps.flags & StepFlag.EPOCH_START) != 0)
    whole = (steps.flags & StepFlag.PARTIAL) == 0
    again = fresh[whole[fresh]][1:] if len(fresh) and fresh[0] == 0 else fresh[whole[fresh]]
    if not len(again):
        return None
    others = np.setdiff1d(np.flatnonzero(whole), fresh)
    usual_ns = float(np.median(steps.data_wait_ns[others])) if len(others) else 0.0
    making_us = inside.batch_us if inside is not None else 0.0
    return EpochStarts(len(fresh), again, np.maximum(0.0, (steps.data_wait_ns[again] - usual_ns) / 1e3 - making_us))


def loads_itself(run: Run) -> bool:
    """Whether the training thread makes the batches, as far as the run shows; then it lacks cores there, too."""
    return run.own_batches is not None if run.loader is None else run.loader.num_workers == 0


LEAST_LOOKS = 8  # ours: with fewer samples in the profiled time, the result is chance
LEAST_PREPARING = 3
LEAST_BESIDE = 40  # ours, outside the profiled time: with fewer, a share's 95 % interval is about ±1/6 or wider


def prepared(run: Run) -> tuple[tuple[int, int], ...]:
    """When the loop makes batches itself, as [start, end); empty with a DataLoader or with too few samples."""
    stack = run.stack
    if stack is None or run.steps.batch_count.any() or len(stack.prepares_batch) != len(stack.t_ns):
        return ()
    rows = stack.prepares_batch == 1
    if len(stack.t_ns) < LEAST_LOOKS or rows.sum() < LEAST_PREPARING:
        return ()
    times = union(stack.since_ns[rows], stack.t_ns[rows])
    return tuple((start, end) for start, end in times.tolist())


def share_beside(run: Run) -> float | None:
    """The share of the unprofiled time that goes to making batches; None with too few samples."""
    own = run.own_batches
    if own is None or own.looks < LEAST_BESIDE or own.looked_ns <= 0:
        return None
    return own.preparing_ns / own.looked_ns
