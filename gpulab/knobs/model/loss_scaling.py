"""Loss scaling around an unmodified loop, without which half precision loses its small gradients.

Each backward pass starts from the scaled loss, and right after it the gradients it has made are unscaled: the user's
code (clipping, logging) sees gradients of the usual size. A step is left out where they have overflowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gpulab.knobs.knob import KnobEffects
from gpulab.knobs.model.accumulation import Taken
from gpulab.torch_hooks.optimizer_step import HookOrder, Watcher, around_steps
from gpulab.torch_hooks.patching import replaced

if TYPE_CHECKING:
    from torch import Tensor
    from torch.amp import GradScaler
    from torch.nn import Module
    from torch.optim import Optimizer


FIRST_SCALE = 2.0**16  # torch's own


@contextmanager
def loss_scaling(effects: KnobEffects, scale: float | None) -> Iterator[LossScaling]:
    """Scale the losses of this thread, at first by `scale`; it has to be told of the modules that take part."""
    import torch

    scaling, thread = LossScaling(effects, scale), get_ident()

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
                scaling.backward(tensors, go)

        return backward

    with ExitStack() as undo:
        undo.callback(scaling.taken.give_back)
        undo.enter_context(around_steps(HookOrder.SCALING, scaling))
        undo.enter_context(replaced(torch.autograd, "backward", wrap))
        yield scaling


class LossScaling(Watcher):
    """One GradScaler for everything that is trained, made at the first backward pass."""

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
        self._within = False  # a backward pass of ours
        self._overflows = 0
        self._seen: dict[int, int] = {}  # of each optimizer: the overflows at its last step
        self.taken = Taken()  # what a step was not to see, and is the user's

    def meet(self, module: Module) -> None:
        """Its parameters may get scaled gradients."""
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

    def backward(self, roots: Any, go: Callable[[Any], None]) -> None:
        """One backward pass from the scaled roots; the gradients it leaves are unscaled and added to those before."""
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
        """What the next backward pass would be scaled by; None before the first."""
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
        """Leave the step out where gradients have overflowed, by taking them away."""
        self.taken.give_back()
        self._in_closure = closure
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        unknown = [p for p in parameters if id(p) not in self._parameters]
        if self._scaler is not None and unknown and self._passes:
            self._unscale(unknown, self._scaler)  # of no module that was called
        self._know(unknown)
        if closure or not self._passes:
            return
        suspect = self._overflowed() or self._overflows != self._seen.get(id(optimizer), 0)
        self._seen[id(optimizer)] = self._overflows
        if suspect and not _finite(parameters):
            self.taken.take(parameters)
            self._effects.count("steps left out")

    def after(self, optimizer: Optimizer) -> None:
        """The scale may be updated before the next backward pass: other optimizers may have to step first."""
        self._stepped, self._in_closure = True, False
        self.taken.give_back()

    def _drop_gradients(self) -> None:
        for p in self._parameters.values():
            p.grad = None
        self._effects.count("steps left out")


def _add_back(before: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Accumulate as autograd does: into the tensor that was there."""
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
