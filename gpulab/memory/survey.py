"""Who holds tensor memory in this process now, by the names that a user can delete; and what lets go of it."""

from __future__ import annotations

import ctypes
import gc
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from gpulab.memory.ledger import claims, holdings
from gpulab.memory.owners import (
    LONGEST_NS,
    Root,
    Walk,
    error_roots,
    library_roots,
    model_roots,
    notebook_roots,
    other_roots,
)
from gpulab.memory.storages import Key, Live, is_tensor_type, live, torch_module
from gpulab.memory_record import Holding, HoldingKind, Survey

CHEAP = 4  # stages of a search: all but the variables of libraries
SMALL = 0.01  # ours: below this share of all memory no further place is searched


def survey(shell: Any, namespace: Mapping[str, Any]) -> Survey:
    """Collect garbage cycles, then name the owner of every live storage of this process."""
    before = bytes_by_device(live().bytes)
    gc.collect()
    now = live()
    after = bytes_by_device(now.bytes)
    rows, is_whole = named(now, all_roots(shell, namespace), barriers=(shell, namespace))
    garbage = {device: count - after.get(device, 0) for device, count in before.items()}
    return Survey(rows, {device: count for device, count in garbage.items() if count > 0}, is_whole)


def notebook() -> tuple[Any, dict[str, Any]]:
    """IPython's shell with the names of the notebook; without IPython None and the names of the main module."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell, vars(sys.modules["__main__"]) if shell is None else shell.user_ns


def all_roots(shell: Any, namespace: Mapping[str, Any], error: BaseException | None = None) -> Iterator[list[Root]]:
    """Where owners are searched, the most telling first; the variables of all libraries come last.

    `error`: an exception on its way, whose traceback holds the variables of dead calls.
    """
    yield model_roots(namespace)
    yield notebook_roots(shell, namespace)
    on_its_way = [] if error is None else [Root("traceback", error.__traceback__, "traceback")]
    yield [*on_its_way, *error_roots(shell)]
    yield other_roots()
    yield library_roots()


def bytes_by_device(sizes: Mapping[Key, int]) -> dict[str, int]:
    """The sum of the storages on each device."""
    sums: dict[str, int] = {}
    for (device, _), count in sizes.items():
        sums[device] = sums.get(device, 0) + count
    return sums


def search(
    sizes: Mapping[Key, int],
    stages: Iterable[list[Root]],
    longest_ns: int = LONGEST_NS,
    barriers: Iterable[object] = (),
) -> Walk:
    """Walk from the roots of all stages, because what frees a storage is known only with everything that holds it.

    The last stage, the variables of libraries, only if much has no owner until then.
    """
    walk, total = Walk(sizes, longest_ns, barriers), sum(sizes.values())
    for number, roots in enumerate(stages):
        if number < CHEAP or sum(sizes[key] for key in walk.missing) > SMALL * total:
            walk.follow(roots)
    return walk


def named(
    now: Live, stages: Iterable[list[Root]], longest_ns: int = LONGEST_NS, barriers: Iterable[object] = ()
) -> tuple[dict[str, tuple[Holding, ...]], bool]:
    """The owners of all storages by device. `stages`: roots in the order in which they are searched."""
    walk = search(now.bytes, stages, longest_ns, barriers)
    owners = walk.owners(now.bytes)
    purposes = claims(now, {})
    rows: dict[str, tuple[Holding, ...]] = {}
    for device in bytes_by_device(now.bytes):
        sizes = {key: count for key, count in now.bytes.items() if key[0] == device}
        parts = holdings(sizes, {}, owners)
        mixed: dict[str, Counter[HoldingKind]] = {}
        for owner in owners:
            kinds = Counter[HoldingKind]()
            for key in owner.keys & sizes.keys():
                claim = purposes.get(key)
                named_itself = claim is None or (claim.kind == "saved activations" and not owner.graph)
                kinds["variables" if claim is None or named_itself else claim.kind] += sizes[key]
            mixed[owner.name] = kinds
        rows[device] = tuple(_with_purpose(row, mixed.get(row.owner, Counter())) for row in parts)
    return rows, not walk.is_cut


def _with_purpose(row: Holding, kinds: Counter[HoldingKind]) -> Holding:
    """The row with the purpose of most of its bytes."""
    return replace(row, kind=kinds.most_common(1)[0][0]) if kinds else row


# -- letting go --------------------------------------------------------------------------------------------------------


def free_tracebacks(shell: Any) -> None:
    """Clear the last exception's frames, and the references that Python and IPython keep to it."""
    for root in error_roots(shell):
        if isinstance(root.thing, BaseException):
            clear_frames(root.thing)
    for name in ("last_exc", "last_value", "last_traceback", "last_type"):
        if hasattr(sys, name):
            delattr(sys, name)
    handler = getattr(shell, "InteractiveTB", None)
    for name in ("etype", "evalue", "tb"):
        if getattr(handler, name, None) is not None:
            setattr(handler, name, None)


def free_results(namespace: dict[str, Any], names: Iterable[str]) -> None:
    """Delete those of the names that are results with autograd's graph, such as `loss`, which the cell makes anew."""
    for name in names:
        value = namespace.get(name)
        if is_tensor_type(type(value)) and getattr(value, "grad_fn", None) is not None:
            del namespace[name]


def clear_frames(error: BaseException | None) -> None:
    """Clear the variables of all calls in the tracebacks of an exception, its causes and its contexts."""
    chain, done = [error], set[int]()
    while chain:
        e = chain.pop()
        if e is None or id(e) in done:
            continue
        done.add(id(e))
        with suppress(Exception):
            traceback.clear_frames(e.__traceback__)
        e.__traceback__ = None
        chain += [e.__cause__, e.__context__]


_EVERY = object()


def free_outputs(shell: Any, namespace: dict[str, Any], value: object = _EVERY) -> None:
    """Empty `Out` and forget `_`, `__`, `___` and `_1`, `_2`, …; or only those that are this value."""
    outputs = namespace.get("Out")
    numbers = (
        [n for n, each in outputs.items() if value is _EVERY or each is value] if isinstance(outputs, dict) else []
    )
    for number in numbers:
        del namespace["Out"][number]
        namespace.pop(f"_{number}", None)
    hook = getattr(shell, "displayhook", None)
    for name in ("_", "__", "___"):
        if name in namespace and (value is _EVERY or namespace[name] is value):
            namespace[name] = ""
        if hasattr(hook, name) and (value is _EVERY or getattr(hook, name) is value):
            setattr(hook, name, "")


def empty_caches() -> None:
    """Collect garbage, and give memory back that the C library and torch's GPU allocator keep for later."""
    gc.collect()
    with suppress(OSError, AttributeError, TypeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    torch = torch_module()
    if torch is not None and torch.cuda.is_initialized():
        with suppress(RuntimeError):  # a GPU with a persistent error frees nothing
            torch.cuda.empty_cache()
