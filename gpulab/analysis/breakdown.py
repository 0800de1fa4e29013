"""Step accounting: divides each step's wall time into parts that never overlap and sum to the step.

Each device has its own account. In a GPU's account, idle time in which the training thread runs Python code between two
calls counts as "launch" up to `PYTHON_GAP_NS`: an eager program pays it for each launch.

The time in which the training thread was ready to run but had no processor core ("core_wait") is counted by the system
and is not in the trace: its total per step is known, its position is not. It is subtracted from the parts in which the
thread works, in proportion to their time. It is not subtracted from "data_wait": a loop that makes its own batches also
lacks cores while it loads, and that time remains "data_wait".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from gpulab.analysis import cores
from gpulab.analysis.loader import loads_itself, prepared
from gpulab.intervals import Intervals, clip, closed, covers, joined, measure, paint, subtract, union, union_of
from gpulab.run import Float64, Int64, Run
from gpulab.timeline.labels import CALLS, COLLECTIVES, KERNELS, OPERATORS, WAITS, WORK, Labels, Rows, What, labels
from gpulab.timeline.launches import device_windows, host_steps, replay_times, unrecorded_times
from gpulab.timeline.trace_steps import start_up

PARTS = (
    "compute",
    "communication",
    "memcpy",
    "memset",
    "data_wait",
    "core_wait",
    "sync_wait",
    "blocking_copy",
    "allocator",
    "optimizer",
    "launch",
    "queued",
    "start_up",
    "other",
    "unknown",
)

# From one operator to the next a Python program takes 2 µs (median) to 123 µs (99th percentile), measured between the
# operators of a launch-bound model on a B200 (b200_moe_launch_bound); longer gaps have a cause of their own.
PYTHON_GAP_NS = 100_000

DEVICE_PARTS = ("compute", "communication", "memcpy", "memset")  # in the rest of a step a GPU is idle


class StepParts(Struct, frozen=True):
    """One profiled step: `parts_ns` has every name of `PARTS` and sums to `end_ns - start_ns` exactly.

    `start_ns` and `end_ns` are the step's window on the accounted device, `host` is its window in the training loop.
    The two differ if the host runs ahead of a GPU (`device_windows`).
    """

    number: int
    start_ns: int
    end_ns: int
    parts_ns: dict[str, int]
    flags: int  # StepFlag
    host: tuple[int, int]

    @property
    def own_ns(self) -> int:
        """The step's length without start-up."""
        return self.end_ns - self.start_ns - self.parts_ns.get("start_up", 0)


