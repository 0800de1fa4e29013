"""What marks are about: arguments that must be asked for while the loop runs, as nobody can tell them afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from gpulab.capture.dataloader.facts import death, samples_in
from gpulab.capture.steps.training_facts import TrainingFactsReader
from gpulab.capture.steps.weights import UpdateWatch, WeightWatch
from gpulab.tape.marks import Kind, Tape
from gpulab.torch_hooks.patching import Args, KeywordArgs


class Evidence(Protocol):
    """What is known of the steps so far: where an optimizer steps, weights need not be looked at."""

    @property
    def without_optimizer(self) -> bool: ...

    @property
    def undecided(self) -> bool: ...


class Clock(Protocol):
    """Times what a DataLoader does."""

    asked: int | None  # the loader of that number is asked for a batch now
    own_ns: int  # what that has cost since somebody has put it to 0


class Keys:
    """One number for a DataLoader and all its iterators, which share their index sampler; never one for two loaders."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[Callable[[], Any], int]] = {}
        self._count = 0

    def of(self, owner: Any) -> int:
        """The number of the loader that `owner` is, or of the one whose iterator it is."""
        sampler = getattr(owner, "_index_sampler", None)
        shared = sampler if sampler is not None else owner
        entry = self._numbers.get(id(shared))
        if entry is not None and entry[0]() is shared:  # an id returns when its object is gone
            return entry[1]
        self._count += 1
        self._numbers[id(shared)] = (_reference(shared), self._count)
        return self._count


def _reference(target: Any) -> Callable[[], Any]:
    """Weak where possible; a list of batches cannot be referred to weakly and is kept for the run."""
    try:
        return weakref.ref(target)
    except TypeError:
        return lambda: target


_CREATE_GRAPH_OF_BACKWARD, _CREATE_GRAPH_OF_GRAD = 3, 4  # among the positional arguments (torch 2.13)


class Arguments:
    """Of the marks of one run."""

    def __init__(
        self, tape: Tape, evidence: Callable[[], Evidence], clock: Clock | None, facts: TrainingFactsReader | None
    ) -> None:
        self._tape = tape
        self._facts = facts
        self._evidence = evidence
        self._clock = clock
        self._key = Keys().of
        self._newest: Callable[[], object] = object  # the loader or iterator that was asked last
        self._number = 0  # its
        self._by_hand = True
        self._updates = UpdateWatch()
        self._weights: WeightWatch | None = None  # of the first backward pass, while it tells a batch from a step

    def loader(self, args: Args, kwargs: KeywordArgs) -> int:
        """The number of the one that is asked; whether weights were updated by hand is a mark before."""
        if self._weights is not None:
            if not self._evidence().undecided:
                self._weights = None
            elif self._weights.changed():
                self._tape.note(Kind.UPDATED, 0)
        owner = args[0]
        if self._newest() is not owner:
            self._newest, self._number = weakref.ref(owner), self._key(owner)
        if self._clock is not None:
            self._clock.asked = self._number
        return self._number

    def backward(self, args: Args, kwargs: KeywordArgs) -> int:
        """Whether weights were changed by hand since the last backward pass."""
        root = args[0] if args else kwargs.get("tensors")
        self._note_create_graph(args, kwargs, _CREATE_GRAPH_OF_BACKWARD)
        if self._facts is not None and self._facts.wants_passes:
            self._facts.backward(root)
        if not self._is_by_hand():
            return 0
        self._tape.wake_at(0)  # evidence is to be as new as the marks
        if self._weights is None:
            self._weights = WeightWatch.of(root)
        return self._updates.before(root)

    def grad(self, args: Args, kwargs: KeywordArgs) -> int:
        """The same: where weights are updated by hand it may stand for a backward pass."""
        self._note_create_graph(args, kwargs, _CREATE_GRAPH_OF_GRAD)
        return self._is_by_hand() and self._updates.before(args[0] if args else kwargs.get("outputs"))

    def _note_create_graph(self, args: Args, kwargs: KeywordArgs, position: int) -> None:
        if self._facts is not None and (args[position] if len(args) > position else kwargs.get("create_graph")):
            self._facts.differentiates_twice = True

    def _is_by_hand(self) -> bool:
        """Whether weights may be updated by hand: once an optimizer has stepped they never are."""
        self._by_hand = self._by_hand and self._evidence().without_optimizer
        return self._by_hand

    def scaled(self, args: Args, kwargs: KeywordArgs) -> int:
        return id(args[1] if len(args) > 1 else kwargs.get("optimizer"))

    def samples(self, batch: Any) -> int:
        """In a batch; -1: unknown. What timing it has cost is a mark before."""
        if self._clock is not None and self._clock.own_ns:
            self._tape.note(Kind.OWN, self._clock.own_ns)
            self._clock.own_ns = 0
        if self._facts is not None and self._facts.wants_batches:
            self._facts.batch(self._newest(), batch)
        return samples(batch)


def samples(batch: Any) -> int:
    """In a batch; -1: unknown. Nearly always it is a list of tensors."""
    try:
        return int(batch[0].shape[0]) if type(batch) is list else _samples_of_any(batch)
    except (AttributeError, IndexError):
        return _samples_of_any(batch)


def _samples_of_any(batch: Any) -> int:
    try:
        count = samples_in(batch)
    except Exception as e:
        if death(str(e)) is not None:  # torch's signal handler raises wherever the main thread is
            raise
        return -1
    return -1 if count is None else count
