"""Which spans of a timeline mean what: loader waits, launches, synchronizations, communication."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Hashable
from typing import Any, Concatenate, ParamSpec
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from gpulab.intervals import Intervals, intersect, joined, subtract, union
from gpulab.run import DEVICE_CATEGORIES, Category, Int64, Run, Timeline
from gpulab.timeline.kernel_names import is_communication as is_communication

P = ParamSpec("P")
Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.intp]

COPYING = ("cudaMemcpy", "hipMemcpy", "cuMemcpy")
ALLOCATING = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaHostRegister", "hipMalloc", "hipFree", "hipHostMalloc")
PACKED_FROM = 1 << 20  # spans: from there a mask is kept as bits, and unpacked in a third of the time it takes to make
KEPT_TIMELINES = 2  # a comparison reads two; a notebook keeps twenty runs, whose masks would weigh more than they do
_kept_of: WeakKeyDictionary[Timeline, dict[Hashable, Any]] = WeakKeyDictionary()
_ADDING = "torch::autograd::AccumulateGrad"
EVALUATING = "autograd::engine::evaluate_function: "
_WAIT = re.compile(r"(?<![Aa])[Ss]ync(?!hronizationPolicy)|^(?!.*Enqueue).*(Finish|Wait)$")
_NODE = re.compile(r"(Backward\d*|AccumulateGrad)$")
OPERATOR_OF_NODE = re.compile(r"(\w+?)Backward\d*$")  # as `plain_name` spells it
LAUNCHING = (Category.CUDA_RUNTIME, Category.CUDA_DRIVER)
HOST_CATEGORIES = (Category.CPU_OP, *LAUNCHING)


@functools.cache  # the same test for the same prefixes, so that `named` asks each name once
def starting_with(*prefixes: str) -> Callable[[str], bool]:
    return lambda name: name.startswith(prefixes)


@functools.cache
def among(*names: str) -> Callable[[str], bool]:
    return frozenset(names).__contains__


@functools.cache
def containing(part: str) -> Callable[[str], bool]:
    return lambda name: part in name


is_host_collective = starting_with("gloo:", "mpi:", "ucc:")  # on a thread of the backend, as torch annotates it
# a message from one rank to another; NCCL's kernel for these also runs its all-to-all, a collective, and is none here
is_message = starting_with(*(f"{backend}:{way}" for backend in ("gloo", "mpi", "ucc") for way in ("send", "recv")))
is_exchange = starting_with("c10d::", "_c10d_functional::")  # a call that begins an exchange with other ranks, or waits
is_loader = starting_with("enumerate(DataLoader)")  # a DataLoader at work, as torch annotates it
is_optimizer = starting_with("Optimizer.step#", "Optimizer.zero_grad#")  # likewise
is_step = starting_with("ProfilerStep#", "gpulab.")  # a step's own annotation, or a mark of ours
is_copy_or_memset = starting_with("cudaMemcpy", "cudaMemset", "hipMemcpy", "hipMemset", "cuMemcpy", "cuMemset")
# calls that return when all earlier work on the device has ended
waits_for_everything = starting_with("cudaDeviceSynchronize", "hipDeviceSynchronize", "cuCtxSynchronize")


def is_wait(name: str) -> bool:
    """Of a runtime's calls those that return when work on the device has ended: cudaStreamSynchronize, urQueueFinish,
    mtia_stream_sync, aclrtSynchronizeStream, … but no copy: cudaMemcpyAsync, hipMemcpySync.
    """
    return _WAIT.search(name) is not None and not is_copy_or_memset(name)


def may_wait(name: str) -> bool:
    """Of a runtime's calls those that may wait for the device: waits and copies."""
    return is_wait(name) or name.startswith(COPYING)


def is_kernel_launch(name: str) -> bool:
    """Of a runtime's calls those that start kernels: cudaLaunchKernel, urEnqueueKernelLaunch, … but no graph.

    cudaLaunchHostFunc starts a function of the host.
    """
    return "launch" in name.lower() and "LaunchHostFunc" not in name and not is_graph_launch(name)


def is_graph_launch(name: str) -> bool:
    """A call that starts a whole CUDA graph."""
    return "GraphLaunch" in name


def is_launch(name: str) -> bool:
    """A call that starts anything on the device: kernels, a graph, a copy, a memset."""
    return is_kernel_launch(name) or is_graph_launch(name) or is_copy_or_memset(name)


def is_compiling(name: str) -> bool:
    """A stage of torch.compile, as it annotates itself."""
    return name.endswith("(dynamo_timed)")


def is_autograd_node(name: str) -> bool:
    """An evaluation of a node of autograd's graph; torch before 1.9 names only the node (`AddBackward0`)."""
    return name.startswith("autograd::engine") or _NODE.search(name) is not None


def plain_name(name: str) -> str:
    """An operator as autograd spells it, without signs and capitals: `aten::add_` is of AddBackward0."""
    return name.rpartition("::")[2].replace("_", "").lower()


