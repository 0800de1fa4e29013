"""The step finder on random loops whose steps are known, and on random marks that mean nothing.

A loop is played from a small grammar with a clock that ticks; the player writes down, as it goes, which step each batch
and each optimizer step belongs to. That diary, not the told's rules, says what is right.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Struct, field

from gpulab.run import StepFlag, Steps
from gpulab.tape.marks import Kind
from gpulab.tape.step_finder import UNSETTLED_BATCHES
from tests.support.tapes import Told

TRAIN, SECOND, VAL = 1, 2, 3
FRESH_KEYS = 100


class Diary(Struct, dict=True):
    """Plays marks into a step finder and notes what each of them is."""

    told: Told = field(default_factory=Told)
    now: int = 0
    step: int = 0  # the step that is being trained, from 0
    updates: list[tuple[int, int]] = field(default_factory=list)  # (step, when)
    batches: dict[int, int] = field(default_factory=dict)
    samples: dict[int, int] = field(default_factory=dict)
    keys: int = FRESH_KEYS

    def tick(self, ns: int = 3) -> int:
        """Time passes."""
        self.now += ns
        return self.now

    def begin(self, loader: int) -> None:
        """iter(loader)"""
        self.told.asked(loader, self.tick(), fresh=True)
        self.told.answered(self.tick(2), "iterator")

    def batch(self, loader: int, size: int | None, step: int | None = None) -> None:
        """next(iterator); `step`: the one that will train it, None in an evaluation."""
        self.told.asked(loader, self.tick())
        self.told.answered(self.tick(5), "batch", size)
        if step is not None:
            self.batches[step] = self.batches.get(step, 0) + 1
            self.samples[step] = self.samples.get(step, 0) + (size or 0)

    def exhaust(self, loader: int) -> None:
        """next(iterator) raises StopIteration."""
        self.told.asked(loader, self.tick())
        self.told.answered(self.tick(1), "end")

    def evaluate(self, loader: int, batches: int, *, wholly: bool = True) -> None:
        """A pass that trains nothing."""
        self.begin(loader)
        for _ in range(batches):
            self.batch(loader, 10)
            self.tick(20)
        if wholly:
            self.exhaust(loader)

    def backward(self) -> None:
        """loss.backward()"""
        self.tick(7)
        self.told.backward(self.now)

    def optimize(self, optimizer: int) -> None:
        """optimizer.step()"""
        start = self.tick()
        end = self.tick(4)
        self.told.optimized(optimizer, start, end)
        self.updates.append((self.step, end))

    def new_loader(self) -> int:
        """A DataLoader made afresh."""
        self.keys += 1
        return self.keys

    def finish(self) -> Steps:
        """The steps found, after a last line of code."""
        return self.told.steps(self.tick(50))


def assert_lawful(steps: Steps) -> None:
    """What holds for any marks."""
    wall = steps.end_ns - steps.start_ns
    assert (wall >= 0).all()
    assert (steps.start_ns[1:] >= steps.end_ns[:-1]).all(), "steps overlap"
    assert (steps.data_wait_ns >= 0).all() and (steps.data_wait_ns <= wall).all()
    assert (steps.optimizer_ns >= 0).all() and (steps.optimizer_ns <= wall).all()
    assert (steps.sample_count >= -1).all() and (steps.batch_count >= 0).all()
    assert steps.number.tolist() == list(range(1, len(steps) + 1))


def assert_as_written(steps: Steps, diary: Diary, count: int) -> None:
    """Every step holds its own updates and no other's, and the batches that it trained."""
    assert_lawful(steps)
    assert len(steps) == count
    for row in range(count):
        mine = [t for step, t in diary.updates if step == row]
        others = [t for step, t in diary.updates if step != row]
        start, end = int(steps.start_ns[row]), int(steps.end_ns[row])
        assert all(start <= t <= end for t in mine), f"step {row + 1} misses an update of its own"
        assert not any(start < t < end for t in others), f"step {row + 1} holds an update of another"
    if diary.batches:
        assert steps.batch_count.tolist() == [diary.batches.get(i, 0) for i in range(count)]
        assert steps.sample_count.tolist() == [diary.samples.get(i, 0) or -1 for i in range(count)]


