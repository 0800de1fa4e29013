"""Traces of other accelerators: read as its work what its own calls started, never told as the CPU's."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulab.analysis.facts import facts
from gpulab.diagnosis.diagnose import diagnose
from gpulab.run import Category, Run
from gpulab.timeline.labels import LAUNCHES, kind_of, labels
from gpulab.timeline.labels import WAITS as WAITING
from gpulab.trace.load import load_run
from tests.support import trace_files as made
from tests.support.trace_files import Event

WAITS = (
    "urQueueFinish",
    "synStreamSynchronize",
    "mtia_stream_sync",
    "aclrtSynchronizeStream",
    "zeEventHostSynchronize",
)
OTHERS = ("urEnqueueEventsWait", "cudaMemcpyAsync", "cudaStreamWaitEvent", "hipMallocAsync", "cudaLaunchKernel")


def step(number: int, runtime: str, launch: str, rows: str, wait: str, **args: object) -> list[Event]:
    """100 ms, of which the device computes 80 from the second on."""
    at, key = number * 100_000.0, number + 1
    return [
        made.span("user_annotation", f"ProfilerStep#{number}", at, 99_900),
        made.span("cpu_op", "aten::mm", at + 100, 300),
        made.span(runtime, launch, at + 150, 50, args={"correlation": key}),
        made.span(rows, "GEMM", at + 300, 80_000, pid=17, tid=7, args={"correlation": key, **args}),
        made.span(runtime, wait, at + 1_000, 79_310, args={}),
    ]


def loaded(folder: Path, events: list[Event], devices: list[Event]) -> Run:
    return load_run(made.write(folder, made.text(events, deviceProperties=devices)))


@pytest.mark.parametrize(
    ("kind", "device"),
    [
        (("mtia_runtime", "runtime_launch", "mtia_ccp_events", WAITS[2]), "ARTEMIS"),
        (("xpu_runtime", "urEnqueueKernelLaunch", "kernel", WAITS[0]), "Intel(R) Data Center GPU Max 1550"),
        (("privateuse1_runtime", "Launch", "kernel", WAITS[1]), ""),
        (("new_runtime", "beginWork", "new_rows", "waitFinish"), ""),
    ],
)
def test_its_rows_are_work_of_the_device(tmp_path: Path, kind: tuple[str, ...], device: str) -> None:
    events = [e for number in range(4) for e in step(number, *kind, device=0, stream=0)]
    run = loaded(tmp_path, events, [{"id": 0, "name": device}] if device else [])
    assert run.device.kind == "cuda" and run.device.name == (device or "accelerator (name not in the trace)")
    account = facts(run).breakdown
    assert account is not None and account.typical_share("compute") == pytest.approx(0.8, abs=0.01)
    assert account.typical_share("sync_wait") < 0.01  # it waits while the device computes
    assert run.timeline is not None and labels(run.timeline).of(*LAUNCHES).sum() == 4


@pytest.mark.parametrize("args", [{"device": 0, "stream": 0}, {"Stream Id": 2}], ids=["no calls", "Ascend"])
def test_rows_that_nobody_started_are_not_the_cpus(tmp_path: Path, args: dict[str, int]) -> None:
    events = [e for n in range(4) for e in step(n, "", "", "device_rows", "", **args)]
    run = loaded(tmp_path, events, [])
    assert run.device.name == "an accelerator, which gpulab cannot read"
    said = diagnose(facts(run), predict_cures=False)
    assert (
        said.first.key == "cannot_tell" and "an accelerator, which gpulab cannot read" in said.first.evidence[0].words
    )
    assert facts(run).breakdown is None and not said.untold


@pytest.mark.parametrize(("operator", "kind"), [("aten::mm", "unknown"), ("aten::mkldnn_convolution", "cpu")])
def test_a_gpu_without_rows_is_not_recorded(tmp_path: Path, operator: str, kind: str) -> None:
    events = []
    for number in range(4):
        events += [
            made.span("user_annotation", f"ProfilerStep#{number}", number * 1000, 1000),
            made.span("cpu_op", operator, number * 1000, 900),
        ]
    run = loaded(tmp_path, events, [made.DEVICE])
    assert run.device.kind == kind
    first = diagnose(facts(run), predict_cures=False).first
    assert (first.key == "cannot_tell" and "(not recorded)" in first.evidence[0].words) == (kind == "unknown")


def test_waits_go_by_what_their_names_say() -> None:
    assert all(kind_of(Category.CUDA_RUNTIME, name) in WAITING for name in WAITS)
    assert not any(kind_of(Category.CUDA_RUNTIME, name) in WAITING for name in OTHERS)
