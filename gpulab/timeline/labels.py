"""The meaning of each span of a timeline, decided once: all analyses read these columns instead of names.

    spans = labels(timeline)
    waiting = spans.times(spans.training(What.WAIT, What.DEVICE_WAIT))

`what` follows from a span's category and name, `where` from its thread or stream, `call` from the correlation that a
host call shares with the work that it started.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import cached_property, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gpulab.intervals import EMPTY, Intervals, intersect, joined, subtract, union
from gpulab.run import Category, Int32, Int64, Run, Timeline, UInt8
from gpulab.timeline.kernel_names import is_communication
from gpulab.user_code import is_users_in_trace

P = ParamSpec("P")
T = TypeVar("T")
Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.intp]


class What(IntEnum):
    """The kind of a span."""

    OTHER = 0  # copies of annotations on the device, synchronization in a stream, categories of other programs
    # operators that PyTorch runs on the host
    OPERATOR = 1
    NODE = 2  # evaluates a node of autograd's graph
    ADDING_NODE = 3  # evaluates a node that accumulates a gradient
    ADDING = 4  # accumulates a gradient
    EXCHANGE = 5  # begins an exchange with other ranks, or waits for one
    # exchanges that the host itself runs on a backend thread, from the call until all ranks are done
    COLLECTIVE = 6
    MESSAGE = 7  # from one rank to another
    # annotations
    ANNOTATION = 8  # of the program or a library, enclosing work
    STEP = 9  # of a step, or a mark of gpulab
    LOADER = 10  # a DataLoader at work
    UPDATE = 11  # Optimizer.step
    ZEROING = 12  # Optimizer.zero_grad
    COMPILING = 13  # a stage of torch.compile
    # calls of the GPU's runtime and driver
    CALL = 14
    LAUNCH = 15  # starts device work, which shares its correlation
    KERNEL_LAUNCH = 16  # starts a kernel: cudaLaunchKernel, urEnqueueKernelLaunch, …
    GRAPH_LAUNCH = 17  # starts a whole CUDA graph
    COPY_CALL = 18
    MEMSET_CALL = 19
    ALLOCATION = 20  # allocates or releases device or page-locked memory
    WAIT = 21  # returns when work on the device has ended: cudaStreamSynchronize, urQueueFinish, …
    DEVICE_WAIT = 22  # returns when all earlier work has ended
    EVENT_WAIT = 23  # returns when one event has occurred (which is not recorded)
    # work of a device
    KERNEL = 24
    COMMUNICATION = 25  # a kernel that exchanges data with other GPUs
    COPY = 26
    MEMSET = 27
    # the rest
    PYTHON = 28  # a Python function
    USER_PYTHON = 29  # a function of the user's code
    OVERHEAD = 30  # time of the profiler itself


OPERATORS = (What.OPERATOR, What.NODE, What.ADDING_NODE, What.ADDING, What.EXCHANGE)
NODES = (What.NODE, What.ADDING_NODE, What.ADDING)
COLLECTIVES = (What.COLLECTIVE, What.MESSAGE)
MARKS = (What.LOADER, What.UPDATE, What.ZEROING, What.ANNOTATION, What.COMPILING)
WAITS = (What.WAIT, What.DEVICE_WAIT, What.EVENT_WAIT)
KERNEL_LAUNCHES = (What.KERNEL_LAUNCH, What.GRAPH_LAUNCH)
LAUNCHES = (What.LAUNCH, *KERNEL_LAUNCHES, What.COPY_CALL, What.MEMSET_CALL)
CALLS = (What.CALL, *LAUNCHES, What.ALLOCATION, *WAITS)
KERNELS = (What.KERNEL, What.COMMUNICATION)
WORK = (*KERNELS, What.COPY, What.MEMSET)


class Where(IntEnum):
    """The thread or stream on which a span ran."""

    HOST = 0  # any other thread
    TRAINER = 1  # the thread that runs the training loop
    AUTOGRAD = 2  # a thread that evaluates nodes of the autograd graph
    STREAM = 3  # of a device


_HOST_KINDS = (  # by the begin of a name; the first match decides
    (("gloo:send", "gloo:recv", "mpi:send", "mpi:recv", "ucc:send", "ucc:recv"), What.MESSAGE),
    (("gloo:", "mpi:", "ucc:"), What.COLLECTIVE),
    (("c10d::", "_c10d_functional::"), What.EXCHANGE),
    (("enumerate(DataLoader)",), What.LOADER),
    (("Optimizer.step#",), What.UPDATE),
    (("Optimizer.zero_grad#",), What.ZEROING),
    (("ProfilerStep#", "gpulab."), What.STEP),
)
_CALL_KINDS = (
    (("cudaMemcpy", "hipMemcpy", "cuMemcpy"), What.COPY_CALL),
    (("cudaMemset", "hipMemset", "cuMemset"), What.MEMSET_CALL),
    (
        ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaHostRegister", "hipMalloc", "hipFree", "hipHostMalloc"),
        What.ALLOCATION,
    ),
    (("cudaDeviceSynchronize", "hipDeviceSynchronize", "cuCtxSynchronize"), What.DEVICE_WAIT),
)
_OF_CATEGORY: Mapping[int, What] = {
    Category.KERNEL: What.KERNEL,
    Category.GPU_MEMCPY: What.COPY,
    Category.GPU_MEMSET: What.MEMSET,
    Category.PYTHON_FUNCTION: What.PYTHON,
    Category.OVERHEAD: What.OVERHEAD,
}
EVALUATING = "autograd::engine::evaluate_function: "
_ADDING = "torch::autograd::AccumulateGrad"
_WAIT = re.compile(r"(?<![Aa])[Ss]ync(?!hronizationPolicy)|^(?!.*Enqueue).*(Finish|Wait)$")
_NODE = re.compile(r"(Backward\d*|AccumulateGrad)$")  # torch before 1.9 names only the node: `AddBackward0`
FUNCTION = re.compile(r"(?P<file>[^<>()]+\.(?:py|ipynb))\((?P<line>\d+)\): (?P<function>.+)")  # in Kineto's spelling
OPERATOR_OF_NODE = re.compile(r"(\w+?)Backward\d*$")  # in the spelling of `plain_name`


def distinct(numbers: npt.NDArray[np.integer[Any]]) -> list[int]:
    """The distinct numbers, in order; all must be small and not negative."""
    return np.flatnonzero(np.bincount(numbers)).tolist()


class Pieces(Struct, frozen=True):
    """Disjoint pieces of one thread: the name of each (index into the timeline's names), its begin and its end."""

    name_id: Int64
    start_ns: Int64
    end_ns: Int64

    def times(self, name_id: int) -> Intervals:
        """The time of all pieces with this name."""
        mine = self.name_id == name_id
        return union(self.start_ns[mine], self.end_ns[mine])


def once(compute: Callable[Concatenate[Labels, P], T]) -> Callable[Concatenate[Timeline, P], T]:
    """Caches a figure of a timeline that several analyses need, as long as the labels live.

    All other arguments must be hashable.
    """

    @wraps(compute)
    def answer(timeline: Timeline, /, *args: P.args, **kwargs: P.kwargs) -> T:
        spans = labels(timeline)
        answers = spans.__dict__.setdefault("answers", {})
        key = (compute, args, *kwargs.items())
        if key not in answers:
            answers[key] = compute(spans, *args, **kwargs)
        result: T = answers[key]
        return result

    return answer


class Labels(Timeline, frozen=True, eq=False, kw_only=True, dict=True):
    """A timeline with the meaning of its spans.

    `call`: for device work, the row of the call that started it, else -1. Of several calls with one correlation, the
    earliest counts.
    """

    what: UInt8  # What
    where: UInt8  # Where
    call: Int32

    def of(self, *kinds: What) -> Mask:
        """Rows whose kind is one of these."""
        lowest, width = min(kinds), max(kinds) - min(kinds) + 1
        if width == len(set(kinds)):  # adjacent kinds need only one comparison: smaller values wrap around
            return np.asarray(self.what - np.uint8(lowest) < width)
        which = np.zeros(256, dtype=bool)
        which[list(kinds)] = True
        return np.asarray(np.take(which, self.what))

    def training(self, *kinds: What) -> Mask:
        """Rows of these kinds on the training thread and the autograd threads."""
        return self.of(*kinds) & self.on_training_threads

    def rows(self, *kinds: What) -> Rows:
        """Indices of the rows whose kind is one of these."""
        return np.flatnonzero(self.of(*kinds))

    @cached_property
    def end_ns(self) -> Int64:
        """End of each span."""
        return self.start_ns + self.duration_ns

    @cached_property
    def on_training_threads(self) -> Mask:
        """Rows on the training thread or an autograd thread."""
        return np.asarray(self.where - np.uint8(Where.TRAINER) <= Where.AUTOGRAD - Where.TRAINER)

    def named(self, test: Callable[[str], bool], rows: Rows | Mask | slice = slice(None)) -> Mask:
        """Which of these rows have a name that passes the test; each distinct name is tested once."""
        passing = np.fromiter(map(test, self.names), dtype=bool, count=len(self.names))
        return np.asarray(passing[self.name_id[rows]])

    def times(self, which: Mask | Rows) -> Intervals:
        """The time that the chosen rows cover."""
        start = self.start_ns[which]
        return union(start, start + self.duration_ns[which])

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """Indices of the GPUs that worked."""
        return tuple(sorted({self.lanes[i].process for i in distinct(self.lane_id[self.of(*WORK)])}))

    @once
    def on_device(self, index: int, *kinds: What) -> Mask:
        """Rows of these kinds on the streams of that GPU; without kinds, its kernels, copies and memsets."""
        theirs = np.array([lane.kind == "stream" and lane.process == index for lane in self.lanes], dtype=bool)
        of_device: Mask = self.of(*(kinds or WORK)) & theirs[self.lane_id]
        return of_device

    @cached_property
    def loading(self) -> Intervals:
        """The time in which the training thread is in the DataLoader."""
        return self.times(self.of(What.LOADER) & (self.where == Where.TRAINER))

    @cached_property
    def zeroing(self) -> Intervals:
        """The time inside `Optimizer.zero_grad`."""
        return self.times(self.training(What.ZEROING))

    @cached_property
    def stepping(self) -> Intervals:
        """The time inside `Optimizer.step`, from the end of the last backward pass in it on.

        Lightning and LBFGS pass the forward and backward passes as a closure, which the optimizer then calls.
        """
        stepping = self.times(self.training(What.UPDATE))
        nodes = self.training(*NODES) & (self.duration_ns > 0)
        start, end = self.start_ns[nodes], self.end_ns[nodes]
        if not len(stepping) or not len(start):
            return stepping
        latest = np.maximum.accumulate(end)
        last = np.searchsorted(start, stepping[:, 1], side="left") - 1
        begun = np.where(last >= 0, np.minimum(latest[np.maximum(last, 0)], stepping[:, 1]), stepping[:, 0])
        return np.stack((np.maximum(stepping[:, 0], begun), stepping[:, 1]), axis=1)

    @cached_property
    def updating(self) -> Intervals:
        """The time of updating the parameters and zeroing their gradients."""
        return joined(self.stepping, self.zeroing)

    @cached_property
    def exchanging(self) -> Intervals:
        """The time in which the training thread exchanges data with other ranks, or waits for them (CPU device).

        This includes the user's own operators, such as an autograd Function, that make such a call and wait for it: the
        time while a collective runs, without operators that compute inside. It also includes the hooks of
        DistributedDataParallel that hand over a bucket of gradients: the time of autograd for a parameter after its
        gradient was accumulated.
        """
        calls = self.training(What.EXCHANGE)
        if not calls.any():
            return EMPTY
        other = np.flatnonzero(self.training(*(kind for kind in OPERATORS if kind != What.EXCHANGE)))
        start, end, called = self.start_ns[other], self.end_ns[other], self.start_ns[calls]
        calling = np.searchsorted(called, end) > np.searchsorted(called, start)
        around, inside = other[calling], other[~calling]
        computing = self.times(inside[self.what[inside] != What.ADDING])
        waiting = intersect(self.times(around), self.times(self.of(*COLLECTIVES)))
        nodes = around[self.what[around] == What.ADDING_NODE]
        handing = self._after_adding(self.start_ns[nodes], self.end_ns[nodes])
        return joined(self.times(calls), subtract(joined(waiting, handing), computing))

    def _after_adding(self, start: Int64, end: Int64) -> Intervals:
        """The time of such nodes after their last accumulation of a gradient; the whole node if it has none."""
        adding = self.training(What.ADDING)
        if not len(start) or not adding.any():
            return union(start, end)
        last = np.searchsorted(self.start_ns[adding], end) - 1
        inside = (last >= 0) & (self.start_ns[adding][last] >= start)
        return union(np.where(inside, self.end_ns[adding][last], start), end)

    def pieces(self, rows: Rows) -> Pieces:
        """The time in which each of these nested rows is the innermost."""
        opened: list[tuple[int, int]] = []  # name, end
        stretches: list[tuple[int, int, int]] = []
        at, latest = 0, np.iinfo(np.int64).max
        columns = (self.name_id[rows], self.start_ns[rows], self.end_ns[rows])
        for name, start, end in [*zip(*(column.tolist() for column in columns), strict=True), (-1, latest, latest)]:
            while opened and opened[-1][1] <= start:
                closed, until = opened.pop()
                stretches.append((closed, at, until))
                at = max(at, until)
            if opened:
                stretches.append((opened[-1][0], at, start))
            at = start
            opened.append((name, end))
        return Pieces(*np.array([one for one in stretches if one[2] > one[1]], np.int64).reshape(-1, 3).T)

    @cached_property
    def user_functions(self) -> Pieces:
        """The time of the training thread in each function of the user's code."""
        return self.pieces(np.flatnonzero(self.of(What.USER_PYTHON) & (self.where == Where.TRAINER)))

    @cached_property
    def operators(self) -> CallTree:
        """The operators of the training threads as trees."""
        return CallTree.of(self, np.flatnonzero(self.training(*OPERATORS)))

    @cached_property
    def computing(self) -> Intervals:
        """The time in which the training thread or autograd is in an operator that computes, on the CPU device."""
        return subtract(self.times(self.training(*OPERATORS)), self.exchanging)


class CallTree(Struct, frozen=True):
    """The spans of some host rows of one timeline as trees, thread by thread.

    `parent[i]` is the position in `rows` of the innermost row that was still open on that thread when `rows[i]` began;
    -1 if none was. Rows of zero length are left out.
    """

    rows: Int64
    parent: Int64

    @classmethod
    def of(cls, timeline: Timeline, rows: Rows) -> CallTree:
        """The tree of these rows, which must be in the timeline's order."""
        rows = rows[timeline.duration_ns[rows] > 0]
        by_lane = np.argsort(timeline.lane_id[rows], kind="stable")
        rows = rows[by_lane]
        parent = np.full(len(rows), -1, dtype=np.int64)
        for first, last in _blocks(timeline.lane_id[rows]):
            block = rows[first:last]
            held = open_at_start(timeline.start_ns[block], timeline.end_ns[block])
            parent[first:last] = np.where(held >= 0, held + first, -1)
        return cls(rows, parent)

    def innermost(self, timeline: Timeline, points: npt.NDArray[np.signedinteger[Any]]) -> Int64:
        """For each point (host row), the row of the innermost span open at its start on its thread; -1 if none."""
        innermost = np.full(len(points), -1, dtype=np.int64)
        if len(self.rows) == 0 or len(points) == 0:
            return innermost
        for first, last in _blocks(timeline.lane_id[self.rows]):
            mine = np.flatnonzero(timeline.lane_id[points] == timeline.lane_id[self.rows[first]])
            block = self.rows[first:last]
            at = timeline.start_ns[points[mine]]
            position = first + np.searchsorted(timeline.start_ns[block], at, side="right") - 1
            position[position < first] = -1
            climbing = np.flatnonzero(position >= 0)
            while len(climbing):
                closed = timeline.end_ns[self.rows[position[climbing]]] <= at[climbing]
                climbing = climbing[closed]
                position[climbing] = self.parent[position[climbing]]
                climbing = climbing[position[climbing] >= 0]
            innermost[mine] = np.where(position >= 0, self.rows[position], -1)
        return innermost

    def self_ns(self, timeline: Timeline) -> Int64:
        """Each row's duration without the rows directly in it, in ns, in the order of `rows`."""
        own: Int64 = timeline.duration_ns[self.rows].copy()
        inside = np.flatnonzero(self.parent >= 0)
        child, above = self.rows[inside], self.rows[self.parent[inside]]
        shared = np.minimum(timeline.end_ns[child], timeline.end_ns[above]) - timeline.start_ns[child]
        np.subtract.at(own, self.parent[inside], shared)
        return np.maximum(own, 0)


def open_at_start(start: Int64, end: Int64) -> Int64:
    """For each span of one lane, the latest earlier row that had not ended when it began; -1 if none.

    Rows are sorted by start, longer first. The earlier span need not contain the whole later span: time stamps rounded
    by the profiler let children outlive their parents. A candidate that had ended is replaced by its own candidate, for
    all rows at once: every row between the two had ended before either began.
    """
    if not len(start):
        return np.empty(0, dtype=np.int64)
    candidate = np.arange(-1, len(start) - 1)
    candidate[1:][np.maximum.accumulate(end)[:-1] <= start[1:]] = -1
    climbing = np.flatnonzero(candidate >= 0)
    while len(climbing := climbing[end[candidate[climbing]] <= start[climbing]]):
        candidate[climbing] = candidate[candidate[climbing]]
        climbing = climbing[candidate[climbing] >= 0]
    return candidate


def _blocks(lane_id: np.ndarray) -> list[tuple[int, int]]:
    """[first, last) of each run of equal lanes."""
    edges = np.flatnonzero(np.diff(lane_id, prepend=-1, append=-1))
    return list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))


