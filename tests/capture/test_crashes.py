"""After an error of the GPU that stays: the user's own exception is the one seen, and nothing of gpulab goes on."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import gpulab
from gpulab.analysis.facts import facts
from gpulab.analysis.steps import select
from gpulab.capture.pilot import Pilot
from gpulab.capture.profiler import SACRIFICED, TEARDOWN, Window
from gpulab.capture.recorder import Capture
from gpulab.errors import DeviceLost, GpulabError, StoreError
from gpulab.knobs.loader_options import LoaderOption
from gpulab.prediction.predict import predict
from gpulab.tuning.code import Code
from gpulab.tuning.execute import Execution, Stopper, run_block
from gpulab.tuning.record import Block, Experiment
from gpulab.tuning.schedule import Size
from tests.support.fake_cuda import ASSERT, FakeCuda

SETUP = """
from tests.support import fake_cuda
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
gpu = fake_cuda.FakeEvent
data = TensorDataset(torch.randn(400, 8), torch.randint(0, 3, (400,)))
model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(data, batch_size=4)
fails_at = -1
"""
CELL = """
for number, (x, y) in enumerate(loader, 1):
    loss = nn.functional.cross_entropy(model(x), y)
    if number == fails_at:
        gpu.fake.fail()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
NEXT_STEP = "Restart the kernel: after this error the CUDA context is lost."


@pytest.fixture
def names(fake_cuda: FakeCuda) -> dict[str, Any]:
    """A notebook that uses the first GPU."""
    fake_cuda.start()
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(SETUP, namespace)
    return namespace


def compared(cell: str, knobs: dict[str, object], names: dict[str, Any], **more: Any) -> Any:
    """Compare the baseline with itself under these knobs."""
    given = {"pairs": 2, "steps": 4, "save": False, "show": False, **more}
    return gpulab.experiment(cell, knobs, namespace=names, **given)


def lost(cell: str, knobs: dict[str, object], names: dict[str, Any]) -> Experiment:
    """The experiment in which the cell loses the GPU: the user's own exception is raised, from the user's line."""
    with pytest.raises(RuntimeError, match=ASSERT) as caught:
        compared(cell, knobs, names)
    assert "in fail\n" in lines(caught.value) and profiler_is_off()
    assert caught.value.__notes__ == [NEXT_STEP]
    experiment = gpulab.experiments[-1].result
    assert isinstance(experiment, Experiment)
    return experiment


def lines(error: BaseException) -> str:
    """The lines of code in its traceback."""
    return "".join(traceback.format_tb(error.__traceback__))


def profiler_is_off() -> bool:
    """Neither torch's library nor its Python part believes that a profiler runs."""
    return not torch._C._autograd._profiler_enabled() and not torch.autograd.profiler._is_profiler_enabled


def opened() -> Window:
    window = Window("cuda")
    window.start()
    return window


def test_a_window_on_a_lost_gpu(fake_cuda: FakeCuda) -> None:
    fake_cuda.start()
    window = opened()
    torch.ones(3) + 1
    fake_cuda.error = ASSERT
    recording = window.stop()
    assert profiler_is_off()
    assert "aten::add" in recording.timeline(0).names, "what was recorded of the host is kept"


def test_a_window_waits_for_the_gpus_only(fake_cuda: FakeCuda) -> None:
    fake_cuda.clock_ns = 0
    fake_cuda.start(1)
    fake_cuda.current = 0  # the code says cuda:1 wherever it means it
    window = opened()
    fake_cuda.current = 1
    fake_cuda.enqueue(5_000_000)
    fake_cuda.current = 0
    window.stop()
    assert fake_cuda.clock_ns == 5_000_000 and fake_cuda.contexts == []


def test_a_window_on_code_of_the_cpu_starts_no_cuda(fake_cuda: FakeCuda) -> None:
    window = opened()
    torch.ones(3) + 1
    assert "aten::add" in window.stop().timeline(0).names
    assert fake_cuda.started_by is None and fake_cuda.contexts == []


CAPTURING = CELL.replace("    loss =", "    graph = gpu.fake.capture()\n    graph.__enter__()\n    loss =")
CAPTURING += "    graph.__exit__(None, None, None)\n"


@pytest.mark.parametrize("trains", ["optimizer.step()", "model.weight.data -= 0.1 * model.weight.grad"])
def test_steps_inside_a_graph_capture(names: dict[str, Any], fake_cuda: FakeCuda, trains: str) -> None:
    with gpulab.profile(show=False, save=False, live=False, device="cuda", steps=30) as profile:
        exec(CAPTURING.replace("optimizer.step()", trains), names)
    assert fake_cuda.violations == [] and fake_cuda.captured == []
    assert len(profile.run.steps) >= 30


