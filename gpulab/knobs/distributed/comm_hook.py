"""What DistributedDataParallel sends of a gradient: all of it, in 16 bits, or an approximation of low rank.

Source: PyTorch, "DDP Communication Hooks".
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from gpulab.knobs.distributed.ddp_options import NO_DDP, data_parallel
from gpulab.knobs.knob import CodeEdit, Kind, Knob, KnobEffects, Value, Verification
from gpulab.knobs.observe.describe import observed_data_parallel
from gpulab.knobs.observe.observation import Observation
from gpulab.run import Run
from gpulab.torch_hooks.patching import replaced

HOOKED = "models with the hook"
HAS_ONE = "the model already has a communication hook, and takes only one"
GLOO_WAITS = (
    "PyTorch's PowerSGD blocks gloo's own threads, and deadlocks with more than one bucket: "
    "use NCCL, or a bucket_cap_mb larger than all gradients together"
)
START_STEPS = 2  # PowerSGD needs two steps of whole gradients first; its own default of 1000 would outlast a block

_EDITS = {
    "fp16": "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
    "model.register_comm_hook(None, default_hooks.fp16_compress_hook)  # once, after DistributedDataParallel(…)",
    "bf16": "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
    "model.register_comm_hook(None, default_hooks.bf16_compress_hook)  # once, after DistributedDataParallel(…)",
    "powersgd": "from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook\n"
    "state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=1000)\n"
    "model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)  # once, after DistributedDataParallel(…)",
}


class CommHook(Knob):
    """The hook that exchanges a bucket of gradients in place of DistributedDataParallel's own all-reduce."""

    name = "comm_hook"
    title = "Compressed gradients"
    help = "Exchanges gradients in 16 bits, or as low-rank factors (PowerSGD): fewer bytes over a slow link"
    kind: Kind = "module call"
    of_ranks = True
    options: tuple[Value, ...] = ("none", "fp16", "bf16", "powersgd")
    climb_values = ("fp16",)
    changes_training = "the ranks exchange rounded gradients"
    aliases = ("compression", "gradient_compression", "compress")
    helps_against: Mapping[str, int] = {"exposed_communication": 2}

    def value_in(self, observation: Observation) -> Value | None:
        seen = data_parallel(observation)
        return None if seen is None or seen.has_hook else "none"

    def refuses(self, observation: Observation, value: Value) -> str | None:
        seen = data_parallel(observation)
        if seen is None:
            return NO_DDP
        if seen.has_hook:
            return HAS_ONE
        return GLOO_WAITS if value == "powersgd" and seen.backend == "gloo" and seen.bucket_count > 1 else None

    @contextmanager
    def applied(self, value: Value) -> Iterator[KnobEffects]:
        effects = KnobEffects()
        if value == "none":
            yield effects
            return
        from torch.nn.parallel import DistributedDataParallel

        thread = get_ident()
        met: weakref.WeakSet[Any] = weakref.WeakSet()

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
                if get_ident() == thread and self not in met:  # by now the user's code has registered its own
                    met.add(self)
                    _register(self, str(value), effects)
                return original(self, *args, **kwargs)

            return forward

        with replaced(DistributedDataParallel, "forward", wrap):
            yield effects

    def verify(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        count = effects.counts.get(HOOKED, 0)
        if value == "none" and not effects.refused:
            return Verification("took effect", "no hook was registered")
        if not count:
            return Verification("no effect", "; ".join(effects.refused) or NO_DDP)
        return Verification("took effect", f"{count} DistributedDataParallel exchanged gradients with {value}")

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        return CodeEdit(_EDITS.get(str(value), "# leave model.register_comm_hook(…) out"))


def _register(model: Any, name: str, effects: KnobEffects) -> None:
    if getattr(model, "_comm_hooks", None):
        effects.refuse(HAS_ONE)
        return
    seen = observed_data_parallel(model)
    if name == "powersgd" and seen is not None and seen.backend == "gloo" and seen.bucket_count > 1:
        effects.refuse(GLOO_WAITS)
        return
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    try:
        if name == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=START_STEPS)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            model.register_comm_hook(None, getattr(default_hooks, f"{name}_compress_hook"))
    except (RuntimeError, ValueError, TypeError) as e:  # bf16 needs NCCL 2.9.7 and CUDA 11
        effects.refuse(f"PyTorch rejected the hook: {e}")
        return
    effects.count(HOOKED)


COMM_HOOK = CommHook()
