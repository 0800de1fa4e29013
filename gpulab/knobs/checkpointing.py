"""Activation checkpointing of the repeated blocks of a model, without an edit of its code.

Inside a block no activations are kept: the backward pass computes them again. Before a block is checkpointed it is
tested once: computed twice, it must give the same values to the bit and leave nothing changed.
"""

from __future__ import annotations

import copy
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from enum import Enum
from functools import partial
from importlib import import_module
from threading import get_ident
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from gpulab.formatting import plural
from gpulab.knobs.dataset_cache import same
from gpulab.knobs.description import WeakTable, is_compiled
from gpulab.knobs.knob import CodeEdit, Knob, KnobEffects, Value, Verification, no_effect, took_effect
from gpulab.knobs.observation import Observation, ObservedModule
from gpulab.knobs.repeated_blocks import (
    HOOK_INSIDE,
    IN_USE,
    NO_BLOCKS,
    checkpointing_lines,
    has_hook,
    obstacle,
    refusal,
    sites,
)
from gpulab.patching.hook_points import Call, Layer, around_outermost
from gpulab.patching.randomness import Randomness
from gpulab.run import Run
from gpulab.user_code import is_gpulabs_file

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

# Names of counts
BLOCKS, RECOMPUTED = "checkpointed blocks", "recomputations"
REENTRANT = "CheckpointFunction"  # in a trace; without reentrant autograd nothing is there (torch 2.13)
COMPILES = "the model is compiled, and compiled code itself decides what it keeps"
_OWN_ARGUMENTS = frozenset(
    ("function", "use_reentrant", "context_fn", "determinism_check", "debug", "preserve_rng_state", "early_stop")
)
_CONTAINERS = (list, dict, set, OrderedDict, Counter, defaultdict, deque)


