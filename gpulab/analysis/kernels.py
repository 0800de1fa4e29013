"""Lists what a GPU ran in the steps, row by row and in sums: the call that started it, its operator, its class.

Kernels, launches and copies count in the step whose host code launched them. A kernel or copy without a launch in the
trace counts in the step in which it began. Times are sums over streams and devices, and shares are of that sum, never
of wall time.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cached_property

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gpulab.analysis.breakdown import Breakdown
from gpulab.analysis.collectives import CollectiveFacts, collective_facts
from gpulab.intervals import Intervals, covers, intersect, joined, paint, subtract, union
from gpulab.run import Category, Int32, Int64, Timeline, UInt8
from gpulab.timeline.kernel_names import reading
from gpulab.timeline.labels import (
    CALLS,
    KERNEL_LAUNCHES,
    KERNELS,
    LAUNCHES,
    OPERATORS,
    WORK,
    CallTree,
    Labels,
    Mask,
    Rows,
    What,
    distinct,
    labels,
    once,
)
from gpulab.timeline.launches import (
    called_ns,
    launched_within,
    replay_of,
    replay_times,
    unrecorded_times,
)
from gpulab.timeline.trace_steps import start_up


class DeviceWork(Struct, frozen=True, dict=True):
    """Columns, one row per kernel, copy or memset of the accounted device that a step launched, in order of time.

    Steps are `windows` on the device and `host_windows` on the host, [n, 2] in ns. `idle` is the time in `windows` in
    which the device did nothing. Times per step are sums over the steps divided by their number; sums over kernels
    count two streams twice.
    """

    timeline: Labels
    windows: Intervals
    host_windows: Intervals
    idle: Intervals
    tree: CallTree  # of all operators
    rows: Int64  # in the timeline
    call: Int32  # row of the call that started it; -1: not in the trace
    operator: Int64  # row of the innermost operator around that call; -1: none
    kind: UInt8  # index into CLASSES

    @cached_property
    def of_optimizer(self) -> Mask:
        """Which rows were started inside an optimizer's step or zero_grad."""
        return self.launched_in(self.timeline.updating)

    def launched_in(self, times: Intervals) -> Mask:
        """Which rows were started within these times of the host."""
        return (self.call >= 0) & covers(times, self.timeline.start_ns[self.call])

    @property
    def steps(self) -> int:
        return max(1, len(self.windows))

    @cached_property
    def kernel(self) -> Mask:
        """Which rows are kernels."""
        return np.asarray(self.timeline.category[self.rows] == Category.KERNEL)

    @cached_property
    def computing(self) -> Mask:
        """Which rows are kernels other than communication."""
        return np.asarray(self.kernel & (self.kind != CLASSES.index("communication")))

    @cached_property
    def computing_us(self) -> float:
        """Device time of `computing` kernels per step."""
        return self.us(self.computing)

    @cached_property
    def duration_ns(self) -> Int64:
        """The duration of each row."""
        return self.timeline.duration_ns[self.rows]

    def of(self, *kinds: str) -> Mask:
        """Which rows are kernels of one of these classes."""
        among = np.zeros(len(CLASSES), dtype=bool)
        among[[CLASSES.index(kind) for kind in kinds]] = True
        which: Mask = among[self.kind] & self.kernel
        return which

    def us(self, which: Mask) -> float:
        """Device time of the chosen rows per step."""
        return float(self.duration_ns[which].sum()) / self.steps / 1e3

    def share(self, which: Mask) -> float:
        """The share of the chosen kernels in the time of all kernels except communication."""
        return self.us(which & self.kernel) / self.computing_us if self.computing_us else 0.0

    def costliest(self, which: Mask) -> str:
        """The name with most time among the chosen rows; empty without rows."""
        if not which.any():
            return ""
        time_ns = np.bincount(self.timeline.name_id[self.rows[which]], weights=self.duration_ns[which])
        return self.timeline.names[int(time_ns.argmax())]

    def per_step_us(self, times: Intervals) -> float:
        """How much of these device times lies in a step, in µs: the median, so that no odd step matters.

        A step without any of these times counts as 0.
        """
        return median_per_step_us(self.windows, times)

    def host_per_step_us(self, times: Intervals) -> float:
        """The same for times of the host."""
        return median_per_step_us(self.host_windows, times)

    def names_of(self, rows: Int64) -> npt.NDArray[np.object_]:
        """The names of rows of the timeline; "" for -1."""
        names = np.array([*self.timeline.names, ""], dtype=object)
        of_rows: npt.NDArray[np.object_] = names[np.where(rows >= 0, self.timeline.name_id[rows], -1)]
        return of_rows


