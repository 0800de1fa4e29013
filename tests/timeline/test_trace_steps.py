"""Steps of loaded traces: which marks make them, what they wait for, what is odd about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulab.analysis.breakdown import breakdown
from gpulab.run import Category, Lane, Phase, Run, StepFlag, Timeline
from gpulab.timeline.trace_steps import FoundSteps, find_steps
from gpulab.trace.load import load_run
from tests.support import real_traces
from tests.support import trace_files as made
from tests.support.trace_files import Event

NEXT = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
Row = tuple[str, int, int]


def timeline(rows: list[Row], others: list[Row] | None = None) -> Timeline:
    """Annotations on the training thread (name, start, end), and others on a second thread."""
    spans = sorted([(s, s - e, n, 0) for n, s, e in rows] + [(s, s - e, n, 1) for n, s, e in others or []])
    names = tuple({n: 0 for _, _, n, _ in spans})
    end = max((s - d for s, d, _, _ in spans), default=0)
    return Timeline(
        start_ns=np.array([s for s, _, _, _ in spans], np.int64),
        duration_ns=np.array([-d for _, d, _, _ in spans], np.int64),
        name_id=np.array([names.index(n) for _, _, n, _ in spans], np.int32),
        category=np.full(len(spans), Category.USER_ANNOTATION, np.uint8),
        lane_id=np.array([lane for _, _, _, lane in spans], np.int32),
        correlation=np.zeros(len(spans), np.int64),
        names=names,
        lanes=(Lane("thread", 1, 1), Lane("thread", 1, 2)),
        window_ns=(0, end),
        training_lane=0,
    )


def bounds(found: FoundSteps) -> list[tuple[int, int, int]]:
    s = found.steps
    return list(zip(s.number.tolist(), s.start_ns.tolist(), s.end_ns.tolist(), strict=True))


class TestProfilerSteps:
    def test_numbers_and_bounds(self) -> None:
        found = find_steps(timeline([("ProfilerStep#8", 0, 90), ("ProfilerStep#9", 100, 190)]))
        assert found.source == "ProfilerStep"
        assert bounds(found) == [(8, 0, 90), (9, 100, 190)]
        assert found.traced_numbers == (8, 9)
        assert (found.duplicate_marks, found.missing_numbers) == (0, 0)

    def test_other_threads_do_not_count(self) -> None:
        found = find_steps(timeline([("ProfilerStep#1", 0, 90)], [("ProfilerStep#2", 100, 200)]))
        assert bounds(found) == [(1, 0, 90)]

    def test_overlap_by_rounding_is_cut(self) -> None:
        found = find_steps(timeline([("ProfilerStep#1", 0, 101), ("ProfilerStep#2", 100, 200)]))
        assert bounds(found) == [(1, 0, 100), (2, 100, 200)]

    def test_duplicates_and_gaps_are_counted(self) -> None:
        marks = [("ProfilerStep#1", 0, 90), ("ProfilerStep#1", 1, 80), ("ProfilerStep#4", 100, 190)]
        found = find_steps(timeline([*marks, ("ProfilerStep#9", 110, 120)]))
        assert bounds(found) == [(1, 0, 90), (4, 100, 190)]
        assert (found.duplicate_marks, found.missing_numbers) == (2, 2)

    def test_the_same_number_again_later(self) -> None:
        found = find_steps(timeline([("ProfilerStep#1", 0, 90), ("ProfilerStep#1", 100, 190)]))
        assert bounds(found) == [(1, 0, 90)]
        assert found.duplicate_marks == 1

    def test_names_that_only_look_like_steps(self) -> None:
        odd = ["ProfilerStep#", "ProfilerStep#x", "ProfilerStep#²", "ProfilerStep#-1", "ProfilerStep#" + "9" * 30]
        assert find_steps(timeline([(n, 0, 9) for n in odd])).source == "whole window"

    def test_a_step_without_duration_is_none(self) -> None:
        assert find_steps(timeline([("ProfilerStep#1", 5, 5), ("x", 0, 9)])).source == "whole window"


class TestOtherMarks:
    def test_from_one_fetch_to_the_next(self) -> None:
        found = find_steps(timeline([(NEXT, 10, 20), (NEXT, 50, 65), (NEXT, 90, 91)]))
        assert found.source == "DataLoader"
        assert bounds(found) == [(0, 10, 50), (1, 50, 90)]
        assert found.steps.data_wait_ns.tolist() == [10, 15]
        assert found.steps.batch_count.tolist() == [1, 1]

    def test_a_fetch_inside_a_fetch_is_one(self) -> None:
        found = find_steps(timeline([(NEXT, 10, 40), (NEXT, 15, 25), (NEXT, 50, 60), (NEXT, 90, 91)]))
        assert bounds(found) == [(0, 10, 50), (1, 50, 90)]
        assert found.steps.batch_count.tolist() == [1, 1]

    def test_from_one_update_to_the_next_of_one_optimizer(self) -> None:
        adam, sgd = "Optimizer.step#Adam.step", "Optimizer.step#SGD.step"
        marks = [(adam, 10, 20), (sgd, 22, 30), (adam, 60, 70), (sgd, 72, 80), (adam, 110, 120)]
        found = find_steps(timeline(marks))
        assert found.source == "Optimizer.step"
        assert bounds(found) == [(0, 20, 70), (1, 70, 120)]
        assert found.steps.optimizer_ns.tolist() == [8 + 10, 8 + 10]

    def test_one_fetch_is_no_step_but_updates_are(self) -> None:
        marks = [(NEXT, 0, 5), ("Optimizer.step#Adam.step", 10, 20), ("Optimizer.step#Adam.step", 60, 70)]
        assert bounds(find_steps(timeline(marks))) == [(0, 20, 70)]

    def test_no_mark_is_the_whole_window(self) -> None:
        found = find_steps(timeline([("anything", 10, 20)]))
        assert (found.source, len(found.steps), found.traced_numbers) == ("whole window", 0, ())


class TestColumns:
    def test_waiting_and_updating_are_clipped_to_the_step(self) -> None:
        marks = [
            ("ProfilerStep#1", 0, 100),
            ("ProfilerStep#2", 100, 200),
            (NEXT, 90, 110),
            (NEXT, 120, 130),
            ("Optimizer.step#Adam.step", 150, 160),
            ("Optimizer.zero_grad#Adam.zero_grad", 155, 170),
        ]
        steps = find_steps(timeline(marks, [(NEXT, 0, 90)])).steps
        assert steps.data_wait_ns.tolist() == [10, 20]
        assert steps.batch_count.tolist() == [1, 1]
        assert steps.optimizer_ns.tolist() == [0, 20]
        assert steps.sample_count.tolist() == [-1, -1]
        assert set(steps.phase.tolist()) == {Phase.TRACED}

    def test_first_and_last_are_flagged(self) -> None:
        steps = find_steps(timeline([(f"ProfilerStep#{i}", i * 10, i * 10 + 9) for i in range(3)])).steps
        assert steps.flags.tolist() == [StepFlag.FIRST, 0, StepFlag.LAST]
        (only,) = find_steps(timeline([("ProfilerStep#1", 0, 9)])).steps.flags.tolist()
        assert only == StepFlag.FIRST | StepFlag.LAST

    @given(
        st.lists(
            st.tuples(
                st.sampled_from([f"ProfilerStep#{i}" for i in range(4)] + [NEXT, "Optimizer.step#A.step"]),
                st.integers(0, 60),
                st.integers(0, 60),
            ),
            max_size=14,
        )
    )
    @settings(max_examples=300)
    def test_any_marks_give_a_sound_record(self, marks: list[Row]) -> None:
        line = timeline([(name, start, start + length) for name, start, length in marks])
        found = find_steps(line)
        _record(line, found).check()
        waits = [(s, s + d) for n, s, d in marks if n == NEXT]
        for i in range(len(found.steps)):
            inside = set(range(int(found.steps.start_ns[i]), int(found.steps.end_ns[i])))
            waited = inside & {t for s, e in waits for t in range(s, e)}
            assert found.steps.data_wait_ns[i] == len(waited)


def _record(line: Timeline, found: FoundSteps) -> Run:
    from gpulab.run import Device, Environment, Samples, Settings

    known: dict[str, Any] = {"python": "", "platform": "", "cpu": "", "logical_cores": None, "usable_cores": None}
    return Run(
        id="x",
        created="",
        source="trace",
        settings=Settings(),
        device=Device("cpu", "CPU"),
        environment=Environment(**known, memory_total_bytes=None),
        steps=found.steps,
        samples=Samples(),
        timeline=line,
        wall_ns=1,
        outcome="completed",
        step_source=found.source,
        traced_numbers=found.traced_numbers,
    )


class TestLoadedRun:
    """The record that `load_run` joins."""

    def load(self, folder: Path, events: list[Event], **more: Any) -> Run:
        return load_run(made.write(folder, made.text(events, **more), "rank0.1623212756351.pt.trace.json.gz"))

    def test_a_whole_trace(self, tmp_path: Path) -> None:
        run = self.load(tmp_path, [*made.step(3), *made.step(4, 1000)])
        assert run.id == "rank0.1623212756351"
        assert (run.source, run.step_source) == ("trace", "ProfilerStep")
        assert (run.device.kind, run.device.name, run.device.index) == ("cuda", "NVIDIA H100 80GB HBM3", 0)
        assert run.device.details["sm_count"] == 132
        assert run.device.memory_total_bytes == run.memory.total_bytes == made.DEVICE["totalGlobalMem"]
        assert run.wall_ns == 2_000_000
        assert run.traced_numbers == (3, 4)
        assert run.steps.data_wait_ns.tolist() == [200_000, 200_000]
        assert run.steps.optimizer_ns.tolist() == [90_000, 90_000]
        assert {"live curves", "unprofiled step time"} <= {m.what for m in run.missing}
        account = breakdown(run)
        assert account is not None
        assert account.steps[0].parts_ns["compute"] == 200_000
        assert account.steps[0].parts_ns["memcpy"] == 20_000
        assert account.steps[0].parts_ns["data_wait"] == 200_000

    def test_the_date_is_the_traces(self, tmp_path: Path) -> None:
        assert self.load(tmp_path, made.step()).created == ""
        dated = self.load(tmp_path, made.step(), baseTimeNanoseconds=1_751_410_836_000_000_000)
        assert dated.created.startswith("2025-07-18T")

    def test_a_gpu_without_properties(self, tmp_path: Path) -> None:
        run = self.load(tmp_path, made.step(), deviceProperties=[])
        assert (run.device.kind, run.device.name) == ("cuda", "GPU (name not in the trace)")
        assert "the GPU's name and size" in {m.what for m in run.missing}

    def test_the_gpu_that_worked_is_the_device(self, tmp_path: Path) -> None:
        properties = [{**made.DEVICE, "id": i, "name": f"GPU number {i}"} for i in range(4)]
        other = made.on_gpu("kernel", "k", 0, 900, 7, device=2)
        run = self.load(tmp_path, [*made.step(), other], deviceProperties=properties)
        assert (run.device.index, run.device.name) == (2, "GPU number 2")
        assert [c.what for c in run.choices] == ["steps", "device"]

    def test_a_trace_of_the_cpu(self, tmp_path: Path) -> None:
        run = self.load(tmp_path, [made.span("cpu_op", "aten::mm", 0, 5)], deviceProperties=[])
        assert run.device.kind == "cpu"
        assert run.step_source == "whole window"
        assert "steps" in {m.what for m in run.missing}
        assert breakdown(run) is not None

    def test_peaks_of_memory(self, tmp_path: Path) -> None:
        args = {"Device Type": 1, "Device Id": 0, "Bytes": 5, "Total Allocated": 700, "Total Reserved": 900}
        host = {**args, "Device Type": 0, "Device Id": -1, "Total Allocated": 10**6}
        event = {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": made.BASE_US}
        run = self.load(tmp_path, [*made.step(), {**event, "args": args}, {**event, "args": host}])
        assert (run.memory.peak_allocated_bytes, run.memory.peak_reserved_bytes) == (700, 900)

    def test_it_can_be_stored_and_read_back(self, tmp_path: Path) -> None:
        import io

        from gpulab.store.run_format import decode, encode

        args = {"Device Type": 1, "Device Id": 0, "Bytes": 5}
        event = {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": made.BASE_US, "args": args}
        run = self.load(tmp_path, [*made.step(), event])
        document, columns = encode(run)
        back = decode(document, io.BytesIO(columns))
        assert back.origin == run.origin
        assert back.memory_events is not None and back.memory_events.bytes.tolist() == [5]
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


def test_six_batches_in_one_real_step() -> None:
    run = load_run(real_traces.path("h100_owlv2_starved"))
    assert run.steps.batch_count.tolist() == [6]
    assert run.memory.peak_reserved_bytes == 3_600_809_984


def test_real_step_times() -> None:
    """README beside the traces: steps 1 to 6 of workers0 take 164 to 181 ms, 49 to 69 ms of it in the DataLoader."""
    steps = load_run(real_traces.path("v100_resnet50_workers0")).steps
    wall, wait = steps.wall_ns / 1e6, steps.data_wait_ns / 1e6
    assert wall.min() > 163.5 and wall.max() < 181.5
    assert wait.min() > 49
