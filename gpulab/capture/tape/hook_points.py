"""What is hooked in torch to write marks: one literal table, and one wrapper that marks before and after a call."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from threading import get_ident
from types import MethodType
from typing import Any, Protocol

from msgspec import Struct

from gpulab.capture.dataloader.description import samples_in
from gpulab.capture.dataloader.wait_hooks import Keys
from gpulab.capture.dataloader.worker_faults import death
from gpulab.capture.steps.weights import UpdateWatch, WeightWatch
from gpulab.capture.tape.marks import Kind, Mark, Tape
from gpulab.torch_hooks.optimizer_step import step_hooks
from gpulab.torch_hooks.patching import Args, KeywordArgs, replaced


class Evidence(Protocol):
    """What is known of the steps so far: where an optimizer steps, weights need not be looked at."""

    @property
    def without_optimizer(self) -> bool: ...

    @property
    def undecided(self) -> bool: ...


class Arguments:
    """The arguments of marks: what has to be asked while the loop runs, as nobody can tell it afterwards."""

    def __init__(self, mark: Mark, evidence: Evidence) -> None:
        self._mark = mark
        self._evidence = evidence
        self._key = Keys().of
        self._newest: Callable[[], object] = object  # the loader or iterator that was asked last
        self._number = 0  # its
        self._updates = UpdateWatch()
        self._weights: WeightWatch | None = None  # of the first backward pass, while it tells a batch from a step

    def loader(self, args: Args, kwargs: KeywordArgs) -> int:
        """The number of the one that is asked; whether weights were updated by hand is a mark before."""
        if self._weights is not None:
            if not self._evidence.undecided:
                self._weights = None
            elif self._weights.changed():
                self._mark(Kind.UPDATED, 0)
        owner = args[0]
        if self._newest() is not owner:
            self._newest, self._number = weakref.ref(owner), self._key(owner)
        return self._number

    def backward(self, args: Args, kwargs: KeywordArgs) -> int:
        """Whether weights were changed by hand since the last backward pass."""
        if not self._evidence.without_optimizer:
            return 0
        root = args[0] if args else kwargs.get("tensors")
        if self._weights is None:
            self._weights = WeightWatch.of(root)
        return self._updates.before(root)

    def grad(self, args: Args, kwargs: KeywordArgs) -> int:
        """The same: where weights are updated by hand it may stand for a backward pass."""
        return self._evidence.without_optimizer and self._updates.before(args[0] if args else kwargs.get("outputs"))

    def scaled(self, args: Args, kwargs: KeywordArgs) -> int:
        return id(args[1] if len(args) > 1 else kwargs.get("optimizer"))


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
    result: Callable[[Any], int] | None = None  # 0


LOADERS = "torch.utils.data.dataloader"
POINTS = (
    Point(LOADERS, "DataLoader", "__iter__", Kind.ITER, Kind.ITERATOR, Kind.ITERATOR, Arguments.loader),
    Point(LOADERS, "_BaseDataLoaderIter", "__next__", Kind.ASK, Kind.GOT, Kind.END, Arguments.loader, samples),
    Point("torch.autograd", "", "backward", Kind.BACKWARD, Kind.BACKWARD_END, Kind.BACKWARD_END, Arguments.backward),
    Point("torch.autograd", "", "grad", Kind.GRAD, None, None, Arguments.grad),
    Point("torch.amp", "GradScaler", "step", Kind.SCALE, Kind.SCALED, Kind.SCALE_FAILED, Arguments.scaled),
)  # and each optimizer's step, through the hooks that torch offers: STEP, STEPPED


def install(tape: Tape, evidence: Evidence, undo: ExitStack, *, inner: bool) -> None:
    """Mark the calls of this thread. Beside the hooks of the loop, steps are hooked first (`inner`), the rest last."""
    thread, arguments = get_ident(), Arguments(tape.mark, evidence)
    if inner:
        undo.enter_context(
            step_hooks(_optimizer(tape.mark, thread, Kind.STEPPED), _optimizer(tape.mark, thread, Kind.STEP))
        )
    for point in POINTS:
        if (point.name == "step") == inner:
            module = import_module(point.module)
            owner = getattr(module, point.owner) if point.owner else module
            wrap = functools.partial(_wrapped, point=point, mark=tape.mark, arguments=arguments, thread=thread)
            undo.enter_context(replaced(owner, point.name, wrap))


def _wrapped(original: Any, *, point: Point, mark: Mark, arguments: Arguments, thread: int) -> Any:
    before, after, failed = (None if kind is None else int(kind) for kind in (point.before, point.after, point.failed))
    argument, result_of = MethodType(point.argument, arguments), point.result
    assert before is not None

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        if get_ident() != thread:
            return original(*args, **kwargs)
        mark(before, argument(args, kwargs))
        try:
            result = original(*args, **kwargs)
        except BaseException:
            if failed is not None:
                mark(failed, 0)
            raise
        if after is not None:
            mark(after, result_of(result) if result_of is not None else 0)
        return result

    return hooked


def _optimizer(mark: Mark, thread: int, kind: int) -> Callable[[Any, Args, KeywordArgs], None]:
    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        if get_ident() == thread:
            mark(kind, id(optimizer))

    return hook
