"""Reads the arguments of marks while the loop runs: which loader, how many samples, whether weights changed by hand.

If no optimizer steps, a change of the weights by hand makes a batch a training step.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from gpulab.capture.loader_facts import death, samples_in
from gpulab.capture.memory_reader import MemoryReader
from gpulab.capture.training_facts import TrainingFactsReader, graph_of, some_values
from gpulab.devices.gpus import in_graph_capture
from gpulab.patching.attributes import Args, KeywordArgs
from gpulab.tape.marks import Kind, Tape

if TYPE_CHECKING:
    from gpulab.capture.batch_clock import LoadingClock
    from gpulab.tape.step_finder import StepFinder


class Keys:
    """Numbers DataLoaders; all iterators of a loader have its number, by the index sampler that they share."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[Callable[[], Any], int]] = {}
        self._count = 0

    def of(self, owner: Any) -> int:
        """The number of `owner`, a loader or an iterator of one."""
        sampler = getattr(owner, "_index_sampler", None)
        shared = sampler if sampler is not None else owner
        entry = self._numbers.get(id(shared))
        if entry is not None and entry[0]() is shared:  # an id is reused when its object is gone
            return entry[1]
        self._count += 1
        self._numbers[id(shared)] = (_reference(shared), self._count)
        return self._count


def _reference(target: Any) -> Callable[[], Any]:
    """A weak reference if possible; a list of batches has none and stays alive for the run."""
    try:
        return weakref.ref(target)
    except TypeError:
        return lambda: target


_CREATE_GRAPH_OF_BACKWARD, _CREATE_GRAPH_OF_GRAD = 3, 4  # among the positional arguments (torch 2.13)


class Arguments:
    """The arguments of the marks of one run. `evidence` returns its steps as they were read last."""

    def __init__(
        self,
        tape: Tape,
        evidence: Callable[[], StepFinder],
        clock: LoadingClock | None,
        facts: TrainingFactsReader | None,
        memory: MemoryReader | None,
    ) -> None:
        self._tape = tape
        self._facts = facts
        self._memory = memory
        self._evidence = evidence
        self._clock = clock
        self._key = Keys().of
        self._newest: Callable[[], object] = object  # the loader or iterator with the last request
        self._number = 0  # its number
        self._by_hand = True
        self._updates = UpdateDetector()

    def loader(self, args: Args, kwargs: KeywordArgs) -> int:
        """The loader's number. Before it returns, an update of the weights by hand gets its own mark."""
        if self._updates.first is not None:
            if not self._evidence().undecided:
                self._updates.first = None
            elif self._updates.since_first():
                self._tape.note(Kind.UPDATED, 0)
        owner = args[0]
        if self._newest() is not owner:
            self._newest, self._number = weakref.ref(owner), self._key(owner)
        if self._clock is not None:
            self._clock.loader = self._number
        return self._number

    def backward(self, args: Args, kwargs: KeywordArgs) -> int:
        """Whether weights were changed by hand since the last backward pass."""
        root = args[0] if args else kwargs.get("tensors")
        self._note_create_graph(args, kwargs, _CREATE_GRAPH_OF_BACKWARD)
        if self._facts is not None and self._facts.wants_passes:
            self._facts.backward(root)
        if self._memory is not None:
            self._memory.passes += 1
            if self._memory.passes >= self._memory.next:
                self._memory.backward()
        if not self._is_by_hand():
            return 0
        self._tape.wake_at(0)  # so that the evidence is up to date
        if self._updates.first is None:
            self._updates.begin(root)
        return self._updates.before(root)

    def grad(self, args: Args, kwargs: KeywordArgs) -> int:
        """As `backward`: `torch.autograd.grad` may replace it if weights are updated by hand."""
        self._note_create_graph(args, kwargs, _CREATE_GRAPH_OF_GRAD)
        return self._is_by_hand() and self._updates.before(args[0] if args else kwargs.get("outputs"))

    def _note_create_graph(self, args: Args, kwargs: KeywordArgs, position: int) -> None:
        if self._facts is not None and (args[position] if len(args) > position else kwargs.get("create_graph")):
            self._facts.differentiates_twice = True

    def _is_by_hand(self) -> bool:
        """Whether weights may be updated by hand: not once an optimizer has stepped."""
        self._by_hand = self._by_hand and self._evidence().without_optimizer
        return self._by_hand

    def scaled(self, args: Args, kwargs: KeywordArgs) -> int:
        return id(args[1] if len(args) > 1 else kwargs.get("optimizer"))

    def samples(self, batch: Any) -> int:
        """Samples in a batch, usually a list of tensors; -1: unknown. Also notes the cost of timing the batch."""
        if self._clock is not None and self._clock.own_ns:
            self._tape.note(Kind.OWN, self._clock.own_ns)
            self._clock.own_ns = 0
        if self._facts is not None and self._facts.wants_batches:
            self._facts.batch(self._newest(), batch)
        if self._memory is not None and self._memory.awaits_batch:
            self._memory.batch(batch)
        try:
            return int(batch[0].shape[0]) if type(batch) is list else _samples_of_any(batch)
        except (AttributeError, IndexError):
            return _samples_of_any(batch)


def _samples_of_any(batch: Any) -> int:
    try:
        count = samples_in(batch)
    except Exception as e:
        if death(str(e)) is not None:  # torch's signal handler raises at any line of the main thread
            raise
        return -1
    return -1 if count is None else count


