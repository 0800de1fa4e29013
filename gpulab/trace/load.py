"""A trace file as a `Run`: the reader's result and its steps, joined into one record."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import numpy as np

from gpulab.run import (
    DEVICE_CATEGORIES,
    Choice,
    Device,
    DeviceProperties,
    Environment,
    Memory,
    MemoryEvents,
    Missing,
    Observer,
    Run,
    Samples,
    Series,
    Settings,
    Timeline,
    TraceOrigin,
)
from gpulab.timeline.labels import CALLS, LAUNCHES, labels
from gpulab.timeline.memory_curve import HOST, MemoryCurve, memory
from gpulab.timeline.trace_steps import WHOLE_WINDOW, FoundSteps, find_steps
from gpulab.trace.kineto_file import Trace, read_trace

MEMORY_POINTS = 400  # points of the memory curve: more than the width of a picture shows
NO_NAME = "GPU (name not in the trace)"
NO_NAME_OF_OTHER = "accelerator (name not in the trace)"
_OF_CPU = re.compile("mkldnn|onednn|mkl_|_cpu")  # operators that only a CPU runs
NOT_IN_THIS_PART = "not in this part of the file"  # in a file that is cut short: the GPU's work comes last
_ENDINGS = (".gz", ".json", ".trace", ".pt")

Tell = Callable[[float], None]
READERS: dict[str, Callable[[Path], Trace]] = {  # by the ending of a file's name
    ".json": read_trace,
    ".json.gz": read_trace,
}


def load_run(path: str | Path, tell: Tell = lambda _: None) -> Run:
    """The run in a trace file. Raises TraceError if it cannot be read, in one sentence with the next step.

    `tell` is called with the fraction that has been read. A file with none of the endings of READERS is read as a
    PyTorch trace.
    """
    path = Path(path)
    reader = READERS.get(next(filter(path.name.endswith, READERS), ""), read_trace)
    trace = read_trace(path, tell) if reader is read_trace else reader(path)
    trace_steps = find_steps(trace.timeline)
    device = _device(trace)
    start, end = trace.timeline.window_ns
    run = Run(
        id=_identity(path),
        created=_created(trace.origin),
        source="trace",
        settings=Settings(name=_identity(path), live=False, save=False),
        device=device,
        environment=_environment(trace.origin),
        steps=trace_steps.steps,
        samples=Samples(tuple(_memory_curve(c, trace.timeline.window_ns) for c in memory(trace.memory_events))),
        timeline=trace.timeline,
        wall_ns=end - start,
        outcome="completed",
        step_source=trace_steps.source,
        memory=_memory(trace.memory_events, device),
        observer=Observer(event_count=trace.origin.events_read),
        missing=tuple(_missing(trace, trace_steps, device)),
        choices=_choices(trace, trace_steps),
        traced_numbers=trace_steps.traced_numbers,
        origin=trace.origin,
        memory_events=trace.memory_events,
    )
    run.check()
    return run


def _identity(path: Path) -> str:
    name = path.name
    while name.endswith(_ENDINGS) and "." in name[1:]:
        name = name[: name.rindex(".")]
    return name


def _created(origin: TraceOrigin) -> str:
    """When the trace begins, if its clock is Unix time; else an empty text."""
    seconds = origin.zero_ns / 1e9
    if not 1.4e9 < seconds < 4e9:
        return ""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _environment(origin: TraceOrigin) -> Environment:
    """The environment of a trace: its software, and what little it says about its machine."""
    unknown = "not in the trace"
    return Environment(
        python=unknown,
        platform=unknown,
        cpu=unknown,
        logical_cores=None,
        usable_cores=None,
        memory_total_bytes=None,
        packages=dict(origin.versions),
    )


def _device(trace: Trace) -> Device:
    timeline = trace.timeline
    cut, index = trace.origin.is_cut_short, _busiest_device(timeline)
    if not timeline.has_device_events and not cut and (unread := _unread(trace)):
        return Device("unknown", unread)
    if not timeline.has_device_events and not labels(timeline).of(*LAUNCHES).any():
        if not cut:
            return Device("cpu", "name not in the trace")
        if len({d.name for d in trace.origin.device_properties}) != 1:
            return Device("unknown", NOT_IN_THIS_PART)
    properties = _properties(trace.origin, index)
    if properties is None and cut:
        return Device("cuda", NOT_IN_THIS_PART, index)
    if properties is None:
        return Device("cuda", NO_NAME if _speaks_cuda(timeline) else NO_NAME_OF_OTHER, index)
    return Device(
        "cuda",
        properties.name or NO_NAME,
        index,
        memory_total_bytes=properties.total_memory_bytes,
        details={
            "sm_count": properties.sm_count,
            "compute_capability": properties.compute_capability,
            "warp_size": properties.warp_size,
            "max_threads_per_sm": properties.max_threads_per_sm,
        },
    )


def _unread(trace: Trace) -> str:
    """The accelerator whose rows are not kernels, or of which the trace has only the name; empty without one."""
    timeline, names = trace.timeline, " and ".join(sorted({d.name or NO_NAME for d in trace.origin.device_properties}))
    if _speaks_cuda(timeline):
        return ""
    streams = [i for i, lane in enumerate(timeline.lanes) if lane.kind == "stream"]
    if np.isin(timeline.lane_id, streams).any():
        return f"{names or 'an accelerator'}, which gpulab cannot read"
    events = trace.memory_events
    on_cpu = any(map(_OF_CPU.search, timeline.names)) or (events is not None and (events.device_index < 0).all())
    return f"{names} (not recorded)" if names and not on_cpu else ""


def _speaks_cuda(timeline: Timeline) -> bool:
    """Whether the trace has calls of CUDA or HIP, or GPU work without calls of any runtime."""
    spans = labels(timeline)
    calls = spans.named(lambda name: name.startswith(("cu", "hip")), spans.of(*CALLS))
    return bool(calls.any()) or (timeline.has_device_events and not len(calls))


def _properties(origin: TraceOrigin, index: int | None) -> DeviceProperties | None:
    """The device that worked; if unknown, the model of the first device."""
    matching = [d for d in origin.device_properties if d.id == index]
    return next(iter(matching or (origin.device_properties if index is None else ())), None)


def _device_time(timeline: Timeline) -> dict[int, int]:
    """Summed span time per device index, to find the device that this trace is about."""
    rows = np.isin(timeline.category, [int(c) for c in DEVICE_CATEGORIES])
    per_lane = np.bincount(timeline.lane_id[rows], timeline.duration_ns[rows] + 1.0, minlength=len(timeline.lanes))
    time: dict[int, int] = {}
    for lane, spent in zip(timeline.lanes, per_lane.tolist(), strict=True):
        if spent:
            time[lane.process] = time.get(lane.process, 0) + int(spent)
    return time


def _busiest_device(timeline: Timeline) -> int | None:
    time = _device_time(timeline)
    return max(time, key=lambda index: time[index]) if time else None


def _memory_curve(curve: MemoryCurve, window_ns: tuple[int, int]) -> Series:
    """The memory that the allocator held, at even distances: the most between one reading and the next."""
    at = np.linspace(*window_ns, MEMORY_POINTS).astype(np.int64)
    first = np.searchsorted(curve.t_ns, at, side="left")
    allocated = np.concatenate(([0], curve.allocated_bytes))  # before the first event: unknown, or the held memory
    if curve.absolute and len(curve.t_ns):
        allocated[0] = curve.allocated_bytes[0]
    most = [allocated[a : max(b, a) + 1].max() for a, b in pairwise([*first.tolist(), len(curve.t_ns)])]
    where = "host memory" if curve.device_index == HOST else f"GPU {curve.device_index} memory"
    return Series(
        name=f"allocated_{'host' if curve.device_index == HOST else f'gpu{curve.device_index}'}_bytes",
        unit="bytes",
        label=where + ("" if curve.absolute else ", change"),
        source="the trace",
        t_ns=at,
        value=np.array(most, dtype=np.float64),
    )


def _memory(events: MemoryEvents | None, device: Device) -> Memory:
    if events is None or device.index is None:
        return Memory(total_bytes=device.memory_total_bytes)
    mine = events.device_index == device.index

    def peak(column: np.ndarray) -> int | None:
        values = column[mine & (column >= 0)]
        return int(values.max()) if len(values) else None

    return Memory(
        peak_allocated_bytes=peak(events.total_allocated_bytes),
        peak_reserved_bytes=peak(events.total_reserved_bytes),
        total_bytes=device.memory_total_bytes,
    )


def _missing(trace: Trace, trace_steps: FoundSteps, device: Device) -> Iterator[Missing]:
    yield Missing("live curves", "a trace holds no readings of the device's meters", key="curves")
    yield Missing("untraced step time", "a trace shows only steps that the profiler slowed down", key="step_time")
    if device.kind == "cuda" and not trace.timeline.has_device_events:
        yield Missing(
            "device time",
            "the trace holds launches but no kernel, copy or memset: the profiler got no GPU activity",
            key="breakdown",
        )
    if device.name in (NO_NAME, NO_NAME_OF_OTHER):
        yield Missing("the GPU's name and size", "the trace has no deviceProperties for it", key="device")
    if trace.memory_events is None:
        yield Missing(
            "memory over time", "recorded only with torch.profiler.profile(profile_memory=True)", key="memory"
        )
    elif device.kind == "cuda" and (trace.memory_events.total_allocated_bytes < 0).all():
        yield Missing("peak memory", "this version of torch wrote no allocator totals", key="memory")
    if trace_steps.source == WHOLE_WINDOW:
        reason = "the trace has no ProfilerStep, DataLoader or optimizer marks that tell two whole steps apart"
        yield Missing("steps", reason, key="steps")


def _choices(trace: Trace, trace_steps: FoundSteps) -> tuple[Choice, ...]:
    choices = [Choice("steps", trace_steps.source, _REASONS[trace_steps.source])]
    devices = _device_time(trace.timeline)
    if len(devices) > 1:
        others = ", ".join(f"GPU {i}" for i in sorted(devices))
        index = _busiest_device(trace.timeline)
        choices.append(Choice("device", f"GPU {index}", f"the one that worked longest of {others}"))
    return tuple(choices)


_REASONS = {
    "ProfilerStep": "torch.profiler's own marks, from profiler.step()",
    "DataLoader": "no ProfilerStep: a step is the time from one fetch to the next on the training thread",
    "Optimizer.step": "no ProfilerStep and no DataLoader mark: a step is the time between two updates",
    WHOLE_WINDOW: "no marks that tell two whole steps apart: the whole window stands as one",
}
