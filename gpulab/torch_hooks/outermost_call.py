"""Finds the outermost module call of the user's code, so that several knobs can wrap it with one patch of torch.

A call is outermost when no other module call of this thread is going on: the model, a loss module, each network of a
GAN. Calls that the backward pass makes (activation checkpointing) are passed through, and so are calls within a
function that torch.compile or torch.jit was given.
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

Call = Callable[[tuple[Any, ...], dict[str, Any]], Any]
Around = Callable[["Module", Call, tuple[Any, ...], dict[str, Any]], Any]


class Layer(IntEnum):
    """From the outside in: how wrappers of one call are nested, in whatever order their knobs were entered."""

    INPUTS = 0
    AUTOCAST = 1
    COMPILED = 2


class _Here(threading.local):
    def __init__(self) -> None:
        self.arounds: list[tuple[Layer, int, Around]] = []
        self.inside = False
        self.process = 0  # a worker that was forked meanwhile is another


_here = _Here()
_numbers = itertools.count()


@contextmanager
def around_outermost(layer: Layer, around: Around) -> Iterator[None]:
    """Have `around(module, call, args, kwargs)` stand in for each outermost call of this thread.

    It returns what the user's code gets; `call(args, kwargs)` makes the call itself, or the next layer in.
    """
    entry = (layer, next(_numbers), around)
    if not _here.arounds:
        _here.inside, _here.process = False, os.getpid()
    _here.arounds = sorted([*_here.arounds, entry])
    try:
        with _shared.held():
            yield
    finally:
        _here.arounds = [e for e in _here.arounds if e is not entry]


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


_shared = Shared(_install)


@cache
def _wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same function each time, so that nothing compiled between two runs takes it for another."""
    from torch._C import _current_graph_task_id as backward_task
    from torch._C import _get_tracing_state as tracing
    from torch._C._dynamo import eval_frame
    from torch.compiler import is_compiling

    here = _here
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
    for _, _, around in reversed(_here.arounds):
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
