"""Where the time to make a batch goes, inside the processes that make them: read, transform, collate, hand over.

Of many short batches only some were timed: each row counts as often as it stands for batches. A loop that makes its
batches itself has no such rows; there looks at its stack tell the time.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from gpulab.analysis.steps import loaded_ahead, select
from gpulab.formatting import duration, percent
from gpulab.intervals import clip, covers, measure, union
from gpulab.run import Batches, Float64, Int64, Run, StepFlag
from gpulab.timeline.labels import What, labels

LEAST_PART = 0.01  # ours: of a batch's time: of less, nobody can say how much was waiting
_MOSTLY = 0.5  # ours: what takes half of a batch's time decides what its workers need
FEWEST = 3  # ours: batches for a median
SMALLEST_PART, SMALLEST_WAIT = (
    0.01,
    0.05,
)  # ours, of a batch: less is left out of the sentence

Rows = np.ndarray  # of bool, one per batch
_READ, _TRANSFORM, _COLLATE = range(3)


class WorkerRow(Struct, frozen=True):
    """One worker's batches: medians per batch. `idle_fraction`: share of its time in which it made none.

    `waited_fraction`: share of its making in which it used no CPU though a core was free. `hand_over_us`, `pin_us`: as
    in `LoadingFacts`.
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
    """The loop's wait for a batch, in µs: what was being done to the batch meanwhile. They sum to the typical wait.

    While the workers have not begun with the batch or are at it, the wait is shared out as the batch's own time is;
    after that it is handed over, and pinned. What the training process does for it beside that, as its sampler, counts
    as handing over.
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
    """Times per batch, in µs, over the batches of the counted steps (the first ones, made at the start, are out).

    `batches` of them were timed, which stand for `of_batches`.
    `batch_us` is the whole making of one batch in its process, the median. `read_us`, `transform_us`, `collate_us` are
    shares of that: of the summed time of all batches, so that the parts are never more than the batch. `hand_over_us`:
    from a batch's being made to the loop's having it, where the loop was already waiting for it; None where it never
    was, and without workers. `copy_us`: host-to-device copies per step from the trace; None without a GPU.
    `*_waited_fraction`: share of that part's wall time in which the process slept: it waited for storage, a lock or a
    network; None where the part takes no time worth telling, or the system does not tell how long it waited for a core.
    `core_wait_fraction`: share of a batch's time in which it was ready and all cores were taken; None likewise.
    `wait`: what the loop's wait for a batch was for; None where it is not known.
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
        """Share of the loop's wait in which nobody makes the batch; 0 where that is not known."""
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
    """As of a table in which each value stands so often."""
    order = np.argsort(values)
    below = np.cumsum(weight[order])
    middle = np.searchsorted(below * 2, [below[-1], below[-1] + 1])
    return float(values[order][middle].mean())


def _median_us(values: Int64, weight: Int64) -> float:
    return _median(values, weight) / 1e3


def _counted(run: Run, batches: Batches) -> Rows:
    """Batches that the loop had in the steps that count, else in any step; without such all but the first ones."""
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
    """Batches' time by part (reading, transforming, collating), each a row of the tables: [3, batches], in ns, as often
    as each stands for batches.

    A thread is on a core, ready and without one, or it sleeps: the three of a part sum to its wall time.
    """

    whole: Int64  # of each batch; at least its parts
    wall: Int64
    core_wait: Float64
    sleeping: Float64
    has_core_wait: Rows  # of which the system tells the wait for a core

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
        """Of all batches' time, each part."""
        return [float(part.sum()) / max(1, int(self.whole.sum())) for part in self.wall]

    @property
    def core_wait_fraction(self) -> float | None:
        whole_ns = int(self.whole[self.has_core_wait].sum())
        return float(self.core_wait[:, self.has_core_wait].sum()) / whole_ns if whole_ns > 0 else None

    def waited_fraction(self, *parts: int) -> float | None:
        """Of these parts, asleep; None where they take too little time, or nobody knows why they used no CPU."""
        candidates = list(parts)
        if self.wall[candidates].sum() <= LEAST_PART * int(self.whole.sum()):
            return None
        part_ns = int(self.wall[candidates][:, self.has_core_wait].sum())
        return float(self.sleeping[candidates][:, self.has_core_wait].sum()) / part_ns if part_ns > 0 else None


def _shared_out(core_wait: Int64, cpu: Int64, idle: Int64) -> Float64:
    """A batch's wait for a core by part: by the CPU time that each takes, where the scheduler takes cores away.

    No part gets more than it was idle; what is over goes to the others.
    """
    rest_ns = np.minimum(core_wait, idle.sum(axis=0)).astype(np.float64)
    share_ns = np.minimum(rest_ns * cpu / np.maximum(cpu.sum(axis=0), 1), idle)
    room = idle - share_ns
    rest_ns = np.maximum(rest_ns - share_ns.sum(axis=0), 0)
    return np.asarray(share_ns + room * np.minimum(1, rest_ns / np.maximum(room.sum(axis=0), 1)))