def device_work(timeline: Timeline | None, account: Breakdown | None) -> DeviceWork | None:
    """The work accounted in `account`; None if that is not of a GPU."""
    if timeline is None or account is None or account.device_index is None or not account.steps:
        return None
    spans, index = labels(timeline), account.device_index
    windows, host = account.windows, account.host_windows
    every = np.flatnonzero(spans.on_device(index))
    rows = every[launched_within(spans, every, host, windows)]
    call = spans.call[rows]
    tree = CallTree.of(spans, spans.rows(*OPERATORS))
    operator = np.full(len(rows), -1, dtype=np.int64)
    operator[call >= 0] = tree.innermost(spans, call[call >= 0])
    busy = joined(spans.times(every), unrecorded_times(spans, index))
    steps = subtract(account.covered, start_up(spans, index).times)
    return DeviceWork(
        timeline=spans,
        windows=windows,
        host_windows=host,
        idle=subtract(steps, busy),
        tree=tree,
        rows=rows,
        call=call,
        operator=operator,
        kind=_kinds(spans, rows, operator),
    )


def median_per_step_us(windows: Intervals, times: Intervals) -> float:
    """How much of these times lies in a window, in µs: the median over the windows."""
    return float(np.median(paint(windows, [times])[:, 0])) / 1e3


