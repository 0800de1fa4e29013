"""Small traces as PyTorch would write them, in the spellings of its versions, for tests that need known figures.

One step of 1,000 µs, in the modern spelling (times in µs from `BASE_US`):

    host  ProfilerStep#3  |0 ─────────────────────────────────────────── 1000|
          DataLoader      |0 ── 200|
          aten::mm                  |210 ── 260|
          cudaLaunchKernel           |220 230|
          Optimizer.step                              |900 ──── 990|
    GPU   kernel                             |300 ─────── 500|
          memcpy HtoD                                        |510 530|
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Event = dict[str, Any]

BASE_US = 1_419_116_104_654
DEVICE = {
    "id": 0,
    "name": "NVIDIA H100 80GB HBM3",
    "totalGlobalMem": 85018279936,
    "computeMajor": 9,
    "computeMinor": 0,
    "maxThreadsPerMultiprocessor": 2048,
    "warpSize": 32,
    "numSms": 132,
}


def span(cat: str, name: str, start: float, dur: float, **more: Any) -> Event:
    """One complete event; `start` counts from BASE_US."""
    thread: Event = {"pid": 100, "tid": 100}
    return {"ph": "X", "cat": cat, "name": name, **thread, "ts": BASE_US + start, "dur": dur, **more}


def on_gpu(cat: str, name: str, start: float, dur: float, correlation: int, **args: Any) -> Event:
    """One complete event on stream 7 of GPU 0."""
    known = {"External id": 9, "device": 0, "context": 1, "stream": 7, "correlation": correlation, **args}
    return span(cat, name, start, dur, pid=0, tid=7, args=known)


def step(number: int = 3, at: float = 0.0) -> list[Event]:
    """The events of the step in the picture above."""
    mark, c = "user_annotation", 40 + number * 2
    next_ = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    return [
        span(mark, f"ProfilerStep#{number}", at, 1000, args={"External id": 1, "Ev Idx": 0}),
        span(mark, next_, at, 200, args={"External id": 2}),
        span("cpu_op", "aten::mm", at + 210, 50, args={"External id": 9, "Input Dims": [[2, 2], [2, 2]]}),
        span("cuda_runtime", "cudaLaunchKernel", at + 220, 10, args={"External id": 9, "correlation": c}),
        {"ph": "s", "id": c, "pid": 100, "tid": 100, "ts": BASE_US + at + 220, "cat": "ac2g", "name": "ac2g"},
        {"ph": "f", "id": c, "pid": 0, "tid": 7, "ts": BASE_US + at + 300, "cat": "ac2g", "name": "ac2g", "bp": "e"},
        on_gpu("kernel", "volta_sgemm_64x64_nt", at + 300, 200, c, **_KERNEL_ARGS),
        on_gpu("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", at + 510, 20, c + 1, bytes=2048, **_COPY_ARGS),
        span(mark, "Optimizer.step#SGD.step", at + 900, 90, args={"External id": 3}),
    ]


_KERNEL_ARGS = {"blocks per SM": 0.5, "warps per SM": 4.0, "est. achieved occupancy %": 6, "grid": [1, 1, 1]}
_COPY_ARGS = {"memory bandwidth (GB/s)": 1.5}


def labels() -> list[Event]:
    """Names of processes and threads, as Kineto writes them: `name` is their first key."""
    return [
        {"name": "process_name", "ph": "M", "ts": BASE_US, "pid": 100, "tid": 0, "args": {"name": "python3"}},
        {"name": "process_labels", "ph": "M", "ts": BASE_US, "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
        {"name": "thread_name", "ph": "M", "ts": BASE_US, "pid": 100, "tid": 7, "args": {"name": "thread 7 (pt)"}},
    ]


def document(events: list[Event], **more: Any) -> Event:
    """The whole file: head, events, tail."""
    head = {"schemaVersion": 1, "deviceProperties": [DEVICE], **more}
    return {**head, "traceEvents": events, "traceName": "made.json"}


def text(events: list[Event], **more: Any) -> str:
    """The whole file as JSON in the layout of Kineto."""
    return json.dumps(document(events, **more), indent=2, ensure_ascii=False)


def write(folder: Path, content: str | bytes, name: str = "made.pt.trace.json") -> Path:
    """Write it, gzipped where the name ends in .gz."""
    data = content if isinstance(content, bytes) else content.encode()
    path = folder / name
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def changed(events: list[Event], change: Callable[[Event], Event | None]) -> list[Event]:
    """Each event as `change` makes it; None leaves it out."""
    return [new for e in events if (new := change(dict(e))) is not None]
