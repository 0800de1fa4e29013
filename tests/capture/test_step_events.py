"""Steps timed on a GPU: events at their boundaries, on a scripted `torch.cuda`."""

from __future__ import annotations

import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpulab.analysis.facts import facts
from gpulab.capture.pilot import ShortRun
from gpulab.capture.profiler import StepEvents, gpu_of
from gpulab.run import Int64, Run
from gpulab.store.run_format import decode, encode
from gpulab.views.report.sections import sections
from tests.support import synthetic
from tests.support.fake_cuda import FakeCuda, FakeStream

MS = 1_000_000


def timed(fake: FakeCuda, work_ns: list[int], host_ns: int) -> tuple[StepEvents, Int64]:
    """A loop that launches so much work in each step and takes `host_ns` for it; its boundaries on the host."""
    events, edges = StepEvents(), []
    for work in [*work_ns, 0]:
        assert fake.clock_ns is not None
        events.mark(fake.clock_ns)
        edges.append(fake.clock_ns)
        fake.enqueue(work)
        fake.clock_ns += host_ns
    return events, np.array(edges, np.int64)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 50 * MS), min_size=1, max_size=30), st.integers(1, 20 * MS))
def test_a_step_takes_what_the_gpu_takes_for_it(fake_cuda: FakeCuda, work_ns: list[int], host_ns: int) -> None:
    """Against the sum by hand: the GPU begins a step when it is done with the one before, and not before the host."""
    fake_cuda.start()
    begin_ns = max(fake_cuda.now_ns, fake_cuda.stream_of(0).end_ns)
    fake_cuda.clock_ns = begin_ns
    events, edges = timed(fake_cuda, work_ns, host_ns)
    reached, expected = begin_ns, []
    for i, work in enumerate(work_ns):
        ended = max(reached + work, begin_ns + i * host_ns + work, begin_ns + (i + 1) * host_ns)
        expected.append(ended - reached)
        reached = ended
    taken = events.finish(edges[:-1], edges[1:])
    np.testing.assert_allclose(taken, expected, atol=1)
    fake_cuda.clock_ns = None


@pytest.mark.parametrize("leave_after", [None, 6])
def test_a_short_run_is_timed_on_the_gpu(fake_cuda: FakeCuda, leave_after: int | None) -> None:
    """The loop never waits for the GPU; one that is left by `break` keeps its whole steps, too."""
    fake_cuda.start()
    fake_cuda.clock_ns = 0
    model, steps = torch.nn.Linear(2, 2), leave_after or 10
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ShortRun(steps, on_gpu=True) as block:
        for i, batch in enumerate(torch.utils.data.DataLoader(torch.ones(20, 2), batch_size=1)):  # type: ignore[arg-type]
            model(batch).sum().backward()
            fake_cuda.enqueue(40 * MS)
            fake_cuda.clock_ns = (fake_cuda.clock_ns or 0) + MS
            optimizer.step()
            if i + 1 == leave_after:
                break
    assert len(block.steps) == steps and "synchronize" not in fake_cuda.calls
    assert (block.steps.time_ns[1 : steps - 1] == 40 * MS).all()
    assert fake_cuda.now_ns >= fake_cuda.stream_of(0).end_ns, "the GPU was waited for at the end"


def test_a_long_run_is_timed_on_the_gpu_to_its_end(fake_cuda: FakeCuda) -> None:
    """Also after the pilot has woken at a mark at which no step ends."""
    fake_cuda.start()
    fake_cuda.clock_ns = 0
    model, steps = torch.nn.Linear(2, 2), 800
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ShortRun(steps, on_gpu=True) as block:
        for batch in torch.utils.data.DataLoader(torch.ones(steps, 2), batch_size=1):  # type: ignore[arg-type]
            model(batch).sum().backward()
            model(batch).sum().backward()
            fake_cuda.enqueue(40 * MS)
            fake_cuda.clock_ns = (fake_cuda.clock_ns or 0) + MS
            optimizer.step()
    assert len(block.steps) == steps and (block.steps.time_ns[1 : steps - 1] == 40 * MS).all()


def test_a_boundary_in_a_graph_capture_leaves_the_graph_alone(fake_cuda: FakeCuda) -> None:
    fake_cuda.start()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ShortRun(6, on_gpu=True) as block:
        for i in range(6):
            model(torch.ones(2)).sum().backward()
            if i == 3:
                with fake_cuda.capture():
                    optimizer.step()
            else:
                optimizer.step()
    assert fake_cuda.violations == [] and fake_cuda.captured == []
    assert (block.steps.device_ns == -1).sum() >= 2, "the two steps at that boundary have no time of the GPU"


def test_a_gpu_that_nobody_uses_gets_no_event(fake_cuda: FakeCuda) -> None:
    events = StepEvents()
    events.mark(1)
    assert fake_cuda.started_by is None, "CUDA was not started by us"
    fake_cuda.initialized = True
    events.mark(2)
    assert fake_cuda.contexts == [] and fake_cuda.event_count == 0
    assert len(events.finish(np.array([1]), np.array([2]))) == 0


