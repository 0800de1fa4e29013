"""Whether modules under `fully_shard` (FSDP2) give their gathered weights back between the passes.

Source: PyTorch, "torch.distributed.fsdp.fully_shard".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gpulab.formatting import plural
from gpulab.knobs.knob import CodeEdit, Kind, Knob, KnobEffects, Value, Verification
from gpulab.knobs.observe.observation import Observation
from gpulab.run import Run
from gpulab.torch_hooks.outermost_call import Call, Layer, around_outermost

if TYPE_CHECKING:
    from torch.nn import Module

SET = "sharded modules"
NONE_SHARDED = "no module under fully_shard is called in your code"


class ReshardAfterForward(Knob):
    """Kept, the weights are not gathered a second time for the backward pass."""

    name = "reshard_after_forward"
    title = "FSDP: reshard after the forward pass"
    help = "Off: one all-gather of the weights per step instead of two, at the cost of keeping all of them in memory"
    kind: Kind = "module call"
    of_ranks = True
    options: tuple[Value, ...] = (False, True)
    climb_values = (False,)
    cost = "Off keeps all weights in memory on each rank between forward and backward."
    aliases = ("reshard",)

    def value_in(self, observation: Observation) -> Value | None:
        return None  # PyTorch does not tell

    def refuses(self, observation: Observation, value: Value) -> str | None:
        return None if any(m.fully_sharded for m in observation.modules) else NONE_SHARDED

    @contextmanager
    def applied(self, value: Value) -> Iterator[KnobEffects]:
        from torch.distributed.fsdp import FSDPModule

        effects = KnobEffects()
        met: dict[int, Any] = {}

        def around(module: Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if id(module) not in met:
                met[id(module)] = module
                for part in module.modules():
                    if isinstance(part, FSDPModule):
                        part.set_reshard_after_forward(bool(value), recurse=False)
                        effects.count(SET)
            return call(args, kwargs)

        with around_outermost(Layer.INPUTS, around):
            yield effects

    def verify(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        count = effects.counts.get(SET, 0)
        if not count:
            return Verification("no effect", NONE_SHARDED)
        does = "freed" if value else "kept"
        return Verification("took effect", f"{plural(count, 'module')} {does} weights after the forward pass")

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        line = f"fully_shard(module, reshard_after_forward={value})"
        return CodeEdit(line, "fully_shard", self.name, str(value))


RESHARD_AFTER_FORWARD = ReshardAfterForward()
