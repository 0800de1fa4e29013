"""Computes everything that a report says about a run, once; the views only lay it out."""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import cached_property
from typing import TypeVar

import numpy as np
from msgspec import Struct

from gpulab.analysis import kernels as gpu
from gpulab.analysis.breakdown import Breakdown, breakdowns
from gpulab.analysis.calls import share_of_calls
from gpulab.analysis.collectives import CollectiveFacts
from gpulab.analysis.cores import CoreShare, core_share
from gpulab.analysis.integrity import Integrity, integrity
from gpulab.analysis.kernels import DeviceWork, device_work
from gpulab.analysis.loader import LoadingFacts, loading
from gpulab.analysis.operators import (
    CostRow,
    HostOperators,
    host_operators,
    kernels,
    operators,
)
from gpulab.analysis.optimizer_work import OptimizerWork, optimizer_work
from gpulab.analysis.step_shares import StepShares, step_shares
from gpulab.analysis.steps import Selection, Spread, select, spread, spread_of_steps, steps_per_round
from gpulab.formatting import plural
from gpulab.run import BESIDE_KINDS, Float64, Int64, Phase, Run, Series, Timeline
from gpulab.timeline.labels import NODES, labels
from gpulab.timeline.memory_curve import MemoryCurve, memory

T = TypeVar("T")
FEW_STEPS, FEW_COUNTED = 10, 5  # ours: with fewer steps, or fewer counted steps, shares are chance


def too_few(count: int) -> str:
    """ "4 counted steps are too few", to be sure or for shares."""
    return f"{plural(count, 'counted step')} {'is' if count == 1 else 'are'} too few"


class CurveFact(Struct, frozen=True):
    """One sampled curve in figures: mean and maximum over the run, in the series' own unit.

    `step_mean` is the mean of readings whose interval lies in counted steps, without start-up, compiling and traced
    steps; None with fewer than `LEAST_READINGS`.
    """

    name: str
    label: str
    unit: str
    source: str
    mean: float
    maximum: float
    count: int
    step_mean: float | None = None


class TraceFacts(Struct, frozen=True):
    """What only a GPU's trace shows of the profiled steps; None is "not measurable" or withheld by the checks.

    `kernels`, `copies`, `launches` and `exchanges` with other ranks are those that the steps made; the time of an
    exchange includes waiting for the other ranks. `devices` is the accounting of every GPU of the trace, the busiest
    first.
    """

    devices: tuple[Breakdown, ...]
    kernels: gpu.Kernels | None
    launches: gpu.Launches | None
    copies: tuple[gpu.CopyRow, ...]
    est_sm_efficiency: float | None  # of the busiest GPU, from the first step's start to the last one's end
    exchanges: tuple[CollectiveFacts, ...] = ()