class Breakdown(Struct, frozen=True, eq=False):
    """The accounting of a profiled window on one device.

    `device_index` is the device's number, None for a CPU. `median_us` is the per-part median over the steps; `share` is
    each part's share of the summed wall time without start-up (shares sum to 1; the share of "start_up" is 0).
    `busy_fraction` and `kernel_busy_fraction` are None for a CPU. `whole_window`: no step was found, so the window
    counts as one step. `prepared_ns` are the times, [start, end), at which the loop itself made a batch (`prepared`);
    they count as "data_wait". `round_steps`: steps of a round, as `Facts.round_steps`. `core_wait_from`: the parts from
    which "core_wait" was subtracted. `claims`: the time that each part claims; if claims overlap, the first part gets
    the time, and time that no part claims is "unknown".
    """

    device: str
    device_index: int | None
    steps: tuple[StepParts, ...]
    median_us: dict[str, float]
    share: dict[str, float]
    median_step: int  # number of the step of median length (if steps differ in a round: of those that wait)
    busy_fraction: float | None
    kernel_busy_fraction: float | None
    whole_window: bool = False
    prepared_ns: tuple[tuple[int, int], ...] = ()
    round_steps: int = 1
    core_wait_from: tuple[str, ...] = ()
    claims: Mapping[str, Intervals] = field(default_factory=dict)

    @property
    def windows(self) -> Intervals:
        """The steps on the accounted device, [n, 2] in ns."""
        return np.array([(s.start_ns, s.end_ns) for s in self.steps], dtype=np.int64).reshape(-1, 2)

    @property
    def host_windows(self) -> Intervals:
        """The steps of the training loop, [n, 2] in ns."""
        return np.array([s.host for s in self.steps], dtype=np.int64).reshape(-1, 2)

    @property
    def step_host_windows(self) -> Intervals | None:
        """`host_windows`; None if no step was found."""
        return None if self.whole_window or not self.steps else self.host_windows

    @property
    def covered(self) -> Intervals:
        """The time of all steps on the accounted device, merged."""
        return union(self.windows[:, 0], self.windows[:, 1])

    @property
    def bare(self) -> Intervals:
        """The time within the steps, on the accounted device, that no part claims."""
        return subtract(self.covered, joined(*self.claims.values()))

    @property
    def host_covered(self) -> Intervals:
        """The time of all steps of the training loop, merged."""
        return union(self.host_windows[:, 0], self.host_windows[:, 1])

    @property
    def span_ns(self) -> tuple[int, int]:
        """From the begin of the first step to the end of the last, on the accounted device; needs a step."""
        return self.steps[0].start_ns, self.steps[-1].end_ns

    @property
    def wall_ns(self) -> int:
        return sum(s.end_ns - s.start_ns for s in self.steps)

    @property
    def mean_step_us(self) -> float | None:
        """Mean length of a step without start-up; None without a step."""
        return (self.wall_ns - self.start_up_ns) / len(self.steps) / 1e3 if self.steps else None

    @property
    def start_up_ns(self) -> int:
        """Time of one-time work at the first calls; no share includes it."""
        return sum(s.parts_ns["start_up"] for s in self.steps)

    def typical_share(self, *parts: str) -> float:
        """Median over the steps of the share that these parts have together, so that one odd step does not matter.

        If steps differ within a round, the median is over rounds of `round_steps` steps.
        """
        shares = [
            sum(s.parts_ns[p] for s in steps for p in parts) / max(1, sum(s.own_ns for s in steps))
            for steps in self._rounds()
        ]
        return float(np.median(shares)) if shares else 0.0

    def by(self, round_steps: int) -> Breakdown:
        """This accounting with medians over rounds of so many steps, for a run whose steps differ within a round."""
        account = replace(self, round_steps=round_steps)
        if round_steps == 1 or not self.steps:
            return account
        rounds = account._rounds()
        means = {p: [sum(s.parts_ns[p] for s in steps) / len(steps) for steps in rounds] for p in PARTS}
        median_us = {p: float(np.median(ns)) / 1e3 for p, ns in means.items()}
        return replace(account, median_us=median_us, median_step=self._median_of_waiting())

    def _median_of_waiting(self) -> int:
        """Number of the step of median length among those that wait at least half as long as the longest."""
        longest_ns = max(s.parts_ns["data_wait"] for s in self.steps)
        waiting = [s for s in self.steps if 2 * s.parts_ns["data_wait"] >= longest_ns]
        return waiting[median_window(np.array([(s.start_ns, s.end_ns) for s in waiting]))].number

    def _rounds(self) -> list[tuple[StepParts, ...]]:
        round_steps = max(1, min(self.round_steps, len(self.steps)))
        return [self.steps[i : i + round_steps] for i in range(len(self.steps) - round_steps + 1)] if self.steps else []


def breakdown(run: Run, *, idle_causes: bool = True) -> Breakdown | None:
    """Account the profiled steps on the device that worked longest; None without a trace of that device.

    Without `idle_causes` (if the clocks of host and device disagree) all idle time of a device but "core_wait" is
    "unknown".
    """
    return next(iter(breakdowns(run, idle_causes=idle_causes)), None)


def breakdowns(run: Run, *, idle_causes: bool = True) -> tuple[Breakdown, ...]:
    """The same for each device of the trace, the one that worked longest first. Devices are never summed."""
    timeline = run.timeline
    if timeline is None or len(timeline) == 0:
        return ()
    if not timeline.has_device_events and run.device.kind == "cuda":
        return ()
    spans = labels(timeline)
    indices: Sequence[int | None] = spans.devices or (None,)
    accounts = [_account(run, spans, index, idle_causes=idle_causes) for index in indices]
    return tuple(sorted(accounts, key=lambda b: -(b.busy_fraction or 0)))