_labels_of: WeakKeyDictionary[Timeline, Labels] = WeakKeyDictionary()


def labels(timeline: Timeline) -> Labels:
    """The labels of a timeline: made at the first call, kept as long as the timeline."""
    if isinstance(timeline, Labels):
        return timeline
    columns = _labels_of.get(timeline)
    if columns is None:
        columns = _labels_of[timeline] = _labels(timeline)
    return columns


def _labels(timeline: Timeline) -> Labels:
    what = _what(timeline)
    call = np.full(len(timeline), -1, dtype=np.int32)
    calls, work = (np.flatnonzero(np.isin(what, kinds)) for kinds in (CALLS, WORK))
    started, launching = matched(timeline, work, calls)
    call[started] = launching
    unnamed = calls[what[calls] == What.CALL]
    what[matched(timeline, unnamed, work)[0]] = What.LAUNCH
    columns = {name: getattr(timeline, name) for name in timeline.__struct_fields__}
    return Labels(**columns, what=what, where=_where(timeline, what)[timeline.lane_id], call=call)


def _what(timeline: Timeline) -> UInt8:
    """The kind of each span; each pair of category and name is looked up once."""
    pair = timeline.category.astype(np.int64) * len(timeline.names) + timeline.name_id
    used = np.flatnonzero(np.bincount(pair))
    table = np.zeros(int(used.max(initial=0)) + 1, dtype=np.uint8)
    for number in used.tolist():
        category, name = divmod(number, len(timeline.names))
        table[number] = kind_of(category, timeline.names[name])
    return np.asarray(table[pair])


