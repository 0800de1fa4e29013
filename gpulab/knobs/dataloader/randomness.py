"""The random numbers of torch, NumPy and Python: kept as they are around work of our own, and seen when drawn."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def kept() -> Iterator[None]:
    """Put all generators back at the end. Those of GPUs too, once they are in use."""
    import torch

    python, numpy, cpu = random_state()
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


def random_state() -> tuple[Any, Any, Any]:
    """Of Python's, NumPy's (None before it is imported) and torch's global generators."""
    import torch

    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state(), torch.get_rng_state()