def _account(run: Run, spans: Labels, index: int | None, *, idle_causes: bool) -> Breakdown:
    claims = dict(_host_claims(spans) if index is None else _device_claims(spans, index, idle_causes=idle_causes))
    # not in the trace: batches that the loop makes itself, and pauses recorded while the profiler ran
    own_batches, (start, end) = prepared(run), spans.window_ns
    pauses = [(p.start_ns, p.end_ns) for p in run.pauses if p.start_ns < end and p.end_ns > start]
    for part, times_ns in (("data_wait", own_batches), ("other", pauses)):
        if times_ns and part in claims:
            claims[part] = joined(claims[part], union_of(times_ns))
    numbers, host, flags = host_steps(run, spans)
    windows = host if index is None else device_windows(spans, host, index)
    painted = paint(windows, list(claims.values()))
    totals = np.zeros((len(windows), len(PARTS)), dtype=np.int64)
    for column, part in enumerate((*claims, "unknown")):
        totals[:, PARTS.index(part)] += painted[:, column]
    givers = _working_parts(index)
    totals = _without_core(totals, givers, _waited_for_core_ns(run, totals, givers, host, index))
    steps = tuple(
        StepParts(n, w[0], w[1], dict(zip(PARTS, row, strict=True)), f, (h[0], h[1]))
        for n, w, row, f, h in zip(numbers, windows.tolist(), totals.tolist(), flags, host.tolist(), strict=True)
    )
    once = PARTS.index("start_up")
    wall = int(totals.sum() - totals[:, once].sum()) or 1
    return Breakdown(
        device=run.device.name,
        device_index=index,
        steps=steps,
        median_us={p: float(np.median(totals[:, i])) / 1e3 for i, p in enumerate(PARTS)},
        share={p: float(totals[:, i].sum()) / wall if i != once else 0.0 for i, p in enumerate(PARTS)},
        median_step=numbers[median_window(windows)],
        busy_fraction=None if index is None else _busy(spans, windows, index, *WORK),
        kernel_busy_fraction=None if index is None else _busy(spans, windows, index, *KERNELS),
        whole_window=not run.traced_numbers,
        prepared_ns=own_batches,
        core_wait_from=givers,
        claims=claims,
    )


def _working_parts(index: int | None) -> tuple[str, ...]:
    """The parts in which the training thread works; on a GPU, those of its idle time. "data_wait" is not among them."""
    computing = ("compute",) if index is None else ()
    return (*computing, "optimizer", "launch", "other", "unknown")


def _waited_for_core_ns(
    run: Run, totals: Int64, givers: tuple[str, ...], host: Intervals, index: int | None
) -> Float64:
    """Core wait of each step. A GPU's work hides part: its idle time has the same share of core wait as the loop."""
    waited_ns = cores.waited_ns(run.core_times, host)
    wall_ns = np.maximum(1, host[:, 1] - host[:, 0])
    if index is None:
        loading_ns = totals[:, PARTS.index("data_wait")] if loads_itself(run) else 0
        return np.asarray(waited_ns * (1 - np.minimum(1.0, loading_ns / wall_ns)))
    idle_ns = totals[:, [PARTS.index(p) for p in givers]].sum(axis=1)
    return np.asarray(idle_ns * (waited_ns / wall_ns))


def _without_core(totals: Int64, givers: tuple[str, ...], waited_ns: Float64) -> Int64:
    return cores.moved(totals, [PARTS.index(p) for p in givers], PARTS.index("core_wait"), waited_ns)


def _host_claims(spans: Labels) -> Iterator[tuple[str, Intervals]]:
    """Claims on the CPU: compute is the operators of the training thread and of autograd outside the DataLoader."""
    yield "start_up", start_up(spans, None).times
    yield "data_wait", spans.loading
    yield "compute", spans.computing
    yield "communication", joined(spans.times(spans.of(*COLLECTIVES)), spans.exchanging)
    yield "optimizer", spans.updating
    yield "other", _other(spans)


def _device_claims(spans: Labels, index: int, *, idle_causes: bool) -> Iterator[tuple[str, Intervals]]:
    """Claims on a GPU: first the work of the device, then what the host did while the device idled."""
    for part, kind in zip(DEVICE_PARTS, (What.KERNEL, What.COMMUNICATION, What.COPY, What.MEMSET), strict=True):
        yield part, spans.times(spans.on_device(index, kind))
    if idle_causes:
        # inside a replayed graph the device waits for other nodes of the graph and not for the host: "queued"
        replays = replay_times(spans, index)
        for part, times in _idle_claims(spans, index):
            if not len(replays):
                yield part, times
            else:
                yield part, joined(times, replays) if part == "queued" else subtract(times, replays)


def _idle_claims(spans: Labels, index: int) -> Iterator[tuple[str, Intervals]]:
    work = np.flatnonzero(spans.on_device(index))
    started = work[spans.call[work] >= 0]
    yield "start_up", start_up(spans, index).times
    yield "unknown", joined(_launched_outside(spans, work, started), unrecorded_times(spans, index))
    yield "data_wait", spans.loading
    for part, calls in (("sync_wait", WAITS), ("blocking_copy", (What.COPY_CALL,)), ("allocator", (What.ALLOCATION,))):
        yield part, spans.times(spans.training(*calls))
    yield "queued", union(spans.end_ns[spans.call[started]], spans.start_ns[started])
    yield "optimizer", spans.updating
    yield "launch", closed(spans.times(spans.training(*OPERATORS, *CALLS)), PYTHON_GAP_NS)
    yield "other", _other(spans)