def kind_of(category: int, name: str) -> What:
    """The kind of a span with that category and name."""
    if category in (Category.CUDA_RUNTIME, Category.CUDA_DRIVER):
        return _kind_of_call(name)
    if category == Category.KERNEL and is_communication(name):
        return What.COMMUNICATION
    if category == Category.PYTHON_FUNCTION and (function := FUNCTION.fullmatch(name)):
        return What.USER_PYTHON if is_users_in_trace(function["file"]) else What.PYTHON
    if category not in (Category.CPU_OP, Category.USER_ANNOTATION):
        return _OF_CATEGORY.get(category, What.OTHER)
    kind = next((kind for prefixes, kind in _HOST_KINDS if name.startswith(prefixes)), None)
    if kind is not None:
        return kind
    if category == Category.USER_ANNOTATION:
        return What.COMPILING if name.endswith("(dynamo_timed)") else What.ANNOTATION
    if name.startswith((_ADDING, EVALUATING + _ADDING)):
        return What.ADDING if name.startswith(_ADDING) else What.ADDING_NODE
    return What.NODE if name.startswith("autograd::engine") or _NODE.search(name) else What.OPERATOR


def _kind_of_call(name: str) -> What:
    """The kind of a call of the runtime or the driver; cudaLaunchHostFunc starts a host function."""
    if "GraphLaunch" in name:
        return What.GRAPH_LAUNCH
    if "launch" in name.lower() and "LaunchHostFunc" not in name:
        return What.KERNEL_LAUNCH
    kind = next((kind for prefixes, kind in _CALL_KINDS if name.startswith(prefixes)), None)
    if kind is None and _WAIT.search(name):
        kind = What.EVENT_WAIT if "EventSynchronize" in name else What.WAIT
    return What.CALL if kind is None else kind