def _kinds(timeline: Timeline, rows: Int64, operator: Int64) -> UInt8:
    """The class of each row; each distinct pair of kernel and operator is classified once."""
    operator_name = np.where(operator >= 0, timeline.name_id[operator], -1).astype(np.int64)
    pairs = timeline.name_id[rows].astype(np.int64) * (len(timeline.names) + 1) + operator_name + 1
    distinct, group = np.unique(pairs, return_inverse=True)
    names = (*timeline.names, "")
    kinds = [
        CLASSES.index(class_of(names[pair // (len(timeline.names) + 1)], names[pair % (len(timeline.names) + 1) - 1]))
        for pair in distinct.tolist()
    ]
    of_rows: UInt8 = np.array(kinds, dtype=np.uint8)[group] if len(rows) else np.empty(0, np.uint8)
    return of_rows


def replayed_fraction(work: DeviceWork) -> float:
    """Share of kernel time that replayed graphs ran."""
    duration_ns = work.duration_ns[work.kernel]
    total_ns = int(duration_ns.sum())
    replayed_ns = int(duration_ns[replay_of(work.timeline, work.rows[work.kernel]) >= 0].sum())
    return replayed_ns / total_ns if total_ns else 0.0


def idle_within_us(work: DeviceWork) -> float:
    """How long the device idles per step inside replays."""
    if not len(work.rows):
        return 0.0
    of_device = work.timeline.lanes[int(work.timeline.lane_id[work.rows[0]])].process
    replays = replay_times(work.timeline, of_device)
    return work.per_step_us(intersect(work.idle, replays)) if len(replays) else 0.0


# Whether launches cause the GPU's idle time: a launch costs microseconds, so a long gap has another cause.


# Ten times the 99th percentile of the time from one operator to the next in a launch-bound program (b200_moe: 123 µs).
LONGEST_NS = 1_000_000


def not_launching_us(work: DeviceWork, elsewhere: Intervals) -> float:
    """Idle time per step in gaps with fewer than one launch per `LONGEST_NS`: starting up, loading, other work.

    `elsewhere` is time that is accounted to another cause anyway.
    """
    t = work.timeline
    begun = t.start_ns[t.of(*LAUNCHES)]
    gaps = work.idle
    launches = np.searchsorted(begun, gaps[:, 1], side="left") - np.searchsorted(begun, gaps[:, 0], side="left")
    sparse = gaps[(gaps[:, 1] - gaps[:, 0]) > LONGEST_NS * (launches + 1)]
    return work.per_step_us(subtract(sparse, elsewhere))


def small_kernels_fraction(work: DeviceWork) -> float | None:
    """Share of kernel time in kernels with fewer blocks than the GPU has multiprocessors; None if not recorded."""
    blocks = work.timeline.extra.get("blocks_per_sm")
    kernel = work.computing
    if blocks is None or not kernel.any():
        return None
    rows = work.rows[kernel]
    duration = work.timeline.duration_ns[rows]
    recorded = blocks[rows] >= 0
    total = int(duration[recorded].sum())
    return float(duration[recorded & (blocks[rows] < 1)].sum() / total) if total else None


def exposed_upload_us(work: DeviceWork) -> tuple[float, float, Intervals]:
    """Copies to the GPU from pageable memory, per step: µs without a concurrent kernel, bytes, and when they ran."""
    t = work.timeline
    copies = work.rows[t.named(lambda name: name.startswith("Memcpy HtoD (Pageable"), work.rows)]
    kernels = work.rows[work.kernel]
    copying = union(t.start_ns[copies], t.end_ns[copies])
    exposed = subtract(copying, union(t.start_ns[kernels], t.end_ns[kernels]))
    size = t.extra.get("bytes")
    moved = float(np.nansum(size[copies])) / work.steps if size is not None and len(copies) else 0.0
    return work.per_step_us(exposed), moved, copying


CLASSES = (
    "matrix",
    "attention",  # fused: softmax and both products in one kernel
    "normalization",  # batch, layer and group norm, softmax
    "pointwise",
    "reduction",
    "layout",  # from one order of image axes to the other
    "optimizer",
    "copy",
    "communication",
    "other",
)

# Operator → class of those of its kernels whose name does not show a class.
_BY_OPERATOR: tuple[tuple[str, str], ...] = (
    ("attention", r"^aten::_?(scaled_dot_product_)?(flash|efficient|cudnn|mem_eff)\w*attention"),
    ("matrix", r"^aten::(mm|addmm|bmm|baddbmm|matmul|linear|addbmm|dot|mv|_scaled_mm|_addmm_activation)$"),
    ("matrix", r"^aten::(\w*convolution\w*|conv\d?d|cudnn_conv\w*|miopen_conv\w*|mkldnn_conv\w*|mkldnn_linear)$"),
    ("normalization", r"^aten::\w*(softmax|batch_norm|layer_norm|group_norm|instance_norm)\w*$"),
    ("reduction", r"^aten::(sum|mean|max|min|argmax|norm|linalg_vector_norm|var\w*|std\w*|nll_loss\w*)$"),
)
_OPERATOR = tuple((kind, re.compile(pattern)) for kind, pattern in _BY_OPERATOR)

POINTWISE_OPERATORS = re.compile(
    r"^aten::(add|sub|mul|div|rsub|neg|abs|sign|exp|expm1|log|log1p|sqrt|rsqrt|pow|tanh|sigmoid|relu|gelu|silu|"
    r"leaky_relu|hardtanh|gt|ge|lt|le|eq|ne|logical_and|logical_or|logical_not|bitwise_and|bitwise_or|bitwise_not|"
    r"hardswish|elu|clamp|clamp_min|clamp_max|where|masked_fill|addcmul|addcdiv|lerp|erf|sin|cos|maximum|minimum|"
    r"threshold|threshold_backward|gelu_backward|silu_backward|tanh_backward|sigmoid_backward|native_dropout|"
    r"native_dropout_backward|reciprocal|square|softplus|mish|fill)_?$"
)


def class_of(kernel: str, operator: str = "") -> str:
    """One of `CLASSES`, for a kernel's name and that of the innermost operator that launched it ("" unknown)."""
    kind = reading(kernel).kind
    if kind is None and operator:
        kind = next((kind for kind, pattern in _OPERATOR if pattern.search(operator)), None)
    return kind or "other"


@once
def names_tell(spans: Labels) -> bool:
    """Whether kernel names show number formats and matrix units: only if calls of CUDA show that the GPU is one of
    NVIDIA. AMD's libraries name only some of their matrix kernels."""
    return any(spans.names[i].startswith("cu") for i in distinct(spans.name_id[spans.of(*CALLS)]))


SHORT_KERNEL_US = 10.0  # definitions.md, "Step on a GPU": a launch costs more
UNKNOWN_AT_MOST = 0.01  # ours: of the time of all kernels

_COPY = re.compile(r"Memcpy (\w+)(?: \((\w+) -> (\w+)\))?")
_HOST_MEMORY = {"Pageable": "pageable", "Pinned": "pinned"}


class Launches(Struct, frozen=True):
    """Kernel launches, including graph launches. None if there is no launch to measure.

    queue_delay_us: from the end of a launch to the start of the first kernel it started; 0 if that began earlier.
    """

    count: int
    per_step: float | None
    median_us: float | None
    median_queue_delay_us: float | None
    without_kernel: int
    kernels_without_launch: int
    most_kernels_per_launch: int  # more than one: graph replays


class CopyRow(Struct, frozen=True):
    """All copies of one kind. `bytes` and `gb_per_s` (10⁹ bytes per second of copying) are None without sizes."""

    kind: str  # HtoD, DtoH, DtoD, PtoP, …
    host_memory: str | None  # "pageable" or "pinned"; None: no host memory, or not said
    count: int
    time_us: float
    bytes: int | None
    gb_per_s: float | None


class Kernels(Struct, frozen=True):
    """What ran on the device. Fractions are 0–1, None without a kernel or if the trace does not show them."""

    count: int
    tensor_core_fraction: float | None  # of kernel time; None if names do not show it for more than 1 % of the time
    short_count_fraction: float | None
    short_time_fraction: float | None
    est_achieved_occupancy_pct: float | None


def kernels(timeline: Timeline, windows: Intervals) -> Kernels:
    rows = _launched(timeline, windows, *KERNELS)
    duration, count = timeline.duration_ns[rows], len(rows)
    time_ns, short = int(duration.sum()), duration < SHORT_KERNEL_US * 1e3
    return Kernels(
        count=count,
        tensor_core_fraction=_tensor_core_fraction(timeline, rows),
        short_count_fraction=float(short.mean()) if count else None,
        short_time_fraction=float(duration[short].sum() / time_ns) if time_ns else None,
        est_achieved_occupancy_pct=_mean_occupancy_pct(timeline, rows),
    )


def short_count_fraction(timeline: Timeline, windows: Intervals, below_us: float) -> float | None:
    """The fraction of kernels launched within the windows that are shorter than `below_us`; None without kernels."""
    rows = _launched(timeline, windows, *KERNELS)
    return float((timeline.duration_ns[rows] < below_us * 1e3).mean()) if len(rows) else None


def launches(timeline: Timeline, windows: Intervals) -> Launches:
    """Kernel launches that the host made within the windows; kernels without a launch are those of the whole trace."""
    spans = labels(timeline)
    calls = spans.rows(*KERNEL_LAUNCHES)
    calls = calls[covers(windows, timeline.start_ns[calls])]
    items = spans.rows(*WORK)
    call = spans.call[items]
    stray = (call < 0) & spans.of(*KERNELS)[items]
    started, first, how_many = np.unique(call[call >= 0], return_index=True, return_counts=True)
    mine = np.isin(started, calls, assume_unique=True)
    begins = timeline.start_ns[items[call >= 0][first[mine]]]
    delay = np.maximum(0, begins - timeline.end_ns[started[mine]])
    return Launches(
        count=len(calls),
        per_step=len(calls) / len(windows) if len(windows) else None,
        median_us=_median_us(timeline.duration_ns[calls]),
        median_queue_delay_us=_median_us(delay),
        without_kernel=len(calls) - int(mine.sum()),
        kernels_without_launch=int(stray.sum()),
        most_kernels_per_launch=int(how_many[mine].max(initial=0)),
    )


def copies(timeline: Timeline, windows: Intervals) -> tuple[CopyRow, ...]:
    """Copies launched within the windows, by kind and by the host memory they touch; the costliest first."""
    rows = _launched(timeline, windows, What.COPY)
    names, group = np.unique(timeline.name_id[rows], return_inverse=True)
    kinds: dict[tuple[str, str | None], int] = {}
    kind_of_name = [kinds.setdefault(_copy_kind(timeline.names[i]), len(kinds)) for i in names.tolist()]
    kind = np.array(kind_of_name, dtype=np.int64)[group]
    table = [_copy_row(timeline, key, rows[kind == number]) for key, number in kinds.items()]
    return tuple(sorted(table, key=lambda row: -row.time_us))


def exchanges(timeline: Timeline, windows: Intervals, steps: int) -> tuple[CollectiveFacts, ...]:
    """Kernels launched in the windows whose exchange with other ranks is recorded; the costliest kind first."""
    if "collective" not in timeline.extra:
        return ()
    rows = _launched(timeline, windows, *KERNELS)
    rows = rows[np.isfinite(timeline.extra["collective"][rows])]
    return collective_facts(timeline, rows, timeline.duration_ns[rows], steps)


def _launched(timeline: Timeline, windows: Intervals, *kinds: What) -> Rows:
    """Rows of these kinds, on all devices, whose launch lies within the windows."""
    rows = labels(timeline).rows(*kinds)
    return rows[covers(windows, called_ns(timeline, rows))]


def _tensor_core_fraction(timeline: Timeline, rows: Int64) -> float | None:
    if not names_tell(timeline):
        return None
    time_ns = np.bincount(timeline.name_id[rows], weights=timeline.duration_ns[rows]).tolist()
    by_use: Counter[bool | None] = Counter()
    for i in distinct(timeline.name_id[rows]):
        by_use[reading(timeline.names[i]).tensor_cores] += time_ns[i]
    total_ns = by_use.total()
    return by_use[True] / total_ns if total_ns and by_use[None] <= UNKNOWN_AT_MOST * total_ns else None


def _mean_occupancy_pct(timeline: Timeline, rows: Int64) -> float | None:
    """Mean occupancy weighted by duration; None if no kernel with a duration has the figure."""
    occupancy_pct = timeline.extra.get("occupancy_pct")
    if occupancy_pct is None:
        return None
    measured = rows[occupancy_pct[rows] >= 0]
    weight = timeline.duration_ns[measured]
    return float((occupancy_pct[measured] * weight).sum() / weight.sum()) if weight.any() else None


def est_sm_efficiency(timeline: Timeline, device_index: int, span_ns: tuple[int, int]) -> float | None:
    """Blocks per multiprocessor of the kernels running together, at most 1: the mean over the whole span of time.

    Estimated as in the TensorBoard plugin; None if no kernel of the span has the figure.
    """
    blocks_per_sm = timeline.extra.get("blocks_per_sm")
    if blocks_per_sm is None:
        return None
    start, end = span_ns
    mine = labels(timeline).on_device(device_index, *KERNELS) & (blocks_per_sm > 0)
    rows = np.flatnonzero(mine & (timeline.end_ns > start) & (timeline.start_ns < end))
    if not len(rows):
        return None
    edges = np.concatenate((timeline.start_ns[rows], timeline.end_ns[rows]))
    change = np.concatenate((blocks_per_sm[rows], -blocks_per_sm[rows]))
    order = np.argsort(edges, kind="stable")
    running = np.clip(np.cumsum(change[order])[:-1], 0.0, 1.0)
    return float((running * np.diff(np.clip(edges[order], start, end))).sum() / (end - start))


def _median_us(values_ns: Int64) -> float | None:
    return float(np.median(values_ns)) / 1e3 if len(values_ns) else None


def _copy_kind(name: str) -> tuple[str, str | None]:
    """Kind and host memory from "Memcpy HtoD (Pageable -> Device)"."""
    match = _COPY.match(name)
    if match is None:
        return "unknown", None
    ends = [_HOST_MEMORY.get(end or "") for end in match.groups()[1:]]
    return match[1], ends[0] or ends[1]


def _copy_row(timeline: Timeline, kind: tuple[str, str | None], rows: Int64) -> CopyRow:
    column = timeline.extra.get("bytes")
    size = np.full(len(rows), np.nan) if column is None else column[rows]
    duration = timeline.duration_ns[rows]
    recorded = size >= 0
    moved, copying_ns = float(size[recorded].sum()), int(duration[recorded].sum())
    return CopyRow(
        kind=kind[0],
        host_memory=kind[1],
        count=len(rows),
        time_us=int(duration.sum()) / 1e3,
        bytes=int(moved) if recorded.any() else None,
        gb_per_s=moved / copying_ns if copying_ns else None,
    )