class OnGpu:
    """An optimizer whose parameters lie on a GPU."""

    def __init__(self, index: int) -> None:
        parameter = SimpleNamespace(device=torch.device("cuda", index))
        self.param_groups = [{"params": [parameter]}]


@pytest.mark.parametrize("also_before", [True, False], ids=["another cell's tensors", "it begins elsewhere"])
def test_events_count_on_the_gpu_that_trains(fake_cuda: FakeCuda, also_before: bool) -> None:
    """Tensors lie on the first GPU, too; its stream is idle."""
    fake_cuda.start(0)
    if also_before:
        fake_cuda.start(1)
    fake_cuda.clock_ns = 0
    events = StepEvents()
    events.mark(0)
    if also_before:
        assert events.index is None and fake_cuda.event_count == 0, "two GPUs are in use: nobody knows yet"
    fake_cuda.start(1)
    for at in (1_000, 2_000, 3_000):
        fake_cuda.clock_ns = at
        events.updated(OnGpu(1))
        events.mark(at)
        fake_cuda.enqueue(5_000, fake_cuda.stream_of(1))
    assert events.index == 1
    taken = events.finish(np.array([0, 1_000, 2_000]), np.array([1_000, 2_000, 3_000]))
    assert taken.tolist() == [-1, 5_000, 5_000]


def test_training_on_a_stream_of_its_own_is_timed_there(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """`with torch.cuda.stream(side)` around the step, the loader outside of it."""
    fake_cuda.start(0)
    fake_cuda.clock_ns = 0
    side, events = FakeStream(fake_cuda, 0), StepEvents()
    for at in (0, 1_000, 2_000):
        fake_cuda.clock_ns = at
        with monkeypatch.context() as inside:
            inside.setattr(torch.cuda, "current_stream", lambda index: side)
            events.updated(OnGpu(0))
        events.mark(at)
        fake_cuda.enqueue(100_000, side)
    assert events.finish(np.array([0, 1_000]), np.array([1_000, 2_000])).tolist() == [100_000, 100_000]


def test_an_event_before_its_predecessor_measures_nothing(fake_cuda: FakeCuda) -> None:
    fake_cuda.start(0)
    fake_cuda.clock_ns = 0
    late, events = FakeStream(fake_cuda, 0), StepEvents()
    fake_cuda.enqueue(50_000, late)
    events.mark(0)
    events._stream = late
    events.mark(1_000)
    events.mark(2_000)
    assert events.finish(np.array([0, 1_000]), np.array([1_000, 2_000])).tolist() == [50_000, -1]


def test_an_error_that_stays_is_left_to_the_users_code(fake_cuda: FakeCuda) -> None:
    fake_cuda.start()
    events = StepEvents()
    events.mark(1)
    with pytest.raises(RuntimeError):
        fake_cuda.fail()
    events.mark(2)
    events.mark(3)
    assert events.finish(np.array([1, 2]), np.array([2, 3])).tolist() == [-1, -1]


def test_where_an_optimizers_parameters_lie() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    assert gpu_of(torch.optim.SGD([parameter], lr=0.1)) is None
    assert gpu_of(object()) is None


def test_without_a_gpu_no_step_has_a_time_there() -> None:
    with ShortRun(3) as block:
        assert block.events is None
    assert len(block.steps.device_ns) == 0


# -- what the record and the report make of it -------------------------------------------------------------------------


def with_device_times(device_ns: Int64) -> Run:
    run = synthetic.gpu_case().run
    return replace(run, steps=replace(run.steps, device_ns=device_ns))


def test_throughput_is_the_gpus() -> None:
    host = synthetic.gpu_case().run
    twice = facts(with_device_times(2 * host.steps.wall_ns))
    before = facts(host)
    assert before.step_us is not None and twice.step_us is not None
    assert twice.step_us.median == pytest.approx(2 * before.step_us.median)
    assert twice.samples_per_s == pytest.approx((before.samples_per_s or 0) / 2)


def test_the_report_says_whose_time_a_step_has() -> None:
    run = synthetic.gpu_case().run
    some = run.steps.wall_ns.copy()
    some[10] = -1
    for times, words in ((run.steps.wall_ns, "when it has finished this one"), (some, "1 of the ")):
        (shown,) = [s for s in sections(facts(with_device_times(times))) if s.title == "Step time"]
        assert any(words in line for line in shown.lines)


def test_a_stored_run_keeps_the_gpus_times() -> None:
    run = with_device_times(synthetic.gpu_case().run.steps.wall_ns)
    document, columns = encode(run)
    assert (decode(document, io.BytesIO(columns)).steps.device_ns == run.steps.device_ns).all()


def test_a_record_with_too_few_times_is_refused() -> None:
    with pytest.raises(AssertionError, match="differ in length"):
        with_device_times(np.zeros(3, np.int64)).check()
