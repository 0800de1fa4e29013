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
Call = Callable[[tuple[Any, ...], dict[str, Any]], Any]
Around = Callable[["Module", Call, tuple[Any, ...], dict[str, Any]], Any]

_numbers = itertools.count()


class HookOrder(IntEnum):
    """Who comes first before a step; after it, the last comes first."""

    LAYOUT = 0
    SCALING = 1
    ACCUMULATING = 2
    OPTIONS = 3


class Layer(IntEnum):
    """From the outside in: how wrappers of one module call are nested."""

    INPUTS = 0
    AUTOCAST = 1
    COMPILED = 2


class OptimizerHook:
    """Stands around each step of an optimizer; a method that is left out does nothing."""

    def before(self, optimizer: Optimizer, closure: bool) -> None:
        """It is about to step; with a closure the gradients come only now."""

    def after(self, optimizer: Optimizer) -> None:
        """It has stepped; not called where the step raised."""


class _Here(threading.local):
    """Of one thread: who hooks a point, in their order; what is going on there; and the process that it belongs to."""

    def __init__(self) -> None:
        self.hooks: list[tuple[IntEnum, int, Any]] = []
        self.stepping: list[Optimizer] = []
        self.calling = False
        self.process = 0  # a worker that was forked meanwhile is another

    @contextmanager
    def hooked(self, order: IntEnum, hook: object) -> Iterator[None]:
        entry = (order, next(_numbers), hook)
        if not self.hooks:
            self.stepping, self.calling, self.process = [], False, os.getpid()
        self.hooks = sorted([*self.hooks, entry])
        try:
            yield
        finally:
            self.hooks = [e for e in self.hooks if e is not entry]


_steps, _calls = _Here(), _Here()


# -- optimizer steps ---------------------------------------------------------------------------------------------------


@contextmanager
def step_hooks(after: StepHook, before: StepHook | None = None) -> Iterator[None]:
    """Call `before` and `after` around each step of any optimizer, on whatever thread; `after` not where it raised."""
    from torch.optim import optimizer as module

    with ExitStack() as undo:
        if before is not None:
            undo.callback(module.register_optimizer_step_pre_hook(before).remove)
        undo.callback(module.register_optimizer_step_post_hook(after).remove)
        yield


@contextmanager
def around_steps(order: HookOrder, hook: OptimizerHook) -> Iterator[None]:
    """Have `hook` told of each step on this thread. Of an optimizer that steps inside of another only the outer."""
    with _steps.hooked(order, hook), _step_patch.held():
        yield


def _hook_steps(undo: ExitStack) -> None:
    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not _steps.hooks:
            return
        stepping = _steps.stepping
        if any(o is optimizer for o in stepping):  # its last step raised
            stepping.clear()
        stepping.append(optimizer)
        if len(stepping) == 1:
            closure = (args[1] if len(args) > 1 else None) or kwargs.get("closure")
            for _, _, hook in _steps.hooks:
                hook.before(optimizer, closure is not None)

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        stepping = _steps.stepping
        if not stepping or stepping[-1] is not optimizer:
            return
        stepping.pop()
        if not stepping:
            for _, _, hook in reversed(_steps.hooks):
                hook.after(optimizer)

    undo.enter_context(step_hooks(after, before))


# -- outermost module calls --------------------------------------------------------------------------------------------


@contextmanager
def around_outermost(layer: Layer, around: Around) -> Iterator[None]:
    """Have `around(module, call, args, kwargs)` stand in for each outermost call of this thread.

    It returns what the user's code gets; `call(args, kwargs)` makes the call itself, or the next layer in.
    """
    with _calls.hooked(layer, around), _call_patch.held():
        yield


def _hook_calls(undo: ExitStack) -> None:
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


@cache
def _wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same function each time, so that nothing compiled between two runs takes it for another."""
    from torch._C import _current_graph_task_id as backward_task
    from torch._C import _get_tracing_state as tracing
    from torch._C._dynamo import eval_frame
    from torch.compiler import is_compiling

    here = _calls
    compiled_caller: Callable[[], object] = getattr(eval_frame, "get_eval_frame_callback", lambda: None)

    def __call__(self: Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or here.calling or not here.hooks:
            return original(self, *args, **kwargs)
        if backward_task() != -1 or tracing() is not None or compiled_caller() or here.process != os.getpid():
            return original(self, *args, **kwargs)
        here.calling = True
        try:
            return _through(self, original, args, kwargs)
        finally:
            here.calling = False

    return __call__


def _through(module: Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return original(module, *args, **kwargs)

    step: Call = call
    for _, _, around in reversed(_calls.hooks):
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


_step_patch, _call_patch = Shared(_hook_steps), Shared(_hook_calls)