def _launched_outside(spans: Labels, work: Rows, started: Rows) -> Intervals:
    """The gaps before work whose launch is not in the trace: what the device waited for is unknown."""
    busy, begun = spans.times(work), spans.start_ns[started]  # both by start
    after_gap = np.flatnonzero(
        np.searchsorted(begun, busy[:, 0], "left") == np.searchsorted(begun, busy[:, 0], "right")
    )
    begin = np.where(after_gap > 0, busy[after_gap - 1, 1], spans.window_ns[0])
    return union(begin, busy[after_gap, 0])


def _other(spans: Labels) -> Intervals:
    """Time of the profiler itself and of torch.compile. The program's annotations enclose work and are not counted."""
    return spans.times(spans.training(What.OVERHEAD, What.COMPILING))


def _busy(spans: Labels, windows: Intervals, index: int, *kinds: What) -> float:
    """Share of [first step start, last step end) in which the device does such work (definitions.md, "Words")."""
    start, end = int(windows[0, 0]), int(windows[-1, 1])
    return measure(clip(spans.times(spans.on_device(index, *kinds)), start, end)) / max(1, end - start)


def median_window(windows: Intervals) -> int:
    """Index of the window [start, end) of median length; of the two in the middle, the shorter one."""
    wall = windows[:, 1] - windows[:, 0]
    return int(np.argsort(wall, kind="stable")[(len(wall) - 1) // 2])


# -- the position of parts within a step, for views that draw them -----------------------------------------------------


class Pieces(Struct, frozen=True):
    """Disjoint, non-empty pieces that fill the accounted steps, as columns in order of time."""

    start_ns: Int64
    end_ns: Int64
    part: Int64  # index into PARTS


def placed(account: Breakdown) -> Pieces | None:
    """The pieces of every accounted step; None if the account has no `claims`.

    When the program waited for a core is unknown: "core_wait" is placed at the end of each piece that it was subtracted
    from.
    """
    if not account.claims:
        return None
    windows = account.windows
    totals = np.array([[step.parts_ns[part] for part in PARTS] for step in account.steps], dtype=np.int64)
    pieces = _painted(account.claims, windows)
    return _with_core_wait(pieces, windows, _summed(pieces, windows), totals.reshape(-1, len(PARTS)))


def _with_core_wait(pieces: Pieces, windows: Int64, before: Int64, after: Int64) -> Pieces:
    """If a part has less time `after` than `before`, the end of each of its pieces becomes "core_wait"."""
    row = np.searchsorted(windows[:, 0], pieces.start_ns, side="right") - 1
    whole_ns, rest_ns = before[row, pieces.part], after[row, pieces.part]
    length = pieces.end_ns - pieces.start_ns
    own_ns = np.where(rest_ns < whole_ns, np.floor(length * (rest_ns / np.maximum(whole_ns, 1))), length).astype(
        np.int64
    )
    middle = pieces.start_ns + own_ns
    start, end = np.stack((pieces.start_ns, middle), axis=1), np.stack((middle, pieces.end_ns), axis=1)
    waits = np.full(len(length), PARTS.index("core_wait"), dtype=np.int64)
    part = np.stack((pieces.part, waits), axis=1)
    some = end > start
    return _joined(start[some], end[some], part[some], windows)


def _painted(claims: Mapping[str, Intervals], windows: Int64) -> Pieces:
    edges = np.unique(np.concatenate([windows.ravel(), *(claim.ravel() for claim in claims.values())]))
    begin, until = edges[:-1], edges[1:]
    inside = covers(windows[windows[:, 1] > windows[:, 0]], begin)
    begin, until = begin[inside], until[inside]
    part = np.full(len(begin), PARTS.index("unknown"), dtype=np.int64)
    bare = np.ones(len(begin), dtype=bool)
    for name, claim in claims.items():
        mine = bare & covers(claim, begin)
        part[mine] = PARTS.index(name)
        bare &= ~mine
    return _joined(begin, until, part, windows)


def _joined(begin: Int64, until: Int64, part: Int64, windows: Int64) -> Pieces:
    """Merge neighbouring pieces of the same part, but not across steps."""
    if not len(begin):
        return Pieces(begin, until, part)
    fresh = np.ones(len(begin), dtype=bool)
    fresh[1:] = (part[1:] != part[:-1]) | (begin[1:] != until[:-1]) | np.isin(begin[1:], windows[:, 0])
    first = np.flatnonzero(fresh)
    last = np.concatenate((first[1:], [len(begin)])) - 1
    return Pieces(begin[first], until[last], part[first])


def _summed(pieces: Pieces, windows: Int64) -> Int64:
    totals = np.zeros((len(windows), len(PARTS)), dtype=np.int64)
    window = np.searchsorted(windows[:, 0], pieces.start_ns, side="right") - 1
    np.add.at(totals, (window, pieces.part), pieces.end_ns - pieces.start_ns)
    return totals
