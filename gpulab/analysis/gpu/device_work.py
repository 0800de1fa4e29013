"""What one GPU did within the profiled steps, row by row: which call started it, for which operator, of what class."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gpulab.analysis.breakdown import Breakdown
from gpulab.intervals import Intervals, covers, intersect, joined, paint, subtract, union
from gpulab.run import Category, Int64, Timeline, UInt8
from gpulab.timeline import spans
from gpulab.timeline.device_steps import launched_within
from gpulab.timeline.kernel_names import reading
from gpulab.timeline.launches import CallTree, launch_of, replay_of, replay_times, unrecorded_times
from gpulab.timeline.start_up import start_up


class DeviceWork(Struct, frozen=True):
    """Columns, one row per kernel, copy or memset of the accounted device that a step launched, in order of time.

    Steps are `windows` on the device and `host_windows` on the host, [n, 2] in ns. `idle` is the time in `windows` in
    which the device did nothing. Times per step are sums over the steps divided by their number; sums over kernels
    count two streams twice.
    """

    timeline: Timeline
    windows: Intervals
    host_windows: Intervals
    idle: Intervals
    tree: CallTree  # of all operators
    rows: Int64  # in the timeline
    call: Int64  # row of the call that started it; -1: not in the trace
    operator: Int64  # row of the innermost operator around that call; -1: none
    kind: UInt8  # index into CLASSES

    @property
    def of_optimizer(self) -> spans.Mask:
        """Which rows were started inside an optimizer's step or zero_grad."""
        return self.launched_in(spans.update_times(self.timeline))

    def launched_in(self, times: Intervals) -> spans.Mask:
        """Which rows were started within these times of the host."""
        return (self.call >= 0) & covers(times, self.timeline.start_ns[self.call])

    @property
    def steps(self) -> int:
        return max(1, len(self.windows))

    @property
    def kernel(self) -> spans.Mask:
        return np.asarray(self.timeline.category[self.rows] == Category.KERNEL)

    def of(self, *kinds: str) -> spans.Mask:
        return np.isin(self.kind, [CLASSES.index(k) for k in kinds]) & self.kernel

    def us(self, chosen: spans.Mask) -> float:
        """Device time of the chosen rows per step."""
        return float(self.timeline.duration_ns[self.rows[chosen]].sum()) / self.steps / 1e3

    def share(self, chosen: spans.Mask) -> float:
        """Of the time of all kernels but communication: what the chosen kernels take."""
        all_us = self.us(self.kernel & ~self.of("communication"))
        return self.us(chosen & self.kernel) / all_us if all_us else 0.0

    def costliest(self, chosen: spans.Mask) -> str:
        """The name that takes most time of the chosen rows; empty where there is none."""
        rows = self.rows[chosen]
        if not len(rows):
            return ""
        time_ns = np.bincount(self.timeline.name_id[rows], weights=self.timeline.duration_ns[rows])
        return self.timeline.names[int(time_ns.argmax())]

    def per_step_us(self, times: Intervals) -> float:
        """The length of these times of the device within the steps, in µs per step.

        It is the median, so that no odd step speaks for all. A step without any of it counts as 0.
        """
        return median_per_step_us(self.windows, times)

    def host_per_step_us(self, times: Intervals) -> float:
        """The same of times of the host."""
        return median_per_step_us(self.host_windows, times)

    def names_of(self, rows: Int64) -> npt.NDArray[np.object_]:
        """The names of rows of the timeline; "" for -1."""
        names = np.array([*self.timeline.names, ""], dtype=object)
        of_rows: npt.NDArray[np.object_] = names[np.where(rows >= 0, self.timeline.name_id[rows], -1)]
        return of_rows


