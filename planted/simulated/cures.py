"""A loop without one of its parts: what the cure of each finding takes away, done in the model.

The cure that shortens the steady step most is the true cause; a loop that none shortens is healthy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from planted.simulated.architectures import FUSED_OF_FOREACH, KERNELS
from planted.simulated.program import (
    COMPUTE,
    Allocate,
    Graph,
    HostWork,
    Item,
    Kernel,
    LoadData,
    Loop,
    Operator,
    Read,
    Synchronize,
    Update,
    Upload,
)

Cure = Callable[[Loop], Loop]
FEW_NS = 100_000  # what taking a batch that is ready costs
GRAPH_NS = 5_000
NARROW = {"fp32": 1 / 8, "tf32": 1 / 2}  # of a product's time, in 16 bits; half of what data sheets promise at most
FULL = {kinds["fp32"]: NARROW["fp32"] for kinds in KERNELS.values() if kinds["fp32"] != kinds["bf16"]} | {
    kinds["tf32"]: NARROW["tf32"] for kinds in KERNELS.values() if kinds["tf32"] != kinds["bf16"]
}
EMPTY_BELOW = 1.0  # blocks per multiprocessor


def each(loop: Loop, change: Callable[[Item], Item | None]) -> Loop:
    """The loop with every item changed, or left out where `change` gives None."""

    def changed(items: tuple[Item, ...]) -> tuple[Item, ...]:
        return tuple(new for item in items if (new := change(item)) is not None)

    later = tuple((every, changed(items)) for every, items in loop.now_and_then)
    return replace(loop, step=changed(loop.step), now_and_then=later)


def _of_kernels(change: Callable[[Kernel], Kernel]) -> Callable[[Item], Item]:
    def of_item(item: Item) -> Item:
        if isinstance(item, Operator | Graph):
            return replace(item, kernels=tuple(change(k) for k in item.kernels))
        if isinstance(item, Update):
            operators = (replace(o, kernels=tuple(change(k) for k in o.kernels)) for o in item.operators)
            return replace(item, operators=tuple(operators))
        return item

    return of_item


def without_data_wait(loop: Loop) -> Loop:
    """Every batch is ready."""
    return replace(
        each(loop, lambda item: LoadData(min(item.ns, FEW_NS)) if isinstance(item, LoadData) else item), workers=0
    )


def without_reads(loop: Loop) -> Loop:
    """No result is read back, nothing is waited for."""
    return each(loop, lambda item: None if isinstance(item, Read | Synchronize) else item)


def with_pinned_copies(loop: Loop) -> Loop:
    """Batches come from pinned memory, and nobody waits for them."""

    def pinned(item: Item) -> Item:
        return replace(item, pinned=True, non_blocking=True) if isinstance(item, Upload) else item

    return each(loop, pinned)


def without_allocations(loop: Loop) -> Loop:
    """Memory is kept."""
    return each(loop, lambda item: None if isinstance(item, Allocate) else item)


def as_graphs(loop: Loop) -> Loop:
    """All operators in a row are one launch of a CUDA graph."""
    later = tuple((every, _graphs(items)) for every, items in loop.now_and_then)
    return replace(loop, step=_graphs(loop.step), now_and_then=later)


def _graphs(items: tuple[Item, ...]) -> tuple[Item, ...]:
    found: list[Item] = []
    held: list[Kernel] = []
    for item in items:
        operators = item.operators if isinstance(item, Update) else (item,) if isinstance(item, Operator) else None
        if operators is not None and all(k.stream == COMPUTE for o in operators for k in o.kernels):
            held += [k for o in operators for k in o.kernels]
            continue
        if held:
            found.append(Graph(GRAPH_NS, tuple(held)))
            held = []
        found.append(item)
    return (*found, Graph(GRAPH_NS, tuple(held))) if held else tuple(found)


def in_sixteen_bits(loop: Loop) -> Loop:
    """Products in full precision or TF32 are done in 16 bits."""
    return each(loop, _of_kernels(lambda k: replace(k, ns=round(k.ns * FULL.get(k.name, 1.0)))))


def with_fused_update(loop: Loop) -> Loop:
    """The optimizer is one operator."""

    def fused(item: Item) -> Item:
        if not isinstance(item, Update) or len(item.operators) < 2:
            return item
        kernels = [k for o in item.operators for k in o.kernels]
        one = replace(kernels[0], ns=round(sum(k.ns for k in kernels) * FUSED_OF_FOREACH))
        return replace(item, operators=(Operator("aten::_fused_adamw_", 30_000, (one,)),))

    return each(loop, fused)


def with_twice_the_batch(loop: Loop) -> Loop:
    """Kernels that leave multiprocessors empty take no longer, the others twice as long; so do loading and copying."""

    def longer(kernel: Kernel) -> Kernel:
        return kernel if kernel.blocks_per_sm < EMPTY_BELOW else replace(kernel, ns=2 * kernel.ns)

    def twice(item: Item) -> Item:
        if isinstance(item, LoadData):
            return LoadData(2 * item.ns)
        if isinstance(item, Upload):
            return replace(item, bytes=2 * item.bytes)
        return item if isinstance(item, Update) else _of_kernels(longer)(item)

    return each(loop, twice)


def without_pauses(kind: str) -> Cure:
    """Without host work that hooks name so, or that the trace names, for `logging`."""

    def kept(item: Item) -> Item | None:
        gone = isinstance(item, HostWork) and (item.pause == kind or (kind == "logging" and item.annotation))
        return None if gone else item

    return lambda loop: each(loop, kept)


def without(key: str) -> Cure:
    """Without the operators that the cure of that finding takes out."""

    def kept(item: Item) -> Item | None:
        return None if isinstance(item, Operator) and item.cured_by == key else item

    return lambda loop: each(loop, kept)


def without_communication(loop: Loop) -> Loop:
    """Nothing is exchanged with other GPUs."""

    def kept(item: Item) -> Item | None:
        is_nccl = isinstance(item, Operator) and any(k.name.startswith("nccl") for k in item.kernels)
        return None if is_nccl else item

    return each(loop, kept)


CURES: Mapping[str, Cure] = {
    "data_starved": without_data_wait,
    "sync_points": without_reads,
    "blocking_copy": with_pinned_copies,
    "allocator_thrash": without_allocations,
    "launch_bound": as_graphs,
    "no_mixed_precision": in_sixteen_bits,
    "unfused_optimizer": with_fused_update,
    "small_batch": with_twice_the_batch,
    "exposed_communication": without_communication,
    "logging_or_eval": without_pauses("logging"),
    "gc_pause": without_pauses("gc"),
    "checkpoint_save": without_pauses("checkpoint_save"),
    "unfused_attention": without("unfused_attention"),
    "memory_bound_ops": without("memory_bound_ops"),
    "layout": without("layout"),
}
SAMPLES: Mapping[str, float] = {"small_batch": 2.0}  # after over before