# -- a DataLoader and an optimizer ---------------------------------------------------------------------------------


class Training(Struct, frozen=True):
    """A training loop as people write it."""

    epochs: tuple[int, ...]  # batches in each
    accumulation: int
    optimizers: int  # that step in each step, one after the other
    ahead: bool  # the loader fetches one batch ahead (Accelerate)
    zipped: bool  # a second loader gives a batch beside each
    anew: bool  # loaders are made afresh for each epoch
    before: int  # batches of evaluation before training
    after: str  # evaluation after each epoch: "", "whole", "left early", "training data"
    every: int  # evaluation after so many batches of an epoch; 0: none
    left_early: bool  # the last epoch is left by a break


trainings = st.builds(
    Training,
    epochs=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    accumulation=st.integers(1, 4),
    optimizers=st.integers(1, 3),
    ahead=st.booleans(),
    zipped=st.booleans(),
    anew=st.booleans(),
    before=st.sampled_from([0, 0, 1, 5, UNSETTLED_BATCHES + 3]),
    after=st.sampled_from(["", "whole", "left early", "training data"]),
    every=st.sampled_from([0, 0, 2, 3]),
    left_early=st.booleans(),
).filter(lambda t: not (t.ahead and (t.zipped or t.every or t.left_early)))


def play(training: Training, diary: Diary | None = None) -> tuple[Diary, int]:
    """Play the loop; an epoch ends with a step, also where its batches do not fill an accumulation."""
    diary = diary or Diary()
    if training.before:
        diary.evaluate(VAL, training.before)
    for number, length in enumerate(training.epochs):
        last = number == len(training.epochs) - 1
        loader = diary.new_loader() if training.anew else TRAIN
        second = diary.new_loader() if training.anew else SECOND
        _play_epoch(diary, training, loader, second, length, left=last and training.left_early)
        if training.after and not (last and training.left_early):
            evaluated = loader if training.after == "training data" else diary.new_loader() if training.anew else VAL
            diary.evaluate(evaluated, 2, wholly=training.after != "left early")
    return diary, diary.step


def _play_epoch(diary: Diary, t: Training, loader: int, second: int, length: int, *, left: bool) -> None:
    diary.begin(loader)
    if t.zipped:
        diary.begin(second)
    first = diary.step
    size = 4
    fetched = 0

    def fetch() -> None:
        nonlocal fetched
        step = first + fetched // t.accumulation
        if fetched < length:
            diary.batch(loader, size, step)
            if t.zipped:
                diary.batch(second, size + 3, step)
            fetched += 1
        else:
            diary.exhaust(loader)

    if t.ahead:
        fetch()
    for i in range(length):
        fetch()
        diary.backward()
        if (i + 1) % t.accumulation == 0 or i == length - 1:
            for optimizer in range(t.optimizers):
                diary.optimize(optimizer)
            diary.step += 1
        evaluating = t.every and (i + 1) % t.every == 0 and i < length - 1
        if evaluating:
            diary.evaluate(VAL, 3)
    if not left and not t.ahead:
        diary.exhaust(loader)


@given(trainings)
def test_training_from_a_loader(training: Training) -> None:
    diary, count = play(training)
    steps = diary.finish()
    if training.ahead and any(_two_steps(n, training.accumulation) for n in training.epochs):
        assert int(steps.batch_count.sum()) == sum(diary.batches.values())  # which of the two had one more is open
        diary.batches.clear()
    assert diary.told.source == "DataLoader and Optimizer.step"
    assert_as_written(steps, diary, count)


