"""The first steps of a planted cell under torch.profiler, with all that other advisers ask for."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from benchmarks.planted.planted import Planted
from benchmarks.planted.timing import Enough, compiled, hushed, notebook

STEPS = 8


class Marking:
    """Marks a step of the profiler after each step of the first optimizer, and ends the cell."""

    def __init__(self, profiler: Any, steps: int) -> None:
        self._profiler = profiler
        self._left = steps
        self._first: int | None = None

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """After each step of any optimizer."""
        if self._first is None:
            self._first = id(optimizer)
        if id(optimizer) != self._first:
            return
        self._left -= 1
        if self._left == 0:
            raise Enough
        self._profiler.step()


def recorded(planted: Planted, steps: int = STEPS, *, stacks: bool = True) -> tuple[Any, object]:
    """The finished profile, from the cell's first line on, and what has to live as long: names in it are the code's."""
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.profiler import ProfilerAction, profile

    before, cell = planted.text
    names, code = notebook(before, planted.name), compiled(cell, f"<{planted.name}>")
    with profile(
        schedule=lambda step: ProfilerAction.RECORD, record_shapes=True, profile_memory=True, with_stack=stacks
    ) as profiler:
        handle = register_optimizer_step_post_hook(Marking(profiler, steps))
        try:
            with hushed(), contextlib.suppress(Enough):
                exec(code, names)
        finally:
            handle.remove()
    return profiler, (names, code)


def exported(profiler: Any, path: Path) -> Path:
    """The profile as a trace file."""
    with hushed():
        profiler.export_chrome_trace(str(path))
    return path
