"""Steps of loaded traces: which marks make them, what they wait for, what is odd about them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpulab.analysis.breakdown import breakdown
from gpulab.run import Category, Phase, Run, Samples, StepFlag, Timeline
from gpulab.store.run_format import decode, encode
from gpulab.timeline.trace_steps import FoundSteps, find_steps
from gpulab.trace.load import load_run
from tests.support import real_traces, synthetic
from tests.support import trace_files as made
from tests.support.timelines import BACKWARD, MAIN, Span, timeline
from tests.support.trace_files import Event

NEXT = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
ADAM, SGD, ZERO = "Optimizer.step#Adam.step", "Optimizer.step#SGD.step", "Optimizer.zero_grad#Adam.zero_grad"
Row = tuple[str, int, int]  # name, start, end
OTHER = "another thread's "


def step(number: object, start: int, end: int) -> Row:
    return f"ProfilerStep#{number}", start, end


def marked(rows: list[Row]) -> Timeline:
    """Annotations on the training thread, and others on a second one."""
    return timeline(
        [
            Span(n.removeprefix(OTHER), Category.USER_ANNOTATION, BACKWARD if n.startswith(OTHER) else MAIN, s, e - s)
            for n, s, e in rows
        ]
    )


def bounds(found: FoundSteps) -> list[tuple[int, int, int]]:
    s = found.steps
    return list(zip(s.number.tolist(), s.start_ns.tolist(), s.end_ns.tolist(), strict=True))


@pytest.mark.parametrize(
    ("rows", "source", "steps", "duplicates_and_gaps"),
    [
        ([step(8, 0, 90), step(9, 100, 190)], "ProfilerStep", [(8, 0, 90), (9, 100, 190)], (0, 0)),
        ([step(1, 0, 90), (f"{OTHER}ProfilerStep#2", 100, 200)], "ProfilerStep", [(1, 0, 90)], (0, 0)),
        ([step(1, 0, 101), step(2, 100, 200)], "ProfilerStep", [(1, 0, 100), (2, 100, 200)], (0, 0)),  # rounded
        (
            [step(1, 0, 90), step(1, 1, 80), step(4, 100, 190), step(9, 110, 120)],
            "ProfilerStep",
            [(1, 0, 90), (4, 100, 190)],
            (2, 2),
        ),
        ([step(1, 0, 90), step(1, 100, 190)], "ProfilerStep", [(1, 0, 90)], (1, 0)),
        *(([step(odd, 0, 9)], "whole window", [], (0, 0)) for odd in ("", "x", "²", "-1", "9" * 30)),
        ([step(1, 5, 5), ("x", 0, 9)], "whole window", [], (0, 0)),
        ([("anything", 10, 20)], "whole window", [], (0, 0)),
        ([(NEXT, 10, 20), (NEXT, 50, 65), (NEXT, 90, 91)], "DataLoader", [(0, 10, 50), (1, 50, 90)], (0, 0)),
        (  # a fetch inside a fetch is one
            [(NEXT, 10, 40), (NEXT, 15, 25), (NEXT, 50, 60), (NEXT, 90, 91)],
            "DataLoader",
            [(0, 10, 50), (1, 50, 90)],
            (0, 0),
        ),
        (  # of the optimizer that steps most often
            [(ADAM, 10, 20), (SGD, 22, 30), (ADAM, 60, 70), (SGD, 72, 80), (ADAM, 110, 120)],
            "Optimizer.step",
            [(0, 20, 70), (1, 70, 120)],
            (0, 0),
        ),
        ([(NEXT, 0, 5), (ADAM, 10, 20), (ADAM, 60, 70)], "Optimizer.step", [(0, 20, 70)], (0, 0)),
    ],
)
def test_which_marks_make_the_steps(
    rows: list[Row], source: str, steps: list[tuple[int, int, int]], duplicates_and_gaps: tuple[int, int]
) -> None:
    found = find_steps(marked(rows))
    assert (found.source, bounds(found)) == (source, steps)
    assert found.traced_numbers == tuple(number for number, _, _ in steps)
    assert (found.duplicate_marks, found.missing_numbers) == duplicates_and_gaps


def test_without_a_training_thread_there_is_no_mark() -> None:
    assert find_steps(replace(marked([step(1, 0, 90)]), training_lane=None)).source == "whole window"


def test_waiting_and_updating_are_clipped_to_the_step() -> None:
    rows = [
        *(step(1, 0, 100), step(2, 100, 200), (NEXT, 90, 110), (NEXT, 120, 130)),
        *((ADAM, 150, 160), (ZERO, 155, 170), (f"{OTHER}{NEXT}", 0, 90)),
    ]
    steps = find_steps(marked(rows)).steps
    assert steps.data_wait_ns.tolist() == [10, 20] and steps.optimizer_ns.tolist() == [0, 20]
    assert steps.batch_count.tolist() == [1, 1] and steps.sample_count.tolist() == [-1, -1]
    assert set(steps.phase.tolist()) == {Phase.TRACED}


@pytest.mark.parametrize(
    ("count", "flags"), [(3, [StepFlag.FIRST, 0, StepFlag.LAST]), (1, [StepFlag.FIRST | StepFlag.LAST])]
)
def test_first_and_last_are_flagged(count: int, flags: list[int]) -> None:
    steps = find_steps(marked([step(i, i * 10, i * 10 + 9) for i in range(count)])).steps
    assert steps.flags.tolist() == flags


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*(f"ProfilerStep#{i}" for i in range(4)), NEXT, "Optimizer.step#A.step"]),
            st.integers(0, 60),
            st.integers(0, 60),
        ),
        max_size=14,
    )
)
@settings(max_examples=300)
def test_any_marks_give_a_sound_record(marks: list[Row]) -> None:
    recorded = marked([(name, start, start + length) for name, start, length in marks])
    found = find_steps(recorded)
    run = replace(synthetic.no_trace_case().run, steps=found.steps, timeline=recorded, missing=())
    replace(run, traced_numbers=found.traced_numbers, step_source=found.source, pauses=(), samples=Samples()).check()
    waits = [(s, s + d) for n, s, d in marks if n == NEXT]
    for i, row in enumerate(zip(found.steps.start_ns.tolist(), found.steps.end_ns.tolist(), strict=True)):
        waited = set(range(*row)) & {t for s, e in waits for t in range(s, e)}
        assert found.steps.data_wait_ns[i] == len(waited)
        begun = [s for n, s, d in marks if n == NEXT and row[0] <= s < row[1]]
        assert found.steps.batch_count[i] <= len(begun)


@pytest.mark.parametrize(("counts", "steps"), [((12, 4), 0), ((4, 12), 0), ((12, 9), 2), ((12, 4, 12), 3)])
def test_two_steps_one_of_them_cut_are_none(counts: tuple[int, ...], steps: int) -> None:
    """No step is typical then: the whole window stands as one."""
    spans, at = [], 0
    for number, count in enumerate(counts):
        spans.append(Span(f"ProfilerStep#{number}", Category.USER_ANNOTATION, MAIN, at, count * 10))
        spans += [Span("aten::mm", Category.CPU_OP, MAIN, at + 10 * i, 10) for i in range(count)]
        at += count * 10
    assert len(find_steps(timeline(spans)).steps) == steps


# The record that `load_run` joins


def loaded(folder: Path, events: list[Event], **more: Any) -> Run:
    return load_run(made.write(folder, made.text(events, **more), "rank0.1623212756351.pt.trace.json.gz"))


def test_a_whole_trace(tmp_path: Path) -> None:
    run = loaded(tmp_path, [*made.step(3), *made.step(4, 1000)])
    assert run.id == "rank0.1623212756351"
    assert (run.source, run.step_source) == ("trace", "ProfilerStep")
    assert (run.device.kind, run.device.name, run.device.index) == ("cuda", "NVIDIA H100 80GB HBM3", 0)
    assert run.device.details["sm_count"] == 132
    assert run.device.memory_total_bytes == run.memory.total_bytes == made.DEVICE["totalGlobalMem"]
    assert run.wall_ns == 2_000_000
    assert run.traced_numbers == (3, 4)
    assert run.steps.data_wait_ns.tolist() == [200_000, 200_000]
    assert run.steps.optimizer_ns.tolist() == [90_000, 90_000]
    assert {"live curves", "untraced step time"} <= {m.what for m in run.missing}


def test_what_the_head_of_the_file_tells(tmp_path: Path) -> None:
    assert loaded(tmp_path, made.step()).created == ""
    dated = loaded(tmp_path, made.step(), baseTimeNanoseconds=1_751_410_836_000_000_000)
    assert dated.created.startswith("2025-07-18T")
    run = loaded(tmp_path, made.step(), deviceProperties=[])
    assert (run.device.kind, run.device.name) == ("cuda", "GPU (name not in the trace)")
    assert "the GPU's name and size" in {m.what for m in run.missing}


def test_the_gpu_that_worked_is_the_device(tmp_path: Path) -> None:
    properties = [{**made.DEVICE, "id": i, "name": f"GPU number {i}"} for i in range(4)]
    other = made.on_gpu("kernel", "k", 0, 900, 7, device=2)
    run = loaded(tmp_path, [*made.step(), other], deviceProperties=properties)
    assert (run.device.index, run.device.name) == (2, "GPU number 2")
    assert [c.what for c in run.choices] == ["steps", "device"]


def test_a_trace_of_the_cpu(tmp_path: Path) -> None:
    run = loaded(tmp_path, [made.span("cpu_op", "aten::mm", 0, 5)], deviceProperties=[])
    assert run.device.kind == "cpu"
    assert run.step_source == "whole window"
    assert "steps" in {m.what for m in run.missing}
    assert breakdown(run) is not None


def test_memory_of_a_trace_is_kept_with_its_peaks(tmp_path: Path) -> None:
    args = {"Device Type": 1, "Device Id": 0, "Bytes": 5, "Total Allocated": 700, "Total Reserved": 900}
    host = {**args, "Device Type": 0, "Device Id": -1, "Total Allocated": 10**6}
    event = {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": made.BASE_US}
    run = loaded(tmp_path, [*made.step(), {**event, "args": args}, {**event, "args": host}])
    assert (run.memory.peak_allocated_bytes, run.memory.peak_reserved_bytes) == (700, 900)
    document, columns = encode(run)
    back = decode(document, io.BytesIO(columns))
    assert back.origin == run.origin
    assert back.memory_events is not None and back.memory_events.bytes.tolist() == [5, 5]
    assert decode(document, io.BytesIO(columns), timeline=False).memory_events is None


@pytest.mark.parametrize(
    ("name", "source", "numbers"),
    [
        ("v100_resnet50_workers0", "ProfilerStep", range(5, 11)),
        ("a100_8ranks_rank3", "ProfilerStep", range(1009, 1015)),
        ("h100_owlv2_starved", "ProfilerStep", [6]),
        ("mi300_resnet_healthy", "ProfilerStep", range(15, 18)),
        ("b200_moe_launch_bound", "whole window", []),
        ("a100_alexnet_sync_events", "whole window", []),
        ("v100_dlrm_8ranks/rank0", "ProfilerStep", [10]),
    ],
)
def test_steps_of_real_traces(name: str, source: str, numbers: list[int]) -> None:
    run = load_run(real_traces.path(name))
    assert run.step_source == source
    assert list(run.traced_numbers) == list(numbers)
