"""What gpulab says of loops on a simulated GPU, held against the truth of the model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulated_gpu.program import (
    COMPUTE,
    COPIES,
    SIDE,
    AwaitEvent,
    Graph,
    Item,
    Kernel,
    LoadData,
    Loop,
    Operator,
    Read,
    RecordEvent,
    Synchronize,
    Update,
    Upload,
)
from benchmarks.simulated_gpu.record import Plan, Recorded, record
from benchmarks.simulated_gpu.truth import steady_step_ns, truth_of
from gpulab.analysis.breakdown import DEVICE_PARTS
from gpulab.analysis.facts import Facts, facts
from gpulab.intervals import covers

US = 1_000
PLAN = Plan(warmup=2, measured=6, traced=4, after=1)
NODES = ("", "MmBackward0")


# -- random loops ------------------------------------------------------------------------------------------------------


@st.composite
def loops(draw: st.DrawFn) -> Loop:
    """Launches of 5 to 600 kernels in a step of 2 µs to 5 ms each, and what a step does beside them."""
    count = draw(st.integers(5, 600))
    longest_us = draw(st.sampled_from([4, 20, 100, 5_000 if count < 100 else 400]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    body = _operators(random, count, longest_us, host_us=draw(st.sampled_from([5, 15, 40])))
    if draw(st.booleans()):
        body = _beside(random, body)
    if draw(st.booleans()):
        body = _in_graphs(body)
    waits = draw(st.sampled_from([(), (Read(),), (Read(pinned=True),), (Synchronize(),), (Read("aten::nonzero"),) * 3]))
    for wait in waits:
        body.insert(int(random.integers(len(body) + 1)), wait)
    before = draw(st.sampled_from([(), (LoadData(50 * US),), (LoadData(3_000 * US),), (LoadData(40_000 * US),)]))
    copies = (
        (),
        (Upload(4_000_000),),
        (Upload(4_000_000, pinned=True),),
        (Upload(40_000_000, True, True),),
        (Upload(40_000_000, True, True, COPIES), RecordEvent("batch", COPIES), AwaitEvent("batch", COMPUTE)),
    )
    update = Update((Operator("aten::_fused_adamw_", 20 * US, (Kernel("adam", 50 * US),)),), "AdamW")
    return Loop((*before, *draw(st.sampled_from(copies)), *body, update))


def _operators(random: np.random.Generator, count: int, longest_us: int, host_us: int) -> list[Item]:
    lengths = np.exp(random.uniform(np.log(2), np.log(longest_us), count))
    return [
        Operator("aten::mm", host_us * US, (Kernel(f"gemm_{i % 7}", round(us * US)),), NODES[i > count // 2])
        for i, us in enumerate(lengths)
    ]


def _beside(random: np.random.Generator, body: list[Item]) -> list[Item]:
    """With some work on a second stream, which waits for the first one and is waited for."""
    at = int(random.integers(len(body)))
    aside = Operator("aten::mul", 5 * US, (Kernel("aside", int(random.integers(2, 800)) * US, SIDE),))
    begin = [RecordEvent("begin"), AwaitEvent("begin", SIDE), aside, RecordEvent("end", SIDE)]
    return [*body[:at], *begin, *body[at:], AwaitEvent("end", COMPUTE)]


def _in_graphs(body: list[Item]) -> list[Item]:
    """The first half as one CUDA graph."""
    half = len(body) // 2
    first = tuple(k for item in body[:half] if isinstance(item, Operator) for k in item.kernels if k.stream == COMPUTE)
    rest = [item for item in body[:half] if not (isinstance(item, Operator) and item.kernels[0].stream == COMPUTE)]
    return [*([Graph(5 * US, first)] if first else []), *rest, *body[half:]]


def played(loop: Loop) -> tuple[Recorded, Facts]:
    recorded = record(loop, plan=PLAN)
    return recorded, facts(recorded.run)


@settings(max_examples=60)
@given(loops())
def test_steps_their_kernels_and_the_causes_of_idle_time_are_those_of_the_model(loop: Loop) -> None:
    recorded, found = played(loop)
    account = found.breakdown
    assert account is not None and account.device_index == 0
    for true, step in zip(truth_of(recorded), account.steps, strict=True):
        assert (step.number, step.start_ns, step.end_ns) == (true.number, true.start_ns, true.end_ns)
        told = {part: ns for part, ns in step.parts_ns.items() if part not in DEVICE_PARTS and ns}
        if step is account.steps[0]:  # Python before the first row of the trace: nothing shows what it is for
            told["launch"] = told.get("launch", 0) + told.pop("unknown", 0)
        assert told == {cause: ns for cause, ns in true.idle_ns.items() if ns}


@settings(max_examples=40)
@given(loops())
def test_every_kernel_belongs_to_the_step_that_launched_it(loop: Loop) -> None:
    recorded, found = played(loop)
    work, account = found.work, found.breakdown
    assert work is not None and account is not None and found.trace is not None and found.trace.kernels is not None
    launched = work.timeline.start_ns[work.call[work.kernel]]
    for true, host in zip(truth_of(recorded), work.host_windows, strict=True):
        mine = covers(host.reshape(1, 2), launched)
        assert int(mine.sum()) == true.kernels
        assert int(work.timeline.duration_ns[work.rows[work.kernel][mine]].sum()) == true.kernel_ns
    assert found.trace.kernels.count == sum(true.kernels for true in truth_of(recorded))


@settings(max_examples=40)
@given(loops())
def test_the_typical_step_is_the_one_that_the_loop_takes_in_the_long_run(loop: Loop) -> None:
    _, found = played(loop)
    steady_us = steady_step_ns(loop) / US
    assert found.traced_step_us is not None
    assert found.traced_step_us.median == pytest.approx(steady_us, rel=0.02, abs=20)
