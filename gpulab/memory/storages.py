"""Finds every live tensor of this process and its storage, which is what takes memory.

Python's garbage collector knows each tensor object; those that only autograd's graph holds are reached through the
graph. Nothing is unpacked: a saved tensor with hooks (checkpointing, offloading) would be computed or copied anew.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import compress
from typing import Any, NamedTuple

Key = tuple[str, int]  # device and address


class Storage(NamedTuple):
    """One block of memory; views share it."""

    key: Key
    bytes: int


class Live(NamedTuple):
    """All live storages by key, the tensors of each, and the modules and optimizers that exist.

    `graph`: storages that autograd's graph has saved, without hooks.
    """

    bytes: dict[Key, int]
    tensors: dict[Key, list[Any]]
    modules: list[Any]
    optimizers: list[Any]
    graph: set[Key]


def torch_module() -> Any:
    """torch, if it has been imported."""
    return sys.modules.get("torch")


def live() -> Live:
    """Everything that is alive now. Takes some 10 ms per 100,000 Python objects; empty without torch."""
    torch = torch_module()
    result = Live({}, {}, [], [], set())
    if torch is None or not hasattr(torch, "nn"):
        return result
    tensor_types, module_types, optimizer_types = (
        _subclasses(kind) for kind in (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
    )
    kinds = tensor_types | module_types | optimizer_types
    every = gc.get_objects()
    objects = list(compress(every, map(kinds.__contains__, map(id, map(type, every)))))  # a third faster than a loop
    del every
    tensors = []
    for thing in objects:
        kind = id(type(thing))
        if kind in tensor_types:
            tensors.append(thing)
        else:
            (result.modules if kind in module_types else result.optimizers).append(thing)
    del objects
    nodes: set[Any] = set()
    for tensor in tensors:
        for each in (tensor, *gradient(tensor)):
            for storage in storages_of(each):
                _add(result, storage)
                result.tensors.setdefault(storage.key, []).append(each)
        for each in saved(tensor, nodes):
            for storage in storages_of(each):
                _add(result, storage)
                result.graph.add(storage.key)
    return result


def _add(result: Live, storage: Storage) -> None:
    """Arrays of NumPy at one address may have different lengths."""
    result.bytes[storage.key] = max(storage.bytes, result.bytes.get(storage.key, 0))


def _subclasses(kind: type) -> set[int]:
    """By id: a class need not be hashable."""
    subclasses, waiting = {id(kind)}, [kind]
    while waiting:
        direct: list[type] = type.__subclasses__(waiting.pop())
        for sub in direct:
            if id(sub) not in subclasses:
                subclasses.add(id(sub))
                waiting.append(sub)
    return subclasses


def is_tensor_type(kind: type) -> bool:
    torch = torch_module()
    return torch is not None and issubclass(kind, torch.Tensor)


@contextmanager
def unobserved() -> Iterator[None]:
    """Neither `__torch_function__` nor a mode of the user's is called by what is read meanwhile."""
    torch = torch_module()
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


def attribute(tensor: Any, name: str) -> Any:
    """An attribute as torch has it, whatever a class of the user's makes of it."""
    torch = torch_module()
    return getattr(torch.Tensor, name).__get__(tensor)


def storages_of(tensor: Any) -> list[Storage]:
    """The storages of a tensor: several of a sparse one; none on `meta`, and none of a fake or a wrapper."""
    torch = torch_module()
    with suppress(Exception), unobserved():
        layout = attribute(tensor, "layout")
        if layout is not torch.strided:
            parts = (attribute(tensor, name) for name in _parts(layout, torch))
            return [storage for part in parts for storage in storages_of(part())]
        storage = torch.Tensor.untyped_storage(tensor)
        device = storage.device
        if device.type == "meta" or not storage.nbytes():
            return []
        address = storage.data_ptr()
        return [Storage((str(device), address), storage.nbytes())] if address else []
    return []


def _parts(layout: Any, torch: Any) -> tuple[str, ...]:
    if layout is torch.sparse_coo:
        return "_indices", "_values"
    columns = layout in (torch.sparse_csr, torch.sparse_bsr)
    return ("crow_indices", "col_indices", "values") if columns else ("ccol_indices", "row_indices", "values")


# -- tensors without a Python object of their own ----------------------------------------------------------------------


def gradient(tensor: Any) -> Iterator[Any]:
    """The gradient of a leaf, if it has one."""
    own = None
    with suppress(Exception), unobserved():
        own = attribute(tensor, "grad") if attribute(tensor, "is_leaf") else None
    if own is not None:
        yield own


def saved(tensor: Any, visited: set[Any]) -> Iterator[Any]:
    """The tensors that the graph behind a tensor has saved for its backward pass. `visited`: nodes to skip."""
    try:
        with unobserved():
            root = attribute(tensor, "grad_fn")
    except Exception:  # a view whose base was changed in place may raise
        return
    waiting = [] if root is None else [root]
    while waiting:
        node = waiting.pop()
        if node in visited:
            continue
        visited.add(node)
        yield from _saved_by(node)
        waiting += [following for following, _ in node.next_functions if following is not None]


def _saved_by(node: Any) -> Iterator[Any]:
    variable = getattr(node, "variable", None)  # of a leaf that accumulates its gradient
    if variable is not None:
        yield variable
        yield from gradient(variable)
    for value in list(getattr(node, "__dict__", {}).values()):  # attributes of a custom function's `ctx`
        if is_tensor_type(type(value)):
            yield value
    for name in _saved_names(type(node)):  # type: ignore[arg-type]
        with suppress(Exception):  # freed by the backward pass
            with unobserved():
                value = getattr(node, name)
                tensors = [_content(one) for one in (value if isinstance(value, tuple | list) else (value,))]
            yield from (tensor for tensor in tensors if tensor is not None)


def _content(saved_tensor: Any) -> Any:
    """The tensor in autograd's slot; None for one with hooks, whose content is a Python object of its own."""
    if hasattr(saved_tensor, "unpack_hook"):
        tensor = saved_tensor.data if saved_tensor.unpack_hook is None else None
    else:  # before torch 2.9 a slot cannot be read without unpacking it
        tensor = None
    return tensor if tensor is not None and is_tensor_type(type(tensor)) else None


@cache
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
