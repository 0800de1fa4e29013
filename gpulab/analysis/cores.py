"""Computes how many cores a run got, who used the others, and how long each part of a step had no core."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from gpulab.analysis.loader import loads_itself
from gpulab.analysis.steps import select
from gpulab.intervals import Intervals, measure
from gpulab.run import CoreTimes, CoreUse, Float64, Int64, Phase, Run

if TYPE_CHECKING:
    from gpulab.analysis.facts import Facts

LEAST_OTHERS = 0.15  # ours, of the cores: the system's own services use less
_ONE_MORE = 0.5  # ours: so many more ready threads than cores, on average, are the program's own doing
LEAST_NS = 100_000_000  # ours: the system counts busy cores in ticks of 10 ms, so shorter times are too inexact


class CoreShare(Struct, frozen=True):
    """Means over the steps that count (`analysis.steps.select`), else the profiled ones; None is "not measurable".

    `thread_cpu_fraction`, `thread_wait_fraction`: share of the steps' time in which the training thread had a core, and
    in which it was ready but had none. `wait_us`: the latter, per step. `got_cores`: mean number of cores that the
    process and its workers used; `others_cores`: cores that all other programs used, of which the host of a virtual
    machine took `stolen_cores`. `pool_waiting`, `workers_waiting`: how many other threads of the process, and of its
    workers, were ready without a core (mean). `throttled_fraction`: share of the periods of the control group's CPU
    quota in which the quota ran out. `pressure_fraction`: share of the time in which some program of the machine was
    ready and had no core.
    """

    thread_cpu_fraction: float | None
    thread_wait_fraction: float | None
    wait_us: float | None
    got_cores: float | None
    others_cores: float | None
    stolen_cores: float | None
    pool_waiting: float | None
    workers_waiting: float | None
    throttled_fraction: float | None
    pressure_fraction: float | None
    cores: int | None  # on which the scheduler may run the process
    quota_cores: float | None

    @property
    def others_fraction(self) -> float | None:
        """The share of the cores that other programs used; None: not measurable."""
        return None if self.others_cores is None else self.others_cores / (self.cores or 1)

    @property
    def ready_threads(self) -> float:
        """Threads of the program that had a core or waited for one (mean)."""
        waiting = (self.thread_wait_fraction or 0.0) + (self.pool_waiting or 0.0) + (self.workers_waiting or 0.0)
        return (self.got_cores or 0.0) + waiting

    @property
    def free_cores(self) -> float | None:
        """How many cores were unused (mean); None: not measurable, or a quota ran out."""
        if self.got_cores is None or self.others_cores is None or self.throttled_fraction:
            return None
        return min(self.cores or 1, self.quota_cores or self.cores or 1) - self.got_cores - self.others_cores


def core_share(run: Run) -> CoreShare | None:
    """The core times of a run; None if nothing was read, or no step ran."""
    # over steps that count on the host; if none counts, over the profiled steps or all
    steps = run.steps
    after = np.flatnonzero(steps.phase != Phase.WARMUP)
    rows = next((r for r in (select(run).rows, run.traced_rows, after) if len(r)), np.empty(0, np.int64))
    windows = np.stack((steps.start_ns[rows], steps.end_ns[rows]), axis=1)
    if run.core_times is None or not len(windows):
        return None
    wall_ns = measure(windows)
    if wall_ns <= 0:
        return None
    waited_ns = _wait_ns(run.core_times, windows)
    used = _Used.of(run.core_use, windows)
    return CoreShare(
        thread_cpu_fraction=_share(within(run.core_times, run.core_times.cpu_ns, windows), wall_ns),
        thread_wait_fraction=None if waited_ns is None else min(1.0, waited_ns / wall_ns),
        wait_us=None if waited_ns is None else min(waited_ns, wall_ns) / len(windows) / 1e3,
        got_cores=used.per_s("tree_cpu_ns"),
        others_cores=used.per_s("others_cpu_ns", ticks=True),
        stolen_cores=used.per_s("stolen_ns", ticks=True),
        pool_waiting=used.per_s("pool_wait_ns"),
        workers_waiting=used.per_s("workers_wait_ns"),
        throttled_fraction=used.throttled,
        pressure_fraction=used.per_s("pressure_ns"),
        cores=run.environment.affinity_cores,
        quota_cores=run.environment.core_quota,
    )


def is_own_doing(cores: CoreShare) -> bool:
    """Whether the program's own threads and workers outnumber the cores, while other programs use few cores."""
    usable = min(cores.cores or 1, cores.quota_cores or cores.cores or 1)
    others = cores.others_cores or 0.0
    return cores.ready_threads >= usable + _ONE_MORE and others < LEAST_OTHERS * (cores.cores or 1)


def _wait_ns(readings: CoreTimes, windows: Intervals) -> float | None:
    return max(0.0, float(within(readings, readings.wait_ns, windows).sum())) if is_known(readings) else None


def _share(part: np.ndarray, wall_ns: int) -> float:
    return min(1.0, max(0.0, float(part.sum()) / wall_ns))


