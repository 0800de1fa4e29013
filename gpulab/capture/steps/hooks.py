"""Hang the step tracker into torch for the length of one run, and put everything back.

Touched are: the two global optimizer hooks that torch offers, the methods through which a DataLoader is asked for data
(`capture/dataloader/wait_hooks.py`) and through which GradScaler steps, `torch.autograd.backward`, and, as long as
somebody wants to hear of module calls, torch's global module hook. Nothing of the user's objects is changed.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from gpulab.capture.dataloader.wait_hooks import wait_hooks
from gpulab.torch_hooks.patching import replaced

if TYPE_CHECKING:
    from gpulab.capture.steps.loop import Loop


def install(loop: Loop, undo: ExitStack) -> ModuleHook:
    """Install all hooks; `undo` takes them out again, in reverse order. Needs torch to be imported."""
    thread = get_ident()
    undo.enter_context(wait_hooks(loop, thread))
    passed = _Passed()
    undo.enter_context(_optimizer_hooks(loop, thread, passed))
    undo.enter_context(_backward_hook(loop, thread, passed))
    modules = ModuleHook(loop, thread)
    undo.callback(modules.close)
    undo.enter_context(_compile_hook(modules))
    modules.on()
    return modules


@dataclass(slots=True)
class _Passed:
    """When the last backward pass ended: inside a closure that an optimizer was handed, its own work begins there."""

    backward_ns: int = 0


class ModuleHook:
    """Hears of each module call while it is on; closed for good once torch.compile is used.

    What torch.compile makes while such a hook is there, it would have to make anew when the hook is gone.
    """

    def __init__(self, loop: Loop, thread: int) -> None:
        self._loop = loop
        self._thread = thread
        self._handle: Any = None
        self._closed = False
        self._lock = threading.Lock()

    def on(self) -> None:
        """Begin to hear, unless closed. From any thread."""
        from torch.compiler import is_compiling
        from torch.nn.modules.module import register_module_forward_pre_hook

        thread, loop, identify = self._thread, self._loop, get_ident

        def call(module: Any, args: Any) -> None:
            if is_compiling():  # should torch.compile meet this line all the same, it must not read on
                return
            if identify() == thread:
                loop.called()

        with self._lock:
            if self._handle is None and not self._closed:
                self._handle = register_module_forward_pre_hook(call)

    def off(self) -> None:
        with self._lock:
            if self._handle is not None:
                self._handle.remove()
                self._handle = None

    def close(self) -> None:
        """Hear no more, whoever asks."""
        with self._lock:
            self._closed = True
        self.off()


@contextmanager
def _compile_hook(modules: ModuleHook) -> Iterator[None]:
    """Close the module hook when something is compiled, now or before.

    A library that wraps torch.compile when it is imported (Lightning does) keeps hold of our wrapper: after the run it
    passes everything through and holds nothing of the run.
    """
    import torch

    open_hooks = [modules]

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            for hook in open_hooks:
                hook.close()
            return original(*args, **kwargs)

        return compile

    if _something_is_compiled():
        modules.close()
    try:
        with replaced(torch, "compile", wrap):
            yield
    finally:
        open_hooks.clear()


def _something_is_compiled() -> bool:
    """Whether torch.compile was called in this process. An optimizer alone also loads Dynamo, with no back end."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and any(b is not None for b in getattr(dynamo, "cached_backends", {}).values())


@contextmanager
def _optimizer_hooks(loop: Loop, thread: int, passed: _Passed) -> Iterator[None]:
    from torch.amp import GradScaler
    from torch.optim import optimizer as module

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

    with ExitStack() as undo:
        undo.callback(module.register_optimizer_step_pre_hook(before).remove)
        undo.callback(module.register_optimizer_step_post_hook(after).remove)
        undo.enter_context(replaced(GradScaler, "step", wrap_step))
        yield


@contextmanager
def _backward_hook(loop: Loop, thread: int, passed: _Passed) -> Iterator[None]:
    import torch

    hear = loop.backward

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

        return backward

    with replaced(torch.autograd, "backward", wrap):
        yield