# -- weights that are updated by hand ----------------------------------------------------------------------------------

_NODES = 1000
_COMPARED = 4  # tensors, until one of them changes: the gradient of the last bias may be zero
_PATIENCE = 16  # backward passes without a change after which other tensors are compared
_ALIKE = 4  # consecutive updates with equally many backward passes show the loop's rhythm


class _Weights(Struct, frozen=True):
    """A tensor at some time: its version, which writes through `.data` do not change, and a few values."""

    leaf: Callable[[], Any]
    version: int
    values: Any

    @classmethod
    def of(cls, leaf: Any) -> _Weights:
        return cls(weakref.ref(leaf), leaf._version, some_values(leaf))

    def changed(self) -> bool:
        leaf = self.leaf()
        return leaf is None or leaf._version != self.version or bool((some_values(leaf) != self.values).any())


class UpdateDetector:
    """Detects at each backward pass whether weights have changed since the previous pass, or since the first.

    It compares tensors near the loss, whose gradients are seldom zero: the first one of them that changes or, with
    functional updates, is replaced by another. On a GPU reading values waits for the device; once `Rhythm` knows how
    many backward passes an update has, passes on a GPU are only counted.
    """

    def __init__(self) -> None:
        self.first: _Weights | None = None  # of the first backward pass, until batches are known to be steps or not
        self._compared: list[_Weights] = []
        self._leaves: dict[int, Callable[[], Any]] = {}  # by id: leaves of several networks recur
        self._rhythm = Rhythm()
        self._unchanged = 0

    def begin(self, root: Any) -> None:
        """The first backward pass begins, from `root` (a tensor or several). Does nothing while a graph is captured."""
        with suppress(Exception):
            self.first = None if in_graph_capture() else next(map(_Weights.of, _nearest_leaves(root, 1)), None)

    def since_first(self) -> bool:
        """Whether weights have changed since `begin`. On a GPU this waits for the device."""
        try:
            there = self.first is not None and self.first.leaf() is not None and not in_graph_capture()
            return there and self.first is not None and self.first.changed()
        except Exception:
            return False

    def before(self, root: Any) -> bool:
        """A backward pass from `root` begins: whether it is the first after an update. False in a graph capture."""
        try:
            return not in_graph_capture() and self._is_first(root)
        except Exception:  # a user-defined tensor type may raise at any call
            return False

    def _is_first(self, root: Any) -> bool:
        compared = self._compared[0].leaf() if self._compared else None
        if compared is not None and compared.is_cuda and self._rhythm.size:
            return self._rhythm.next_is_first()
        nearest = _nearest_leaves(root, _COMPARED)
        if not self._compared:
            self._compare(nearest)
            return False
        changed = self._changed(nearest)
        self._rhythm.add(changed)
        return changed

    def _changed(self, nearest: list[Any]) -> bool:
        replaced = bool(nearest) and self._is_new(nearest[0])
        changed = [weights for weights in self._compared if weights.changed()]
        if not changed and not replaced:
            self._unchanged += 1
            if self._unchanged > _PATIENCE:
                self._compare(nearest)
            return False
        leaf = changed[0].leaf() if changed else None
        self._compare(nearest if replaced or leaf is None else [leaf])
        return True

    def _is_new(self, leaf: Any) -> bool:
        """Whether a functional update has made this tensor to replace the compared one."""
        from torch.nn import Parameter

        compared = self._compared[0].leaf()
        recurs = self._leaves.get(id(leaf), lambda: None)() is leaf  # an id is reused when its object is gone
        alike = compared is None or leaf.shape == compared.shape
        return not recurs and alike and not isinstance(leaf, Parameter)

    def _compare(self, leaves: list[Any]) -> None:
        self._unchanged = 0
        self._compared = [_Weights.of(leaf) for leaf in leaves]
        self._leaves |= {id(leaf): weakref.ref(leaf) for leaf in leaves}


class Rhythm:
    """How many backward passes an update has, once that number was the same a few times."""

    def __init__(self) -> None:
        self.size = 0  # 0: unknown
        self._sizes: deque[int] = deque(maxlen=_ALIKE)
        self._passes = 1

    def add(self, changed: bool) -> None:
        """Add a backward pass, the first after an update or not."""
        if not changed:
            self._passes += 1
            return
        self._sizes.append(self._passes)
        self._passes = 1
        if len(self._sizes) == _ALIKE and len(set(self._sizes)) == 1:
            self.size = self._sizes[0]

    def next_is_first(self) -> bool:
        """Whether the next backward pass, whose weights are not compared, is the first after an update."""
        first = self._passes >= self.size
        self._passes = 1 if first else self._passes + 1
        return first


def _nearest_leaves(root: Any, most: int) -> list[Any]:
    """The first tensors in autograd's graph that accumulate a gradient.

    `torch.func.grad` wraps the user's tensors anew in each call; these are unwrapped.
    """
    from torch._C import _functorch

    leaves: list[Any] = []
    for node, _ in islice(graph_of(root), _NODES):
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            while _functorch.is_gradtrackingtensor(leaf):
                leaf = _functorch.get_unwrapped(leaf)
            leaves.append(leaf)
        if len(leaves) == most:
            break
    return leaves