def differentiates_twice(run: Run) -> bool:
    """Whether a gradient is differentiated: as the code asked, else as nodes of such derivatives tell."""
    if run.training is not None and run.training.differentiates_twice:
        return True
    return run.timeline is not None and any("BackwardBackward" in name for name in run.timeline.names)


def matched(timeline: Timeline, rows: npt.NDArray[np.intp], partners: npt.NDArray[np.intp]) -> tuple[Rows, Rows]:
    """Those of `rows` that share their correlation with one of `partners`, and that partner (the first) for each."""
    wanted, offered = timeline.correlation[rows], timeline.correlation[partners]
    order = np.argsort(offered, kind="stable")
    keys = offered[order]
    if len(keys) == 0:
        return rows[:0], partners[:0]
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    shared = (keys[at] == wanted) & (wanted > 0)
    return rows[shared], partners[order[at[shared]]]


def kept_of(timeline: Timeline) -> dict[Hashable, Any]:
    """What was worked out of this timeline, for all who read it; of the latest timelines only."""
    if timeline not in _kept_of:
        for oldest in list(_kept_of)[: 1 - KEPT_TIMELINES]:
            del _kept_of[oldest]
        _kept_of[timeline] = {}
    return _kept_of[timeline]


def _kept(classify: Callable[Concatenate[Timeline, P], Mask]) -> Callable[Concatenate[Timeline, P], Mask]:
    """One classification of the spans for all who read a run; its masks are read-only."""

    def kept(timeline: Timeline, /, *key: P.args, **none: P.kwargs) -> Mask:
        masks = kept_of(timeline)
        mask = masks.get((classify, *key))
        if mask is None:
            mask = classify(timeline, *key, **none)
            mask.flags.writeable = False
            masks[(classify, *key)] = np.packbits(mask) if len(timeline) > PACKED_FROM else mask
        elif len(timeline) > PACKED_FROM:
            mask = np.unpackbits(mask, count=len(timeline)).view(np.bool_)
        return mask

    return functools.update_wrapper(kept, classify)


@_kept
def named(timeline: Timeline, test: Callable[[str], bool]) -> Mask:
    """Rows whose name passes the test, which asks nothing but the name; each distinct name is asked once."""
    if not len(timeline):
        return np.empty(0, dtype=bool)
    return np.fromiter(map(test, timeline.names), dtype=bool, count=len(timeline.names))[timeline.name_id]


@_kept
def in_category(timeline: Timeline, *categories: Category) -> Mask:
    wanted = np.zeros(256, dtype=bool)
    wanted[[int(c) for c in categories]] = True
    return wanted[timeline.category]


def runtime_calls(timeline: Timeline) -> Mask:
    """Calls of the GPU's runtime and driver: launches, copies, waits, allocations."""
    return in_category(timeline, *LAUNCHING)


@_kept
def launches(timeline: Timeline) -> Mask:
    """Calls that start anything on the device: by their name, or as its work shares their correlation."""
    calls = runtime_calls(timeline)
    started, _ = matched(timeline, np.flatnonzero(calls), np.flatnonzero(device_items(timeline)))
    by_work = np.zeros(len(timeline), dtype=bool)
    by_work[started] = True
    return calls & (named(timeline, is_launch) | by_work)


def device_items(timeline: Timeline, index: int | None = None) -> Mask:
    """Kernels, copies and memsets of every GPU, or of that one."""
    items = in_category(timeline, *DEVICE_CATEGORIES)
    return items if index is None else items & on_device(timeline, index)


def devices(timeline: Timeline) -> list[int]:
    lanes = np.unique(timeline.lane_id[device_items(timeline)]).tolist()
    return sorted({timeline.lanes[i].process for i in lanes})


@_kept
def on_device(timeline: Timeline, index: int) -> Mask:
    theirs = [i for i, lane in enumerate(timeline.lanes) if lane.kind == "stream" and lane.process == index]
    return np.isin(timeline.lane_id, theirs)


@_kept
def structure(timeline: Timeline) -> Mask:
    """Annotations of the program and of libraries, which only enclose work: none of a step, loader, optimizer."""
    marks = named(timeline, _marks_work)
    return in_category(timeline, Category.USER_ANNOTATION) & ~marks


def _marks_work(name: str) -> bool:
    return is_step(name) or is_loader(name) or is_optimizer(name) or is_compiling(name)


def training_lanes(timeline: Timeline) -> list[int]:
    """The training thread and autograd's own threads: those that evaluate nodes of its graph."""
    autograd = named(timeline, is_autograd_node)
    lanes = {i for i in np.unique(timeline.lane_id[autograd]).tolist() if timeline.lanes[i].kind == "thread"}
    if timeline.training_lane is not None:
        lanes.add(timeline.training_lane)
    return sorted(lanes)


@_kept
def on_training_threads(timeline: Timeline) -> Mask:
    """Rows on the training thread or on one of autograd's."""
    return np.isin(timeline.lane_id, training_lanes(timeline))


def on_training_thread(timeline: Timeline) -> Mask:
    """Rows on the training thread itself."""
    if timeline.training_lane is None:
        return np.zeros(len(timeline), dtype=bool)
    return np.asarray(timeline.lane_id == timeline.training_lane)


