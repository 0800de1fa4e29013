"""Finds the blocks of a model whose forward pass can be computed again: the layers of a transformer, stages of a CNN.

Of several levels of blocks the one is chosen that keeps the fewest layers: the inputs of its blocks, the layers outside
them, and the layers of the largest block, which its backward pass needs at once.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec import Struct

from gpulab.knobs.observation import ObservedBlocks
from gpulab.patching.randomness import is_generator

if TYPE_CHECKING:
    from torch.nn import Module

NO_BLOCKS = "no repeated blocks in the model, and no long nn.Sequential"
IN_USE = "your code already checkpoints activations"
HOOK_INSIDE = "a hook inside it would run twice"
_HUGGING_FACE = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # the first from version 5 on
_COPYING = ("DataParallel", "FullyShardedDataParallel")  # classes that copy or move weights within `forward`


class Site(Struct, frozen=True):
    """A module that is computed again as a whole, or a Sequential of single layers in several segments."""

    path: str  # from the model: "encoder.layers.0"; empty: the model itself
    module: Module
    segments: int = 1


def sites(model: Module) -> list[Site]:
    """The blocks of a model, the first one first; empty if computing them again would save nothing."""
    sizes: dict[int, int] = {}
    total = _layer_count(model, sizes)
    limits = {sizes[id(part)] for part in _repeated(model)} | set(map(_segment_size, _chains(model)))
    plans = [_plan(model, limit, sizes) for limit in sorted(limits)]
    cost, chosen = min(plans, key=lambda plan: plan[0], default=(total, []))
    return chosen if cost < total else []


def obstacle(site: Site) -> str:
    """Why a block must not be computed twice, in words that follow "it was left out:"; empty if nothing is known."""
    from torch.jit import ScriptModule
    from torch.nn.modules.batchnorm import _NormBase

    for part in site.module.modules():
        if part is not site.module and has_hook(part):
            return HOOK_INSIDE
        if isinstance(part, _NormBase) and part.running_mean is not None:
            return f"a second forward pass would update the running statistics of {type(part).__name__} twice"
        if "forward" in vars(part):
            return "its forward was replaced"
        if isinstance(part, ScriptModule):
            return "it is compiled by TorchScript"
        if any(is_generator(type(value)) for value in vars(part).values()):
            return "it draws from a random generator of its own"
    return ""


def has_hook(module: Module) -> bool:
    """Whether a call of the module calls functions of the user's, too."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def refusal(model: Module) -> str:
    """Why no block of this model can be computed again; empty if that is not certain."""
    parts = list(model.modules())
    if _in_use(model):
        return IN_USE
    copying = next((type(p).__name__ for p in parts if type(p).__name__ in _COPYING), None)
    if copying is not None or any(c.__name__ == "FSDPModule" for p in parts for c in type(p).__mro__):
        return f"gpulab cannot restore a model under {copying or 'fully_shard'}: checkpoint its blocks in your code"
    chosen = sites(model)
    if not chosen:
        return NO_BLOCKS
    obstacles = [obstacle(site) for site in chosen]
    return f"no block can be computed twice: {obstacles[0]}" if all(obstacles) else ""


def observed_blocks(model: Module) -> ObservedBlocks:
    """What is known of a model's blocks before it runs."""
    why = refusal(model)
    usable = [] if why else [site for site in sites(model) if not obstacle(site)]
    return ObservedBlocks(sum(max(1, s.segments - 1) for s in usable), _edit(model, usable), why, _in_use(model))


def _in_use(model: Module) -> bool:
    """Whether Hugging Face's switch is on."""
    return any(getattr(part, "gradient_checkpointing", None) is True for part in model.modules())


# -- which level -------------------------------------------------------------------------------------------------------


def _layer_count(module: Module, sizes: dict[int, int]) -> int:
    """The number of single layers in a module; noted by `id` for all within it."""
    if id(module) in sizes:
        return sizes[id(module)]
    sizes[id(module)] = 1  # a module may hold the one that holds it
    children = list(module.children())
    sizes[id(module)] = sum(_layer_count(child, sizes) for child in children) if children else 1
    return sizes[id(module)]