def test_blocks_of_steps_inside_a_graph_capture(names: dict[str, Any], fake_cuda: FakeCuda) -> None:
    compared(CAPTURING, {"workers": 1}, names)
    assert fake_cuda.violations == [] and fake_cuda.captured == []


@pytest.mark.parametrize("step", [1, 8])
def test_a_profiled_block(names: dict[str, Any], step: int) -> None:
    names["fails_at"] = step
    profile = gpulab.profile(show=False, save=False, live=False)
    with pytest.raises(RuntimeError, match=ASSERT) as caught, profile:
        exec(CELL, names)
    assert "in fail\n" in lines(caught.value) and profiler_is_off()
    assert profile.run.outcome == "failed" and ASSERT in profile.run.outcome_detail
    assert not [m.reason for m in profile.run.missing if "gpulab failed" in m.reason]
    assert len(profile.run.steps) >= step - 1


@pytest.mark.parametrize("step", [1, 5, 20])
def test_the_cell_as_written_fails(names: dict[str, Any], step: int) -> None:
    names["fails_at"] = step
    experiment = lost(CELL, {"workers": 1}, names)
    assert experiment.stopped and f"{ASSERT}. {NEXT_STEP}" in " ".join(experiment.notes)


def test_an_arm_fails(names: dict[str, Any]) -> None:
    sides = lost(CELL, {"fails_at": [5, -2]}, names).sides
    assert ASSERT in sides[1].failure and sides[2].facts is None, "nothing more was run"


def test_a_block_of_an_arm_fails(names: dict[str, Any], fake_cuda: FakeCuda) -> None:
    cell = "gpu.fake.calls.append('run')\n" + CELL.replace(
        "number == fails_at", "fails_at == -2 and gpu.fake.calls.count('run') > 2"
    )
    side = lost(cell, {"fails_at": [-2]}, names).sides[1]
    assert side.facts is not None and ASSERT in side.failure
    assert "run" not in fake_cuda.calls[fake_cuda.calls.index("launch") :], "nothing more was run"


def test_an_error_that_the_cell_swallows(names: dict[str, Any]) -> None:
    names["fails_at"] = 5
    cell = "try:\n" + CELL.replace("\n", "\n    ") + "\nexcept RuntimeError:\n    pass\n"
    with pytest.raises(DeviceLost, match=f"{ASSERT}. Restart the kernel") as caught:
        compared(cell, {"workers": 1}, names)
    assert profiler_is_off() and not hasattr(caught.value, "__notes__")


def test_nothing_is_foretold_where_no_kernel_comes_back(names: dict[str, Any]) -> None:
    with gpulab.profile(show=False, save=False, live=False, device="cuda") as profile:
        exec(CELL, names)
    assert profile.run.timeline is not None and not profile.run.timeline.has_device_events
    predicted = predict(facts(profile.run), {"workers": "1"})
    assert predicted.refused == "there is no trace of the GPU's work to replay" and predicted.ratio is None


def test_on_a_gpu_that_is_lost_already(names: dict[str, Any], fake_cuda: FakeCuda) -> None:
    """A cell runs, for it may not need it; an experiment does not."""
    fake_cuda.error = ASSERT
    with gpulab.profile(show=False, save=False, live=False, whole=True) as profile:
        exec(CELL, names)
    assert profile.run.outcome == "completed" and len(profile.run.steps) == 100
    with pytest.raises(DeviceLost, match="Restart the kernel"):
        compared(CELL, {"workers": 1}, names)


