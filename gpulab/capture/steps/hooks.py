"""Hang the step tracker into torch for the length of one run, and put everything back.

Touched are: the two global optimizer hooks that torch offers, the methods through which a DataLoader is asked for data
(`capture/dataloader/wait_hooks.py`) and through which GradScaler steps, `torch.autograd.backward` and
`torch.autograd.grad`, the forward method of DistributedDataParallel, and, as long as somebody wants to hear of module
calls, torch's global module hook. Nothing of the user's objects is changed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from gpulab.capture.dataloader.wait_hooks import wait_hooks
from gpulab.capture.steps.module_hook import ModuleHook, compile_hook
from gpulab.capture.tape import hook_points
from gpulab.torch_hooks.optimizer_step import step_hooks
from gpulab.torch_hooks.patching import Args, KeywordArgs, heard_before, replaced

if TYPE_CHECKING:
    from gpulab.capture.steps.loop import Loop


def install(loop: Loop, undo: ExitStack) -> ModuleHook:
    """Install all hooks; `undo` takes them out again, in reverse order. Needs torch to be imported."""
    thread = get_ident()
    if loop.tape is not None:
        hook_points.install(loop.tape, loop.tracker, undo, inner=True)
    undo.enter_context(wait_hooks(loop, thread))
    passed = _Passed()
    undo.enter_context(_optimizer_hooks(loop, thread, passed))
    undo.enter_context(_backward_hook(loop, thread, passed))
    modules, inputs = ModuleHook(loop.called, thread), loop.model_inputs
    inputs.install()
    for hook in (modules, inputs):
        undo.callback(hook.close)
    undo.enter_context(compile_hook(modules, inputs))
    if loop.tape is not None:
        hook_points.install(loop.tape, loop.tracker, undo, inner=False)
    modules.on()
    return modules


class _Passed(Struct):
    """When the last backward pass ended: inside a closure that an optimizer was handed, its own work begins there."""

    backward_ns: int = 0


@contextmanager
def _optimizer_hooks(loop: Loop, thread: int, passed: _Passed) -> Iterator[None]:
    from torch.amp import GradScaler

    optimizing, optimized = loop.optimizing, loop.optimized
    began: dict[int, int] = {}
    attempts: list[bool] = []  # of each GradScaler.step going on: did the optimizer really step?

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if get_ident() == thread:
            optimizing()
            began[id(optimizer)] = perf_counter_ns()

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if get_ident() != thread:
            return
        if attempts:
            attempts[-1] = True
        optimized(optimizer, max(began.pop(id(optimizer), 0) or perf_counter_ns(), passed.backward_ns))

    def wrap_step(original: Any) -> Any:
        @functools.wraps(original)
        def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if get_ident() != thread:
                return original(self, optimizer, *args, **kwargs)
            start_ns = perf_counter_ns()
            attempts.append(False)
            try:
                result = original(self, optimizer, *args, **kwargs)
            finally:
                stepped = attempts.pop()
            if not stepped:
                optimized(optimizer, max(start_ns, passed.backward_ns))
            return result

        return step

    with step_hooks(after, before), replaced(GradScaler, "step", wrap_step):
        yield


@contextmanager
def _backward_hook(loop: Loop, thread: int, passed: _Passed) -> Iterator[None]:
    import torch

    hear, ended = loop.backward, loop.tracker.backward_ended

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != thread:
                return original(*args, **kwargs)
            hear(args[0] if args else kwargs.get("tensors"))
            try:
                return original(*args, **kwargs)
            finally:
                passed.backward_ns = perf_counter_ns()
                ended(passed.backward_ns)

        return backward

    with (
        replaced(torch.autograd, "backward", wrap),
        heard_before(torch.autograd, "grad", lambda args, kwargs: loop.differentiated(_outputs(args, kwargs))),
    ):
        yield


def _outputs(args: Args, kwargs: KeywordArgs) -> Any:
    return args[0] if args else kwargs.get("outputs")
