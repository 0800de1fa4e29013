"""The random numbers of torch, NumPy and Python: kept as they are around work of our own, and seen when drawn."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Drawn:
    """Whether random numbers were drawn; known after the block."""

    numbers: bool = False


@contextmanager
def kept() -> Iterator[None]:
    """Put all generators back at the end. Those of GPUs too, once they are in use."""
    import torch

    python, numpy, cpu = random.getstate(), _numpy_state(), torch.get_rng_state()
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpus = torch.cuda.get_rng_state_all() if in_use else None
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            sys.modules["numpy"].random.set_state(numpy)
        torch.set_rng_state(cpu)
        if gpus is not None:
            with suppress(RuntimeError):  # a GPU whose error stays takes nothing; the user's own error is to pass
                torch.cuda.set_rng_state_all(gpus)


@contextmanager
def drawn() -> Iterator[Drawn]:
    """Tell whether torch's, NumPy's or Python's global random numbers moved."""
    import torch

    seen = Drawn()
    python, numpy, cpu = random.getstate(), _numpy_state(), torch.get_rng_state()
    yield seen
    seen.numbers = not (
        random.getstate() == python and _same_numpy(_numpy_state(), numpy) and torch.equal(torch.get_rng_state(), cpu)
    )


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy.random.get_state() if numpy is not None else None


def _same_numpy(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    return bool(a[0] == b[0] and (a[1] == b[1]).all() and tuple(a[2:]) == tuple(b[2:]))