class Facts(Struct, frozen=True, dict=True):
    """The figures of one run. None is "not measurable", and a view says so."""

    run: Run
    selection: Selection
    step_us: Spread | None  # unprofiled, after selection
    traced_step_us: Spread | None  # the profiled window
    data_wait_us: Spread | None  # blocked in the DataLoader, per step: in `step_us`, else in `traced_step_us`
    optimizer_us: Spread | None  # inside Optimizer.step, likewise
    samples_per_s: float | None
    steps_per_s: float | None
    outside_steps_fraction: float | None  # share of the wall time that belongs to no step
    observer_us_per_step: float | None  # time of gpulab's hooks, which is subtracted from `step_us` and `data_wait_us`
    breakdown: Breakdown | None  # of the profiled window
    integrity: Integrity | None  # of the trace; what it withholds is None here, or unknown in the breakdown
    operators: tuple[CostRow, ...]  # costliest first, self time on the host (compute device "cpu") or the device
    kernels: tuple[CostRow, ...]  # GPU only
    trace: TraceFacts | None  # GPU only
    memory: tuple[MemoryCurve, ...]  # of the trace's memory events
    curves: tuple[CurveFact, ...]
    loading: LoadingFacts | None = None  # inside the DataLoader
    work: DeviceWork | None = None  # GPU only: what ran in the steps, row by row
    host: HostOperators | None = None  # if the CPU computes
    optimizer: OptimizerWork | None = None  # inside Optimizer.step and zero_grad, from the trace
    cores: CoreShare | None = None  # the cores that the training thread and the process got
    # Times of a step are means over a round of so many steps: workers may deliver their batches at once.
    round_steps: int = 1
    whole_window: bool = False  # one round: all profiled steps of a trace from another tool

    def of(self, analysis: Callable[[Facts], T]) -> T:
        """The result of an analysis of this run, computed at the first call: such a figure needs no field here."""
        figures = self.__dict__.setdefault("figures", {})
        if analysis not in figures:
            figures[analysis] = analysis(self)
        answer: T = figures[analysis]
        return answer

    @cached_property
    def shares(self) -> StepShares | None:
        """Where a typical step's time goes; every view and every rule reads it here."""
        return step_shares(self)

    @property
    def typical_step_us(self) -> Spread | None:
        """A step without the profiler if such steps were measured, else a profiled step."""
        return self.step_us or self.traced_step_us

    @property
    def whole_us(self) -> float | None:
        """Mean time per step from the end of the warm-up to the last step, including time between steps.

        Excludes starting and stopping the profiler, and first calls in the profiled steps. None without steps.
        """
        steps, ours = self.run.steps, self.run.observer
        first = np.flatnonzero(steps.phase != Phase.WARMUP)
        if not len(first):
            return None
        once_ns = self.breakdown.start_up_ns if self.breakdown is not None else 0
        own_ns = (ours.profiler_start_ns or 0) + (ours.profiler_stop_ns or 0) + once_ns
        span_ns = int(steps.end_ns[-1] - steps.start_ns[first[0]])
        return (span_ns - own_ns) / (len(steps) - int(first[0])) / 1e3

    @property
    def few_steps(self) -> int | None:
        """How many steps count, if too few for shares, else None; a trace from another tool never has too few."""
        run, step = self.run, self.typical_step_us
        if run.source == "trace" or step is None:
            return None
        return step.count if len(run.steps) < FEW_STEPS or step.count < FEW_COUNTED else None

    @property
    def samples_per_step(self) -> int | None:
        """Samples in a typical step; None if unknown for most steps."""
        counted = self.run.steps.sample_count[self.selection.rows]
        samples = counted[counted >= 0]
        return int(np.median(samples)) if len(samples) and 2 * len(samples) >= len(counted) else None

    @property
    def step_times_ns(self) -> Int64:
        """The time of every step of the run, measured as for the typical step."""
        return _time_ns(self.run, self.breakdown)

    @property
    def step_name(self) -> str:
        """What a step is called: inference updates nothing, as a trace shows, and is not called training."""
        timeline = self.run.timeline
        trains = timeline is None or self.run.steps.optimizer_ns.any() or labels(timeline).training(*NODES).any()
        return "training step" if trains else "step"

    @property
    def profiled_over_unprofiled(self) -> float | None:
        """How many times as long a profiled step took (medians); None unless both kinds were measured."""
        if self.step_us is None or self.traced_step_us is None or not self.step_us.median:
            return None
        return self.traced_step_us.median / self.step_us.median

    @property
    def data_wait_fraction(self) -> float | None:
        """Share of the typical step that waits for the DataLoader; None if either was not measured.

        If only profiled steps were measured, it is the share in all of them together: few steps may wait in bursts.
        """
        step, wait = self.typical_step_us, self.data_wait_us
        if self.step_us is None and step is not None and wait is not None:
            steps, rows = self.run.steps, self.run.traced_rows
            once_ns = self.breakdown.start_up_ns if self.breakdown is not None else 0
            return float(steps.data_wait_ns[rows].sum() / max(1, steps.wall_ns[rows].sum() - once_ns))
        return wait.median / step.median if step is not None and wait is not None and step.median > 0 else None

    @property
    def has_workers(self) -> bool | None:
        """Whether other processes load data: as the loader says, else as a trace names its iterators; None: unknown."""
        if self.run.loader is not None:
            return self.run.loader.num_workers > 0
        names = self.run.timeline.names if self.run.timeline is not None else ()
        if any("_SingleProcessDataLoaderIter" in name for name in names):
            return False
        return True if any("_MultiProcessingDataLoaderIter" in name for name in names) else None

    @property
    def worker_count(self) -> int | None:
        """How many processes load data; None if not recorded: a trace shows only whether there are any."""
        if self.run.loader is not None:
            return self.run.loader.num_workers
        return 0 if self.has_workers is False else None