def _two_steps(batches: int, accumulation: int) -> bool:
    return accumulation > 1 and -(-batches // accumulation) == 2


@given(trainings)
def test_waits_are_those_of_the_training_loader(training: Training) -> None:
    """Each batch here takes 5, an iterator 2: nothing of an evaluation between steps is in the sum."""
    if training.every and training.accumulation > 1:
        return  # evaluation within a step: its wait cannot be taken out
    diary, _ = play(training)
    wait = int(diary.finish().data_wait_ns.sum())
    fetches = sum(diary.batches.values())
    begins = len(training.epochs) * (2 if training.zipped else 1)
    ends = len(training.epochs) if training.ahead else 0
    assert 5 * (fetches - 1) <= wait <= 5 * fetches + 2 * begins + ends


@given(trainings)
def test_certain_steps_are_never_taken_back_in_silence(training: Training) -> None:
    """While a loop runs, the count grows, and where it falls the generation says so."""
    diary = Diary()
    seen = [(0, 0)]
    original = diary.tick

    def tick(ns: int = 3) -> int:
        told = diary.told
        seen.append((told.generation, told.count))
        return original(ns)

    diary.tick = tick  # type: ignore[method-assign]
    diary.evaluate(VAL, training.before)
    for length in training.epochs:
        _play_epoch(diary, training, TRAIN, SECOND, length, left=False)
    assert seen == sorted(seen)


# -- an optimizer alone --------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 3))
def test_training_without_a_loader(turns: int, optimizers: int) -> None:
    diary = Diary()
    for _ in range(turns):
        diary.backward()
        for optimizer in range(optimizers):
            diary.optimize(optimizer)
        diary.step += 1
    steps = diary.finish()
    assert diary.told.source == "Optimizer.step"
    if turns == 1:  # nobody can know yet that others belong to it
        diary.updates = diary.updates[:1]
    assert_as_written(steps, diary, turns)


@example([1, 2])
@example([1, 12])
@example([1, 30])
@given(st.lists(st.integers(2, 30), min_size=1, max_size=4))
def test_several_trainings_one_after_the_other(lengths: list[int]) -> None:
    diary = Diary()
    for optimizer, turns in enumerate(lengths):
        for _ in range(turns):
            diary.backward()
            diary.optimize(optimizer)
            diary.step += 1
    assert_as_written(diary.finish(), diary, sum(lengths))


@given(st.integers(1, 6), st.integers(2, 5))
def test_several_updates_on_each_batch_are_a_step_each(batches: int, updates: int) -> None:
    diary = Diary()
    diary.begin(TRAIN)
    for _ in range(batches):
        diary.batch(TRAIN, 4)
        for _ in range(updates):
            diary.backward()
            diary.optimize(0)
            diary.step += 1
    diary.exhaust(TRAIN)
    assert_as_written(diary.finish(), diary, batches * updates)


# -- a loader alone ------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 3), st.booleans())
def test_inference(passes: list[int], loaders: int, left_early: bool) -> None:
    diary = Diary()
    for number, length in enumerate(passes):
        keys = [10 * number + i for i in range(loaders)]
        for key in keys:
            diary.begin(key)
        for _ in range(length):
            for key in keys:
                diary.batch(key, 6, diary.step)
            diary.tick(9)
            diary.step += 1
        if not (left_early and number == len(passes) - 1):
            diary.exhaust(keys[0])
    steps = diary.finish()
    if left_early and sum(passes) == 1:
        assert len(steps) == 0, "one look at one batch is no loop"
        return
    assert diary.told.source == "DataLoader"
    assert_as_written(steps, diary, sum(passes))
    assert bool(steps.flags[-1] & StepFlag.PARTIAL) == left_early


@given(st.integers(2, 60))
def test_weights_updated_by_hand(batches: int) -> None:
    diary = Diary()
    diary.begin(TRAIN)
    for done in range(batches):
        diary.batch(TRAIN, 4, diary.step)
        diary.backward()
        diary.tick(5)
        if diary.told.undecided:
            assert diary.told.count == 0
            diary.told.mark(diary.tick(), Kind.UPDATED)
        diary.step += 1
        assert diary.told.count == done
    diary.exhaust(TRAIN)
    assert diary.told.count == batches
    assert_as_written(diary.finish(), diary, batches)


# -- steps by hand -------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_steps_by_hand_win(epochs: list[int]) -> None:
    diary = Diary()
    for length in epochs:
        diary.begin(TRAIN)
        for _ in range(length):
            diary.batch(TRAIN, 4, diary.step)
            diary.backward()
            diary.optimize(0)
            diary.told.mark(diary.tick(), Kind.HAND)
            diary.step += 1
        diary.exhaust(TRAIN)
    assert diary.told.source == "gpulab.step()"
    assert_as_written(diary.finish(), diary, sum(epochs))


def test_a_first_step_by_hand_begins_with_its_own_epoch() -> None:
    diary = Diary()
    diary.evaluate(VAL, 5)
    diary.begin(TRAIN)
    began = diary.now
    for _ in range(3):
        diary.batch(TRAIN, 4, 0)
        diary.tick(10)
    diary.told.mark(diary.tick(), Kind.HAND)
    steps = diary.finish()
    assert len(steps) == 1 and int(steps.batch_count[0]) == 3
    assert int(steps.start_ns[0]) <= began


# -- marks that mean nothing ---------------------------------------------------------------------------------------

marks = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(1, 3)),
        st.tuples(st.just("batch"), st.integers(1, 3), st.none() | st.integers(0, 5)),
        st.tuples(st.just("exhaust"), st.integers(1, 3)),
        st.tuples(st.just("backward")),
        st.tuples(st.just("optimize"), st.integers(1, 3)),
        st.tuples(st.just("resume"), st.integers(0, 20)),
        st.tuples(st.just("by hand")),
        st.tuples(st.just("manual")),
    ),
    max_size=80,
)


