"""The memory layout of images and of convolution weights: channels first or last."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from gpulab.knobs.accumulation import laid_out_like
from gpulab.knobs.knob import CodeEdit, Knob, KnobEffects, Value, Verification, took_effect
from gpulab.knobs.observation import Observation, kernel_names
from gpulab.patching.hook_points import Call, HookOrder, Layer, OptimizerHook, around_outermost, around_steps
from gpulab.run import Run

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer


class ChannelsLast(Knob):
    """Converts 4-dimensional weights and inputs of outermost modules that have 2-dimensional convolutions."""

    name = "channels_last"
    lesson = "08_fused_kernels"
    title = "channels_last"
    help = "Images and convolution weights in NHWC layout: speeds up convolutions on tensor cores and on CPUs"
    kind = "module call"
    options = (False, True)
    aliases = ("memory_format",)
    change_counts = ("weights", "inputs")
    helps_against = {"layout": 1}

    def value_in(self, observation: Observation) -> Value | None:
        """The layout of the weights; None if they differ."""
        formats = {m.memory_format for m in observation.modules if m.has_convolution and m.memory_format is not None}
        if len(formats) != 1 or "mixed" in formats:
            return None
        return "channels_last" in formats

    def refuses(self, observation: Observation, value: Value) -> str | None:
        if not any(m.has_convolution and m.memory_format is not None for m in observation.modules):
            return "no module in your code has a 2D convolution, and channels_last affects nothing else"
        return None

    def apply(self, value: Value, effects: KnobEffects, undo: ExitStack) -> None:
        """Convert weights at a module's first call, inputs at each call, optimizer states at the first step."""
        import torch

        layout = Layout(torch.channels_last if value else torch.contiguous_format, effects)
        undo.callback(layout.put_back)
        undo.enter_context(around_steps(HookOrder.LAYOUT, layout))
        undo.enter_context(around_outermost(Layer.INPUTS, layout.around))

    def evidence(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        weights, inputs = effects.counts["weights"], effects.counts["inputs"]
        words = f"{weights} weights and {inputs} inputs were converted to channels {'last' if value else 'first'}"
        kernel = next((n for n in kernel_names(run) if "nhwc" in n.lower()), None)
        return took_effect(f"{words}; kernel {kernel[:60]}" if value and kernel is not None else words)

    def idle_words(self, observation: Observation, value: Value, effects: KnobEffects) -> str:
        if self.value_in(observation) == value:
            return f"weights and inputs are already channels {'last' if value else 'first'}"
        return "for these shapes (one channel or one pixel) channels first and channels last are the same layout"

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        layout = f"torch.{'channels_last' if value else 'contiguous_format'}"
        return CodeEdit(
            f"model = model.to(memory_format={layout})  # once\n"
            f"inputs = inputs.to(memory_format={layout})  # each batch"
        )


class Layout(OptimizerHook):
    """Converts weights, inputs and optimizer states; `put_back` restores weights and states."""

    def __init__(self, layout: torch.memory_format, effects: KnobEffects) -> None:
        self._layout = layout
        self._effects = effects
        self._convolves: dict[int, tuple[Module, bool]] = {}
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}  # the parameter or buffer, and its tensor as found
        self._optimizers: dict[int, Optimizer] = {}

    def around(self, module: Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entry = self._convolves.get(id(module))
        if entry is None:
            entry = self._convolves[id(module)] = (module, _convolves(module))
            if entry[1]:
                self._lay_out_weights(module)
        if not entry[1]:
            return call(args, kwargs)
        from torch.utils import _pytree as pytree

        args, kwargs = pytree.tree_map(self._laid_out, (args, kwargs))
        return call(args, kwargs)

    def _laid_out(self, leaf: Any) -> Any:
        import torch

        if not isinstance(leaf, torch.Tensor) or leaf.dim() != 4 or leaf.is_contiguous(memory_format=self._layout):
            return leaf
        self._effects.count("inputs")
        return leaf.contiguous(memory_format=self._layout)

    def _lay_out_weights(self, module: Module) -> None:
        for weight in (*module.parameters(), *module.buffers()):
            if weight.dim() != 4 or id(weight) in self._weights or weight.is_contiguous(memory_format=self._layout):
                continue
            if weight.untyped_storage().nbytes() != weight.numel() * weight.element_size():
                self._effects.refuse("weights that are views of a larger tensor were not converted")
                continue
            self._weights[id(weight)] = (weight, weight.data)
            weight.data = weight.data.contiguous(memory_format=self._layout)
            self._effects.count("weights")

    def before(self, optimizer: Optimizer, closure: bool) -> None:
        """Convert gradients and states like the weights: fused kernels refuse a mix, multi-tensor ones are slow."""
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = optimizer
            self._lay_out_states(optimizer)

    def _lay_out_states(self, optimizer: Optimizer) -> None:
        import torch

        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) not in self._weights:
                    continue
                if p.grad is not None:
                    p.grad = laid_out_like(p.grad, p)
                state = optimizer.state.get(p, {})
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and value.shape == p.shape:
                        state[name] = laid_out_like(value, p)

    def put_back(self) -> None:
        """Copy the present values into the original tensors; gradients and states get the same layout."""
        import torch

        with torch.no_grad():
            for weight, before in self._weights.values():
                if (weight.device, weight.dtype, weight.shape) != (before.device, before.dtype, before.shape):
                    continue  # moved by the user's code
                before.copy_(weight.data)
                weight.data = before
                if weight.grad is not None:
                    weight.grad = laid_out_like(weight.grad, weight)
            for optimizer in self._optimizers.values():
                self._lay_out_states(optimizer)


def _convolves(module: Module) -> bool:
    from torch.nn import Conv2d, ConvTranspose2d

    return any(isinstance(m, Conv2d | ConvTranspose2d) for m in module.modules())


CHANNELS_LAST = ChannelsLast()
