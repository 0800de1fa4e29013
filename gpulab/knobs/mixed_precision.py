"""Mixed precision: autocast around the model, with loss scaling for fp16, whose gradients could underflow.

With fp16 each backward pass starts from the scaled loss, and its gradients are unscaled right after it: the user's code
(clipping, logging) sees gradients of the usual size. If gradients overflow, the step is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from threading import get_ident
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from gpulab.knobs.accumulation import GradientStash
from gpulab.knobs.knob import (
    CodeEdit,
    Knob,
    KnobEffects,
    LoopEnd,
    Value,
    Verification,
    cannot_tell,
    no_effect,
    took_effect,
)
from gpulab.knobs.observation import Observation, first_match, kernel_names, trace_counts
from gpulab.knobs.observer import has_ampere_units
from gpulab.patching.attributes import replaced
from gpulab.patching.hook_points import Around, Call, HookOrder, Layer, OptimizerHook, around_outermost, around_steps
from gpulab.run import Run

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.amp import GradScaler
    from torch.nn import Module
    from torch.optim import Optimizer

FIRST_SCALE = 2.0**16  # initial loss scale, torch's default
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
LOW = frozenset(DTYPES.values())

# The spellings of matrix libraries (cuBLAS, cuDNN, CUTLASS, nvjet) and of torch's own kernels
KERNELS = {
    "bf16": re.compile(r"bf16|bfloat16|nvjet(_\w+)?_ts[st]", re.IGNORECASE),
    "fp16": re.compile(r"(?<!b)f16|fp16|half|h(16816|1688|884)gemm|hmma|nvjet(_\w+)?_hs[sh]", re.IGNORECASE),
}


class Amp(Knob):
    """Automatic mixed precision. The cell's own autocast regions, if any, use the value too."""

    name = "amp"
    lesson = "07_mixed_precision"
    title = "Mixed precision"
    help = "Matmuls and convolutions in 16 bits: helps if they dominate and the device has hardware for it"
    kind = "module call"
    changes_training = "lower precision: compare the losses"
    options = ("off", "fp16", "bf16")
    climb_values = ("bf16", "fp16")  # bf16 needs no loss scaling
    aliases = ("precision", "autocast", "bf16", "fp16")
    spellings = {
        "bfloat16": "bf16",
        "float16": "fp16",
        "half": "fp16",
        "no": "off",
        "false": "off",
        "fp32": "off",
    }
    helps_against = {"no_mixed_precision": 1, "memory_bound_ops": 2}

    def __init__(self) -> None:
        self._scale: float | None = None  # loss scale at the end of the last block; the next block starts with it

    def value_in(self, observation: Observation) -> Value | None:
        """The dtype of the first module called under autocast."""
        if not observation.modules:
            return None
        short = {long: name for name, long in DTYPES.items()}
        return next((short[m.autocast_dtype] for m in observation.modules if m.autocast_dtype in short), "off")

    def refuses(self, observation: Observation, value: Value) -> str | None:
        """Refuses if there is nothing to wrap or to gain, or the cell scales its own loss."""
        if not observation.modules:
            return "your code calls no torch.nn.Module: there is nothing to autocast"
        if value in ("off", self.value_in(observation)):
            return None
        dtypes = {d for m in observation.modules for d in m.parameter_dtypes}
        if dtypes and dtypes <= LOW:
            return f"the weights are already {', '.join(sorted(dtypes))}: autocast would change nothing"
        if dtypes and "float32" not in dtypes:
            return f"the weights are {', '.join(sorted(dtypes))}: autocast only lowers float32"
        if value == "bf16":
            if observation.device.kind != "cuda" or has_ampere_units(observation.device):
                return None
            return f"{observation.device.name} has no bf16 hardware (needs Ampere or newer); use amp=fp16"
        if observation.grad_scaler:
            return "your code has its own GradScaler, and gpulab would scale the loss twice; use amp=bf16"
        if any(o.takes_closure for o in observation.optimizers):
            return "an optimizer that takes a closure cannot skip a step on overflow; use amp=bf16"
        if "float16" in dtypes:
            return "some weights are float16, so their gradients cannot be unscaled; use amp=bf16"
        return None

    def apply(self, value: Value, effects: KnobEffects, undo: ExitStack) -> None:
        """Autocast the outermost module calls and the code's own regions; with fp16 also scale the loss."""
        import torch

        dtype = None if value == "off" else getattr(torch, DTYPES[str(value)])
        scaling = None
        if value == "fp16":
            scaling = LossScaling(effects, self._scale)
            scaling.begin(undo)
            undo.callback(self._keep_scale, scaling)
        undo.enter_context(_own_regions(effects, dtype))
        if dtype is not None:
            undo.enter_context(around_outermost(Layer.AUTOCAST, _autocasting(dtype, effects, scaling)))

    def _keep_scale(self, scaling: LossScaling) -> None:
        with suppress(RuntimeError):  # a failing device: the user's code reports its own error
            self._scale = scaling.scale or self._scale

    def forget(self) -> None:
        self._scale = None

    def evidence(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        """Judges by the kernels on a GPU; on the CPU by autocast's casts, if the baseline has none."""
        counts = effects.counts
        if value == "off":
            regions = counts["autocast regions"]
            if not regions:
                return no_effect("your code runs in fp32 already, without autocast")
            return took_effect(f"{regions} of your code's autocast regions were disabled")
        if value == self.value_in(observation):
            return no_effect(f"the baseline already uses amp={value}")
        calls = counts["module calls"]
        if not calls:
            return no_effect("no module ran under autocast")
        if effects.refusals:
            return cannot_tell("; ".join(effects.refusals))
        words = _lower_precision_in(run, str(value), observation)
        if not words and (results := counts["results of lower precision"]):
            words = f"{results} of {calls} module calls under autocast returned {DTYPES[str(value)]}"
        if not words:
            return cannot_tell(
                f"could not verify that AMP was applied: {calls} module calls ran under autocast, "
                f"but no {DTYPES[str(value)]} result was seen"
            )
        if skipped := counts["steps skipped"]:
            steps = "1 step was" if skipped == 1 else f"{skipped} steps were"
            words = f"{words}; {steps} skipped because scaled gradients overflowed"
        return took_effect(words)

    def without(self, observation: Observation) -> Observation:
        """The observation cannot distinguish the cell's own autocast regions from the knob's."""
        return replace(observation, modules=tuple(replace(m, autocast_dtype=None) for m in observation.modules))

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        if value == "off":
            return CodeEdit("# remove torch.autocast(…) and the GradScaler")
        lines = [
            f'with torch.autocast("{observation.device.kind}", dtype=torch.{DTYPES[str(value)]}):',
            "    outputs = model(inputs)",
            "    loss = criterion(outputs, targets)",
        ]
        if value == "bf16":
            return CodeEdit("\n".join(lines))
        scaler = f'scaler = torch.amp.GradScaler("{observation.device.kind}")  # once, before the loop'
        return CodeEdit("\n".join([scaler, *lines]), loop_end=LoopEnd(scaled=True))


def _lower_precision_in(run: Run, value: str, observation: Observation) -> str:
    """What shows, in the trace but not in the baseline, the lower precision, in words; empty if nothing does."""
    counts = trace_counts(run) or {}
    if run.timeline is not None and run.timeline.has_device_events:
        kernel = first_match(KERNELS[value], tuple(sorted(set(kernel_names(run)) - observation.operators)))
        return f"kernels in {DTYPES[value]}, among them {kernel}" if kernel is not None else ""
    casts = counts.get("aten::_to_copy", 0)
    is_new = casts and "aten::_to_copy" not in observation.operators
    return f"{casts} casts in the trace, none in the baseline" if is_new else ""


def _autocasting(dtype: torch.dtype, effects: KnobEffects, scaling: LossScaling | None) -> Around:
    """Runs a call under autocast and returns its results in float32, as the code after it expects.

    It wraps modules with parameters, and modules whose arguments require a gradient: losses, but not the transforms of
    a dataset.
    """
    import torch
    from torch.utils import _pytree as pytree

    def is_low(leaf: object) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bfloat16, torch.float16)

    def around(module: Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = _device_kind(module, args, kwargs)
        if kind is None:
            return call(args, kwargs)
        if scaling is not None:
            scaling.add_module(module)
        effects.count("module calls")
        if torch.is_autocast_enabled(kind):  # in a region of the code's own
            return call(args, kwargs)
        with torch.autocast(kind, dtype=dtype):
            result = call(args, kwargs)
        if not any(map(is_low, pytree.tree_leaves(result))):
            return result
        effects.count("results of lower precision")
        return pytree.tree_map(lambda leaf: leaf.float() if is_low(leaf) else leaf, result)

    return around


def _device_kind(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The kind of device that the call computes on; None if autocast must not be used."""
    import torch
    from torch.utils import _pytree as pytree

    parameter = next(module.parameters(), None)
    if parameter is not None:
        return parameter.device.type
    if isinstance(module, torch.nn.BCELoss):  # raises under autocast
        return None
    tensors = (t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
    return next((t.device.type for t in tensors if t.requires_grad), None)


def _own_regions(effects: KnobEffects, dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """Inside, the code's own `torch.autocast` regions on this thread use `dtype`, or do nothing if it is None."""
    from torch.amp import autocast_mode

    thread = get_ident()

    def wrap(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def __enter__(self: Any) -> Any:
            if get_ident() != thread or not self._enabled or self.fast_dtype is dtype:
                return original(self)
            effects.count("autocast regions")
            dtype_before = self.fast_dtype
            self._enabled, self.fast_dtype = dtype is not None, dtype or dtype_before
            try:
                return original(self)
            finally:
                self._enabled, self.fast_dtype = True, dtype_before

        return __enter__

    return replaced(autocast_mode.autocast, "__enter__", wrap)


AMP = Amp()


# -- loss scaling ------------------------------------------------------------------------------------------------------


class LossScaling(OptimizerHook):
    """One GradScaler for all trained parameters, created at the first backward pass."""

    def __init__(self, effects: KnobEffects, scale: float | None) -> None:
        self._effects = effects
        self._first_scale = FIRST_SCALE if scale is None else scale
        self._scaler: GradScaler | None = None
        self._parameters: dict[int, Tensor] = {}
        self._modules: set[int] = set()
        self._passes: list[SimpleNamespace] = []  # optimizers to GradScaler, since the scale was last updated
        self._stepped = False
        self._in_closure = False
        self._off = False
        self._within = False  # a scaled backward pass is running
        self._overflows = 0
        self._overflows_at_step: dict[int, int] = {}  # by optimizer: the overflows at its last step
        self._stash = GradientStash()  # overflowed gradients, during the step that skips them

    def begin(self, undo: ExitStack) -> None:
        """Scale the losses of this thread from here on; `add_module` names the modules that take part."""
        import torch

        thread = get_ident()

        def wrap(original: Callable[..., None]) -> Callable[..., None]:
            def backward(
                tensors: Any,
                grad_tensors: Any = None,
                retain_graph: bool | None = None,
                create_graph: bool = False,
                *rest: Any,
                **kw: Any,
            ) -> None:
                def go(roots: Any) -> None:
                    original(roots, grad_tensors, retain_graph, create_graph, *rest, **kw)

                if get_ident() != thread or create_graph:
                    go(tensors)
                else:
                    self._backward(tensors, go)

            return backward

        undo.callback(self._stash.restore)
        undo.enter_context(around_steps(HookOrder.SCALING, self))
        undo.enter_context(replaced(torch.autograd, "backward", wrap))

    def add_module(self, module: Module) -> None:
        """The parameters of this module may get scaled gradients."""
        if id(module) not in self._modules:
            self._modules.add(id(module))
            self._know(list(module.parameters()))

    def _know(self, parameters: Sequence[Tensor]) -> None:
        for p in parameters:
            self._parameters[id(p)] = p
            if getattr(p, "_post_accumulate_grad_hooks", None):
                self._off = True
                self._effects.refuse("the loss is not scaled: a hook consumes the gradients during the backward pass")

    # -- backward ------------------------------------------------------------------------------------------------

    def _backward(self, roots: Any, go: Callable[[Any], None]) -> None:
        """One backward pass from the scaled roots; its gradients are unscaled and added to the earlier gradients."""
        if self._off or self._within or not self._parameters:
            go(roots)
            return
        if self._scaler is None:
            from torch.amp import GradScaler

            first = roots
            while isinstance(first, (list, tuple)):
                first = first[0]
            self._scaler = GradScaler(first.device.type, init_scale=self._first_scale)
        self._update(self._scaler)
        scaler = self._scaler
        before = [(p, p.grad) for p in self._parameters.values() if p.grad is not None]
        for p, _ in before:
            p.grad = None
        self._within = True
        try:
            go(scaler.scale(roots))
        finally:
            self._within = False
            self._unscale(list(self._parameters.values()), scaler)
            _add_back(before)
        if self._in_closure and self._overflowed():
            self._drop_gradients()

    def _update(self, scaler: GradScaler) -> None:
        if self._stepped and self._passes:
            self._overflows += self._overflowed()
            scaler.update()
            self._passes.clear()
        self._stepped = False

    @property
    def scale(self) -> float | None:
        """The scale of the next backward pass; None before the first."""
        if self._scaler is None:
            return None
        self._update(self._scaler)
        return float(self._scaler.get_scale())

    def _unscale(self, parameters: Sequence[Tensor], scaler: GradScaler) -> None:
        with_gradient = [p for p in parameters if p.grad is not None]
        if not with_gradient:
            return
        gradients = SimpleNamespace(param_groups=[{"params": with_gradient}])
        scaler.unscale_(gradients)  # type: ignore[arg-type]
        self._passes.append(gradients)
        self._effects.count("scaled backward passes")

    def _overflowed(self) -> bool:
        """Whether a gradient since the last update is infinite or NaN. Waits for the device, as GradScaler does."""
        assert self._scaler is not None
        flags = [self._scaler._found_inf_per_device(g) for g in self._passes]  # type: ignore[arg-type]
        return any(bool(f.item()) for of_devices in flags for f in of_devices.values())

    # -- steps ---------------------------------------------------------------------------------------------------

    def before(self, optimizer: Optimizer, closure: bool) -> None:
        """If gradients have overflowed, remove them, so that the optimizer skips the step."""
        self._stash.restore()
        self._in_closure = closure
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        unknown = [p for p in parameters if id(p) not in self._parameters]
        if self._scaler is not None and unknown and self._passes:
            self._unscale(unknown, self._scaler)  # they belong to no called module
        self._know(unknown)
        if closure or not self._passes:
            return
        suspect = self._overflowed() or self._overflows != self._overflows_at_step.get(id(optimizer), 0)
        self._overflows_at_step[id(optimizer)] = self._overflows
        if suspect and not _finite(parameters):
            self._stash.put(parameters)
            self._effects.count("steps skipped")

    def after(self, optimizer: Optimizer) -> None:
        """The scale may be updated before the next backward pass: other optimizers may have to step first."""
        self._stepped, self._in_closure = True, False
        self._stash.restore()

    def _drop_gradients(self) -> None:
        for p in self._parameters.values():
            p.grad = None
        self._effects.count("steps skipped")


def _add_back(before: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Accumulate as autograd does: into the former gradient tensor."""
    import torch

    dense = [(p, g, p.grad) for p, g in before if p.grad is not None and not (g.is_sparse or p.grad.is_sparse)]
    with torch.no_grad():
        if dense:
            torch._foreach_add_([g for _, g, _ in dense], [new for *_, new in dense])
        added = {id(p) for p, *_ in dense}
        for p, g in before:
            p.grad = g if id(p) in added or p.grad is None else g + p.grad


def _finite(parameters: Sequence[Tensor]) -> bool:
    gradients = [p.grad for p in parameters if p.grad is not None]
    return all(bool((g._values() if g.is_sparse else g).isfinite().all()) for g in gradients)
