"""The calls of modules, heard through torch's global module hook until torch.compile is used."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Protocol

from gpulab.torch_hooks.patching import replaced


class ModuleHook:
    """Hears of each module call while it is on; closed for good once torch.compile is used.

    What torch.compile makes while such a hook is there, it would have to make anew when the hook is gone.
    """

    def __init__(self, called: Callable[[], None], thread: int) -> None:
        self._called = called
        self._thread = thread
        self._handle: Any = None
        self._closed = False
        self._lock = threading.Lock()

    def on(self) -> None:
        """Begin to hear, unless closed. From any thread."""
        from torch.compiler import is_compiling
        from torch.nn.modules.module import register_module_forward_pre_hook

        thread, called, identify = self._thread, self._called, get_ident

        def call(module: Any, args: Any) -> None:
            if is_compiling():  # should torch.compile meet this line all the same, it must not read on
                return
            if identify() == thread:
                called()

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


class Closable(Protocol):
    """What hears of modules and can be told to hear no more."""

    def close(self) -> None: ...


@contextmanager
def compile_hook(compiled: Callable[[], None], *hooks: Closable) -> Iterator[None]:
    """Close these hooks of modules when something is compiled, now or before; `compiled` is called after that.

    A library that wraps torch.compile when it is imported (Lightning does) keeps hold of our wrapper: after the run it
    passes everything through and holds nothing of the run.
    """
    import torch

    open_hooks = [*hooks]

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            for hook in open_hooks:
                hook.close()
            result = original(*args, **kwargs)
            if open_hooks:
                compiled()
            return result

        return compile

    if _something_is_compiled():
        for hook in hooks:
            hook.close()
    try:
        with replaced(torch, "compile", wrap):
            yield
    finally:
        open_hooks.clear()


def _something_is_compiled() -> bool:
    """Whether torch.compile was called in this process. An optimizer alone also loads Dynamo, with no back end."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and any(b is not None for b in getattr(dynamo, "cached_backends", {}).values())
