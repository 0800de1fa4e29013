"""Saves and restores the states of random number generators, so that a training draws the same numbers again.

These are the global generators of Python, NumPy, torch on the CPU and, if CUDA was started, torch on each GPU, and any
generator object that the code holds. Nothing is imported or started that the user's code has not.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

Undo = Callable[[], object]


def imported_torch() -> Any:
    """torch, if its import is complete; else None."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "optim") and hasattr(torch, "utils") else None


class Randomness:
    """The states of the global generators at its creation."""

    def __init__(self) -> None:
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state(legacy=False)
        torch = imported_torch()
        self._torch = None if torch is None else torch.get_rng_state()
        started = torch is not None and torch.cuda.is_initialized()
        self._cuda = torch.cuda.get_rng_state_all() if started else None

    @property
    def states(self) -> tuple[Any, ...]:
        """All states, for comparison: they differ once a number was drawn."""
        return self._python, self._numpy, self._torch, self._cuda

    def put_back(self) -> str | None:
        """Restore all states; says which could not be restored."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch = imported_torch()
        if torch is None:
            return None
        if self._torch is None:
            return "torch's random numbers: the code itself imported torch"
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        elif torch.cuda.is_initialized():  # only since then: torch seeds the GPUs like the CPU
            torch.cuda.manual_seed_all(torch.initial_seed())
        return None


@contextmanager
def preserving_randomness() -> Iterator[None]:
    """Restore all global generators at the end."""
    before = Randomness()
    try:
        yield
    finally:
        with suppress(RuntimeError):  # a broken GPU accepts no state; the user's own error must come through
            before.put_back()


def is_generator(kind: type) -> bool:
    """Whether objects of this type generate random numbers."""
    return issubclass(kind, _kinds())


def undo_of(generator: Any) -> Undo | None:
    """A function that restores this generator's present state; None if it has no state (`random.SystemRandom`)."""
    kind = type(generator)
    if issubclass(kind, random.SystemRandom):
        return None
    if issubclass(kind, random.Random):
        state = generator.getstate()
        return lambda: generator.setstate(state)
    torch = imported_torch()
    if torch is not None and issubclass(kind, torch.Generator):
        tensor = generator.get_state()
        return lambda: generator.set_state(tensor)
    if hasattr(kind, "bit_generator"):  # numpy.random.Generator
        return undo_of(generator.bit_generator)
    if hasattr(kind, "set_state"):  # numpy.random.RandomState
        state = generator.get_state(legacy=False)
        return lambda: generator.set_state(state)
    position = generator.state  # numpy.random.BitGenerator
    return lambda: setattr(generator, "state", position)


def _kinds() -> tuple[type, ...]:
    numpy, torch = sys.modules.get("numpy"), imported_torch()
    of_numpy = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator)
    return (random.Random, *of_numpy, *(() if torch is None else (torch.Generator,)))
