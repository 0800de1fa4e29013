"""Code without steps and without module calls: its trace is bounded, its time is its own, its result is unchanged."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch.profiler import ProfilerActivity, profile

import gpulab
from gpulab.api import reading as doors
from gpulab.capture import threads, windows
from gpulab.capture.threads import Deadline
from gpulab.run import Run
from gpulab.user_code import Owner, owners
from gpulab.views.report import sections

LIMIT_S = 0.2


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(windows, "TRACE_STEPLESS_LIMIT_S", LIMIT_S)
    monkeypatch.setattr(threads, "RETRY_S", 0.02)
    gc.collect()  # one of all objects takes as long as the limit, so it must not fall into the window
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    assert not threads._waiting, "the main thread still has something to call"
    assert not torch._C._autograd._profiler_enabled()


def multiply(until: Callable[[int], bool]) -> tuple[int, torch.Tensor]:
    """Pure tensor code: how often it multiplied, and what came out."""
    torch.manual_seed(3)
    w, x = torch.randn(16, 16) / 4, torch.randn(16, 16)
    turns = 0
    while not until(turns):
        x = torch.tanh(x @ w)
        turns += 1
    return turns, x


def profiler_ended(turns: int) -> bool:
    """Whether the profiler was stopped while the code went on; gives up after a long while."""
    ended = turns > 0 and not torch._C._autograd._profiler_enabled()
    assert turns < 3_000_000, "the trace of this code is not bounded"
    return ended


@pytest.mark.parametrize("options", [{"whole": True}, {"source": "statement"}], ids=["--whole", "statement"])
@pytest.mark.parametrize("compiled", [False, True], ids=["", "after torch.compile"])
def test_the_trace_of_pure_tensor_code_is_bounded(options: dict[str, Any], compiled: bool) -> None:
    import torch._dynamo

    try:
        if compiled:
            torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        with gpulab.profile("tensors", show=False, save=False, **options) as p:
            turns, out = multiply(profiler_ended)
            again, more = multiply(lambda n: n == turns)
        assert torch.equal(out, more) and again == turns
    finally:
        torch._dynamo.reset()
    run = p.run
    run.check()
    assert run.outcome == "completed" and run.timeline is not None
    products = sum(run.timeline.names[i] == "aten::mm" for i in run.timeline.name_id)
    assert 0 < products <= turns, "nothing after the limit"
    assert run.observer.window_truncated == f"code without steps is traced for {LIMIT_S:g} s at most"
    assert not [m for m in run.missing if m.key == "breakdown"]


def test_the_profilers_own_time_is_not_the_cells() -> None:
    around = time.perf_counter_ns()
    with gpulab.profile("tensors", show=False, save=False, whole=True) as p:
        began = time.perf_counter_ns()
        multiply(profiler_ended)
        inside = time.perf_counter_ns() - began
    around = time.perf_counter_ns() - around
    run, observer = p.run, p.run.observer
    assert observer.profiler_start_ns and observer.profiler_stop_ns
    profiler_ns = observer.profiler_start_ns + observer.profiler_stop_ns
    assert inside - profiler_ns <= run.code_wall_ns <= around - profiler_ns
    assert run.wall_ns - run.code_wall_ns >= profiler_ns


def test_a_cell_that_ran_with_the_profiler_says_so() -> None:
    with gpulab.profile("all", show=False, save=False, whole=True) as p:
        multiply(lambda n: n == 100)
    run = p.run
    assert run.timeline is not None
    start_ns = run.timeline.window_ns[0]
    as_if = replace(run.timeline, window_ns=(start_ns, start_ns + run.wall_ns))
    everything = replace(run, timeline=as_if, observer=replace(run.observer, own_ns=1))
    rows = [row.cells for s in sections.sections(doors.report(everything).facts) for row in s.rows]
    (whole,) = [cells for cells in rows if cells[0].startswith("the whole run")]
    assert whole[0] == "the whole run, with the profiler" and "not measurable" not in " ".join(whole)


def on_another_thread(train: Callable[[], Run]) -> Run:
    runs: list[Run] = []
    thread = threading.Thread(target=lambda: runs.append(train()))
    thread.start()
    thread.join()
    return runs[0]


def test_on_another_thread_what_could_not_be_bounded_is_said() -> None:
    def train() -> Run:
        with gpulab.profile("elsewhere", show=False, save=False, whole=True) as p:
            until = time.monotonic() + 3 * LIMIT_S
            multiply(lambda n: time.monotonic() > until)
        return p.run

    run = on_another_thread(train)
    said = [c for c in run.choices if "could not be ended" in c.reason]
    assert len(said) == 1 and said[0].what == "traced window"
    run.check()


def test_on_another_thread_the_next_module_call_ends_it() -> None:
    calls = [0]

    def train() -> Run:
        net = torch.nn.Linear(2, 2)
        with gpulab.profile("elsewhere", show=False, save=False, source="statement") as p:
            net(torch.ones(1, 2))
            until = time.monotonic() + 60
            while torch.autograd._profiler_enabled() and time.monotonic() < until:  # type: ignore[attr-defined]
                time.sleep(LIMIT_S)
                calls[0] += 1
                net(torch.ones(1, 2))
        return p.run

    run = on_another_thread(train)
    assert run.observer.window_truncated is not None and run.timeline is not None
    assert sum(run.timeline.names[i] == "aten::addmm" for i in run.timeline.name_id) <= calls[0]


class Slow(torch.autograd.Function):
    """Works in Python during its backward pass, past the limit."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        until = time.monotonic() + 3 * LIMIT_S
        while time.monotonic() < until:
            grad = grad + 0
        Slow.profiled = torch._C._autograd._profiler_enabled()
        return grad * 2

    profiled = False


