"""Many profiler sessions in one process: kernels that are lost, early or shifted in each, and what stays slow after."""

from __future__ import annotations

import os
import time
from statistics import median

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import asdict
from torch.profiler import profile

from benchmarks.gpu_first.answer import Answer
from benchmarks.gpu_first.stage import Stage
from gpulab.run import Category, Timeline
from gpulab.timeline.labels import KERNELS as KERNEL_KINDS
from gpulab.timeline.labels import What, labels
from gpulab.trace.profiler_result import Recording

SESSIONS = 12
KERNELS = 200
IDLE_S = 0.3  # between two sessions: the loss is reported with idle time between them
TOLERANCE_NS = 1_000
LOOP_LAUNCHES = 400  # about 2 ms of launches
LOOPS = 60
FIRST_MARK, SECOND_MARK = "first kernels", "counted kernels"


class Session(Struct, frozen=True):
    """Counts of one session. `lost_at` are the positions of the launches without a kernel, the first launch is 0."""

    launches: int
    kernels: int
    lost: int
    lost_at: tuple[int, ...]
    early: int  # kernels that begin before their launch
    shifted: int  # kernels that end after the call that waited for them


def measure(answer: Answer, stage: Stage, sacrificial: int) -> None:
    """Sessions one after the other, with so many kernels launched first whose loss does no harm."""
    x = torch.zeros(1024, device=stage.device)
    answer.figure("TEARDOWN_CUPTI", os.environ.get("TEARDOWN_CUPTI"))
    before_ms = loop_ms(stage, x)
    sessions: list[Session] = []
    for _ in range(stage.size(SESSIONS, 2)):
        time.sleep(0 if stage.simulated else IDLE_S)
        sessions.append(counted(recorded(stage, x, sacrificial)))
        answer.figure("sessions", [asdict(session) for session in sessions])
    after_ms = loop_ms(stage, x)
    slowdown = after_ms / before_ms - 1
    answer.figure("launch_bound_loop", {"before_ms": before_ms, "after_ms": after_ms, "slowdown": slowdown})
    _judge(answer, stage, sessions, sacrificial)
    expected = "at most 3 % slower after the sessions"
    answer.check("launch-bound loop", expected, f"{slowdown:+.1%}", agrees=slowdown <= 0.03)


def loop_ms(stage: Stage, x: torch.Tensor) -> float:
    """The median time of a loop that does nothing but launch."""
    launches, times = stage.size(LOOP_LAUNCHES, 20), []
    for _ in range(stage.size(LOOPS, 5)):
        stage.synchronize()
        began = time.perf_counter()
        for _ in range(launches):
            x.add_(1)
        stage.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return median(times)


def recorded(stage: Stage, x: torch.Tensor, sacrificial: int) -> Timeline:
    """One session of torch's profiler: kernels that may be lost, then those that count."""
    stage.synchronize()
    began_ns = time.perf_counter_ns()
    with profile(activities=stage.activities) as session:
        with torch.profiler.record_function(FIRST_MARK):
            for _ in range(sacrificial):
                x.add_(1)
            stage.synchronize()
        with torch.profiler.record_function(SECOND_MARK):
            for _ in range(stage.size(KERNELS, 10)):
                x.add_(1)
            stage.synchronize()
    return Recording(session, began_ns, time.perf_counter_ns(), began_ns).timeline(began_ns)


def counted(timeline: Timeline) -> Session:
    """What is missing or misplaced among the kernels launched under the second mark."""
    begin, end = _span_of(timeline, SECOND_MARK)
    launched = labels(timeline).of(What.KERNEL_LAUNCH)
    launch = np.flatnonzero(launched & (timeline.start_ns >= begin) & (timeline.start_ns < end))
    kernel = labels(timeline).rows(*KERNEL_KINDS)
    row_of = dict(zip(timeline.correlation[kernel].tolist(), kernel.tolist(), strict=True))
    rows = [row_of.get(correlation) for correlation in timeline.correlation[launch].tolist()]
    pairs = [(int(timeline.start_ns[call]), row) for call, row in zip(launch, rows, strict=True) if row is not None]
    return Session(
        launches=len(launch),
        kernels=len(pairs),
        lost=len(launch) - len(pairs),
        lost_at=tuple(position for position, row in enumerate(rows) if row is None),
        early=sum(int(timeline.start_ns[row]) < start - TOLERANCE_NS for start, row in pairs),
        shifted=sum(int(timeline.end_ns[row]) > end + TOLERANCE_NS for _, row in pairs),
    )


def _span_of(timeline: Timeline, name: str) -> tuple[int, int]:
    """Begin and end of the mark on the host; its copy on the device has the same name."""
    marked = (timeline.category == Category.USER_ANNOTATION) & labels(timeline).named(name.__eq__)
    row = int(np.flatnonzero(marked)[0])
    return int(timeline.start_ns[row]), int(timeline.end_ns[row])


def _judge(answer: Answer, stage: Stage, sessions: list[Session], sacrificial: int) -> None:
    after = f"after {sacrificial} sacrificial kernels" if sacrificial else "without sacrificial kernels"
    for what in ("lost", "early", "shifted"):
        counts = [getattr(session, what) for session in sessions]
        if stage.simulated or not all(session.launches for session in sessions):
            why = "simulated" if stage.simulated else "a session has no launch at all"
            answer.unmeasured(f"{what} kernels, {after}", "0 in each session", why)
        else:
            answer.check(f"{what} kernels, {after}", "0 in each session", str(counts), agrees=not any(counts))
