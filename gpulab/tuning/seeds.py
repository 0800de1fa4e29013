"""Other random numbers for a run, and the ones of before put back."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """All global random numbers begin at `seed` inside: of torch (with its GPUs), NumPy's global ones, Python's."""
    torch, numpy = sys.modules["torch"], sys.modules["numpy"]
    python_state, numpy_state, torch_state = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    gpu_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if gpu_states is not None:
            with suppress(RuntimeError):  # a GPU whose error stays takes nothing; the user's own error is to pass
                torch.cuda.set_rng_state_all(gpu_states)