class CheckpointActivations(Knob):
    """torch.utils.checkpoint around the repeated blocks of each outermost module that is called in training."""

    name = "checkpointing"
    title = "Activation checkpointing"
    help = "Activations of repeated blocks are computed again in the backward pass, not kept: less memory, slower"
    kind = "module call"
    lesson = "06_memory"
    options = (False, True)
    aliases = ("checkpoint", "gradient_checkpointing", "activation_checkpointing", "recompute")
    cost = "Each block's forward pass is computed twice."
    refusal_rests_on = ("modules",)
    change_counts = (BLOCKS,)
    idle_text = "no repeated block was called in training"
    helps_against = {"memory_pressure": 1}

    def __init__(self) -> None:
        self._models: WeakTable[_Model] = WeakTable()  # blocks that were tested, until the experiment is over

    def value_in(self, observation: Observation) -> Value | None:
        """Whether the code itself checkpoints: by its calls, the trace, or Hugging Face's switch."""
        if not observation.modules:
            return None
        in_use = any(m.blocks is not None and m.blocks.in_use for m in observation.modules)
        return in_use or observation.checkpoints or REENTRANT in observation.operators

    def refuses(self, observation: Observation, value: Value) -> str | None:
        """Refuses without repeated blocks, and where PyTorch itself would compute something else the second time."""
        in_use = self.value_in(observation)
        if in_use:
            return IN_USE if value else f"{IN_USE}: leave that out to compare"
        modules = _trained(observation)
        if not modules:
            return "your code calls no torch.nn.Module with parameters"
        if not value:
            return None
        if observation.differentiates_twice:
            return "your code differentiates a gradient (create_graph=True)"
        if any(m.compiled for m in modules):
            return COMPILES
        reasons = [NO_BLOCKS if m.blocks is None else m.blocks.refusal for m in modules]
        return next((why for why in reasons if why != NO_BLOCKS), NO_BLOCKS) if all(reasons) else None

    def apply(self, value: Value, effects: KnobEffects, undo: ExitStack) -> None:
        """Replace the blocks' `forward` during each outermost call, and only then."""
        if value:
            checkpointing = Checkpointing(effects, self._models)
            undo.enter_context(around_outermost(Layer.CHECKPOINTED, checkpointing.around))

    def forget(self) -> None:
        self._models.clear()

    def evidence(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        """By the recomputations: without a backward pass nothing is computed again."""
        blocks, again = effects.counts[BLOCKS], effects.counts[RECOMPUTED]
        words = f"{plural(blocks, 'block')} checkpointed"
        if not again:
            return no_effect(f"{words}, and no backward pass needed what they had computed")
        return took_effect(f"{words}, computed again {plural(again, 'time')} in backward passes")

    def idle_words(self, observation: Observation, value: Value, effects: KnobEffects) -> str:
        return super().idle_words(observation, value, effects) if value else "your code checkpoints no activations"

    def without(self, observation: Observation) -> Observation:
        """Without the knob's own calls; where the code checkpoints by itself, the knob refuses."""
        return replace(observation, checkpoints=False)

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        """The lines for the blocks of the code's own models."""
        if not value:
            return CodeEdit("# leave torch.utils.checkpoint out")
        edits = [m.blocks.edit for m in _trained(observation) if m.blocks is not None and m.blocks.edit]
        return CodeEdit("\n".join(edits) or "\n".join(checkpointing_lines(["*model.blocks"])))


def _trained(observation: Observation) -> list[ObservedModule]:
    """The modules that are trained; all with parameters if none was seen in training."""
    able = [m for m in observation.modules if m.parameter_count]
    return [m for m in able if m.trained] or able


CHECKPOINTING = CheckpointActivations()


# -- while the code runs -----------------------------------------------------------------------------------------------


class _Piece:
    """Layers that are computed again as one. `obstacle`: why they must not be; `proven`: nothing speaks against it.

    `run` calls the modules in `inner`; a block's own module, the first of `modules`, is called around it.
    """

    def __init__(self, name: str, run: Callable[..., Any], modules: list[Module], obstacle: str) -> None:
        self.name = name
        self.run = run
        self.modules = modules
        self.obstacle = obstacle
        self.inner = modules[1:] if getattr(run, "__self__", None) is modules[0] else modules
        self.tested = self.proven = False


class _Model(Struct):
    """A model's blocks: for the path of each module, the pieces and the layers after them. `why`: there are none.

    `configs`: Hugging Face's settings that make a cache of keys and values in each call.
    """

    why: str
    blocks: dict[str, tuple[list[_Piece], list[Module]]]
    configs: list[Any]

    def fits(self, module: Module) -> bool:
        """Whether the code has replaced none of the blocks since then."""
        for path, (pieces, rest) in self.blocks.items():
            try:
                owner = module.get_submodule(path)
            except AttributeError:
                return False
            layers = [*(m for piece in pieces for m in piece.modules), *rest] if rest else pieces[0].modules[:1]
            if not _same_container(list(owner.children()) if rest else [owner], layers) or "forward" in vars(owner):
                return False
        return True


class Checkpointing:
    """Checkpoints the blocks of outermost modules; between two calls of a module nothing of it is changed."""

    def __init__(self, effects: KnobEffects, models: WeakTable[_Model]) -> None:
        self._effects = effects
        self._models = models
        self._thread = get_ident()
        self._pieces: set[int] = set()  # checkpointed so far
        self._inside = False  # a block is being computed: what is within it is part of it
        self._inputs: list[tuple[_Piece, Tensor, int]] = []  # of unproven blocks: counters of writes

    def around(self, module: Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One outermost call. Outside training it is left as it is."""
        import torch

        if not (module.training and torch.is_grad_enabled()) or next(module.parameters(), None) is None:
            return call(args, kwargs)
        model = self._models.get(module)
        if model is None or not model.fits(module):
            model = _model(module)
            self._models.put(module, model)
        why = COMPILES if is_compiled(module) else model.why or _global_hook()
        if why:
            self._effects.refuse(why)
            return call(args, kwargs)
        with ExitStack() as undo:
            undo.callback(self._judge_inputs)
            for path, (pieces, rest) in model.blocks.items():
                attributes = vars(module.get_submodule(path))
                attributes["forward"] = self._chained(pieces, rest) if rest else partial(self._call, pieces[0])
                undo.callback(attributes.pop, "forward", None)
            for config in model.configs:
                if config.use_cache:
                    config.use_cache = False
                    undo.callback(setattr, config, "use_cache", True)
                    self._effects.note("use_cache is off meanwhile, as Hugging Face's own switch has it")
            return call(args, kwargs)

    def _chained(self, pieces: list[_Piece], rest: list[Module]) -> Callable[[Any], Any]:
        def forward(input: Any) -> Any:
            for piece in pieces:
                input = self._call(piece, input)
            return _through(rest, input)

        return forward

    def _call(self, piece: _Piece, /, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of a block: checkpointed, unless something speaks against it."""
        import torch

        if self._inside or get_ident() != self._thread or not torch.is_grad_enabled():
            return piece.run(*args, **kwargs)
        why = piece.obstacle or _obstacle_now(args, kwargs) or (HOOK_INSIDE if any(map(has_hook, piece.inner)) else "")
        self._inside = True
        try:
            if not why and not piece.tested:
                began = time.perf_counter()
                why = piece.obstacle = _difference(piece, args, kwargs)
                piece.tested = True
                self._effects.preparation_s += time.perf_counter() - began
            if why:
                self._effects.refuse(f"{piece.name} was left out: {why}")
                return piece.run(*args, **kwargs)
            if not piece.proven:  # the code may write into its inputs afterwards: the block gets its own copies
                self._inputs += [(piece, _counter(t), t._version) for t in _tensors((*args, *kwargs.values()))]
                args, kwargs = _copies(args, kwargs)
            return self._checkpointed(piece, args, kwargs)
        finally:
            self._inside = False

    def _checkpointed(self, piece: _Piece, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from torch._C import _current_graph_task_id as backward_task
        from torch.utils.checkpoint import checkpoint

        def run(*args: Any, **kwargs: Any) -> Any:
            if backward_task() != -1:
                self._effects.count(RECOMPUTED)
            return piece.run(*args, **kwargs)

        if id(piece) not in self._pieces:
            self._pieces.add(id(piece))
            self._effects.count(BLOCKS)
        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    def _judge_inputs(self) -> None:
        """The outermost call has ended: a block whose input was written into since then is left out from now on."""
        for piece, tensor, version in self._inputs:
            piece.proven = True
            if tensor._version != version and not piece.obstacle:
                piece.obstacle = "its input is changed in place after it has run"
                self._effects.refuse(f"{piece.name} was left out: {piece.obstacle}")
                self._effects.counts[BLOCKS] -= 1
        self._inputs.clear()


def _model(module: Module) -> _Model:
    """What of a model can be checkpointed. Holds no reference to the model itself."""
    why = refusal(module)
    blocks: dict[str, tuple[list[_Piece], list[Module]]] = {}
    for site in [] if why else sites(module):
        against = obstacle(site)
        if site.segments == 1:
            name = type(site.module).__name__  # not its path: one reason for all blocks of a class
            blocks[site.path] = [_Piece(name, site.module.forward, list(site.module.modules()), against)], []
            continue
        layers = list(site.module.children())
        length = len(layers) // site.segments
        starts = range(0, length * (site.segments - 1), length)
        pieces = []
        for start in starts:
            segment = layers[start : start + length]
            name = f"{site.path} layers {start} to {start + length - 1}".lstrip()
            pieces.append(_Piece(name, partial(_through, segment), segment, against))
        blocks[site.path] = pieces, layers[length * (site.segments - 1) :]
    configs = {id(c): c for part in module.modules() for c in [getattr(part, "config", None)] if _makes_cache(c)}
    return _Model(why, blocks, list(configs.values()))


def _makes_cache(config: object) -> bool:
    """Whether it is a configuration of Hugging Face's; its blocks would add to the cache again."""
    of_transformers = any(c.__module__.startswith("transformers.") for c in type(config).__mro__)
    return of_transformers and hasattr(config, "use_cache")


def _through(layers: list[Module], input: Any) -> Any:
    for layer in layers:
        input = layer(input)
    return input


# -- what speaks against a second computation --------------------------------------------------------------------------


def _global_hook() -> str:
    """Why no block can be computed twice now; empty if it can."""
    from torch.nn.modules import module

    for hooks in (module._global_forward_hooks, module._global_forward_pre_hooks):
        for hook in hooks.values():
            code = getattr(hook, "__code__", None)
            if code is None or not is_gpulabs_file(code.co_filename):
                return "your code has a hook for the forward pass of all modules, which would run twice"
    return ""


def _obstacle_now(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What speaks against this call; empty if nothing does."""
    autograd: Any = import_module("torch._C._autograd")
    hooks = autograd._top_saved_tensors_default_hooks(True)
    if not autograd._saved_tensors_hooks_is_enabled() or not (hooks is None or is_gpulabs(hooks[0])):
        return "your code itself decides where its saved tensors are (checkpoint, save_on_cpu or torch.func)"
    if taken := _OWN_ARGUMENTS & kwargs.keys():
        return f"its argument {min(taken)} has the name of an option of torch.utils.checkpoint"
    changing = next((type(v).__name__ for v in (*args, *kwargs.values()) if not _is_lasting(v)), "")
    return f"an argument is a {changing}, which may change before the backward pass" if changing else ""


def is_gpulabs(function: Any) -> bool:
    """Whether gpulab itself set this hook, to see what saves activations."""
    return str(getattr(function, "__module__", "")).startswith("gpulab.")


def _is_lasting(value: object) -> bool:
    """Whether an argument is the same in the backward pass: a tensor, plain data, a tuple of such."""
    import torch

    if isinstance(value, tuple):
        return all(map(_is_lasting, value))
    plain = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)
    return type(value) in (torch.Tensor, torch.nn.Parameter) or isinstance(value, plain)


def _difference(piece: _Piece, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Compute a block twice on copies; says what differs or was changed. Everything is as before afterwards."""
    from torch.utils import _pytree as pytree

    results: list[Any] = []
    for _ in range(2):
        own_args, own_kwargs = _copies(args, kwargs, apart=True)
        inputs = [(t, t._version) for t in _tensors((*own_args, *own_kwargs.values()))]
        randomness, state = Randomness(), _State(piece.modules)
        try:
            result = piece.run(*own_args, **own_kwargs)
            results.append(pytree.tree_map(_detached, result))
            del result
            if state.changed:
                return "its forward pass changes its buffers or attributes"
            if not same(Randomness().states[:2], randomness.states[:2]):
                return "it draws random numbers from Python or NumPy, which torch.utils.checkpoint does not repeat"
            if any(t._version != version for t, version in inputs):
                return "it changes its input in place"
        except Exception as e:
            return f"it cannot be computed on its own ({type(e).__name__})"
        finally:
            state.put_back()
            randomness.put_back()
    return "" if same(*results) else "computed twice it does not give the same values"


def _detached(leaf: Any) -> Any:
    import torch

    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    import torch

    for value in values:
        if isinstance(value, tuple):
            yield from _tensors(value)
        elif isinstance(value, torch.Tensor):
            yield value


def _counter(tensor: Tensor) -> Tensor:
    """An empty tensor whose `_version` counts the writes into this one, and which does not keep its memory."""
    import torch

    with suppress(Exception):  # a layout or a class that cannot be emptied
        counter = tensor.detach()
        counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        if counter._version == tensor._version:
            return counter
    return tensor


def _copies(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], *, apart: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with tensors of their own; `apart`: gradients do not flow back. Expanded tensors cannot be written."""

    def copied(value: Any) -> Any:
        import torch

        if isinstance(value, tuple):
            parts = [copied(one) for one in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if not isinstance(value, torch.Tensor) or 0 in value.stride():
            return value
        return value.detach().requires_grad_(value.requires_grad).clone() if apart else value.clone()

    return tuple(map(copied, args)), {name: copied(value) for name, value in kwargs.items()}


class _State:
    """What modules hold besides their weights: their attributes, and the values of buffers."""

    def __init__(self, modules: list[Module]) -> None:
        import torch

        self._attributes = [(vars(m), dict(vars(m))) for m in modules]
        values = [value for _, attributes in self._attributes for value in attributes.values()]
        self._containers = [(v, copy.copy(v)) for v in values if type(v) in _CONTAINERS]
        tensors = [*(b for m in modules for b in m._buffers.values()), *values]
        self._tensors = [(t, t.detach().clone()) for t in tensors if isinstance(t, torch.Tensor)]

    @property
    def changed(self) -> bool:
        return (
            any(not _same_items(now, before) for now, before in self._attributes)
            or any(not _same_container(now, before) for now, before in self._containers)
            or any(not same(now.detach(), before) for now, before in self._tensors)
        )

    def put_back(self) -> None:
        """Undo the changes, in place; what did not change is not touched."""
        for now, before in self._attributes:
            if not _same_items(now, before):
                now.clear()
                now.update(before)
        for container, before in self._containers:
            if not _same_container(container, before):
                container.clear()
                container.extend(before) if isinstance(container, list | deque) else container.update(before)
        for tensor, values in self._tensors:
            if not same(tensor.detach(), values):
                tensor.data.copy_(values)


def _same_items(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    return list(now) == list(before) and all(map(_is_same, now.values(), before.values()))


def _same_container(now: Any, before: Any) -> bool:
    if isinstance(now, Mapping):
        return _same_items(now, before)
    return now == before if isinstance(now, set) else len(now) == len(before) and all(map(_is_same, now, before))


def _is_same(now: object, before: object) -> bool:
    """The same object, or an equal number or text."""
    return now is before or (isinstance(now, bool | int | float | str) and type(now) is type(before) and now == before)