def test_a_knob_that_cannot_be_taken_out_after_it(names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    applied = LoaderOption.applied

    @contextmanager
    def waits_at_its_end(self: Any, value: Any) -> Any:
        with applied(self, value) as log:
            try:
                yield log
            finally:
                torch.cuda.synchronize()

    monkeypatch.setattr(LoaderOption, "applied", waits_at_its_end)
    with pytest.raises(RuntimeError, match=ASSERT) as caught:
        compared(CELL, {"workers": 1, "fails_at": 5}, names)
    assert "in fail\n" in lines(caught.value)


def test_a_record_that_fails_does_not_hide_the_users_error(
    names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = Capture.finish

    def breaks(self: Capture, *given: Any) -> Any:
        finish(self, *given)
        raise StoreError("the record is broken")

    monkeypatch.setattr(Capture, "finish", breaks)
    with pytest.raises(ZeroDivisionError) as caught:
        compared("epoch = 1 / 0\n" + CELL, {"workers": 1}, names)
    assert "<cell>" in lines(caught.value)


def test_after_an_arm_without_memory_the_next_one_runs(names: dict[str, Any], fake_cuda: FakeCuda) -> None:
    names["size"] = 10
    names["train"] = None
    cell = f"""
def train():
    block = gpu.fake.allocate(size * 2**30)
    assert gpu.fake.allocated[0] == size * 2**30, "memory of an earlier run is still held"
    {CELL.replace(chr(10), chr(10) + "    ")}
        if size == 50 and number == 6:
            more = gpu.fake.allocate(size * 2**30)
train()
"""
    sides = compared(cell, {"size": [50, 70]}, names).result.sides
    assert sides[1].failure.startswith("out of memory") and not sides[1].blocks
    assert not sides[2].failure and len(sides[2].blocks) == 2
    assert fake_cuda.allocated == [0, 0] and fake_cuda.error is None


# -- faults of our own -------------------------------------------------------------------------------------------------


def test_a_profiler_that_cannot_be_ended_costs_the_trace_only(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Window.stop

    def broken(window: Window) -> Any:
        stop(window)
        raise ValueError("no end")

    monkeypatch.setattr(Window, "stop", broken)
    with gpulab.profile(show=False, save=False, live=False, device="cpu", whole=True) as p:
        torch.ones(3) + 1
    assert p.run.timeline is None
    assert any("could not be ended (ValueError: no end)" in m.reason for m in p.run.missing)


def test_a_block_cut_short_by_a_fault_of_ours_is_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, finder: Any) -> None:
        raise ValueError("no note")

    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(SETUP, namespace)
    cell = Code.of_text(CELL, namespace)
    monkeypatch.setattr(Pilot, "_note_feeder", broken)
    ended = run_block(Execution(cell), Size(1, 2), Stopper(), on_gpu=False)
    assert isinstance(ended, GpulabError) and "no note" in str(ended)


def test_a_block_tells_how_long_it_had_a_core() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(SETUP, namespace)
    block = run_block(Execution(Code.of_text(CELL, namespace)), Size(1, 2), Stopper(), on_gpu=False)
    assert isinstance(block, Block) and block.time_ns > 0
    known = block.own_fraction is not None and 0 < block.own_fraction <= 1
    assert known if sys.platform == "linux" else block.own_fraction is None


# -- kernels that a session of the profiler may lose -------------------------------------------------------------------


def test_each_session_begins_with_kernels_that_may_be_lost(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kernels:
        def add_(self, number: int) -> None:
            counts[-1] += 1

    fake_cuda.start()
    monkeypatch.setattr(torch, "zeros", lambda *size, device: Kernels())
    counts: list[int] = []
    for _ in range(2):
        counts.append(0)
        opened().stop()
    assert counts[0] >= SACRIFICED and counts[1] == counts[0] + 1, "one more is lost with each session of a process"


def test_kernels_of_ours_are_not_seen_by_the_users_modes(fake_cuda: FakeCuda) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Log(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.seen: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    fake_cuda.start()
    window = Window("cuda")
    with Log() as log:
        window.start()
        seen = list(log.seen)
    window.stop()
    assert not [name for name in seen if "add_" in name or "zeros" in name]


def test_a_warning_of_each_session_is_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.profiler import profiler

    begin = profiler.profile.start

    def warning_start(self: Any) -> None:  # as torch 2.11 does
        vars(profiler)["_warn_once"]("Warning: Profiler clears events at the end of each cycle.")
        begin(self)

    monkeypatch.setattr(profiler.profile, "start", warning_start)
    window = Window("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        window.start()
    window.stop()


def test_a_window_asks_kineto_for_sizes_and_occupancy() -> None:
    window = opened()
    torch.ones(3) + 1
    events = window.stop().profile.profiler.kineto_results.events()
    (event,) = [e for e in events if e.name() == "aten::add"]
    assert event.metadata_json(), "without the session's option this is empty"


@pytest.mark.parametrize(
    ("cuda", "by_the_user", "stays"),
    [(None, None, True), ("12.4", None, True), ("12.6", None, False), ("13.0", None, False), ("13.0", "0", True)],
)
def test_the_profiler_leaves_the_process_where_that_is_safe(
    names: dict[str, Any], monkeypatch: pytest.MonkeyPatch, cuda: str | None, by_the_user: str | None, *, stays: bool
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv(TEARDOWN, raising=False)
    if by_the_user is not None:
        monkeypatch.setenv(TEARDOWN, by_the_user)
    for _ in range(2):
        with gpulab.profile(show=False, save=False, live=False) as profile:
            exec(CELL, names)
    run = profile.run
    assert run.observer.profiler_stays == stays
    assert stays == bool([c for c in run.choices if c.value == "attached since an earlier run"])
    dropped = select(replace(run, device=replace(run.device, kind="cuda"))).dropped  # the trace has shown a CPU
    assert stays == any("after the profiler" in steps.reason for steps in dropped)
    assert os.environ.get(TEARDOWN) == by_the_user
