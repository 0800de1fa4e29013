"""Lets several knobs stand before and after an optimizer's step, in an order of their own and not that of entering."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from gpulab.torch_hooks.patching import Shared

if TYPE_CHECKING:
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


class _Here(threading.local):
    def __init__(self) -> None:
        self.watchers: list[tuple[HookOrder, int, Watcher]] = []
        self.stepping: list[Optimizer] = []


_here = _Here()
_numbers = itertools.count()


@contextmanager
def around_steps(turn: HookOrder, watcher: Watcher) -> Iterator[None]:
    """Have `watcher` told of each step on this thread. Of an optimizer that steps inside of another only the outer."""
    entry = (turn, next(_numbers), watcher)
    if not _here.watchers:
        _here.stepping = []
    _here.watchers = sorted([*_here.watchers, entry])
    try:
        with _shared.held():
            yield
    finally:
        _here.watchers = [e for e in _here.watchers if e is not entry]


def _register(undo: ExitStack) -> None:
    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not _here.watchers:
            return
        stepping = _here.stepping
        if any(o is optimizer for o in stepping):  # its last step raised
            stepping.clear()
        stepping.append(optimizer)
        if len(stepping) == 1:
            closure = (args[1] if len(args) > 1 else None) or kwargs.get("closure")
            for _, _, watcher in _here.watchers:
                watcher.before(optimizer, closure is not None)

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        stepping = _here.stepping
        if not stepping or stepping[-1] is not optimizer:
            return
        stepping.pop()
        if not stepping:
            for _, _, watcher in reversed(_here.watchers):
                watcher.after(optimizer)

    undo.enter_context(step_hooks(after, before))


_shared = Shared(_register)
