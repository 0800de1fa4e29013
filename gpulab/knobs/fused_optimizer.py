"""Fused optimizer kernels for an optimizer that was built without them, set in its param groups."""

from __future__ import annotations

import inspect
import re
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from gpulab.knobs.description import observed_optimizer
from gpulab.knobs.knob import CodeEdit, Knob, KnobEffects, Value, Verification, cannot_tell, no_effect, took_effect
from gpulab.knobs.observation import Observation, ObservedOptimizer, trace_counts
from gpulab.patching.hook_points import HookOrder, OptimizerHook, around_steps
from gpulab.run import Run

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

OPERATORS = {"Adam": "_fused_adam_", "AdamW": "_fused_adamw_", "SGD": "_fused_sgd_", "Adagrad": "_fused_adagrad_"}
IN_TRACE = re.compile(r"_fused_(adamw?|sgd|adagrad)_")
MARKS = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")  # torch sets them if fused
DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})


class FusedOptimizer(Knob):
    """One kernel for all parameters of an optimizer; off: torch's own choice without fusing."""

    name = "fused_optimizer"
    lesson = "08_fused_kernels"
    title = "Fused optimizer"
    help = "One kernel updates all parameters: helps models with many parameters, or launch-bound steps"
    kind = "optimizer option"
    options = (False, True)
    change_counts = ("optimizers",)
    idle_text = "your code's optimizer already has fused_optimizer={}"
    helps_against = {"launch_bound": 2, "unfused_optimizer": 1}

    def value_in(self, observation: Observation) -> Value | None:
        able = [o for o in observation.optimizers if o.supports_fused]
        return all(o.fused is True for o in able) if able else None

    def refuses(self, observation: Observation, value: Value) -> str | None:
        """Refuses if no optimizer has a fused form, or none for its parameters."""
        if not observation.optimizers:
            return "no optimizer steps in your code"
        if not value:
            return None
        reasons = [_cannot(o) for o in observation.optimizers]
        return reasons[0] if all(reasons) else None

    def apply(self, value: Value, effects: KnobEffects, undo: ExitStack) -> None:
        """Set the param groups of each optimizer when it first steps."""
        switching = Switching(bool(value), effects)
        undo.callback(switching.put_back)
        undo.enter_context(around_steps(HookOrder.OPTIONS, switching))

    def evidence(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        counts, changed = trace_counts(run), effects.counts["optimizers"]
        if counts is None:
            return cannot_tell(f"set on {changed} optimizers, but there is no trace to show the effect")
        operator = next((name for name in counts if IN_TRACE.search(name)), None)
        words = f"{operator or 'no fused operator'} in the trace"
        return took_effect(words) if (operator is not None) == value else no_effect(words)

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        able = next((o.class_name for o in observation.optimizers if not _cannot(o)), "AdamW")
        snippet = f"optimizer = torch.optim.{able}(…, fused={bool(value)})"
        return CodeEdit(snippet, call=able, keyword="fused", literal=str(bool(value)))


def _cannot(optimizer: ObservedOptimizer) -> str | None:
    if not optimizer.supports_fused:
        return f"{optimizer.class_name} has no fused implementation; {', '.join(OPERATORS)} have one"
    other = [d for d in optimizer.parameter_devices if d.split(":")[0] not in DEVICES]
    if other:
        return f"fused optimizers do not support parameters on {other[0]}"
    wrong = [d for d in optimizer.parameter_dtypes if "float" not in d]
    return f"fused optimizers support floating-point parameters only, not {wrong[0]}" if wrong else None


class _Before:
    """An optimizer's former options; `put_back` restores them and keeps the optimizer's state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._options = [_options(group) for group in optimizer.param_groups]
        self._defaults = _options(optimizer.defaults)
        self._marks = {name: vars(optimizer)[name] for name in MARKS if name in vars(optimizer)}

    def put_back(self) -> None:
        optimizer = self.optimizer
        added = len(optimizer.param_groups) - len(self._options)  # groups added since, with the defaults
        for group, options in zip(
            optimizer.param_groups, [*self._options, *[self._defaults] * max(0, added)], strict=False
        ):
            group.update(options)
        optimizer.defaults.update(self._defaults)
        for name in MARKS:
            vars(optimizer).pop(name, None)
        vars(optimizer).update(self._marks)
        rehost_steps(optimizer)


class Switching(OptimizerHook):
    """Sets the options of each optimizer at its first step on this thread."""

    def __init__(self, fused: bool, effects: KnobEffects) -> None:
        self._fused = fused
        self._effects = effects
        self._optimizers: dict[int, Optimizer] = {}
        self._switched: dict[int, _Before] = {}

    def before(self, optimizer: Optimizer, closure: bool) -> None:
        """Switch the optimizer at its first step, unless a reason forbids it."""
        if id(optimizer) in self._optimizers:
            return
        if not self._fused and getattr(optimizer, "found_inf", None) is not None:
            self._wait(optimizer)
            return
        self._optimizers[id(optimizer)] = optimizer
        if not any("fused" in group for group in optimizer.param_groups):
            self._effects.refuse(f"{type(optimizer).__name__} has no fused implementation")
        elif all(bool(group.get("fused")) == self._fused for group in optimizer.param_groups):
            return
        elif self._fused and (reason := _cannot(observed_optimizer(optimizer)) or _impossible(optimizer)):
            self._effects.refuse(reason)
        else:
            self._switched.setdefault(id(optimizer), _Before(optimizer))
            for options in (*optimizer.param_groups, optimizer.defaults):
                options["fused"] = self._fused
                options["foreach"] = False if self._fused else None
            vars(optimizer)["_step_supports_amp_scaling"] = self._fused
            rehost_steps(optimizer)
            self._effects.count("optimizers")

    def _wait(self, optimizer: Optimizer) -> None:
        """For one step: GradScaler left its unscaling to the fused kernel; from the next step on it unscales itself."""
        self._switched.setdefault(id(optimizer), _Before(optimizer))
        vars(optimizer)["_step_supports_amp_scaling"] = False

    def put_back(self) -> None:
        for before in self._switched.values():
            before.put_back()


def rehost_steps(optimizer: Optimizer) -> None:
    """Move the step count to the device where the optimizer reads it: the parameter's if fused, else the CPU."""
    import torch

    for group in optimizer.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        for p in group["params"]:
            step = optimizer.state[p].get("step") if p in optimizer.state else None
            if isinstance(step, torch.Tensor):
                dtype = torch.float32 if group.get("fused") else _step_dtype()
                optimizer.state[p]["step"] = step.to(p.device if on_device else "cpu", dtype)


def _step_dtype() -> Any:
    import torch

    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in ("fused", "foreach") if name in group}


def _impossible(optimizer: Optimizer) -> str | None:
    """Why the fused kernel would refuse these parameters."""
    import torch

    kind = type(optimizer)
    operator = next((OPERATORS[c.__name__] for c in kind.__mro__ if c.__name__ in OPERATORS), None)
    if operator is None or "fused" not in inspect.signature(kind.__init__).parameters:
        return f"{kind.__name__} has no fused implementation"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "a differentiable optimizer cannot be fused"
    parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    for device in {p.device.type for p in parameters}:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", device.upper()):
            return f"this version of torch has no fused {kind.__name__} for {device}"
    if any(p.grad is not None and p.grad.is_sparse for p in parameters):
        return "fused optimizers do not support sparse gradients"
    return None


FUSED_OPTIMIZER = FusedOptimizer()