def training_operators(timeline: Timeline) -> Mask:
    return in_category(timeline, Category.CPU_OP) & on_training_threads(timeline)


def autograd_nodes(timeline: Timeline) -> Mask:
    return named(timeline, is_autograd_node) & on_training_threads(timeline)


def host_collectives(timeline: Timeline) -> Mask:
    """Exchanges with other processes that the host itself carries out, from the call until all have done it."""
    return in_category(timeline, Category.USER_ANNOTATION, Category.CPU_OP) & named(timeline, is_host_collective)


def exchanging_times(timeline: Timeline) -> Intervals:
    """When the training thread is in a call that exchanges data with other ranks, or waits for them (CPU device).

    So it is in an operator of the user's own, such as an autograd Function, that makes such a call and waits for it:
    while a collective runs, the operators that compute inside aside. And so it is in a hook of DistributedDataParallel
    that hands a bucket of gradients over: what autograd does for a parameter from the end of adding its gradient on.
    """
    kept = kept_of(timeline)
    if "exchanging" not in kept:
        kept["exchanging"] = _exchanging_times(timeline)
    times: Intervals = kept["exchanging"]
    return times


def _exchanging_times(timeline: Timeline) -> Intervals:
    operators = training_operators(timeline)
    calls = operators & named(timeline, is_exchange)
    if not calls.any():
        return np.empty((0, 2), np.int64)
    around = operators & ~calls
    called = np.sort(timeline.start_ns[calls])
    around[around] = _calls_within(timeline.start_ns[around], timeline.end_ns[around], called)
    computing = covered(timeline, operators & ~calls & ~around & ~named(timeline, starting_with(_ADDING)))
    waiting = intersect(covered(timeline, around), covered(timeline, host_collectives(timeline)))
    handing = _hook_times(timeline, around)
    return joined(covered(timeline, calls), subtract(joined(waiting, handing), computing))


def _calls_within(start: Int64, end: Int64, called: Int64) -> Mask:
    """Whether something was called between start and end."""
    return np.asarray(np.searchsorted(called, end) > np.searchsorted(called, start))


def _hook_times(timeline: Timeline, around: Mask) -> Intervals:
    nodes = around & named(timeline, starting_with(f"{EVALUATING}{_ADDING}"))
    adding = training_operators(timeline) & named(timeline, starting_with(_ADDING))
    start, end = timeline.start_ns[nodes], timeline.end_ns[nodes]
    if not len(start) or not adding.any():
        return union(start, end)
    order = np.argsort(timeline.start_ns[adding], kind="stable")
    added_start, added_end = timeline.start_ns[adding][order], timeline.end_ns[adding][order]
    last = np.searchsorted(added_start, end) - 1
    inside = (last >= 0) & (added_start[last] >= start)
    begin = np.where(inside, added_end[last], start)
    return union(begin, end)


def host_computing_times(timeline: Timeline) -> Intervals:
    """When the training thread or autograd is in an operator that computes, on the CPU device."""
    return subtract(covered(timeline, training_operators(timeline)), exchanging_times(timeline))


def loading_times(timeline: Timeline) -> Intervals:
    """When the training thread is in the DataLoader."""
    return covered(timeline, on_training_thread(timeline) & named(timeline, is_loader))


def covered(timeline: Timeline, mask: Mask) -> Intervals:
    start = timeline.start_ns[mask]
    return union(start, start + timeline.duration_ns[mask])


def update_times(timeline: Timeline) -> Intervals:
    """Updating the parameters and zeroing their gradients, [n, 2] in ns."""
    return joined(step_times(timeline), zero_times(timeline))


def step_times(timeline: Timeline) -> Intervals:
    """Inside `Optimizer.step`, from the end of the last backward pass in it on: without the passes of a closure."""
    # without the forward and backward passes that run inside: Lightning and LBFGS hand them in as a closure
    stepping = _marked(timeline, "Optimizer.step#")
    nodes = autograd_nodes(timeline) & (timeline.duration_ns > 0)
    start, end = timeline.start_ns[nodes], timeline.end_ns[nodes]
    if not len(stepping) or not len(start):
        return stepping
    order = np.argsort(start, kind="stable")
    latest = np.maximum.accumulate(end[order])
    last = np.searchsorted(start[order], stepping[:, 1], side="left") - 1
    begun = np.where(last >= 0, np.minimum(latest[np.maximum(last, 0)], stepping[:, 1]), stepping[:, 0])
    return np.stack((np.maximum(stepping[:, 0], begun), stepping[:, 1]), axis=1)


def zero_times(timeline: Timeline) -> Intervals:
    return _marked(timeline, "Optimizer.zero_grad#")


def _marked(timeline: Timeline, prefix: str) -> Intervals:
    marks = in_category(timeline, Category.USER_ANNOTATION, Category.CPU_OP) & on_training_threads(timeline)
    return covered(timeline, marks & named(timeline, starting_with(prefix)))
