"""What is hooked in torch to write marks: one literal table, and one wrapper that marks before and after a call."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from threading import get_ident
from types import MethodType
from typing import Any, Protocol

from msgspec import Struct

from gpulab.capture.dataloader.facts import death, samples_in
from gpulab.capture.steps.model_inputs import ModelInputs
from gpulab.capture.steps.module_hook import ModuleHook, compile_hook
from gpulab.capture.steps.weights import UpdateWatch, WeightWatch
from gpulab.tape.marks import Kind, Tape
from gpulab.torch_hooks.optimizer_step import step_hooks
from gpulab.torch_hooks.patching import Args, KeywordArgs, remove_callback, replaced


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


class Arguments:
    """The arguments of marks: what has to be asked while the loop runs, as nobody can tell it afterwards."""

    def __init__(self, tape: Tape, evidence: Callable[[], Evidence], clock: Clock | None) -> None:
        self._tape = tape
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
        if not self._is_by_hand():
            return 0
        self._tape.wake_at(0)  # evidence is to be as new as the marks
        root = args[0] if args else kwargs.get("tensors")
        if self._weights is None:
            self._weights = WeightWatch.of(root)
        return self._updates.before(root)

    def grad(self, args: Args, kwargs: KeywordArgs) -> int:
        """The same: where weights are updated by hand it may stand for a backward pass."""
        return self._is_by_hand() and self._updates.before(args[0] if args else kwargs.get("outputs"))

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


class Point(Struct, frozen=True):
    """A call: where it is found, the marks before, after, and instead of it where it raises, their arguments."""

    module: str
    owner: str  # a class of it; empty: itself
    name: str
    before: Kind
    after: Kind | None
    failed: Kind | None
    argument: Callable[[Arguments, Args, KeywordArgs], int]
    result: Callable[[Arguments, Any], int] | None = None  # 0


LOADERS = "torch.utils.data.dataloader"
POINTS = (
    Point(LOADERS, "DataLoader", "__iter__", Kind.ITER, Kind.ITERATOR, Kind.ITERATOR, Arguments.loader),
    Point(
        *(LOADERS, "_BaseDataLoaderIter", "__next__", Kind.ASK, Kind.GOT, Kind.END),
        *(Arguments.loader, Arguments.samples),
    ),
    Point("torch.autograd", "", "backward", Kind.BACKWARD, Kind.BACKWARD_END, Kind.BACKWARD_END, Arguments.backward),
    Point("torch.autograd", "", "grad", Kind.GRAD, None, None, Arguments.grad),
    Point("torch.amp", "GradScaler", "step", Kind.SCALE, Kind.SCALED, Kind.SCALE_FAILED, Arguments.scaled),
)  # and each optimizer's step, through the hooks that torch offers: STEP, STEPPED


class Pilot(Protocol):
    """What acts on marks, and is told of a fault of ours."""

    @property
    def tape(self) -> Tape: ...

    @property
    def clock(self) -> Clock | None: ...

    def evidence(self) -> Evidence: ...

    def give_up_or_raise(self, error: Exception) -> None: ...


class Compilations:
    """Marks what torch compiles on the thread that made this; it can be heard from its import on."""

    def __init__(self, tape: Tape, undo: ExitStack | None = None) -> None:
        self._note = tape.note
        self._thread = get_ident()
        self._undo = undo
        self._graphs = _graphs()

    def look(self) -> None:
        """Hear of them, if that is possible by now."""
        handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
        if handler is None or self._undo is None:
            return
        undo, self._undo = self._undo, None
        handler.register_end_callback(self._compiled)
        undo.callback(remove_callback, handler.end_callbacks, self._compiled)

    def _compiled(self, *_: Any) -> None:
        before, self._graphs = self._graphs, _graphs()
        if self._graphs > before and get_ident() == self._thread:
            self._note(Kind.COMPILE, 0)


def _graphs() -> int:
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters["stats"]["unique_graphs"]) if "stats" in counters else 0


def install(
    pilot: Pilot, called: Callable[[], None], inputs: ModelInputs, undo: ExitStack
) -> tuple[ModuleHook, Compilations]:
    """Mark the calls of this thread; `undo` takes all hooks out again. Needs torch to be imported.

    `called` hears of module calls as long as the hook that is returned is on.
    """
    tape, thread = pilot.tape, get_ident()
    arguments = Arguments(tape, pilot.evidence, pilot.clock)
    before, after = (_optimizer(pilot, thread, kind) for kind in (Kind.STEP, Kind.STEPPED))
    undo.enter_context(step_hooks(after, before))
    for point in POINTS:
        module = import_module(point.module)
        owner = getattr(module, point.owner) if point.owner else module
        wrap = functools.partial(_wrapped, point=point, pilot=pilot, arguments=arguments, thread=thread)
        undo.enter_context(replaced(owner, point.name, wrap))
    modules, compilations = ModuleHook(called, thread), Compilations(tape, undo)
    inputs.install()
    for hook in (modules, inputs):
        undo.callback(hook.close)
    undo.enter_context(compile_hook(compilations.look, modules, inputs))
    modules.on()
    return modules, compilations


def _wrapped(original: Any, *, point: Point, pilot: Pilot, arguments: Arguments, thread: int) -> Any:
    before, after, failed = (None if kind is None else int(kind) for kind in (point.before, point.after, point.failed))
    argument = MethodType(point.argument, arguments)
    result_of = None if point.result is None else MethodType(point.result, arguments)
    mark, give_up_or_raise = pilot.tape.mark, pilot.give_up_or_raise
    assert before is not None

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        if get_ident() != thread:
            return original(*args, **kwargs)
        try:
            mark(before, argument(args, kwargs), args)
        except Exception as e:
            give_up_or_raise(e)
        try:
            result = original(*args, **kwargs)
        except BaseException as e:
            if failed is not None:
                try:
                    mark(failed, 0, e)
                except Exception as fault:
                    give_up_or_raise(fault)
            raise
        if after is not None:
            try:
                mark(after, 0 if result_of is None else result_of(result), result)
            except Exception as e:
                give_up_or_raise(e)
        return result

    return hooked


def _optimizer(pilot: Pilot, thread: int, kind: int) -> Callable[[Any, Args, KeywordArgs], None]:
    mark, give_up_or_raise = pilot.tape.mark, pilot.give_up_or_raise

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        if get_ident() == thread:
            try:
                mark(kind, id(optimizer), optimizer)
            except Exception as e:
                give_up_or_raise(e)

    return hook
