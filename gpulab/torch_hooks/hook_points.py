"""The two points of a training loop that several knobs hook at once: optimizer steps and outermost module calls.

Each is one patch of torch for all knobs, which come in an order of their own and not that of entering. A module call is
outermost when no other module call of this thread is going on: the model, a loss module, each network of a GAN. Calls
that the backward pass makes (activation checkpointing) are passed through, and so are calls within a function that
torch.compile or torch.jit was given.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from gpulab.torch_hooks.patching import Shared, replaced

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

StepHook = Callable[["Optimizer", tuple[Any, ...], dict[str, Any]], None]


@contextmanager
def step_hooks(after: StepHook, before: StepHook | None = None) -> Iterator[None]:
    """Call `before` and `after` around each step of any optimizer, on whatever thread; `after` not where it raised."""
    from torch.optim import optimizer as module

    with ExitStack() as undo:
        if before is not None:
            undo.callback(module.register_optimizer_step_pre_hook(before).remove)
        undo.callback(module.register_optimizer_step_post_hook(after).remove)
        yield


class HookOrder(IntEnum):
    """Who comes first before a step; after it, the last comes first."""

    LAYOUT = 0
    SCALING = 1
    ACCUMULATING = 2
    OPTIONS = 3


class Watcher:
    """Who stands around the steps; what it leaves out does nothing."""

    def before(self, optimizer: Optimizer, closure: bool) -> None:
        """It is about to step; with a closure the gradients come only now."""

    def after(self, optimizer: Optimizer) -> None:
        """It has stepped; not called where the step raised."""


class _StepsHere(threading.local):
    def __init__(self) -> None:
        self.watchers: list[tuple[HookOrder, int, Watcher]] = []
        self.stepping: list[Optimizer] = []


_steps_here = _StepsHere()
_numbers = itertools.count()


@contextmanager
def around_steps(turn: HookOrder, watcher: Watcher) -> Iterator[None]:
    """Have `watcher` told of each step on this thread. Of an optimizer that steps inside of another only the outer."""
    entry = (turn, next(_numbers), watcher)
    if not _steps_here.watchers:
        _steps_here.stepping = []
    _steps_here.watchers = sorted([*_steps_here.watchers, entry])
    try:
        with _shared_steps.held():
            yield
    finally:
        _steps_here.watchers = [e for e in _steps_here.watchers if e is not entry]


def _register(undo: ExitStack) -> None:
    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not _steps_here.watchers:
            return
        stepping = _steps_here.stepping
        if any(o is optimizer for o in stepping):  # its last step raised
            stepping.clear()
        stepping.append(optimizer)
        if len(stepping) == 1:
            closure = (args[1] if len(args) > 1 else None) or kwargs.get("closure")
            for _, _, watcher in _steps_here.watchers:
                watcher.before(optimizer, closure is not None)

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        stepping = _steps_here.stepping
        if not stepping or stepping[-1] is not optimizer:
            return
        stepping.pop()
        if not stepping:
            for _, _, watcher in reversed(_steps_here.watchers):
                watcher.after(optimizer)

    undo.enter_context(step_hooks(after, before))


_shared_steps = Shared(_register)


Call = Callable[[tuple[Any, ...], dict[str, Any]], Any]
Around = Callable[["Module", Call, tuple[Any, ...], dict[str, Any]], Any]


class Layer(IntEnum):
    """From the outside in: how wrappers of one call are nested, in whatever order their knobs were entered."""

    INPUTS = 0
    AUTOCAST = 1
    COMPILED = 2


class _CallsHere(threading.local):
    def __init__(self) -> None:
        self.arounds: list[tuple[Layer, int, Around]] = []
        self.inside = False
        self.process = 0  # a worker that was forked meanwhile is another


_calls_here = _CallsHere()
_call_numbers = itertools.count()


@contextmanager
def around_outermost(layer: Layer, around: Around) -> Iterator[None]:
    """Have `around(module, call, args, kwargs)` stand in for each outermost call of this thread.

    It returns what the user's code gets; `call(args, kwargs)` makes the call itself, or the next layer in.
    """
    entry = (layer, next(_call_numbers), around)
    if not _calls_here.arounds:
        _calls_here.inside, _calls_here.process = False, os.getpid()
    _calls_here.arounds = sorted([*_calls_here.arounds, entry])
    try:
        with _shared_calls.held():
            yield
    finally:
        _calls_here.arounds = [e for e in _calls_here.arounds if e is not entry]


def _install(undo: ExitStack) -> None:
    """Dynamo, which torch's optimizers load anyway, keeps what `Module.__call__` is when it is imported: so before."""
    from torch._dynamo.eval_frame import OptimizedModule, skip_code
    from torch.nn import Module

    original = Module.__call__
    ours = _wrapper(original)

    def wrap_initialize(initialize: Callable[[Any], None]) -> Callable[[Any], None]:
        def _initialize(self: Any) -> None:  # it keeps hold of the `__call__` of the module within
            with replaced(Module, "__call__", lambda now: original if now is ours else now):
                initialize(self)

        return _initialize

    skip_code(ours.__code__)  # met after a graph break, it is not to be compiled; what it calls is
    undo.enter_context(replaced(OptimizedModule, "_initialize", wrap_initialize))
    undo.callback(_tell_dynamo, ours, original)
    undo.enter_context(replaced(Module, "__call__", _wrapper))
    _tell_dynamo(original, ours)


_shared_calls = Shared(_install)


@cache
def _wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same function each time, so that nothing compiled between two runs takes it for another."""
    from torch._C import _current_graph_task_id as backward_task
    from torch._C import _get_tracing_state as tracing
    from torch._C._dynamo import eval_frame
    from torch.compiler import is_compiling

    here = _calls_here
    compiled_caller: Callable[[], object] = getattr(eval_frame, "get_eval_frame_callback", lambda: None)

    def __call__(self: Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or here.inside or not here.arounds:
            return original(self, *args, **kwargs)
        if backward_task() != -1 or tracing() is not None or compiled_caller():
            return original(self, *args, **kwargs)
        if here.process != os.getpid():
            return original(self, *args, **kwargs)
        here.inside = True
        try:
            return _through(self, original, args, kwargs)
        finally:
            here.inside = False

    return __call__


def _through(module: Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return original(module, *args, **kwargs)

    step: Call = call
    for _, _, around in reversed(_calls_here.arounds):
        step = partial(around, module, step)
    return step(args, kwargs)


def _tell_dynamo(before: Any, now: Any) -> None:
    """torch.compile goes straight to `forward` where `Module.__call__` is the function that it knows as torch's own.

    So nothing that is compiled meanwhile contains our patch, and nothing has to be compiled anew when it is gone.
    """
    for name in ("torch._dynamo.utils", "torch._dynamo.variables.nn_module"):
        module = sys.modules.get(name)
        if module is not None and getattr(module, "unpatched_nn_module_call", None) is before:
            setattr(module, "unpatched_nn_module_call", now)  # noqa: B010