def _where(timeline: Timeline, what: UInt8) -> UInt8:
    """The `Where` of each lane."""
    where = np.array([Where.STREAM if lane.kind == "stream" else Where.HOST for lane in timeline.lanes], np.uint8)
    for lane in distinct(timeline.lane_id[(what >= min(NODES)) & (what <= max(NODES))]):
        where[lane] = where[lane] or Where.AUTOGRAD  # HOST is 0
    if timeline.training_lane is not None:
        where[timeline.training_lane] = Where.TRAINER
    return where


def matched(timeline: Timeline, rows: Rows, partners: Rows) -> tuple[Rows, Rows]:
    """The rows of `rows` that share their correlation with one of `partners`, each with its first such partner."""
    keys_of_rows, offered = timeline.correlation[rows], timeline.correlation[partners]
    order = np.argsort(offered, kind="stable")
    keys = offered[order]
    if len(keys) == 0:
        return rows[:0], partners[:0]
    at = np.minimum(np.searchsorted(keys, keys_of_rows), len(keys) - 1)
    shared = (keys[at] == keys_of_rows) & (keys_of_rows > 0)
    return rows[shared], partners[order[at[shared]]]


def plain_name(name: str) -> str:
    """An operator's name in the form that autograd's names contain: `aten::add_` belongs to AddBackward0."""
    return name.rpartition("::")[2].replace("_", "").lower()


def differentiates_twice(run: Run) -> bool:
    """Whether a gradient is differentiated: by the code's own request, else by autograd nodes of second derivatives."""
    if run.training is not None and run.training.differentiates_twice:
        return True
    return run.timeline is not None and any("BackwardBackward" in name for name in run.timeline.names)
