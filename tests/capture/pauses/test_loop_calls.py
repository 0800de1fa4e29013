"""What a trainer's loop calls beside its steps is one pause with its parts; clocks and calls are set by the script."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

from gpulab.capture.pauses import hooks
from gpulab.capture.pauses.hooks import CALLS, Part, PauseHooks, kind_of_call, with_part
from gpulab.capture.pauses.pauses import Pauses, Stretch
from gpulab.tape import marks
from gpulab.tape.marks import Kind, Tape

MS = 1_000_000


class Clock:
    """Stands still unless it is told to go on."""

    now_ns = 1_000

    def __call__(self) -> int:
        return self.now_ns

    def works(self, ms: float) -> None:
        self.now_ns += int(ms * MS)


class Profiler:
    """As Lightning's."""

    @contextmanager
    def profile(self, action: str) -> Iterator[str]:
        yield action


class CallbackHandler:
    """As that of transformers."""

    def __init__(self, *callbacks: Any) -> None:
        self.callbacks = callbacks

    def call_event(self, event: str) -> None:
        for callback in self.callbacks:
            getattr(callback, event)()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The one that pauses are timed with."""
    clock = Clock()
    for module in (hooks, marks):
        monkeypatch.setattr(module, "perf_counter_ns", clock)
    return clock


@pytest.fixture
def tape() -> Tape:
    """That of the loop."""
    return Tape()


@pytest.fixture
def pauses(clock: Clock, tape: Tape, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pauses]:
    """What is heard of the trainers and writers of this test."""
    module = types.ModuleType("trainers")
    vars(module).update(Profiler=Profiler, CallbackHandler=CallbackHandler, Writer=Writer)
    monkeypatch.setitem(sys.modules, "trainers", module)
    targets = (
        hooks.Target("callback", "trainers", "CallbackHandler", "call_event"),
        hooks.Target("checkpoint_save", "trainers", "Writer", "save"),
        hooks.Target("logging", "trainers", "Writer", "log"),
        hooks.Target("evaluation", "trainers", "Writer", "evaluate"),
    )
    monkeypatch.setattr(hooks, "TARGETS", targets)
    monkeypatch.setattr(hooks, "ACTIONS", (("trainers", "Profiler", "profile"),))
    heard = Pauses()
    with ExitStack() as undo:
        PauseHooks(heard, tape, undo).look()
        yield heard


class Writer:
    """What a callback may use."""

    def __init__(self, clock: Clock, tape: Tape | None = None) -> None:
        self._clock, self._tape = clock, tape

    def save(self, path: str) -> None:
        self._clock.works(20)

    def log(self) -> None:
        self._clock.works(3)

    def evaluate(self, trains: bool = False) -> None:
        self._clock.works(50)
        if trains and self._tape is not None:
            self._tape.note(Kind.BACKWARD, 0)


def test_a_checkpoint_callback_is_timed_as_a_whole(pauses: Pauses, clock: Clock) -> None:
    with Profiler().profile("[LightningModule]Net.training_step") as name:
        clock.works(30)
    assert name == "[LightningModule]Net.training_step" and not pauses.heard, "other actions are none"
    with Profiler().profile("[Callback]ModelCheckpoint{'monitor': 'l.x'}.on_train_batch_end"):
        clock.works(10)
        Writer(clock).save("best.ckpt")
        Writer(clock).log()
        clock.works(20)
    ((kind, start_ns, end_ns, _, detail),) = pauses.heard
    assert (kind, end_ns - start_ns) == ("checkpoint_save", 53 * MS)
    assert detail == "ModelCheckpoint.on_train_batch_end, of it 20.0 ms in Writer.save: best.ckpt"


def test_an_event_names_the_users_callback(pauses: Pauses, clock: Clock) -> None:
    class Watch:
        def on_step_end(self) -> None:
            clock.works(7)

    CallbackHandler(Watch()).call_event("on_step_end")
    ((kind, _, _, spot, detail),) = pauses.heard
    assert (kind, detail) == ("callback", "Watch.on_step_end")
    assert spot is not None and spot[1] == Watch.on_step_end.__code__.co_firstlineno


@pytest.mark.parametrize("read", [False, True])
def test_a_call_in_which_training_goes_on_is_no_pause(pauses: Pauses, clock: Clock, tape: Tape, read: bool) -> None:
    if read:  # by a thread of ours, while it goes on
        works = clock.works

        def works_on(ms: float) -> None:
            tape.take()
            works(ms)

        clock.works = works_on  # type: ignore[method-assign]
    Writer(clock, tape).evaluate(trains=True)
    assert not pauses.heard
    Writer(clock, tape).evaluate()
    assert [p[0] for p in pauses.heard] == ["evaluation"]
    pauses.finish(np.array([0], dtype=np.int64), trains=False)
    assert not pauses.heard, "a run that only evaluates has none"


def test_an_evaluation_counts_once(pauses: Pauses, clock: Clock) -> None:
    """Its own pass without gradients lies within it."""
    Writer(clock).evaluate()
    start_ns, end_ns = pauses.heard[0][1:3]
    pauses._evaluated = [Stretch(start_ns + MS, end_ns - MS), Stretch(end_ns + MS, end_ns + 9 * MS)]
    pauses.finish(np.array([0, end_ns], dtype=np.int64), trains=True)
    assert [(p[1], p[2]) for p in pauses.heard] == [(start_ns, end_ns), (end_ns + MS, end_ns + 9 * MS)]


def test_a_callback_that_evaluates_is_evaluation(pauses: Pauses, clock: Clock) -> None:
    with Profiler().profile("[Callback]Samples.on_train_batch_end"):
        clock.works(30)
    start_ns, end_ns = pauses.heard[0][1:3]
    pauses._evaluated = [Stretch(start_ns + 5 * MS, end_ns)]
    pauses.finish(np.array([0], dtype=np.int64), trains=True)
    assert [p[0] for p in pauses.heard] == ["evaluation"]


def test_what_takes_half_of_a_callback_gives_its_kind() -> None:
    assert kind_of_call("callback", [Part("logging", 6, "")], 10) == "logging"
    assert kind_of_call("callback", [Part("logging", 4, "")], 10) == "callback"
    assert kind_of_call("callback", [Part("checkpoint_save", 1, "")], 10) == "checkpoint_save"
    assert kind_of_call("evaluation", [Part("checkpoint_save", 9, "")], 10) == "evaluation"


def test_the_longest_innermost_part_is_named() -> None:
    parts = [Part("logging", 1, "log"), Part("logging", 3 * MS, "a"), Part("logging", 4 * MS, "whole", False)]
    assert with_part("x", parts, 10 * MS) == "x, of it 3.00 ms in a"
    assert with_part("x", parts[:1], 10 * MS) == "x"


@pytest.mark.parametrize("call", [*CALLS, *(("callback", *action) for action in hooks.ACTIONS)])
def test_the_libraries_have_these_calls(call: tuple[str, str, str, str]) -> None:
    _, module, owner, name = call
    try:
        found = vars(importlib.import_module(module)).get(owner)
    except ImportError:
        pytest.skip(f"{module} is not installed")
    assert found is not None and callable(getattr(found, name))