def _hand_over_us(batches: Batches, rows: Rows) -> float | None:
    """Of those that the loop was waiting for; None without."""
    waiting = rows & (batches.worker >= 0) & (batches.asked_ns >= 0) & (batches.asked_ns < batches.end_ns)
    took = (batches.answered_ns - batches.end_ns - np.maximum(batches.pin_ns, 0))[waiting]
    return _median_us(np.maximum(took, 0), batches.weight[waiting]) if waiting.any() else None


def _pin_us(batches: Batches, rows: Rows) -> float | None:
    """None where it is not known; 0 where no batch is pinned."""
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
    """From the first batch's beginning to the last one's. Those that were not timed worked as long as the timed."""
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
    begun = batches.start_ns[rows]  # in the training process, which may choose for longer than it makes
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
    """Per profiled step, copies that overlap counted once: median."""
    timeline = run.timeline
    if timeline is None or not timeline.has_device_events or not run.traced_numbers:
        return None
    spans = labels(timeline)
    busy = spans.times(spans.of(What.COPY) & spans.named(lambda name: "HtoD" in name))
    each = [measure(clip(busy, int(run.steps.start_ns[i]), int(run.steps.end_ns[i]))) for i in run.traced_rows]
    return float(np.median(np.array(each, np.int64))) / 1e3


def times_by_cause(inside: LoadingFacts) -> dict[str, float]:
    """µs per batch by cause. Waiting for a core is left out; waiting for I/O or a lock needs none."""
    waited = inside.read_us * (inside.read_waited_fraction or 0.0)
    waited += inside.transform_us * (inside.transform_waited_fraction or 0.0)
    working, free = inside.read_us + inside.transform_us - waited, 1 - (inside.core_wait_fraction or 0.0)
    return {
        "cpu_preprocessing": working * free,
        "storage_bound": waited,
        "slow_collate": inside.collate_us * free,
    }


def waiting_for_core_us(inside: LoadingFacts) -> float:
    """Of a batch: ready to compute, but without a core."""
    waited_us = times_by_cause(inside)["storage_bound"]
    computing_us = inside.read_us + inside.transform_us - waited_us + inside.collate_us
    return computing_us * (inside.core_wait_fraction or 0.0)


def mostly_waits(inside: LoadingFacts) -> bool:
    """At least half of the time to make a batch is waiting for a disk, a network or a lock: it needs no core."""
    return times_by_cause(inside)["storage_bound"] >= _MOSTLY * inside.batch_us


def making(inside: LoadingFacts) -> str:
    """How long a batch takes to make and what that goes to, in words."""
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
    """Of how many batches the figures speak, and out of how many."""
    few = f" timed, out of {inside.of_batches:,}" if inside.batches < inside.of_batches else ""
    return f"{inside.batches:,}{few}"


class EpochStarts(Struct, frozen=True):
    """Rows of the steps that begin an epoch, without the very first; how much longer each waits than others do.

    `begins`: all steps that begin one, also cut ones.
    """

    begins: int
    rows: Int64
    longer_us: Float64


def epoch_starts(run: Run, inside: LoadingFacts | None) -> EpochStarts | None:
    """None without a second epoch. What making its first batch takes is no part of the longer wait."""
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
    """Whether the training thread makes the batches, as far as the run tells: then it misses cores there, too."""
    return run.own_batches is not None if run.loader is None else run.loader.num_workers == 0


LEAST_LOOKS = 8  # ours: of fewer in the profiled time, chance speaks
LEAST_PREPARING = 3
LEAST_BESIDE = 40  # ours, beside the profiled time: a share of fewer is right to a sixth at best, in 19 of 20 cases


def prepared(run: Run) -> tuple[tuple[int, int], ...]:
    """The times, as [start, end); empty where a DataLoader feeds the steps, and without looks enough."""
    stack = run.stack
    if stack is None or run.steps.batch_count.any() or len(stack.prepares_batch) != len(stack.t_ns):
        return ()
    rows = stack.prepares_batch == 1
    if len(stack.t_ns) < LEAST_LOOKS or rows.sum() < LEAST_PREPARING:
        return ()
    times = union(stack.since_ns[rows], stack.t_ns[rows])
    return tuple((start, end) for start, end in times.tolist())


def share_beside(run: Run) -> float | None:
    """Of the time beside the profiler, what goes to making batches; None where too few looks tell."""
    own = run.own_batches
    if own is None or own.looks < LEAST_BESIDE or own.looked_ns <= 0:
        return None
    return own.preparing_ns / own.looked_ns
