"""What a knob prepares is ended from another thread, and nothing else is."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from gpulab.knobs import preparation
from gpulab.knobs.compile import Compile
from gpulab.knobs.preparation import PreparationEnded, endable


def compiler(name: str, ends: threading.Event) -> types.ModuleType:
    """A module with a function that works until it is ended, or `ends` is set."""
    module = types.ModuleType(name)
    vars(module)["ends"] = ends
    exec("def work(began):\n    began.set()\n    while not ends.wait(0.001):\n        pass\n", vars(module))
    return module


@contextmanager
def ending() -> Iterator[None]:
    """Inside, another thread ends what is prepared, again and again; no finalizer runs, which would swallow it."""
    over = threading.Event()
    gc.collect()
    gc.disable()

    def end() -> None:
        while not over.wait(0.02):
            preparation.end()

    thread = threading.Thread(target=end)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        gc.enable()


def test_it_is_ended_where_it_works() -> None:
    slow = compiler("slow_compiler", threading.Event())
    with ending(), pytest.raises(PreparationEnded), endable("slow_compiler"):
        slow.work(threading.Event())


def test_it_is_ended_where_an_error_is_not_lost() -> None:
    """Asked once, as Stop does, while the collector calls back: what is raised in a callback is printed, and over."""
    called, over = threading.Event(), threading.Event()

    class Collecting(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if not called.is_set():
                gc.collect()
            return over.wait(timeout)

    def callback(phase: str, info: dict[str, int]) -> None:
        if not called.is_set():
            called.set()
            time.sleep(0.05)

    def end() -> None:
        called.wait()
        preparation.end()
        over.set()

    gc.collect()  # what other tests have left may have finalizers, which swallow errors as well
    thread = threading.Thread(target=end)
    thread.start()
    gc.callbacks.append(callback)
    try:
        with pytest.raises(PreparationEnded), endable("slow_compiler"):
            compiler("slow_compiler", Collecting()).work(threading.Event())
    finally:
        gc.callbacks.remove(callback)
        thread.join()


@pytest.mark.parametrize("within", [endable("another_compiler"), nullcontext()])
def test_nothing_else_is_ended(within: object) -> None:
    ends, began = threading.Event(), threading.Event()
    slow = compiler("slow_compiler", ends)

    def end() -> None:
        began.wait()
        for _ in range(3):
            preparation.end()
        ends.set()

    thread = threading.Thread(target=end)
    thread.start()
    with within:  # type: ignore[attr-defined]
        slow.work(began)
    thread.join()


class Unrolled(torch.nn.Module):
    """A loop that a compiler unrolls: thousands of operations in one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            x = torch.tanh(self.cell(x))
        return x


def test_a_model_that_compiles_for_ever_runs_as_written(
    torch_without_a_space: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, another = Unrolled(), torch.ones(2, 4), torch.nn.Linear(4, 4)
    expected, knob = model(x, 3000), Compile()
    with ending(), knob.applied("default") as effects:
        assert torch.equal(model(x, 3000), expected)
        assert torch.equal(model(x, 3000), expected), "it is not tried again"
    knob.forget()
    assert len(effects.refusals) == 1 and effects.refusals[0].startswith("Unrolled did not compile within ")
    assert "_compiled_call_impl" not in vars(model)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    with knob.applied("default") as effects:
        model(x, 1)
        assert not effects.refusals
        with ending():
            assert torch.equal(model(x, 3000), expected), "a later call that compiles anew is ended, too"
        another(x)
    knob.forget()
    assert len(effects.refusals) == 1 and effects.counts == {"modules compiled": 1}, "the time is over for others, too"


def test_a_profile_function_works_afterwards() -> None:
    """CPython 3.11 stands still there where an exception of another thread was set and taken back."""
    with endable("slow_compiler"):
        preparation.end()
    preparation._current.ending = True
    with endable("slow_compiler"):
        pass
    calls: list[str] = []
    sys.setprofile(lambda frame, event, argument: calls.append(event))
    try:
        called()
    finally:
        sys.setprofile(None)
    assert "call" in calls


def called() -> int:
    return 1
