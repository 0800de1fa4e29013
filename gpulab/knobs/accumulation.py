"""Gradient accumulation around an unmodified loop: only every k-th `step` of its optimizer takes effect."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct, field

from gpulab.knobs.distributed import average, without_sync
from gpulab.knobs.knob import CodeEdit, Knob, KnobEffects, LoopEnd, Value, Verification, took_effect
from gpulab.knobs.observation import Observation
from gpulab.patching.hook_points import HookOrder, OptimizerHook, around_steps
from gpulab.run import Run

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

STEPPED, PASSED, EXCHANGED = "optimizer steps", "steps passed over", "exchanges"


class Accumulate(Knob):
    """One step per k batches, with their mean gradient.

    The gradients of the first k - 1 batches are stored; at the k-th step the optimizer gets the mean. The user's code
    sees its usual losses and gradients, so that networks trained in turn (a GAN) do not mix. Memory: one more copy of
    the gradients than in a loop that lets autograd accumulate.

    DistributedDataParallel exchanges no gradients before the k-th step, as under its `no_sync`. The mean is exchanged
    just before the step, so the exchange does not overlap with a backward pass.
    """

    name = "accumulate"
    title = "Gradient accumulation"
    help = "Batches per optimizer step: the effective batch size of a larger batch with the memory of a small one"
    kind = "optimizer option"
    lesson = "05_batch_size"
    changes_training = "fewer optimizer steps, on gradients averaged over several batches, as with a larger batch"
    options = (1, 2, 4, 8)
    aliases = ("accumulation", "gradient_accumulation")
    changes_steps = True
    change_counts = (PASSED,)
    idle_text = "every optimizer step ran"

    def value_in(self, observation: Observation) -> Value | None:
        """1: each call of `step` is a step. Whether the cell itself accumulates before a step is unknown."""
        return 1 if observation.optimizers else None

    def refuses(self, observation: Observation, value: Value) -> str | None:
        if value == 1:
            return None
        if not observation.optimizers:
            return "no optimizer steps in your code"
        closures = next((o for o in observation.optimizers if o.takes_closure), None)
        if closures is not None:
            return f"{closures.class_name} computes its gradients inside step(), from a closure"
        if observation.grad_scaler:
            return "your code's GradScaler steps on gradients that are still scaled; amp=bf16 needs no scaler"
        return None

    def apply(self, value: Value, effects: KnobEffects, undo: ExitStack) -> None:
        if int(value) > 1:
            accumulation = Accumulation(int(value), effects)
            undo.callback(accumulation.stash.restore)  # needed after a step that raised
            undo.enter_context(without_sync(accumulation.models))
            undo.enter_context(around_steps(HookOrder.ACCUMULATING, accumulation))

    def evidence(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        stepped = effects.counts[STEPPED]
        words = [f"the optimizer stepped {stepped} of {effects.counts[PASSED] + stepped} times"]
        counts = run.steps.batch_count
        batches = int(np.median(counts)) if len(counts) else 0
        if batches > 1:
            words.append(f"your code itself accumulates {batches} batches per step")
        if EXCHANGED in effects.counts:
            words.append(f"the ranks all-reduced gradients {effects.counts[EXCHANGED]} times")
        return took_effect("; ".join(words))

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        if value == 1:
            return CodeEdit("# step after each batch")
        return CodeEdit("", loop_end=LoopEnd(batches=int(value)))


class _Aside(Struct):
    """The gradients of one optimizer since its last step."""

    optimizer: Optimizer  # kept alive, so that its id is not reused
    batches: int = 0
    mean: dict[Tensor, Tensor] = field(default_factory=dict)  # by parameter; complete after k batches


class Accumulation(OptimizerHook):
    """Stores gradients before each step, and restores the user's gradients after it."""

    def __init__(self, batches: int, effects: KnobEffects) -> None:
        self._batches = batches
        self._effects = effects
        self._aside: dict[int, _Aside] = {}
        self.stash = GradientStash()
        self.models: list[Any] = []  # the DistributedDataParallel modules, with several ranks

    def before(self, optimizer: Optimizer, closure: bool) -> None:
        """At the k-th step the parameters get the mean gradient, else none, so that the optimizer skips them."""
        self.stash.restore()
        if closure:
            self._effects.refuse("your code passes a closure to step(), which computes the gradients inside")
            return
        if getattr(optimizer, "grad_scale", None) is not None:
            self._effects.refuse("your code's GradScaler steps on gradients that are still scaled")
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if all(p.grad is None for p in parameters):
            return
        aside = self._aside.setdefault(id(optimizer), _Aside(optimizer))
        self._put_aside(aside, [p for p in parameters if p.grad is not None])
        last = aside.batches == self._batches
        self._effects.count(STEPPED if last else PASSED)
        self.stash.put(parameters)
        if last:
            self._exchange(aside.mean, parameters)
            for p in parameters:
                p.grad = aside.mean.get(p)
            del self._aside[id(optimizer)]

    def _exchange(self, mean: dict[Tensor, Tensor], parameters: Sequence[Tensor]) -> None:
        """Average the gradients of all parameters over the ranks, also parameters that this rank did not use."""
        import torch

        stepped = {id(p) for p in parameters}
        for model in self.models:
            own = [
                mean.setdefault(p, torch.zeros_like(p, requires_grad=False))
                for p in model.parameters()
                if p.requires_grad and id(p) in stepped
            ]
            if own:
                average(own, model.process_group)
                self._effects.count(EXCHANGED)

    def after(self, optimizer: Optimizer) -> None:
        """Restore the gradients that the user's code had before the step."""
        self.stash.restore()

    def _put_aside(self, aside: _Aside, parameters: Sequence[Tensor]) -> None:
        import torch

        share = 1 / self._batches
        begun = [p for p in parameters if p in aside.mean and not _gradient(p).is_sparse]
        with torch.no_grad():
            if begun:
                torch._foreach_add_([aside.mean[p] for p in begun], [_gradient(p) for p in begun], alpha=share)
            done = set(begun)
            for p in parameters:
                if p not in done:
                    part = _gradient(p) * share
                    aside.mean[p] = aside.mean[p] + part if p in aside.mean else part
        aside.batches += 1


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.detach()


ACCUMULATE = Accumulate()


class GradientStash:
    """The user's gradients, hidden from an optimizer until `restore`."""

    def __init__(self) -> None:
        self._entries: list[tuple[Tensor, Tensor, tuple[int, ...]]] = []

    def put(self, parameters: Sequence[Tensor]) -> None:
        self._entries += [(p, p.grad, p.stride()) for p in parameters if p.grad is not None]
        for p in parameters:
            p.grad = None

    def restore(self) -> None:
        """Restore each gradient, in the present memory format of its parameter."""
        entries, self._entries = self._entries, []
        for p, gradient, stride in entries:
            p.grad = gradient if p.stride() == stride else laid_out_like(gradient, p)


def laid_out_like(value: Tensor, weight: Tensor) -> Tensor:
    """The same values, laid out as the weight is."""
    import torch

    if value.stride() == weight.stride() or value.layout != torch.strided:
        return value
    return torch.empty_like(weight, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value.detach())
