"""Loops with one planted cause each, and healthy ones: a table of architectures and of what is done to them.

Lengths are shares of the time that the GPU computes in a step, so that a cause weighs the same in every architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct, field
from msgspec.structs import replace

from planted.simulated.architectures import (
    ARCHITECTURES,
    Architecture,
    Build,
    Part,
    foreach_update,
    fused_update,
    loop_update,
    step_of,
)
from planted.simulated.cures import as_graphs
from planted.simulated.machine import Gpu
from planted.simulated.program import (
    COMPUTE,
    COPIES,
    SIDE,
    Allocate,
    AwaitEvent,
    Graph,
    HostWork,
    Item,
    Kernel,
    LoadData,
    Loop,
    Operator,
    Read,
    RecordEvent,
    Synchronize,
    Update,
    Upload,
)

ALL = tuple(ARCHITECTURES)
READY = LoadData(100_000)  # a batch that is ready
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


class SimulatedLoop(Struct, frozen=True):
    """A loop and what is true of it. `causes`: none is healthy; `also`: other names of the same time."""

    name: str
    causes: tuple[str, ...]
    because: str
    loop: Loop
    also: tuple[str, ...] = ()
    gpu: Gpu = field(default_factory=lambda: Gpu(profiler_ns=1_500))
    peak_memory_fraction: float = 0.7

    @property
    def accepted(self) -> tuple[str, ...]:
        """Keys of a right headline."""
        return (*self.causes[:1], *self.also) if self.causes else ("healthy",)


def computed_ns(items: Iterable[Item]) -> int:
    """Time of all kernels of these items."""
    return sum(k.ns for item in items for k in _kernels(item))


def _kernels(item: Item) -> tuple[Kernel, ...]:
    if isinstance(item, Update):
        return tuple(k for o in item.operators for k in o.kernels)
    return item.kernels if isinstance(item, Operator | Graph) else ()


def _healthy_step(name: str, scale: float, **more: object) -> tuple[Item, ...]:
    return step_of(ARCHITECTURES[name], Build(scale=scale, **more))  # type: ignore[arg-type]


# -- feeding -----------------------------------------------------------------------------------------------------------


def _starved() -> Iterator[SimulatedLoop]:
    for name in ALL:
        step = _healthy_step(name, 0.8)
        compute = computed_ns(step)
        for share in (1.4, 2.5):
            loop = Loop((LoadData(round(share * compute)), *step))
            why = f"making a batch in the loop itself takes {share} times as long as the GPU computes"
            yield SimulatedLoop(f"{name}_loads_{share}", ("data_starved",), why, loop)
        loop = Loop((LoadData(round(1.6 * compute)), *step, Read()))
        why = "likewise, and each step's loss is read"
        yield SimulatedLoop(f"{name}_loads_and_reads", ("data_starved",), why, loop)
        loop = Loop((LoadData(round(5.0 * compute)), *step), workers=3)
        why = "three workers need five times the computing time for a batch each"
        yield SimulatedLoop(f"{name}_slow_workers", ("data_starved",), why, loop)


# -- launching ---------------------------------------------------------------------------------------------------------


def _launch_bound() -> Iterator[SimulatedLoop]:
    for name in ALL:
        for scale, host_us in ((0.05, 12.0), (0.1, 30.0), (0.15, 60.0)):
            loop = Loop((READY, *_healthy_step(name, scale, host_us=host_us)))
            why = f"an operator takes {host_us + 8:.0f} µs to start, its kernel {scale:g} of what it takes elsewhere"
            yield SimulatedLoop(f"{name}_short_kernels_{scale}", ("launch_bound",), why, loop)


def _small_batches() -> Iterator[SimulatedLoop]:
    for name in ("mlp", "resnet", "gpt", "vit", "unet", "dlrm"):
        kernels = _healthy_step(name, 1.0)
        launches = sum(len(_kernels(item)) for item in kernels)
        scale = 18_000 * launches / computed_ns(kernels)  # 18 µs on average, about what a launch takes
        loop = Loop((READY, *_healthy_step(name, scale, blocks_per_sm=0.3)))
        why = (
            "kernels fill a third of the GPU and take hardly longer than their launches: twice the batch costs nothing"
        )
        yield SimulatedLoop(
            f"{name}_small_batch", ("small_batch",), why, loop, ("launch_bound",), peak_memory_fraction=0.1
        )


# -- waiting -----------------------------------------------------------------------------------------------------------


def _synchronized() -> Iterator[SimulatedLoop]:
    waits: tuple[tuple[str, Item, int], ...] = (
        ("item", Read(), 1),
        ("mask", Read("aten::nonzero"), 2),
        ("synchronize", Synchronize(), 1),
        ("pinned_item", Read(pinned=True), 2),
    )
    for name in ALL:
        for kind, wait, every in waits:
            between = _every(every, wait)
            step = step_of(ARCHITECTURES[name], Build(scale=0.5, host_us=20.0), between=between)
            why = f"the forward pass waits for the GPU after each {'' if every == 1 else f'{every}nd '}operator"
            yield SimulatedLoop(f"{name}_{kind}_in_forward", ("sync_points",), why, Loop((READY, *step)))


def _every(count: int, item: Item) -> Callable[[int], tuple[Item, ...]]:
    return lambda i: (item,) if (i + 1) % count == 0 else ()


def _copied() -> Iterator[SimulatedLoop]:
    for name in ALL:
        step = _healthy_step(name, 0.8)
        for share in (0.3, 0.8):
            size = round(share * computed_ns(step) / 1_000) * Gpu().pageable_bytes_per_us
            loop = Loop((READY, Upload(size), *step))
            why = f"copying a batch from pageable memory takes {share} of the computing time, and the loop waits for it"
            yield SimulatedLoop(f"{name}_pageable_{share}", ("blocking_copy",), why, loop)


def _allocating() -> Iterator[SimulatedLoop]:
    for name in ALL:
        step = _healthy_step(name, 0.8)
        for share, calls in ((0.3, 2), (1.0, 6)):
            each = round(share * computed_ns(step) / calls / 2)
            thrash = (Allocate(each, "cudaFree"), Allocate(each)) * calls
            loop = Loop((READY, *step, *thrash))
            why = f"empty_cache() in each step: {2 * calls} calls of the driver take {share} of the computing time"
            yield SimulatedLoop(f"{name}_empty_cache_{share}", ("allocator_thrash",), why, loop)


def _exchange(ns: int, event: str, waits: bool) -> tuple[Item, ...]:
    """All-reduce of what was computed so far; `waits`: what is launched next begins after it."""
    begin = (RecordEvent(f"{event} ready"), AwaitEvent(f"{event} ready", SIDE))
    reduce = Operator("nccl:all_reduce", 20_000, (Kernel(NCCL, ns, SIDE, 0.2),))
    end = (RecordEvent(f"{event} done", SIDE), AwaitEvent(f"{event} done", COMPUTE))
    return (*begin, reduce, *(end if waits else ()))


def _communicating() -> Iterator[SimulatedLoop]:
    for name in ALL:
        for share in (0.2, 0.6):
            build = Build(scale=0.8)
            compute = computed_ns(step_of(ARCHITECTURES[name], build))
            reduce = _exchange(round(share * compute), "gradients", waits=True)
            step = step_of(ARCHITECTURES[name], build, after_backward=reduce)
            why = f"gradients are exchanged after the backward pass for {share} of the computing time"
            yield SimulatedLoop(f"{name}_all_reduce_{share}", ("exposed_communication",), why, Loop((READY, *step)))


# -- computing ---------------------------------------------------------------------------------------------------------


def _unfused() -> Iterator[SimulatedLoop]:
    gone = "unfused_attention"
    for name in ("gpt", "vit"):
        for us in (60.0, 150.0, 400.0):
            between = (Part("mul", us, gone), Part("softmax", us, gone))
            by_hand = (Part("bmm", 50), *between, Part("bmm", 50))
            why = f"scores and softmax of {us:g} µs each go through memory between the two products of attention"
            step = step_of(_with_attention(ARCHITECTURES[name], by_hand), Build())
            yield SimulatedLoop(f"{name}_attention_{us:g}", (gone,), why, Loop((READY, *step)))


def _with_attention(architecture: Architecture, by_hand: tuple[Part, ...]) -> Architecture:
    layer = (p for part in architecture.layer for p in (by_hand if part.kind == "flash" else (part,)))
    return replace(architecture, layer=tuple(layer))


def _chained() -> Iterator[SimulatedLoop]:
    gone = "memory_bound_ops"
    for name in ALL:
        for length in (3, 6):
            more = tuple(Part(("mul", "sigmoid")[i % 2], 60, gone) for i in range(length - 1))
            step = step_of(ARCHITECTURES[name], Build(extra=(Part("add", 60), *more)))
            why = f"{length} pointwise operations of 60 µs follow one another in each layer"
            yield SimulatedLoop(f"{name}_chain_of_{length}", (gone,), why, Loop((READY, *step)))


def _updating() -> Iterator[SimulatedLoop]:
    for name in ALL:
        build = Build(scale=0.5)
        compute = computed_ns(step_of(ARCHITECTURES[name], build))
        step = step_of(ARCHITECTURES[name], build, update=foreach_update(0.5 * compute / 1e3))
        why = "AdamW in ten passes over the parameters takes half as long as the model"
        yield SimulatedLoop(f"{name}_foreach", ("unfused_optimizer",), why, Loop((READY, *step)))
        tensors = round(1.5 * compute / 1e3 / 100)
        step = step_of(ARCHITECTURES[name], build, update=loop_update(tensors, 12))
        why = f"AdamW updates {tensors} tensors one by one with six operations each"
        yield SimulatedLoop(f"{name}_one_by_one", ("unfused_optimizer",), why, Loop((READY, *step)), ("launch_bound",))


def _in_full() -> Iterator[SimulatedLoop]:
    for name in ALL:
        for precision in ("fp32", "tf32"):
            step = _healthy_step(name, 2.0, precision=precision)
            why = f"products are computed in {precision.upper()}"
            cause, also = ("no_mixed_precision",), ("no_tf32",) if precision == "fp32" else ()
            yield SimulatedLoop(f"{name}_{precision}", cause, why, Loop((READY, *step)), also)


def _rearranging() -> Iterator[SimulatedLoop]:
    for name in ("resnet", "unet"):
        for us in (25.0, 40.0, 80.0):
            step = step_of(ARCHITECTURES[name], Build(extra=(Part("layout", us, "layout"),)))
            why = f"images are rearranged for {us:g} µs after each layer"
            yield SimulatedLoop(f"{name}_layout_{us:g}", ("layout",), why, Loop((READY, *step)))


# -- beside training ---------------------------------------------------------------------------------------------------


def _pausing() -> Iterator[SimulatedLoop]:
    for name in ALL:
        step = _healthy_step(name, 0.6)
        ns = round(1.6 * computed_ns(step))
        loop = Loop((READY, *step, HostWork(ns, pause="logging")))
        why = "each step is logged for 1.6 of the computing time"
        yield SimulatedLoop(f"{name}_logs", ("logging_or_eval",), why, loop)
    for name in ("gpt", "dlrm", "gnn"):
        step = _healthy_step(name, 0.6)
        ns = round(1.6 * computed_ns(step))
        yield SimulatedLoop(
            f"{name}_collects",
            ("gc_pause",),
            "garbage is collected in each step",
            Loop((READY, *step, HostWork(ns, pause="gc"))),
        )
        save = (HostWork(4 * ns, pause="checkpoint_save"),)
        yield SimulatedLoop(
            f"{name}_saves", ("checkpoint_save",), "every fourth step is saved", Loop((READY, *step), ((4, save),))
        )


# -- healthy -----------------------------------------------------------------------------------------------------------


def _healthy() -> Iterator[SimulatedLoop]:
    for name in ALL:
        for label, because, loop in _healthy_loops(name):
            yield SimulatedLoop(f"{name}_healthy_{label}", (), because, loop)


def _healthy_loops(name: str) -> Iterator[tuple[str, str, Loop]]:
    step, architecture = _healthy_step(name, 1.0), ARCHITECTURES[name]
    compute = computed_ns(step)
    yield "runs_ahead", "nothing waits, the host is far ahead of the GPU", Loop((READY, *step))
    longer = _healthy_step(name, 6.0)
    yield "long_kernels", "the same with kernels six times as long", Loop((READY, *longer))
    graphs = as_graphs(Loop((READY, *step)))
    yield "graphs", "the whole step is one CUDA graph", graphs
    tiny = as_graphs(Loop((READY, *_healthy_step(name, 0.3))))
    yield "short_graphs", "a CUDA graph of shorter kernels", tiny
    half = LoadData(round(0.4 * compute))
    yield "hidden_data", "making a batch takes long, but the host is far enough ahead", Loop((half, *step))
    workers = Loop((LoadData(round(1.5 * compute)), *step), workers=4)
    yield "workers", "four workers make batches faster than they are used", workers
    rarely = Loop((READY, *step), ((10, (Read(),)),))
    yield "rare_reads", "every tenth loss is read", rarely
    read = Loop((READY, *longer, Read()))
    yield "one_read", "each loss is read after a long step", read
    size = round(0.1 * compute / 1_000) * Gpu().pinned_bytes_per_us
    arrived = (Upload(size, pinned=True, non_blocking=True, stream=COPIES), RecordEvent("batch", COPIES))
    pinned = Loop((READY, *arrived, AwaitEvent("batch", COMPUTE), *step))
    yield "pinned", "batches are copied beside the computing, from pinned memory", pinned
    backward = Build().backward(architecture)
    middle = len(backward) // 2
    reduce = _exchange(round(0.2 * compute), "half", waits=False)
    forward = Build().forward(architecture)
    done = (RecordEvent("all done", SIDE), AwaitEvent("all done", COMPUTE))
    overlapped = (READY, *forward, *backward[:middle], *reduce, *backward[middle:], *done, fused_update(60))
    yield "overlapped", "gradients are exchanged beside the backward pass", Loop(overlapped)


LOOPS: tuple[SimulatedLoop, ...] = (
    *_starved(),
    *_launch_bound(),
    *_small_batches(),
    *_synchronized(),
    *_copied(),
    *_allocating(),
    *_communicating(),
    *_unfused(),
    *_chained(),
    *_updating(),
    *_in_full(),
    *_rearranging(),
    *_pausing(),
    *_healthy(),
)
