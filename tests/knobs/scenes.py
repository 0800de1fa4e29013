"""What a cell may be seen to use, without running one: the observations that knobs decide by."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from gpulab.knobs.observation import (
    Observation,
    ObservedDataParallel,
    ObservedLoader,
    ObservedModule,
    ObservedOptimizer,
)
from gpulab.run import Loader
from tests.support.knob_cells import CPU

LOADER = ObservedLoader(Loader("Digits", 100, 8, 0, None, False, False, 13, False), False, False, "fork")
OPTIMIZER = ObservedOptimizer("AdamW", True, None, ("cpu",), ("float32",), False)
MODULE = ObservedModule("Net", 10, ("float32",), True, "contiguous", False, True, None)
NOTHING = Observation(CPU)
SCENE = Observation(CPU, (LOADER,), (OPTIMIZER,), (MODULE,), compute_threads=2)


def loading(base: Observation = SCENE, **changes: Any) -> Observation:
    """Another DataLoader: fields of what was observed of it, or of its record."""
    own = {k: changes.pop(k) for k in ("custom_batch_sampler", "dataset_from_main", "start_method") if k in changes}
    loader = base.loaders[0]
    return replace(base, loaders=(replace(loader, record=replace(loader.record, **changes), **own),))


def optimizing(**changes: Any) -> Observation:
    """Another optimizer."""
    return replace(SCENE, optimizers=(replace(OPTIMIZER, **changes),))


def calling(**changes: Any) -> Observation:
    """Another module."""
    return replace(SCENE, modules=(replace(MODULE, **changes),))


def in_parallel(backend: str = "gloo", buckets: int = 1, hook: bool = False) -> Observation:
    """A module in a DistributedDataParallel."""
    return calling(data_parallel=ObservedDataParallel(25, False, False, hook, backend, buckets))