def test_a_backward_pass_is_waited_for() -> None:
    """Stopped within, torch would take the profiler for active ever after."""
    x = torch.ones(3, requires_grad=True)
    double: Callable[[torch.Tensor], torch.Tensor] = Slow.apply
    with gpulab.profile("backward", show=False, save=False, whole=True) as p:
        loss = double(x).sum()
        (grad,) = torch.autograd.grad(loss, x)
        multiply(profiler_ended)
    assert Slow.profiled and grad.tolist() == [2, 2, 2]
    assert p.run.observer.window_truncated is not None
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        torch.ones(2) + 1
    assert any(e.key == "aten::add" for e in prof.key_averages())


@pytest.mark.parametrize("marked_by", ["nothing else", "a module call", "a loader"])
def test_optimizers_that_step_within_the_backward_pass(marked_by: str) -> None:
    """Without another mark all lie within autograd's engine, where the profiler must not be touched."""
    torch.manual_seed(5)
    net = torch.nn.Linear(4, 2)
    for parameter in net.parameters():
        own = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, own=own: (own.step(), own.zero_grad())[0])  # type: ignore[no-untyped-call]
    points = torch.randn(48, 4)
    with gpulab.profile("in backward", show=False, save=False) as p:
        for x in torch.utils.data.DataLoader(points, batch_size=4) if marked_by == "a loader" else points.split(4):  # type: ignore[arg-type, no-untyped-call]
            out = x @ net.weight.T + net.bias if marked_by == "nothing else" else net(x)
            out.square().sum().backward()
    run = p.run
    run.check()
    assert run.outcome == "completed" and len(run.steps) == 12
    if marked_by == "nothing else":
        (missing,) = [m for m in run.missing if m.key == "breakdown"]
        assert "backward" in missing.reason
    else:
        assert run.traced_numbers, (run.missing, run.observer)
        assert p.report.facts.breakdown is not None


def test_a_long_step_is_cut_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the middle of a step, without a mark; that step is not taken for a profiled one."""
    monkeypatch.setattr(windows, "TRACE_HARD_LIMIT_S", LIMIT_S)
    early = windows.plan(gpulab.profile("", show=False).settings, None).windows[0]
    with gpulab.profile("long step", show=False, save=False) as p:
        for i in range(12):
            if i == early.after:
                multiply(profiler_ended)
            gpulab.step()
    run = p.run
    run.check()
    assert len(run.steps) == 12 and not run.traced_numbers
    assert run.observer.window_truncated == f"one step ran longer than {LIMIT_S:g} s"


# -- the main thread is asked, politely --------------------------------------------------------------------------------


def spin(until: Callable[[], object], limit_s: float = 60.0) -> None:
    """Python code that leaves no other mark."""
    end = time.monotonic() + limit_s
    while not until():
        assert time.monotonic() < end, "waited in vain"


def test_a_deadline_calls_on_the_main_thread_until_cancelled() -> None:
    called: list[threading.Thread] = []
    in_time = Deadline(60, lambda: called.append(threading.current_thread()), lambda: None)
    in_time.start()
    in_time.cancel()
    assert not called
    limit = Deadline(0.01, lambda: called.append(threading.current_thread()), lambda: None)
    limit.start()
    spin(lambda: len(called) >= 3)
    limit.cancel()
    spin(lambda: not threads._waiting)
    count = len(called)
    time.sleep(0.1)
    assert set(called) == {threading.main_thread()} and len(called) == count
    assert not [t for t in threading.enumerate() if t.name == "gpulab-deadline"]


def test_code_of_the_capture_is_not_interrupted_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    limit = Deadline(0.01, lambda: called.append(1), lambda: None)
    monkeypatch.setitem(owners, __file__, Owner.GPULAB)
    limit.start()
    end = time.monotonic() + 0.2
    spin(lambda: time.monotonic() > end)
    assert not called
    monkeypatch.undo()
    spin(lambda: called)
    limit.cancel()
    spin(lambda: not threads._waiting)


def test_an_interrupt_that_arrives_meanwhile_reaches_the_user() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

    def due() -> None:
        limit._over.set()
        signal.raise_signal(signal.SIGINT)
        time.sleep(10)
        raise AssertionError("the interrupt was swallowed")

    limit = Deadline(0.01, due, lambda: None)
    limit.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            spin(lambda: False)
    finally:
        signal.signal(signal.SIGINT, before)
    limit.cancel()
    spin(lambda: not threads._waiting)
