"""Random marks, told one by one to the step finder and to the tracker that decides while a loop runs: no difference."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpulab.capture.dataloader.wait_hooks import Answer
from gpulab.capture.steps.step_boundaries import StepTracker
from gpulab.capture.tape.marks import MARK, Kind
from gpulab.capture.tape.step_finder import StepFinder, steps_of
from gpulab.run import Phase
from tests.capture.steps.test_step_boundaries import Diary, Training, play, trainings
from tests.support.tapes import ANSWERS, Retold, assert_equal

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
)
by_hand = st.just([(Kind.HAND, 0)])
regular = st.one_of(
    st.builds(_request, st.integers(1, 2), st.integers(0, 5)),
    st.just(_backward(0)),
    st.sampled_from((11, 11, 12)).map(_pair(Kind.STEP, Kind.STEPPED)),
    st.just(_closure(11)),
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


def _known(found: Any) -> tuple[Any, ...]:
    return found.count, found.generation, found.undecided, found.without_optimizer, found.source


EVALUATED = [*_request(1, 4), *_backward(0), (Kind.STEP, 11), (Kind.STEPPED, 11), *_request(2, 4)]


@example(EVALUATED * 50, [1])  # a batch of evaluation after each step belongs to none
@given(scripts(), st.lists(st.integers(0, 9), min_size=7, max_size=7))
@settings(max_examples=400)
def test_the_same_steps_at_the_same_marks(script: Script, ticks: list[int]) -> None:
    told, finder, now = Retold(), StepFinder(0), 0
    marks: list[tuple[int, int, int]] = []
    for number, (kind, argument) in enumerate(script):
        now += ticks[number % len(ticks)]
        told.hear(now, kind, argument)
        finder.read(np.array([(now, kind, argument)], MARK))
        assert _known(finder) == _known(told.tracker), f"after mark {number}"
        marks.append((now, kind, argument))
    oracle = told.tracker.finish(now + 5)
    assert_equal(finder.steps(now + 5), oracle)
    assert_equal(steps_of(np.array(marks, MARK), 0, now + 5), oracle)


STEPS = [_pair(Kind.STEP, Kind.STEPPED)(optimizer) for optimizer in (11, 12, 13)]
OTHER_LOOP = [*(STEPS[0] + STEPS[1]) * 3, *STEPS[2] * 20]


@example(OTHER_LOOP, 12)  # the other loop's steps are found all at once
@given(scripts(), st.integers(1, 40))
def test_who_waits_for_a_step_looks_in_time(script: Script, wanted: int) -> None:
    """At the very mark at which the tracker has so many steps, though nothing is read before the finder says so."""
    marks = np.array([(7 * number, kind, argument) for number, (kind, argument) in enumerate(script)], MARK)
    told, finder, read, ended = Retold(), StepFinder(0), 0, None
    for number, mark in enumerate(marks.tolist()):
        told.hear(*mark)
        if number + 1 - read >= finder.marks_until(wanted):
            finder.read(marks[read : number + 1])
            read = number + 1
            if finder.count >= wanted:
                ended = number
        assert (told.tracker.count >= wanted) == (ended is not None), f"after mark {number}"
        if ended is not None:
            break


class Marking(StepTracker):
    """Writes a tape of what it is told."""

    def __init__(self) -> None:
        super().__init__(0)
        self.marks: list[tuple[int, int, int]] = []

    def _mark(self, t_ns: int, kind: int, argument: int = 0) -> None:
        self.marks.append((t_ns, kind, argument))

    def loader_asked(self, loader: int, t_ns: int, *, fresh: bool = False) -> bool:
        self._mark(t_ns, Kind.ITER if fresh else Kind.ASK, loader)
        return super().loader_asked(loader, t_ns, fresh=fresh)

    def loader_answered(self, t_ns: int, answer: Answer, samples: int | None = None, own_ns: int = 0) -> None:
        kind = next(kind for kind, name in ANSWERS.items() if name == answer)
        self._mark(t_ns, kind, -1 if samples is None else samples)
        super().loader_answered(t_ns, answer, samples, own_ns)

    def backward(self, t_ns: int = 0) -> None:
        for kind in (Kind.BACKWARD, Kind.BACKWARD_END):
            self._mark(self.marks[-1][0], kind)
        super().backward(t_ns)

    def optimized(self, optimizer: int, start_ns: int, end_ns: int) -> bool:
        self._mark(start_ns, Kind.STEP, optimizer)
        self._mark(end_ns, Kind.STEPPED, optimizer)
        return super().optimized(optimizer, start_ns, end_ns)


@given(trainings, st.integers(1, 60))
def test_training_from_a_loader(training: Training, epochs: int) -> None:
    longer = replace(training, epochs=(*training.epochs, epochs))
    tracker = Marking()
    diary, _ = play(longer, Diary(tracker))
    assert_equal(steps_of(np.array(tracker.marks, MARK), 0, diary.now + 5), tracker.finish(diary.now + 5))