@example([("begin", 1), ("optimize", 1), ("resume", 1), ("optimize", 1)])
@given(marks)
def test_any_marks_give_lawful_steps(script: list[tuple[Any, ...]]) -> None:
    diary = Diary()
    told = diary.told
    for mark, *given_ in script:
        match mark:
            case "begin":
                diary.begin(*given_)
            case "batch":
                diary.batch(*given_)
            case "exhaust":
                diary.exhaust(*given_)
            case "backward":
                diary.backward()
            case "optimize":
                diary.optimize(*given_)
            case "resume":
                told.mark(diary.tick(given_[0]), Kind.RESUME, 1)
            case "by hand":
                told.mark(diary.tick(), Kind.UPDATED)
            case "manual":
                told.mark(diary.tick(), Kind.HAND)
        if told.count:
            start, end, *_ = told.rows_since(len(told) - 1)[0].tolist()
            assert start <= end <= diary.now
            assert told.last_batches() >= 0
    before = told.count
    steps = diary.finish()
    assert_lawful(steps)
    assert len(steps) >= before
    assert bool(told.source) or not len(steps)


def test_nested_requests_count_once() -> None:
    """A dataset that reads another DataLoader while it is asked."""
    diary = Diary()
    told = diary.told
    diary.begin(TRAIN)
    for _ in range(2):
        told.asked(TRAIN, diary.tick())
        diary.batch(SECOND, 99)
        told.answered(diary.tick(), "batch", 4)
        diary.backward()
        diary.optimize(0)
    diary.exhaust(TRAIN)
    steps = diary.finish()
    assert steps.batch_count.tolist() == [1, 1] and steps.sample_count.tolist() == [4, 4]


@pytest.mark.parametrize("known", [True, False])
def test_unknown_samples_are_not_zero(known: bool) -> None:
    diary = Diary()
    diary.begin(TRAIN)
    for _ in range(3):
        diary.batch(TRAIN, 4)
        diary.batch(TRAIN, 4 if known else None)
        diary.backward()
        diary.optimize(0)
    assert np.unique(diary.finish().sample_count).tolist() == ([8] if known else [-1])
