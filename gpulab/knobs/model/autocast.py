"""Runs the outermost module calls of the user's code under autocast, and the regions that the code has itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

from gpulab.knobs.knob import KnobEffects
from gpulab.torch_hooks.outermost_call import Call, Layer, around_outermost
from gpulab.torch_hooks.patching import replaced

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

Meet = Callable[["Module"], None]


@contextmanager
def autocast(dtype: torch.dtype, effects: KnobEffects, meet: Meet | None = None) -> Iterator[None]:
    """Autocast the outermost calls to `dtype`, their results back to float32; the code's own regions use it too.

    Wrapped are modules with parameters, and others that are given something to differentiate: losses, but not the
    transforms of a dataset. `meet` is told of each module before it is called.
    """
    import torch

    def around(module: Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = _device_kind(module, args, kwargs)
        if kind is None:
            return call(args, kwargs)
        if meet is not None:
            meet(module)
        effects.count("module calls")
        if torch.is_autocast_enabled(kind):  # in a region of the code's own
            return call(args, kwargs)
        with torch.autocast(kind, dtype=dtype):
            result = call(args, kwargs)
        return _in_float32(result, effects)

    with ExitStack() as undo:
        undo.enter_context(own_regions(effects, dtype))
        undo.enter_context(around_outermost(Layer.AUTOCAST, around))
        yield


@contextmanager
def own_regions(effects: KnobEffects, dtype: torch.dtype | None) -> Iterator[None]:
    """The code's own `torch.autocast` regions use `dtype` on this thread, or do nothing where that is None."""
    from torch.amp import autocast_mode

    thread = get_ident()

    def wrap(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def __enter__(self: Any) -> Any:
            if get_ident() != thread or not self._enabled or self.fast_dtype is dtype:
                return original(self)
            effects.count("autocast regions")
            written = self.fast_dtype
            self._enabled, self.fast_dtype = dtype is not None, dtype or written
            try:
                return original(self)
            finally:
                self._enabled, self.fast_dtype = True, written

        return __enter__

    with replaced(autocast_mode.autocast, "__enter__", wrap):
        yield


def _device_kind(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Where the call computes; None where autocast is not to be used."""
    import torch
    from torch.utils import _pytree as pytree

    parameter = next(module.parameters(), None)
    if parameter is not None:
        return parameter.device.type
    if isinstance(module, torch.nn.BCELoss):  # it raises under autocast
        return None
    tensors = (t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
    return next((t.device.type for t in tensors if t.requires_grad), None)


def _in_float32(result: Any, effects: KnobEffects) -> Any:
    """The code that follows knows nothing of lower precision (as Accelerate does it)."""
    import torch
    from torch.utils import _pytree as pytree

    low = (torch.bfloat16, torch.float16)

    def is_low(leaf: object) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.dtype in low

    if not any(map(is_low, pytree.tree_leaves(result))):
        return result
    effects.count("results of lower precision")
    return pytree.tree_map(lambda leaf: leaf.float() if is_low(leaf) else leaf, result)
