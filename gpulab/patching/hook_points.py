"""The two points of a training loop that several knobs hook at once: optimizer steps and outermost module calls.

Each is one patch of torch for all knobs. Knobs run in a fixed order, in whatever order they were entered. A
module call is outermost when this thread is in no other module call: the model, a loss module, each network of a GAN.
Calls made by the backward pass (activation checkpointing), and calls within a function that torch.compile or torch.jit
compiles, are passed through.
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
from threading import get_ident
from typing import TYPE_CHECKING, Any

from gpulab.patching.attributes import Shared, replaced

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

StepHook = Callable[["Optimizer", tuple[Any, ...], dict[str, Any]], None]
Call = Callable[[tuple[Any, ...], dict[str, Any]], Any]
Around = Callable[["Module", Call, tuple[Any, ...], dict[str, Any]], Any]

_numbers = itertools.count()


class HookOrder(IntEnum):
    """The order of hooks before a step; after it they run in reverse."""

    LAYOUT = 0
    SCALING = 1
    ACCUMULATING = 2
    OPTIONS = 3


class Layer(IntEnum):
    """How wrappers of one module call are nested, from the outside in."""

    INPUTS = 0
    AUTOCAST = 1
    COMPILED = 2
    CHECKPOINTED = 3


class OptimizerHook:
    """Called around each optimizer step; by default its methods do nothing."""

    def before(self, optimizer: Optimizer, closure: bool) -> None:
        """The step begins; with a closure, the gradients are computed within it."""

    def after(self, optimizer: Optimizer) -> None:
        """The step has returned; not called if it raised."""


class _Here(threading.local):
    """A thread's hooks of one point, in order, its call in progress, and its process."""

    def __init__(self) -> None:
        self.hooks: list[tuple[IntEnum, int, Any]] = []
        self.stepping: list[Optimizer] = []
        self.calling = False
        self.process = 0  # a forked worker is another process

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
    """Call `before` and `after` around each step of any optimizer, on any thread; `after` not if the step raised."""
    from torch.optim import optimizer as module

    with ExitStack() as undo:
        if before is not None:
            undo.callback(module.register_optimizer_step_pre_hook(before).remove)
        undo.callback(module.register_optimizer_step_post_hook(after).remove)
        yield


@contextmanager
def around_steps(order: HookOrder, hook: OptimizerHook) -> Iterator[None]:
    """Call `hook` around each step on this thread; if an optimizer steps within another, only for the outer one."""
    with _steps.hooked(order, hook), _step_patch.use():
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


# -- module calls ------------------------------------------------------------------------------------------------------


@contextmanager
def module_calls(called: Callable[[Module], None], thread: int) -> Iterator[None]:
    """Call `called(module)` before each module call of that thread.

    Code that torch.compile makes while this hook is installed would have to be compiled again without it.
    """
    from torch.compiler import is_compiling
    from torch.nn.modules.module import register_module_forward_pre_hook

    identify = get_ident

    def call(module: Module, args: Any) -> None:
        if is_compiling():  # if torch.compile traces this hook nevertheless, it must stop here
            return
        if identify() == thread:
            called(module)

    handle = register_module_forward_pre_hook(call)
    try:
        yield
    finally:
        handle.remove()


# -- outermost module calls --------------------------------------------------------------------------------------------


@contextmanager
def around_outermost(layer: Layer, around: Around) -> Iterator[None]:
    """Replace each outermost call on this thread by `around(module, call, args, kwargs)`.

    The result of `around` goes to the user's code; `call(args, kwargs)` makes the call itself or enters the next layer.
    """
    with _calls.hooked(layer, around), _call_patch.use():
        yield


def _hook_calls(undo: ExitStack) -> None:
    """Patch `Module.__call__`. Dynamo remembers the `__call__` that it finds at its import, so it is imported first."""
    from torch._dynamo.eval_frame import OptimizedModule, skip_code
    from torch.nn import Module

    original = Module.__call__
    ours = _wrapper(original)

    def wrap_initialize(initialize: Callable[[Any], None]) -> Callable[[Any], None]:
        def _initialize(self: Any) -> None:  # it stores the inner module's `__call__`
            with replaced(Module, "__call__", lambda now: original if now is ours else now):
                initialize(self)

        return _initialize

    skip_code(ours.__code__)  # after a graph break Dynamo must compile the callee, not the wrapper
    undo.enter_context(replaced(OptimizedModule, "_initialize", wrap_initialize))
    undo.callback(_tell_dynamo, ours, original)
    undo.enter_context(replaced(Module, "__call__", _wrapper))
    _tell_dynamo(original, ours)


@cache
def _wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    """Always the same function: code compiled in one run must find the same one in the next."""
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
    """Let Dynamo take `now`, in place of `before`, for torch's own `Module.__call__`.

    Dynamo then goes straight to `forward`, so that compiled code does not contain gpulab's patch and stays valid.
    """
    for name in ("torch._dynamo.utils", "torch._dynamo.variables.nn_module"):
        module = sys.modules.get(name)
        if module is not None and getattr(module, "unpatched_nn_module_call", None) is before:
            setattr(module, "unpatched_nn_module_call", now)  # noqa: B010


_step_patch, _call_patch = Shared(_hook_steps), Shared(_hook_calls)