def _plan(model: Module, limit: int, sizes: dict[int, int]) -> tuple[int, list[Site]]:
    """The outermost blocks of at most `limit` layers, and the number of layers that are still kept."""
    chosen: list[Site] = []
    blocks, largest, outside = 0, 0, 0
    visited: set[int] = set()

    def visit(path: str, module: Module, repeated: bool) -> None:
        nonlocal blocks, largest, outside
        if id(module) in visited:
            return
        visited.add(id(module))
        size = sizes[id(module)]
        segments = math.ceil(size / limit)
        if (repeated and size <= limit) or (_is_chain(module) and segments > 1):
            chosen.append(Site(path, module, segments))
            blocks += segments
            largest = max(largest, size - size // segments * (segments - 1))
        elif not any(True for _ in module.children()):
            outside += 1
        else:
            again = set(map(id, _repeated_children(module)))
            for name, child in module.named_children():
                visit(f"{path}.{name}".lstrip("."), child, id(child) in again)

    visit("", model, repeated=False)
    return outside + blocks + largest, chosen


def _repeated(model: Module) -> Iterator[Module]:
    for module in model.modules():
        yield from _repeated_children(module)


def _repeated_children(module: Module) -> Iterator[Module]:
    """Children of one class that hold layers and parameters, and can be called."""
    from torch.nn import ModuleDict, ModuleList

    able = [
        child
        for child in module.children()
        if not isinstance(child, ModuleList | ModuleDict)
        and next(child.children(), None) is not None
        and next(child.parameters(), None) is not None
    ]
    counts = Counter(map(type, able))
    return (child for child in able if counts[type(child)] > 1)


def _is_chain(module: Module) -> bool:
    """Whether it is a Sequential of single layers, with parameters."""
    from torch.nn import Sequential

    single = type(module) is Sequential and all(next(child.children(), None) is None for child in module)
    return single and next(module.parameters(), None) is not None


def _chains(model: Module) -> Iterator[int]:
    """The lengths of all Sequentials of single layers."""
    return (len(list(module.children())) for module in model.modules() if _is_chain(module))


def _segment_size(length: int) -> int:
    return math.ceil(length / max(1, round(math.sqrt(length))))


# -- the edit ----------------------------------------------------------------------------------------------------------


def _edit(model: Module, usable: list[Site]) -> str:
    """The lines that checkpoint these blocks in the user's code; empty without any."""
    if not usable:
        return ""
    inner = "model.module" if type(model).__name__ == "DistributedDataParallel" else "model"
    owner = model.get_submodule("module") if inner != "model" else model
    switch = next((name for name in _HUGGING_FACE if hasattr(owner, name)), None)
    whole = len(usable) == len(sites(model))
    if whole and switch is not None and getattr(owner, "supports_gradient_checkpointing", False):
        return f'{inner}.{switch}({{"use_reentrant": False}})  # once, before the loop'
    places = [place for site in usable if site.segments == 1 for place in [_place(model, site.path, usable)]]
    lines = checkpointing_lines(list(dict.fromkeys(places)))
    chains = [(_expression(site.path), site.segments) for site in usable if site.segments > 1]
    if chains:
        lines = [*lines, *chain_lines(chains)] if places else chain_lines(chains)
    return "\n".join(lines)


def checkpointing_lines(places: list[str]) -> list[str]:
    """The loop over blocks; a place with a star holds several."""
    is_one_list = len(places) == 1 and places[0].startswith("*")
    blocks = places[0].removeprefix("*") if is_one_list else f"[{', '.join(places)}]"
    return [
        "from functools import partial",
        "from torch.utils.checkpoint import checkpoint",
        f"for block in {blocks}:  # once, before the loop",
        "    block.forward = partial(checkpoint, block.forward, use_reentrant=False)",
    ]


def chain_lines(chains: list[tuple[str, int]]) -> list[str]:
    """One line for each Sequential that is computed in segments."""
    call = "partial(checkpoint_sequential, {0}, {1}, use_reentrant=False)"
    return [
        "from functools import partial",
        "from torch.utils.checkpoint import checkpoint_sequential",
        *(f"{place}.forward = {call.format(place, segments)}  # once" for place, segments in chains),
    ]


def _place(model: Module, path: str, usable: list[Site]) -> str:
    """The block itself, or the whole list that holds it, if all of that list are blocks."""
    from torch.nn import ModuleList, Sequential

    parent, _, _ = path.rpartition(".")
    holder = model.get_submodule(parent)
    blocks = {id(site.module) for site in usable}
    whole = isinstance(holder, ModuleList | Sequential) and all(id(child) in blocks for child in holder)
    return f"*{_expression(parent)}" if whole else _expression(path)


def _expression(path: str) -> str:
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", f"model.{path}" if path else "model")