class _Used(Struct, frozen=True):
    """The range of readings that contains the steps."""

    use: CoreUse | None
    first: int
    last: int

    @classmethod
    def of(cls, use: CoreUse | None, windows: Intervals) -> _Used:
        if use is None or len(use) < 2:
            return cls(None, 0, 0)
        first = max(0, int(np.searchsorted(use.t_ns, windows[0, 0], side="right")) - 1)
        last = min(len(use) - 1, max(first + 1, int(np.searchsorted(use.t_ns, windows[-1, 1]))))
        return cls(use, min(first, last - 1), last)

    def per_s(self, name: str, *, ticks: bool = False) -> float | None:
        """How much that count grew per second; None if unknown, or if the range is too short for ticks."""
        if self.use is None:
            return None
        counted: Int64 = getattr(self.use, name)
        took_ns = int(self.use.t_ns[self.last] - self.use.t_ns[self.first])
        unknown = counted[self.first] == -1 or counted[self.last] == -1
        if unknown or took_ns <= (LEAST_NS if ticks else 0):
            return None
        return max(0.0, int(counted[self.last] - counted[self.first]) / took_ns)

    @property
    def throttled(self) -> float | None:
        if self.use is None or self.use.quota_periods[self.first] < 0 or self.use.quota_periods[self.last] < 0:
            return None
        periods = int(self.use.quota_periods[self.last] - self.use.quota_periods[self.first])
        throttled = int(self.use.throttled_periods[self.last] - self.use.throttled_periods[self.first])
        return min(1.0, throttled / periods) if periods > 0 else None


def within(readings: CoreTimes, counted: Int64, windows: Intervals) -> Float64:
    """The growth of a count in each window, [n, 2] in ns; growth is taken as even between two readings."""
    edges = np.interp(windows.ravel(), readings.t_ns, counted).reshape(-1, 2)
    return np.asarray(edges[:, 1] - edges[:, 0])


def waited_ns(readings: CoreTimes | None, windows: Intervals) -> Float64:
    """Time in each window in which the thread was ready but had no core (ns); 0 if unknown."""
    if readings is None or not is_known(readings) or not len(windows):
        return np.zeros(len(windows))
    return np.clip(within(readings, readings.wait_ns, windows), 0, windows[:, 1] - windows[:, 0])


def is_known(readings: CoreTimes) -> bool:
    """Whether the system reports how long a thread waits for a core."""
    return bool(len(readings)) and bool((readings.wait_ns >= 0).all())


def moved(totals: Int64, givers: list[int], taker: int, waits_ns: Float64) -> Int64:
    """The table [steps, parts] with up to `waits_ns` of each step moved from the parts `givers` to the part `taker`.

    Each part gives in proportion to its time. Sums of steps do not change.
    """
    before = totals[:, givers].astype(np.float64)
    sums = before.sum(axis=1)
    share = np.minimum(waits_ns, sums) / np.maximum(sums, 1)
    shares_ns = np.minimum(np.floor(before * share[:, None]).astype(np.int64), totals[:, givers])
    after = totals.copy()
    after[:, givers] -= shares_ns
    after[:, taker] += shares_ns.sum(axis=1)
    return after


def core_wait_in_loading(facts: Facts) -> float:
    """Share of the wait for data in which the thread or worker that makes the batch was ready but had no core."""
    inside, cores = facts.loading, facts.cores
    if inside is not None and inside.core_wait_fraction is not None:
        return inside.core_wait_fraction * (1 if loads_itself(facts.run) else 1 - inside.handing_over)
    own = cores.thread_wait_fraction if cores is not None and loads_itself(facts.run) else None
    return own or 0.0


def core_wait_within_data_wait(facts: Facts) -> float:
    """The same as a share of the step, plus core waits of the training thread after the batch was made."""
    shares, cores, inside = facts.shares, facts.cores, facts.loading
    waited = 0.0 if shares is None else shares.of("data_wait")
    lost = waited * core_wait_in_loading(facts)
    if shares is None or cores is None or cores.thread_wait_fraction is None:
        return lost
    missed = max(0.0, cores.thread_wait_fraction - shares.of("core_wait"))
    if loads_itself(facts.run):  # one thread: at most its whole wait for a core
        return min(lost, missed)
    return lost + min(waited * (0.0 if inside is None else inside.handing_over), missed)


class CoreLoss(Struct, frozen=True):
    """Waits for a core, µs per step: of the training thread, of its compute threads, and of loading."""

    thread_us: float
    pool_us: float
    loading_us: float

    @property
    def total_us(self) -> float:
        return self.thread_us + self.pool_us + self.loading_us


def core_loss_of(facts: Facts, step_us: float | None, least_pool_share: float) -> CoreLoss | None:
    """The loss; None if the system does not report it or there is no step.

    Waits of compute threads for less than `least_pool_share` of the step count as 0. On a GPU only the part counts that
    its work does not hide. While the training thread waits for its compute threads it sleeps or spins: so that wait is
    at most the time in which it does not wait for a core itself.
    """
    cores = facts.cores
    if cores is None or cores.thread_wait_fraction is None or not step_us:
        return None
    on_gpu = facts.run.device.kind == "cuda"
    shares, unknown = facts.shares, 0.0 if on_gpu else cores.thread_wait_fraction
    thread_us = (unknown if shares is None else shares.of("core_wait")) * step_us
    loading_us = core_wait_within_data_wait(facts) * step_us
    if on_gpu:
        return CoreLoss(thread_us, 0.0, loading_us)
    threads = facts.run.environment.compute_threads or 1
    each = min(1.0, (cores.pool_waiting or 0.0) / (threads - 1)) if threads > 1 else 0.0
    pool_us = 0.0 if shares is None else each * shares.of("compute", "optimizer", "launch") * step_us
    return CoreLoss(thread_us, pool_us if pool_us >= least_pool_share * step_us else 0.0, loading_us)
