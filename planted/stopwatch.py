"""Times a cell by itself, without gpulab: wall time between two of its optimizer's steps, then ends it."""

from __future__ import annotations

import contextlib
import io
import itertools
import linecache
import sys
import warnings
from collections.abc import Iterator
from time import perf_counter
from types import CodeType, ModuleType
from typing import Any

_NUMBERS = itertools.count(1)


class Enough(BaseException):
    """Raised in a cell's last step; no handler of a training library takes it for an error of its own."""


class Clock:
    """Counts the steps of the first optimizer that steps, and ends the cell after `warmup + steps` of them.

    Where the update is written by hand, without `torch.optim`, each backward pass counts as a step (`by_backward`).

    A second optimizer of the same loop (a GAN's) is not counted. `seconds` is the wall time of the last `steps`,
    with everything between them: evaluation, saving, a new epoch's workers.
    """

    def __init__(self, warmup: int, steps: int) -> None:
        self._warmup, self._last = warmup, warmup + steps
        self._first: int | None = None
        self._count = 0
        self._began = 0.0
        self.seconds: float | None = None

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """After each step of any optimizer."""
        if self._first is None:
            self._first = id(optimizer)
        if id(optimizer) != self._first:
            return
        self._count += 1
        if self._count == self._warmup:
            settle()
            self._began = perf_counter()
        elif self._count == self._last:
            settle()
            self.seconds = perf_counter() - self._began
            raise Enough


def settle() -> None:
    """Wait for the GPU, where there is one in use."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Discards what a cell prints."""
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def notebook(before: str, name: str) -> dict[str, Any]:
    """The names that the earlier cells define, in a module as in a notebook: torch.compile needs one."""
    module = ModuleType(f"notebook_{next(_NUMBERS)}")
    sys.modules[module.__name__] = module
    names = vars(module)
    with hushed():
        execute(before, names, f"<{name}, earlier cells>")
    return names


def execute(text: str, names: dict[str, Any], called: str) -> None:
    """Run the text with these names."""
    exec(compiled(text, called), names)


def compiled(text: str, called: str) -> CodeType:
    """The compiled text; tracebacks and `inspect` find its lines."""
    linecache.cache[called] = (len(text), None, text.splitlines(keepends=True), called)
    return compile(text, called, "exec")


@contextlib.contextmanager
def by_optimizer(clock: Clock) -> Iterator[None]:
    """Inside, the clock is called after each step of an optimizer of `torch.optim`."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    handle = register_optimizer_step_post_hook(clock)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def by_backward(clock: Clock) -> Iterator[None]:
    """Inside, the clock is called after each backward pass."""
    import torch

    original = torch.Tensor.backward

    def backward(tensor: Any, *args: Any, **kwargs: Any) -> None:
        original(tensor, *args, **kwargs)
        clock(clock, args, kwargs)

    torch.Tensor.backward = backward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.backward = original  # type: ignore[method-assign]


def seconds_per_step(
    cell: str, names: dict[str, Any], warmup: int, steps: int, name: str, by_hand: bool = False
) -> float:
    """Mean wall time of a step. Raises RuntimeError where the cell ends too early."""
    clock = Clock(warmup, steps)
    counted = by_backward if by_hand else by_optimizer
    with counted(clock), hushed(), contextlib.suppress(Enough):
        execute(cell, names, f"<{name}>")
    if clock.seconds is None:
        raise RuntimeError(f"{name} ended before its step {warmup + steps}: give it more epochs")
    return clock.seconds / steps
