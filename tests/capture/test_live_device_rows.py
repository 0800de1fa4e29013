"""What a live window tells of kernels and copies beside their times: the same as a trace file of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
from msgspec import Struct

from gpulab.run import Timeline
from gpulab.trace.kineto_file import read_trace
from gpulab.trace.profiler_result import CLOCK_MARK, Recording

# As Kineto writes them (libkineto, CuptiActivity.cpp): the members of an object, without its braces.
KERNEL = """
      "queued": 0, "device": 0, "context": 1,
      "stream": 7, "correlation": 1,
      "registers per thread": 32,
      "shared memory": 0,
      "blocks per SM": 12.5,
      "warps per SM": 50.0,
      "grid": [1600, 1, 1],
      "block": [128, 1, 1],
      "est. achieved occupancy %": 75,
      "graph id": 0, "graph node id": 0"""
ENDLESS = KERNEL.replace("12.5", '"inf"').replace('"correlation": 1', '"correlation": 4')
BROKEN = KERNEL.replace("12.5", "nan").replace('"correlation": 1', '"correlation": 3')
COPY = """
      "device": 0, "context": 1,
      "stream": 7, "correlation": 2,
      "bytes": 4000000, "memory bandwidth (GB/s)": 20.0"""


class OldestEvent(Struct):
    """An event of PyTorch 2.6, without `activity_type`: its device and its name tell what it is."""

    spelled: str
    activity: str
    start: int
    duration: int
    correlation: int
    members: str = ""

    def name(self) -> str:
        return self.spelled

    @property
    def on_gpu(self) -> bool:
        return self.activity in ("kernel", "gpu_memcpy")

    def device_type(self) -> str:
        return "DeviceType.CUDA" if self.on_gpu else "DeviceType.CPU"

    def is_user_annotation(self) -> bool:
        return self.activity == "user_annotation"

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return self.duration

    def correlation_id(self) -> int:
        return self.correlation

    def device_index(self) -> int:
        return 0

    def device_resource_id(self) -> int:
        return 7 if self.on_gpu else 1


class OlderEvent(OldestEvent):
    """An event of a PyTorch without `metadata_json`."""

    def activity_type(self) -> str:
        return self.activity


class Event(OlderEvent):
    """An event of PyTorch 2.13."""

    asked: ClassVar[list[str]] = []

    def metadata_json(self) -> str:
        self.asked.append(self.spelled)
        return self.members


def rows(event: type[OldestEvent]) -> list[OldestEvent]:
    return [
        event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 60_000, 200_000, 2, COPY),
        event("cudaLaunchKernel", "cuda_runtime", 1_000, 500, 1),
        event("volta_sgemm", "kernel", 10_000, 40_000, 1, KERNEL),
        event("cudaMemcpyAsync", "cuda_runtime", 2_000, 500, 2),
        event("aten::mm", "cpu_op", 500, 3_000, 0, '"kernel_backend": "x"'),
    ]


def recorded(events: list[OldestEvent]) -> Timeline:
    marked = [type(events[0])(CLOCK_MARK, "user_annotation", -10, 5, 0), *events]
    results = SimpleNamespace(events=lambda: marked)
    profile = SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))
    return Recording(profile, began_ns=0, ended_ns=1_000_000, clock_ns=-10).timeline(0)


def test_the_oldest_pytorch_has_the_same_categories() -> None:
    oldest, newest = recorded(rows(OldestEvent)), recorded(rows(Event))
    assert len(set(newest.category.tolist())) == 4
    assert oldest.category.tolist() == newest.category.tolist() and oldest.names == newest.names


def test_a_trace_file_of_the_same_window_has_the_same_columns(tmp_path: Path) -> None:
    events = [*rows(Event), Event("volta_sgemm", "kernel", 300_000, 10, 4, ENDLESS)]
    written = [
        {
            "ph": "X", "cat": e.activity, "name": e.spelled, "ts": e.start / 1e3, "dur": e.duration / 1e3,
            "pid": 0 if e.device_resource_id() == 7 else 99, "tid": e.device_resource_id(),
            "args": {"correlation": e.correlation, **json.loads(f"{{{e.members}}}")},
        }
        for e in events
    ]  # fmt: skip
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": written}))
    read, live = read_trace(file).timeline, recorded(events)
    assert [read.names[i] for i in read.name_id] == [live.names[i] for i in live.name_id]
    assert set(live.extra) == set(read.extra)
    for name, column in live.extra.items():
        np.testing.assert_array_equal(column, read.extra[name])


def test_members_that_are_no_json_cost_one_row_its_figures() -> None:
    live = recorded([*rows(Event), Event("volta_sgemm", "kernel", 300_000, 10, 3, BROKEN)])
    assert np.isfinite(live.extra["blocks_per_sm"]).sum() == 1 and len(live) == 6


def test_kernels_that_ran_before_the_recording_began_were_ours() -> None:
    sacrificed = [
        Event("cudaLaunchKernel", "cuda_runtime", -9_000, 500, 8),
        Event("elementwise_kernel", "kernel", -4_000, 1_000, 8, KERNEL),
    ]
    live = recorded([*sacrificed, *rows(Event)])
    assert len(live) == 5 and "elementwise_kernel" not in {live.names[i] for i in live.name_id}
    assert len(live.extra["bytes"]) == 5


def test_the_window_ends_when_the_gpu_has() -> None:
    late = Event("volta_sgemm", "kernel", 900_000, 700_000, 9, KERNEL)
    assert recorded([*rows(Event), late]).window_ns == (0, 1_600_000)


def test_nothing_is_asked_of_rows_of_the_host() -> None:
    Event.asked.clear()
    assert recorded([e for e in rows(Event) if not e.on_gpu]).extra == {} and Event.asked == []
    assert recorded(rows(OlderEvent)).extra == {}