def facts(run: Run) -> Facts:
    steps, selection = run.steps, select(run)
    rows = selection.rows
    traced = run.traced_rows
    trust = integrity(run)
    withheld = trust.withheld if trust is not None else frozenset()
    accounts = () if "breakdown" in withheld else breakdowns(run, idle_causes="idle_causes" not in withheld)
    fed = "data_wait" not in withheld and (run.loader is not None or bool(steps.batch_count.any()))
    typical_rows = rows if len(rows) else traced
    round_steps = steps_per_round(run, typical_rows)
    accounts = tuple(account.by(round_steps) for account in accounts)
    account = next(iter(accounts), None)
    one_round = run.loader is None and round_steps > 1

    def typical(values: Int64, of: Int64) -> Spread | None:
        return spread_of_steps(run, values, of, round_steps)

    time_ns = _time_ns(run, account)
    work = None if "kernels" in withheld else device_work(run.timeline, account)
    return Facts(
        run=run,
        selection=selection,
        step_us=typical(steps.time_ns[rows], rows),
        traced_step_us=typical(time_ns[traced], traced) if _marks_are_whole(run) else None,
        data_wait_us=typical(steps.data_wait_ns[typical_rows], typical_rows) if fed else None,
        optimizer_us=spread(steps.optimizer_ns[typical_rows])
        if steps.optimizer_ns.any() and "optimizer" not in withheld
        else None,
        samples_per_s=_samples_per_s(run, rows),
        steps_per_s=_rate(len(rows), int(steps.time_ns[rows].sum())),
        outside_steps_fraction=_outside_steps(run, time_ns),
        observer_us_per_step=_own_us(run, typical_rows),
        breakdown=account,
        integrity=trust,
        operators=operators(run.timeline, account)
        if run.timeline is not None and account and "operators" not in withheld
        else (),
        kernels=kernels(work, account) if work is not None and account else (),
        trace=trace_facts(run, accounts, withheld),
        memory=() if "memory" in withheld else memory(run.memory_events),
        curves=tuple(_curve(s, in_steps(run, s, rows)) for s in run.samples.series if is_long_enough(s)),
        loading=loading(run),
        work=work,
        host=host_operators(
            run.timeline, account, share_of_calls(run, account, ["batch"]), share_of_calls(run, account, BESIDE_KINDS)
        )
        if run.timeline is not None and account and account.device_index is None
        else None,
        optimizer=optimizer_work(run.timeline, account, work) if run.timeline is not None and account else None,
        cores=core_share(run),
        round_steps=round_steps,
        whole_window=one_round,
    )


def trace_facts(run: Run, devices: tuple[Breakdown, ...], withheld: Set[str] = frozenset()) -> TraceFacts | None:
    """The figures of a run whose trace holds a GPU's work, accounted in `devices`; None for any other run.

    `withheld` names the figures that the integrity checks do not allow.
    """
    timeline = run.timeline
    if timeline is None or not timeline.has_device_events:
        return None
    windows = devices[0].host_windows if devices else np.array([timeline.window_ns], dtype=np.int64)
    return TraceFacts(
        devices=devices,
        kernels=None if "kernels" in withheld else gpu.kernels(timeline, windows),
        launches=None if "launch_statistics" in withheld else gpu.launches(timeline, windows),
        copies=() if "kernels" in withheld else gpu.copies(timeline, windows),
        est_sm_efficiency=None if "kernels" in withheld else _est_sm_efficiency(timeline, devices),
        exchanges=() if "kernels" in withheld else gpu.exchanges(timeline, windows, len(windows)),
    )


def _est_sm_efficiency(timeline: Timeline, devices: tuple[Breakdown, ...]) -> float | None:
    busiest = devices[0] if devices and devices[0].steps else None
    if busiest is None or busiest.device_index is None:
        return None
    return gpu.est_sm_efficiency(timeline, busiest.device_index, busiest.span_ns)


def _marks_are_whole(run: Run) -> bool:
    """Whether all marks are in the trace. A truncated file has all only if they are the profiler's own."""
    return run.origin is None or not run.origin.is_cut_short or run.step_source == "ProfilerStep"


