"""Where the time to make a batch goes, inside the processes that make them: read, transform, collate, hand over."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpulab.analysis.steps import loaded_ahead, select
from gpulab.intervals import clip, covers, measure, union
from gpulab.run import Batches, Category, Float64, Int64, Run
from gpulab.timeline import spans

LEAST_PART = 0.01  # ours: of a batch's time: of less, nobody can say how much was waiting
FEWEST = 3  # ours: batches for a median

Rows = np.ndarray  # of bool, one per batch


@dataclass(frozen=True, slots=True)
class WorkerRow:
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


@dataclass(frozen=True, slots=True)
class WaitParts:
    """The loop's wait for a batch, in µs: what was being done to the batch meanwhile. They sum to the typical wait.

    While the workers have not begun with the batch or are at it, the wait is shared out as the batch's own time is;
    after that it is handed over, and pinned.
    """

    read_us: float
    transform_us: float
    collate_us: float
    hand_over_us: float
    pin_us: float

    @property
    def total_us(self) -> float:
        return self.read_us + self.transform_us + self.collate_us + self.hand_over_us + self.pin_us


@dataclass(frozen=True, slots=True)
class LoadingFacts:
    """Medians per batch, in µs, over the batches of the counted steps (the first ones, made at the start, are out).

    `batch_us` is the whole making of one batch in its process. `hand_over_us`: from a batch's being made to the loop's
    having it, where the loop was already waiting for it; None where it never was, and without workers. `copy_us`:
    host-to-device copies per step from the trace; None without a GPU. `*_waited_fraction`: share of that part's wall
    time in which the process used no CPU though a core was free: it waited for storage, a lock or a network; None where
    the part takes no time worth telling. `core_wait_fraction`: share of a batch's time in which all cores were taken;
    None where the system does not tell. `wait`: what the loop's wait for a batch was for; None where it is not known.
    """

    batches: int
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


def loading(run: Run) -> LoadingFacts | None:
    """The facts of a run whose batches were timed where they were made; None for any other."""
    batches = run.batches
    if batches is None or not len(batches):
        return None
    rows = _counted(run, batches)
    wall, items = (batches.end_ns - batches.start_ns)[rows], batches.item_count[rows]
    core = batches.core_wait_ns[rows]
    return LoadingFacts(
        batches=int(rows.sum()),
        items_per_batch=float(np.median(items)) if len(items) else None,
        batch_us=_median_us(wall),
        read_us=_median_us(batches.read_ns[rows]),
        transform_us=_median_us(batches.transform_ns[rows]),
        collate_us=_median_us(batches.collate_ns[rows]),
        hand_over_us=_hand_over_us(batches, rows),
        pin_us=_pin_us(batches, rows),
        copy_us=_copy_us(run),
        read_waited_fraction=_waited(batches, rows, batches.read_ns, batches.read_cpu_ns),
        transform_waited_fraction=_waited(batches, rows, batches.transform_ns, batches.transform_cpu_ns),
        workers=tuple(_worker(batches, rows, w) for w in np.unique(batches.worker[rows]).tolist()),
        core_wait_fraction=_share(core[core >= 0], wall[core >= 0]),
        wait=_wait(batches, rows),
    )


def _median_us(values: Int64) -> float:
    return float(np.median(values)) / 1e3


def _counted(run: Run, batches: Batches) -> Rows:
    """Batches that the loop had in the steps that count, else in any step; without such all but the first ones."""
    steps = run.steps
    arrived = np.where(batches.answered_ns >= 0, batches.answered_ns, batches.end_ns)
    counted = select(run).rows
    for chosen in (counted, np.arange(len(steps))):
        inside = covers(union(steps.start_ns[chosen], steps.end_ns[chosen] + 1), arrived)
        if inside.sum() >= FEWEST:
            return inside
    first = 1 if run.loader is None else max(1, loaded_ahead(run.loader))
    rank = np.arange(len(batches))
    return rank >= first if len(batches) >= first + FEWEST else rank >= 0


def _share(part: Int64, whole: Int64) -> float | None:
    return min(1.0, float(part.sum() / whole.sum())) if whole.sum() > 0 else None


def _hand_over_us(batches: Batches, rows: Rows) -> float | None:
    """Of those that the loop was waiting for; None without."""
    waiting = rows & (batches.worker >= 0) & (batches.asked_ns >= 0) & (batches.asked_ns < batches.end_ns)
    took = (batches.answered_ns - batches.end_ns - np.maximum(batches.pin_ns, 0))[waiting]
    return _median_us(np.maximum(took, 0)) if waiting.any() else None


def _pin_us(batches: Batches, rows: Rows) -> float | None:
    """None where it is not known; 0 where no batch is pinned."""
    pinned = rows & (batches.pin_ns > 0)
    if pinned.any():
        return _median_us(batches.pin_ns[pinned])
    return None if (batches.pin_ns[rows] < 0).any() else 0.0


def _waited(batches: Batches, rows: Rows, wall: Int64, cpu: Int64) -> float | None:
    """Neither on a core nor ready for one. A batch waits for a core in proportion to the CPU time that its parts take.

    That is where the scheduler takes one away.
    """
    wall_ns, whole_ns = int(wall[rows].sum()), int((batches.end_ns - batches.start_ns)[rows].sum())
    if wall_ns <= LEAST_PART * whole_ns:
        return None
    of_batch = np.maximum(batches.read_cpu_ns + batches.transform_cpu_ns + batches.collate_cpu_ns, 1)
    core = np.maximum(batches.core_wait_ns, 0) * (cpu / of_batch)
    waited = np.clip(wall - cpu - core, 0, None)
    return float(min(1.0, waited[rows].sum() / wall_ns))


def _worker(batches: Batches, rows: Rows, worker: int) -> WorkerRow:
    mine = rows & (batches.worker == worker)
    wall = (batches.end_ns - batches.start_ns)[mine]
    seconds = float(wall.sum()) / 1e9
    return WorkerRow(
        worker=worker,
        batches=int(mine.sum()),
        batch_us=_median_us(wall),
        items_per_s=float(batches.item_count[mine].sum()) / seconds if seconds > 0 else None,
        idle_fraction=_idle(batches.start_ns[mine], batches.end_ns[mine]) if worker >= 0 else None,
        read_us=_median_us(batches.read_ns[mine]),
        transform_us=_median_us(batches.transform_ns[mine]),
        collate_us=_median_us(batches.collate_ns[mine]),
        waited_fraction=_waited(
            batches,
            mine,
            batches.read_ns + batches.transform_ns + batches.collate_ns,
            batches.read_cpu_ns + batches.transform_cpu_ns + batches.collate_cpu_ns,
        ),
        hand_over_us=_hand_over_us(batches, mine),
        pin_us=_pin_us(batches, mine),
    )


def _idle(start: Int64, end: Int64) -> float | None:
    """From the first batch's beginning to the last one's."""
    if len(start) < FEWEST:
        return None
    span = int(start.max() - start.min())
    working = measure(clip(union(start, end), int(start.min()), int(start.max())))
    return 1 - working / span if span > 0 else None


def _wait(batches: Batches, rows: Rows) -> WaitParts | None:
    rows = rows & (batches.asked_ns >= 0) & (batches.answered_ns >= 0)
    if not rows.any():
        return None
    asked, end, answered = batches.asked_ns[rows], batches.end_ns[rows], batches.answered_ns[rows]
    total = np.maximum(answered - asked, 0)
    while_made = np.clip(np.minimum(end, answered) - asked, 0, None)
    pin = np.clip(batches.pin_ns[rows], 0, total - while_made)
    parts = np.stack([batches.read_ns[rows], batches.transform_ns[rows], batches.collate_ns[rows]]).astype(np.float64)
    of_batch = parts / np.maximum(parts.sum(axis=0), 1)
    sums: Float64 = np.array([*(of_batch * while_made).sum(axis=1), (total - while_made - pin).sum(), pin.sum()])
    typical_us = _median_us(total)
    read, transform, collate, hand_over, pinning = (sums / max(sums.sum(), 1) * typical_us).tolist()
    return WaitParts(read, transform, collate, hand_over, pinning)


def _copy_us(run: Run) -> float | None:
    """Per profiled step, copies that overlap counted once: median."""
    timeline = run.timeline
    if timeline is None or not timeline.has_device_events or not run.traced_numbers:
        return None
    copies = spans.in_category(timeline, Category.GPU_MEMCPY) & spans.named(timeline, lambda name: "HtoD" in name)
    busy = spans.covered(timeline, copies)
    each = [measure(clip(busy, int(run.steps.start_ns[i]), int(run.steps.end_ns[i]))) for i in run.traced_rows]
    return _median_us(np.array(each, np.int64))
