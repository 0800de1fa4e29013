"""Sorts all live storages into what training needs them for: parameters, gradients, activations and the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from gpulab.memory.owners import Owner
from gpulab.memory.storages import Key, Live, is_tensor_type, storages_of
from gpulab.memory_record import Holding, HoldingKind

GRAPH = "autograd's graph"
NOWHERE = "no name of the notebook"


class Claim(NamedTuple):
    """What one storage is for, its owner, and the line that made it (empty: unknown)."""

    kind: HoldingKind
    owner: str
    line: str = ""


def claims(live: Live, activations: Mapping[Key, Claim], batches: Iterable[Key] = ()) -> dict[Key, Claim]:
    """The claim on each storage that training explains; the rest has no claim.

    A weight that the graph has saved too is a parameter: the first of the kinds in `HoldingKind` counts.
    """
    result: dict[Key, Claim] = {}
    for claim, tensor in (*_of_modules(live.modules), *_of_optimizers(live)):
        for storage in storages_of(tensor):
            if storage.key in live.bytes:
                result.setdefault(storage.key, claim)
    for key, claim in activations.items():
        if key in live.bytes:
            result.setdefault(key, claim)
    for key in batches:
        if key in live.bytes:
            result.setdefault(key, Claim("batches", "the batch in flight"))
    for key in live.graph:
        result.setdefault(key, Claim("saved activations", GRAPH))
    return result


def holdings(
    sizes: Mapping[Key, int], claimed: Mapping[Key, Claim], owners: Iterable[Owner] = ()
) -> tuple[Holding, ...]:
    """All storages as rows, one for each kind, owner and line, the largest first. `owners` name what has no claim."""
    sums: dict[Claim, int] = {}
    others: dict[Claim, tuple[str, ...]] = {}
    named: dict[Key, Claim] = {}
    for owner in owners:
        for key in owner.keys:
            named[key] = Claim("variables", owner.name)
            others[named[key]] = owner.others
    for key, count in sizes.items():
        claim = claimed.get(key) or named.get(key) or Claim("unnamed", NOWHERE)
        sums[claim] = sums.get(claim, 0) + count
    rows = [Holding(c.kind, c.owner, count, c.line, others.get(c, ())) for c, count in sums.items()]
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def module_names(modules: Iterable[Any]) -> dict[int, str]:
    """The path and the class of each module by id, as in "layers.0.norm (LayerNorm)"; of the outermost its class."""
    everything = list(modules)
    inner = {id(child) for module in everything for child in _inner(module).values()}
    names: dict[int, str] = {}
    waiting = [(module, "") for module in everything if id(module) not in inner]
    while waiting:
        module, path = waiting.pop()
        if id(module) in names:
            continue
        kind = type(module).__name__
        names[id(module)] = f"{path} ({kind})" if path else kind
        waiting += [(child, f"{path}.{name}" if path else name) for name, child in _inner(module).items()]
    return names


def _inner(module: Any) -> dict[str, Any]:
    children = vars(module).get("_modules") or {}
    return {name: child for name, child in children.items() if child is not None}


def _of_modules(modules: list[Any]) -> Iterator[tuple[Claim, Any]]:
    """Parameters first, then buffers, then gradients: of the outermost module that they belong to."""
    inner = {id(child) for module in modules for child in _inner(module).values()}
    tops = [module for module in modules if id(module) not in inner]
    members = [(type(top).__name__, list(_below(top))) for top in tops]
    for slot, kind in (("_parameters", "parameters"), ("_buffers", "buffers")):
        for owner, below in members:
            for module in below:
                for tensor in (vars(module).get(slot) or {}).values():
                    if tensor is not None:
                        yield Claim(kind, owner), tensor  # type: ignore[arg-type]
    for owner, below in members:
        for module in below:
            for tensor in (vars(module).get("_parameters") or {}).values():
                with suppress(Exception):
                    if tensor is not None and tensor.grad is not None:
                        yield Claim("gradients", owner), tensor.grad


def _below(top: Any) -> Iterator[Any]:
    visited, waiting = set[int](), [top]
    while waiting:
        module = waiting.pop()
        if id(module) not in visited:
            visited.add(id(module))
            yield module
            waiting += _inner(module).values()


def _of_optimizers(live: Live) -> Iterator[tuple[Claim, Any]]:
    """States, and parameters that belong to no module."""
    for optimizer in live.optimizers:
        name = type(optimizer).__name__
        for state in list(vars(optimizer).get("state", {}).values()):
            yield from ((Claim("optimizer state", name), tensor) for tensor in _tensors(state))
        for group in vars(optimizer).get("param_groups", ()):
            for parameter in group.get("params", ()):
                yield Claim("parameters", f"parameters of {name}"), parameter
                with suppress(Exception):
                    if parameter.grad is not None:
                        yield Claim("gradients", f"parameters of {name}"), parameter.grad


def _tensors(state: Any) -> Iterator[Any]:
    """The tensors in nested dicts and lists, as optimizers keep them."""
    if is_tensor_type(type(state)):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors(value)