def _time_ns(run: Run, account: Breakdown | None) -> Int64:
    """Time of each step on its device, because the host may be far ahead of a GPU. Profiled steps: by the trace.

    One-time start-up within profiled steps is excluded.
    """
    time_ns, traced = run.steps.time_ns.copy(), run.traced_rows
    if account is None or account.whole_window:
        return time_ns
    if account.device_index is not None:
        time_ns[traced] = [step.own_ns for step in account.steps]
    elif account.start_up_ns:
        time_ns[traced] -= [step.parts_ns["start_up"] for step in account.steps]
    return time_ns


def _outside_steps(run: Run, time_ns: Int64) -> float | None:
    """The share of the code's wall time that is in no step."""
    if not len(run.steps) or run.code_wall_ns <= 0:
        return None
    return max(0, run.code_wall_ns - int(time_ns.sum()) - int(run.steps.own_ns.sum())) / run.code_wall_ns


def _own_us(run: Run, rows: Int64) -> float | None:
    """gpulab's own time in a step: the median over counted steps; the mean if the record holds only a sum."""
    own_ns = run.steps.own_ns
    if len(own_ns) and len(rows):
        return float(np.median(own_ns[rows])) / 1e3
    return run.observer.hooks_ns / len(run.steps) / 1e3 if len(run.steps) else None


def _rate(count: int, time_ns: int) -> float | None:
    return count / (time_ns / 1e9) if count and time_ns else None


def _samples_per_s(run: Run, rows: np.ndarray) -> float | None:
    """Samples over time, in the counted steps; None if a step's samples are unknown."""
    samples = run.steps.sample_count[rows]
    if len(rows) == 0 or (samples < 0).any():
        return None
    return _rate(int(samples.sum()), int(run.steps.time_ns[rows].sum()))


LEAST_READINGS = 5  # ours, of a rate: its first reading covers the time before the code, its last may be cut off


def has_no_step(run: Run) -> bool:
    """Whether the cell had no steps, so that the accounting covers the whole cell."""
    return run.step_source == "whole cell" or len(run.steps) == 0


def is_long_enough(series: Series) -> bool:
    """Whether the mean of a series is meaningful: for an amount, from the first reading on."""
    is_rate = series.name.endswith(("_pct", "_fraction"))
    return len(series.value) >= (LEAST_READINGS if is_rate else 1)


def in_steps(run: Run, series: Series, rows: Int64) -> Float64:
    """The readings whose whole interval since the previous reading lies in consecutive steps of `rows`."""
    if not len(rows):
        return series.value[:0]
    counted = np.zeros(len(run.steps), bool)
    counted[rows] = True
    step = np.searchsorted(run.steps.start_ns, series.t_ns, side="right") - 1
    inside = (step >= 0) & counted[step] & (series.t_ns < run.steps.end_ns[step])
    gaps = np.cumsum(~counted)
    whole = inside[1:] & inside[:-1] & (gaps[step[1:]] == gaps[step[:-1]])
    values: Float64 = series.value[1:][whole]
    return values


def _curve(series: Series, values: Float64) -> CurveFact:
    return CurveFact(
        name=series.name,
        label=series.label,
        unit=series.unit,
        source=series.source,
        mean=float(series.value.mean()),
        maximum=float(series.value.max()),
        count=len(series.value),
        step_mean=float(values.mean()) if len(values) >= LEAST_READINGS else None,
    )


def early_end_sentence(run: Run) -> str:
    """How the run ended, if that was before the end of its code and the requested steps; else empty."""
    count = len(run.steps)
    how = _EARLY.get(run.outcome) if run.source != "trace" else None
    limit = run.settings.steps
    if how is None or run.reached_step_limit:
        return ""
    if not count:
        return f"{how} before its first step."
    epoch = _epoch_steps(run)
    if limit is not None and count < limit:
        steps = f"{count:,} of {plural(limit, 'step')}"
    elif epoch is not None and count < epoch:
        steps = f"{count:,} of an epoch's {plural(epoch, 'step')}"
    else:
        steps = plural(count, "step")
    return f"{how} after {steps}{': little data' if count < FEW_STEPS else ''}."


def _epoch_steps(run: Run) -> int | None:
    """The number of steps that the loader's batches make; None if unknown."""
    batches = 0 if run.loader is None or run.loader.length is None else run.loader.length
    return round(batches / max(1.0, float(np.median(run.steps.batch_count)))) or None


_EARLY = {"stopped": "Stopped early", "interrupted": "Interrupted", "failed": "Ended by an exception"}
