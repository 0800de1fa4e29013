"""Random marks, read one by one, in chunks of any size, or all at once: no difference."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpulab.capture.pauses import Pauses
from gpulab.run import Phase
from gpulab.tape import step_rows
from gpulab.tape.marks import NEVER, Kind, Marks, Tape
from gpulab.tape.step_finder import StepFinder, steps_of
from tests.support.tapes import assert_equal, tape_of

SWITCHES = (Kind.GRAD_OFF, Kind.EVAL, Kind.TRAIN)
LOADERS = st.integers(1, 3)
OPTIMIZERS = st.integers(11, 13)
Script = list[tuple[int, Any]]


def _pair(first: Kind, second: Kind) -> Any:
    return lambda argument: [(first, argument), (second, argument)]


def _request(loader: int, samples: int) -> Script:
    return [(Kind.ASK, loader), (Kind.GOT, samples)]


@st.composite
def _nested(draw: st.DrawFn) -> Script:
    """A dataset that reads a loader, trains or is traced while it is asked."""
    inner = draw(st.lists(pieces, max_size=3))
    return [
        (Kind.ASK, draw(LOADERS)),
        *(mark for piece in inner for mark in piece),
        (Kind.GOT, draw(st.integers(0, 5))),
    ]


def _backward(updated: int) -> Script:
    return [(Kind.BACKWARD, updated), (Kind.BACKWARD_END, 0)]


def _closure(optimizer: int) -> Script:
    return [(Kind.STEP, optimizer), *_backward(0), (Kind.STEPPED, optimizer)]


def _scaled(optimizer: int, steps: bool) -> Script:
    step = [(Kind.STEP, optimizer), (Kind.STEPPED, optimizer)] if steps else []
    return [(Kind.SCALE, optimizer), *step, (Kind.SCALED, optimizer)]


pieces = st.one_of(
    LOADERS.map(_pair(Kind.ITER, Kind.ITERATOR)),
    st.builds(_request, LOADERS, st.integers(0, 5)),
    st.builds(_request, LOADERS, st.integers(0, 5)),
    LOADERS.map(_pair(Kind.ASK, Kind.END)),
    st.integers(0, 1).map(_backward),
    OPTIMIZERS.map(_pair(Kind.STEP, Kind.STEPPED)),
    OPTIMIZERS.map(_pair(Kind.STEP, Kind.STEPPED)),
    OPTIMIZERS.map(_closure),
    st.builds(_scaled, OPTIMIZERS, st.booleans()),
    st.integers(0, 1).map(lambda argument: [(Kind.GRAD, argument)]),
    st.integers(0, 1).map(lambda argument: [(Kind.RESUME, argument)]),
    st.sampled_from(Phase).map(lambda phase: [(Kind.PHASE, phase)]),
    st.just([(Kind.UPDATED, 0)]),
    st.just([(Kind.COMPILE, 0)]),
    st.just([(Kind.OWN, 2)]),
    st.integers(0, 2).map(lambda number: [(SWITCHES[number], 0)]),
    st.just([(Kind.GRAD_OFF, 0), (Kind.GRAD_ON, 0)]),
)
by_hand = st.just([(Kind.HAND, 0)])
regular = st.one_of(
    st.builds(_request, st.integers(1, 2), st.integers(0, 5)),
    st.just(_backward(0)),
    st.sampled_from((11, 11, 12)).map(_pair(Kind.STEP, Kind.STEPPED)),
    st.just(_closure(11)),
    st.just([(Kind.OWN, 2)]),
    st.just([(Kind.GRAD_OFF, 0), (Kind.GRAD_ON, 0)]),
)
# each a few pieces, again and again; the last sort is long enough to be read at once
loops = st.lists(
    st.tuples(st.integers(1, 40), st.lists(pieces, min_size=1, max_size=7))
    | st.tuples(st.integers(50, 60), st.lists(regular, min_size=1, max_size=5)),
    max_size=4,
)


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """Loops of random turns, with random pieces between."""
    found: Script = []
    for repeat, turn in draw(loops):
        found += [mark for piece in turn for mark in piece] * repeat
        for piece in draw(st.lists(st.one_of(pieces, _nested(), by_hand), max_size=6)):
            found += piece
    if draw(st.booleans()):  # the run ends before the code does
        found.insert(draw(st.integers(0, len(found))), (Kind.STOP, 0))
    if draw(st.booleans()):  # of no batch is known how many samples it has
        found = [(kind, -1 if kind == Kind.GOT else argument) for kind, argument in found]
    return found


def _known(found: StepFinder) -> tuple[Any, ...]:
    return found.count, found.generation, found.undecided, found.without_optimizer, found.source, found.feeder


def _marks(script: Script, ticks: list[int]) -> Marks:
    times = np.cumsum([ticks[number % len(ticks)] for number in range(len(script))], dtype=np.int64).tolist()
    return tape_of([(t_ns, kind, argument) for t_ns, (kind, argument) in zip(times, script, strict=True)])


TICKS = st.lists(st.integers(0, 9), min_size=7, max_size=7)
EVALUATED = [*_request(1, 4), *_backward(0), (Kind.STEP, 11), (Kind.STEPPED, 11), *_request(2, 4)]


WITHOUT_OPTIMIZER = [
    *(_pair(Kind.ITER, Kind.ITERATOR)(1) + [*_request(1, 4), *_backward(0)] * 100 + _pair(Kind.ASK, Kind.END)(1)),
    *(_pair(Kind.ITER, Kind.ITERATOR)(2) + _request(2, 4) * 40 + _pair(Kind.ASK, Kind.END)(2)),
]


def test_batches_of_an_evaluation_are_no_steps_without_optimizer() -> None:
    steps = steps_of(_marks(WITHOUT_OPTIMIZER * 4, [2]), 0, 1 << 40)
    assert len(steps) == 400 and steps.batch_count.tolist() == [1] * 400


@example(WITHOUT_OPTIMIZER * 3, [1], 77)
@example(EVALUATED * 50, [1], 10_000)  # a batch of evaluation after each step belongs to none
@given(scripts(), TICKS, st.integers(2, 500))
@settings(max_examples=400)
def test_chunks_make_no_difference(script: Script, ticks: list[int], chunk: int) -> None:
    """Nor does it whether older rows are packed."""
    marks = _marks(script, ticks)
    one_by_one, in_chunks = StepFinder(0, 3), StepFinder(0, 3)
    for begin in range(0, len(marks), chunk):
        part = marks[begin : begin + chunk]
        for number in range(len(part)):
            one_by_one.read(part[number : number + 1])
        with patch.object(step_rows, "PACKED", 3):
            in_chunks.read(part)
            known, rows = _known(in_chunks), in_chunks.rows_since(len(in_chunks) // 3).tolist()
        assert _known(one_by_one) == known, f"after mark {begin + len(part)}"
        assert one_by_one.rows_since(len(one_by_one) // 3).tolist() == rows
    end_ns = int(marks["t_ns"][-1]) + 5 if len(marks) else 0
    steps = one_by_one.steps(end_ns)
    with patch.object(step_rows, "PACKED", 3):
        assert_equal(in_chunks.steps(end_ns), steps)
    assert_equal(steps_of(marks, 0, end_ns), replace(steps, own_ns=steps_of(marks, 0, end_ns).own_ns))
    assert one_by_one.hooks_ns == in_chunks.hooks_ns


@given(scripts(), TICKS, st.integers(2, 500))
@settings(max_examples=400)
def test_pauses_are_those_of_marks_read_one_by_one(script: Script, ticks: list[int], chunk: int) -> None:
    marks = _marks(script, [1_000_000 * tick for tick in ticks])
    one_by_one, in_chunks = Pauses(), Pauses()
    for begin in range(0, len(marks), chunk):
        in_chunks.read(marks[begin : begin + chunk])
    for number in range(len(marks)):
        one_by_one.read(marks[number : number + 1])
    starts_ns = np.zeros(0, np.int64)
    assert one_by_one.finish(starts_ns, trains=True) == in_chunks.finish(starts_ns, trains=True)
    assert one_by_one.stretches == in_chunks.stretches


STEPS = [_pair(Kind.STEP, Kind.STEPPED)(optimizer) for optimizer in (11, 12, 13)]
OTHER_LOOP = [*(STEPS[0] + STEPS[1]) * 3, *STEPS[2] * 20]


@example(OTHER_LOOP, 12)  # the other loop's steps are found all at once
@example([(Kind.ITER, 1), *STEPS[0] * 2], 2)  # the loader fed nothing: two at once
@given(scripts(), st.integers(1, 40))
def test_who_waits_for_a_step_looks_in_time(script: Script, wanted: int) -> None:
    """At the very mark at which there are so many steps, though nothing is read before the finder says so."""
    marks = _marks(script, [7])
    awake, finder, read = StepFinder(0), StepFinder(0), 0
    for number in range(len(marks)):
        awake.read(marks[number : number + 1])
        if number + 1 - read >= finder.marks_until(wanted):
            finder.read(marks[read : number + 1])
            read = number + 1
        assert (awake.count >= wanted) == (finder.count >= wanted), f"after mark {number}"
        if awake.count >= wanted:
            break


@given(scripts(), st.lists(st.integers(1, 9), min_size=1, max_size=20))
def test_each_mark_is_taken_once(script: Script, takes: list[int]) -> None:
    """Whoever takes them, and when."""
    tape, acted = Tape(), list[int]()
    tape.subscribe(frozenset({Kind.ITER}), lambda t_ns, kind, argument, subject: acted.append(kind))
    due = set(np.cumsum(takes).tolist())
    for number, (kind, argument) in enumerate(script):
        tape.mark(kind, argument)
        if number in due:
            tape.pack()
            tape.wake_at(NEVER)
    assert acted == [kind for kind, _ in script if kind == Kind.ITER]
    assert tape.marks()[["kind", "argument"]].tolist() == script and tape.count == len(script)