def device_work(timeline: Timeline | None, account: Breakdown | None) -> DeviceWork | None:
    """The work accounted in `account`; None where that is not a GPU's."""
    if timeline is None or account is None or account.device_index is None or not account.steps:
        return None
    windows, host = account.windows, account.host_windows
    every = np.flatnonzero(spans.device_items(timeline, account.device_index))
    rows = every[launched_within(timeline, every, host, windows)]
    call = launch_of(timeline, rows)
    tree = CallTree.of(timeline, np.flatnonzero(spans.in_category(timeline, Category.CPU_OP)))
    operator = np.full(len(rows), -1, dtype=np.int64)
    operator[call >= 0] = tree.innermost(timeline, call[call >= 0])
    unrecorded = unrecorded_times(timeline, account.device_index)
    busy = joined(union(timeline.start_ns[every], timeline.end_ns[every]), unrecorded)
    steps = subtract(union(windows[:, 0], windows[:, 1]), start_up(timeline, account.device_index).times)
    return DeviceWork(
        timeline=timeline,
        windows=windows,
        host_windows=host,
        idle=subtract(steps, busy),
        tree=tree,
        rows=rows,
        call=call,
        operator=operator,
        kind=_kinds(timeline, rows, operator),
    )


def median_per_step_us(windows: Intervals, times: Intervals) -> float:
    """The length of these times in the median window, in µs."""
    return float(np.median(paint(windows, [times])[:, 0])) / 1e3


def _kinds(timeline: Timeline, rows: Int64, operator: Int64) -> UInt8:
    """Each distinct pair of kernel and operator is asked once."""
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
    """Of the time in kernels what replayed graphs ran."""
    rows = work.rows[work.kernel]
    duration_ns = work.timeline.duration_ns[rows]
    total_ns = int(duration_ns.sum())
    replayed_ns = int(duration_ns[replay_of(work.timeline, rows) >= 0].sum())
    return replayed_ns / total_ns if total_ns else 0.0


def idle_within_us(work: DeviceWork) -> float:
    """How long the device idles per step inside replays."""
    if not len(work.rows):
        return 0.0
    of_device = work.timeline.lanes[int(work.timeline.lane_id[work.rows[0]])].process
    return work.per_step_us(intersect(work.idle, replay_times(work.timeline, of_device)))


# Whether the GPU's idle time is made of launches: a launch costs microseconds, so a long gap has another cause.


# Ten times the 99th percentile of the time from one operator to the next in a launch-bound program (b200_moe: 123 µs).
LONGEST_NS = 1_000_000


def not_launching_us(work: DeviceWork, elsewhere: Intervals) -> float:
    """Idle time per step in gaps with fewer than one launch per `LONGEST_NS`: starting up, loading, other work.

    `elsewhere` is time that is accounted to another cause anyway.
    """
    t = work.timeline
    begun = t.start_ns[spans.launches(t)]
    gaps = work.idle
    launches = np.searchsorted(begun, gaps[:, 1], side="left") - np.searchsorted(begun, gaps[:, 0], side="left")
    sparse = gaps[(gaps[:, 1] - gaps[:, 0]) > LONGEST_NS * (launches + 1)]
    return work.per_step_us(subtract(sparse, elsewhere))


def small_kernels_fraction(work: DeviceWork) -> float | None:
    """Share of kernel time in kernels of fewer blocks than the GPU has multiprocessors; None where not recorded."""
    blocks = work.timeline.extra.get("blocks_per_sm")
    kernel = work.kernel & ~work.of("communication")
    if blocks is None or not kernel.any():
        return None
    rows = work.rows[kernel]
    duration = work.timeline.duration_ns[rows]
    recorded = blocks[rows] >= 0
    total = int(duration[recorded].sum())
    return float(duration[recorded & (blocks[rows] < 1)].sum() / total) if total else None


def exposed_upload_us(work: DeviceWork) -> tuple[float, float, Intervals]:
    """Copies to the GPU from ordinary memory, per step: µs with no kernel beside them, bytes, and when they ran."""
    t = work.timeline
    copies = work.rows[spans.named(t, spans.starting_with("Memcpy HtoD (Pageable"))[work.rows]]
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
    "layout",  # from one order of the axes of images to the other
    "optimizer",
    "copy",
    "communication",
    "other",
)

# Operators whose kernels without a telling name are of that class.
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


def names_tell(timeline: Timeline) -> bool:
    """Whether kernel names tell number formats and matrix units: only where CUDA's own calls show that the GPU is
    NVIDIA's. AMD's libraries name only some of their matrix kernels."""
    calls = timeline.name_id[spans.runtime_calls(timeline)]
    return any(timeline.names[i].startswith("cu") for i in np.unique(calls).tolist())
