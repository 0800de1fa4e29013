"""A played loop as the record that gpulab would have made of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from gpulab.run import (
    Device,
    Environment,
    Lane,
    Loader,
    Memory,
    Pause,
    Phase,
    Run,
    Samples,
    Settings,
    StepFlag,
    Steps,
    Timeline,
)
from planted.simulated.machine import AUTOGRAD, TRAINING, Gpu, Machine, Played, Span, Task
from planted.simulated.program import LoadData, Loop

PROFILER_START_NS = 8_000_000
BATCH = 32
A100 = Device("cuda", "NVIDIA A100-SXM4-40GB", 0, memory_total_bytes=40 << 30, details={"compute_capability": "8.0"})


class Plan(Struct, frozen=True):
    """How many steps are warm-up, measured, profiled, and measured after the profiler."""

    warmup: int = 3
    measured: int = 12
    traced: int = 5
    after: int = 2


class Recorded(Struct, frozen=True):
    """The record, and what the machine did: the tasks and the host's stretches tell the truth about it."""

    run: Run
    machine: Machine
    traced: tuple[Played, ...]

    @property
    def tasks(self) -> list[Task]:
        """All that the device did."""
        return self.machine.tasks


def record(
    loop: Loop,
    gpu: Gpu | None = None,
    plan: Plan | None = None,
    *,
    device: Device = A100,
    peak_memory_fraction: float = 0.7,
) -> Recorded:
    """Play the loop as gpulab runs a cell: warm-up, measured steps, a profiled window, a few steps more."""
    plan = plan or Plan()
    machine = Machine(gpu, loop.workers, loop.prefetch)
    machine.run(loop, plan.warmup + plan.measured)
    machine.drain()
    machine.idle(PROFILER_START_NS)
    machine.profiled, began = True, machine.now
    machine.run(loop, plan.traced)
    machine.drain()
    ended = max(machine.steps[-1].end_ns, *(t.end_ns for t in machine.tasks))  # as a live recording has it
    machine.profiled = False
    machine.run(loop, plan.after)
    traced = machine.steps[plan.warmup + plan.measured :][: plan.traced]
    run = _run(machine, loop, plan, (began, ended), device, peak_memory_fraction)
    run.check()
    return Recorded(run, machine, tuple(traced))


def _run(
    machine: Machine, loop: Loop, plan: Plan, window: tuple[int, int], device: Device, peak_memory_fraction: float
) -> Run:
    first = plan.warmup + plan.measured
    peak = int((device.memory_total_bytes or 0) * peak_memory_fraction)
    return Run(
        id="simulated",
        created="2026-01-01T00:00:00Z",
        source="cell",
        settings=Settings(name="simulated"),
        device=device,
        environment=Environment("3.11", "simulated", "simulated CPU", 8, 8.0, 64 << 30),
        steps=_steps(machine, loop, plan),
        samples=Samples(),
        timeline=_timeline(machine.spans, window),
        wall_ns=machine.now,
        outcome="completed",
        step_source="DataLoader" if _fed(loop) else "Optimizer.step",
        loader=_loader(loop) if _fed(loop) else None,
        memory=Memory(peak_allocated_bytes=peak, total_bytes=device.memory_total_bytes),
        traced_numbers=tuple(range(first, first + plan.traced)),
        pauses=tuple(Pause(s.kind, s.start_ns, s.end_ns) for s in machine.stalls),
    )


def _fed(loop: Loop) -> bool:
    return any(isinstance(item, LoadData) for item in loop.step)


def _loader(loop: Loop) -> Loader:
    return Loader(
        "Simulated", 100_000, BATCH, loop.workers, loop.prefetch if loop.workers else None, False, True, 3_125, False
    )


def _steps(machine: Machine, loop: Loop, plan: Plan) -> Steps:
    played = machine.steps
    phases = [Phase.WARMUP] * plan.warmup + [Phase.MEASURED] * plan.measured + [Phase.TRACED] * plan.traced
    phases += [Phase.MEASURED] * plan.after
    flags = np.zeros(len(played), np.uint8)
    flags[0] |= int(StepFlag.FIRST | StepFlag.EPOCH_START)
    flags[-1] |= int(StepFlag.LAST)
    flags[plan.warmup + plan.measured + plan.traced :][:1] |= int(StepFlag.PROFILER_EDGE)
    columns = {
        "number": [p.number for p in played],
        "start_ns": [p.start_ns for p in played],
        "end_ns": [p.end_ns for p in played],
        "data_wait_ns": [p.data_wait_ns for p in played],
        "optimizer_ns": [p.optimizer_ns for p in played],
        "batch_count": [sum(isinstance(i, LoadData) for i in loop.items(p.number)) for p in played],
        "sample_count": [BATCH if _fed(loop) else -1] * len(played),
        "device_ns": [p.device_end_ns - p.device_start_ns for p in played],
    }
    arrays = {name: np.array(values, np.int64) for name, values in columns.items()}
    return Steps(**arrays, phase=np.array([int(p) for p in phases], np.uint8), flags=flags)


def _timeline(spans: Sequence[Span], window: tuple[int, int]) -> Timeline:
    """Rows by start, longer first; of two that are alike the one that ended last holds the other."""
    order = sorted(range(len(spans)), key=lambda i: (spans[i].start_ns, spans[i].start_ns - spans[i].end_ns, -i))
    rows = [spans[i] for i in order]
    names = {name: i for i, name in enumerate(dict.fromkeys(row.name for row in rows))}
    places = {TRAINING: 0, AUTOGRAD: 1}
    for row in rows:
        places.setdefault(row.place, len(places))
    lanes = [Lane("stream", 0, n, f"GPU 0 stream {n}") for n in places if n not in (TRAINING, AUTOGRAD)]
    return Timeline(
        start_ns=np.array([row.start_ns for row in rows], np.int64),
        duration_ns=np.array([row.end_ns - row.start_ns for row in rows], np.int64),
        name_id=np.array([names[row.name] for row in rows], np.int32),
        category=np.array([row.category for row in rows], np.uint8),
        lane_id=np.array([places[row.place] for row in rows], np.int32),
        correlation=np.array([row.correlation for row in rows], np.int64),
        names=tuple(names),
        lanes=(Lane("thread", 1, TRAINING, "training thread"), Lane("thread", 1, AUTOGRAD), *lanes),
        window_ns=window,
        training_lane=0,
        extra={
            "bytes": np.array([row.bytes for row in rows], np.float64),
            "blocks_per_sm": np.array([row.blocks_per_sm for row in rows], np.float64),
        },
    )
