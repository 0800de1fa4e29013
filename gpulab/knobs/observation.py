"""What a cell used when it ran as written; from these facts each knob derives its present value and its limits."""

from __future__ import annotations

import re

import numpy as np
from msgspec import Struct

from gpulab.run import Category, Device, Loader, Run

Shape = tuple[int, ...]
StepInputs = tuple[tuple[Shape, ...], ...]  # per backward pass of a step: input shapes of the modules trained by it


class ObservedLoader(Struct, frozen=True):
    """One DataLoader that was iterated. `record` has its settings."""

    record: Loader
    custom_batch_sampler: bool  # not torch's own BatchSampler
    dataset_from_main: bool  # its class (or its collate_fn …) was defined in the notebook
    start_method: str  # of worker processes: "fork", "spawn", "forkserver"


class ObservedOptimizer(Struct, frozen=True):
    """One optimizer that stepped. `fused`: as in its first param group; None: torch chooses."""

    class_name: str
    supports_fused: bool
    fused: bool | None
    parameter_devices: tuple[str, ...]
    parameter_dtypes: tuple[str, ...]
    takes_closure: bool  # LBFGS


class ObservedDataParallel(Struct, frozen=True):
    """How a DistributedDataParallel exchanges gradients. `has_hook`: the code registered a communication hook.

    `backend`: of its process group; `bucket_count`: buckets, if every bucket is filled.
    """

    bucket_cap_mb: float
    gradient_as_bucket_view: bool
    static_graph: bool
    has_hook: bool
    backend: str
    bucket_count: int


class ObservedBlocks(Struct, frozen=True):
    """The repeated blocks of a module. `refusal`: why none can be computed again; `in_use`: the code does so itself."""

    count: int
    edit: str  # the lines that checkpoint them
    refusal: str = ""
    in_use: bool = False


class ObservedModule(Struct, frozen=True):
    """One outermost module that was called. `memory_format`: of its 4-dimensional weights; None without any."""

    class_name: str
    parameter_count: int
    parameter_dtypes: tuple[str, ...]
    has_convolution: bool
    memory_format: str | None  # "contiguous", "channels_last", "mixed"
    compiled: bool
    trained: bool  # a backward pass followed while it was in training mode
    autocast_dtype: str | None  # "bfloat16", "float16" if it was called under autocast
    data_parallel: ObservedDataParallel | None = None  # None: it is no DistributedDataParallel
    fully_sharded: bool = False  # whether any submodule is under FSDP2's `fully_shard`
    blocks: ObservedBlocks | None = None  # None: unknown


class Observation(Struct, frozen=True):
    """What the code used in the reference run, in which nothing was changed."""

    device: Device
    loaders: tuple[ObservedLoader, ...] = ()  # the one that feeds the steps first
    optimizers: tuple[ObservedOptimizer, ...] = ()
    modules: tuple[ObservedModule, ...] = ()
    operators: frozenset[str] = frozenset()  # names in the trace: operators and kernels
    tf32: bool | None = None  # None: the device has none
    # back end that the trace shows: "math", "efficient", "flash", "cudnn"; None: no attention
    attention: str | None = None
    grad_scaler: bool = False  # the cell scales its own gradients
    differentiates_twice: bool = False
    checks: frozenset[str] = frozenset()  # checks that were on, by the names of their knobs
    checkpoints: bool = False  # torch.utils.checkpoint was called, without reentrant autograd
    compute_threads: int | None = None  # of an operator on the CPU, at the end of the run
    step_inputs: StepInputs | None = None  # None: unknown, or not the same in all observed steps

    @property
    def loader(self) -> ObservedLoader | None:
        return self.loaders[0] if self.loaders else None


OPERATORS = (Category.CPU_OP, Category.KERNEL, Category.GPU_MEMCPY, Category.GPU_MEMSET)


def trace_counts(
    run: Run, categories: tuple[Category, ...] = (*OPERATORS, Category.USER_ANNOTATION)
) -> dict[str, int] | None:
    """How often each operator, annotation and kernel is in the trace; None without a trace."""
    timeline = run.timeline
    if timeline is None:
        return None
    ids = timeline.name_id[np.isin(timeline.category, [int(c) for c in categories])]
    times = np.bincount(ids, minlength=len(timeline.names)).tolist()
    return {name: n for name, n in zip(timeline.names, times, strict=True) if n}


def kernel_names(run: Run) -> tuple[str, ...]:
    timeline = run.timeline
    if timeline is None:
        return ()
    ids = np.unique(timeline.name_id[timeline.category == Category.KERNEL])
    return tuple(timeline.names[i] for i in ids.tolist())


def first_match(pattern: re.Pattern[str], names: tuple[str, ...]) -> str | None:
    """The first name that contains the pattern, shortened if it is long."""
    first = next((name for name in names if pattern.search(name)), None)
    return first if first is None or len(first) <= 60 else f"{first[:59]}…"
