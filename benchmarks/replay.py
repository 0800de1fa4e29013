"""Playing a window of 100,000 GPU tasks again with some of them shorter: how long it takes."""

from __future__ import annotations

import time

import numpy as np

from gpulab.run import Category, Device, Environment, Lane, Run, Samples, Settings, Steps, Timeline

TASKS = 100_000
REPEATS = 5
_SYNCHRONIZE_EVERY = 500
_LAUNCH_NS, _KERNEL_NS, _CALL_NS, _LATENCY_NS = 8_000, 9_000, 4_000, 6_000


def measure() -> dict[str, object]:
    """Seconds to read the tasks of a window and to play it once, and to play it again; the median of a few."""
    from gpulab.prediction.replay import Changes, Replay

    run = _run()
    assert run.timeline is not None
    half = Changes(device_factor=np.full(len(run.timeline), 0.5))
    rows = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        replay = Replay(run, 0)
        replay.play(half)
        first = time.perf_counter()
        replay.play(half)
        rows.append((first - began, time.perf_counter() - first))
    middle = np.median(np.array(rows), axis=0)
    return {"tasks": TASKS, "read_and_play_s": float(middle[0]), "play_again_s": float(middle[1])}


def _run() -> Run:
    """One window: launches on two streams in turn, the host waiting now and then."""
    number = np.arange(TASKS, dtype=np.int64)
    called = number * _LAUNCH_NS
    stream = number % 2
    started = np.maximum(called + _LATENCY_NS, number * _KERNEL_NS // 2)
    waits = np.flatnonzero(number % _SYNCHRONIZE_EVERY == _SYNCHRONIZE_EVERY - 1)
    columns = [
        (called, np.full(TASKS, _CALL_NS), 0, Category.CUDA_RUNTIME, np.zeros(TASKS), number + 1),
        (started, np.full(TASKS, _KERNEL_NS - 500), 1, Category.KERNEL, 1 + stream, number + 1),
        (called[waits] + _CALL_NS, np.full(len(waits), 2_000), 2, Category.CUDA_RUNTIME, waits * 0, waits * 0),
    ]
    start = np.concatenate([c[0] for c in columns])
    order = np.argsort(start, kind="stable")
    timeline = Timeline(
        start_ns=start[order],
        duration_ns=np.concatenate([c[1] for c in columns])[order].astype(np.int64),
        name_id=np.concatenate([np.full(len(c[0]), c[2]) for c in columns])[order].astype(np.int32),
        category=np.concatenate([np.full(len(c[0]), int(c[3])) for c in columns])[order].astype(np.uint8),
        lane_id=np.concatenate([c[4] for c in columns])[order].astype(np.int32),
        correlation=np.concatenate([c[5] for c in columns])[order].astype(np.int64),
        names=("cudaLaunchKernel", "kernel", "cudaDeviceSynchronize"),
        lanes=(Lane("thread", 1, 1), Lane("stream", 0, 7), Lane("stream", 0, 20)),
        window_ns=(0, int(start.max()) + _KERNEL_NS),
        training_lane=0,
    )
    return Run(
        id="made-for-the-benchmark",
        created="",
        source="trace",
        settings=Settings(),
        device=Device("cuda", "GPU", 0),
        environment=Environment("", "", "", None, None, None),
        steps=Steps.empty(),
        samples=Samples(),
        timeline=timeline,
        wall_ns=timeline.window_ns[1],
        outcome="completed",
        step_source="whole window",
    )
