"""The rules of the device's side: on loops with one planted cause each, on loops without, and on real traces."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpulab.analysis.calls import Call
from gpulab.analysis.chains import pointwise_chains
from gpulab.analysis.facts import Facts, facts
from gpulab.diagnosis import device, distributed, idle_gpu, operations
from gpulab.diagnosis import optimizer as optimizing
from gpulab.diagnosis.diagnose import FAULT, diagnose
from gpulab.diagnosis.finding import Finding, Rule, RuleContext, Undetermined
from gpulab.run import Category, Damage, Loader, Memory, Missing, Place, Run, Samples, Series
from gpulab.thresholds import DEFAULT
from gpulab.timeline.labels import EVALUATING, labels
from gpulab.trace.load import load_run
from tests.support import synthetic
from tests.support.loops import Machine, loop
from tests.support.real_traces import path
from tests.support.rule_tables import UNTOLD, Answer, Case, Rows, assert_golden, check, first, table

MODULES = (idle_gpu, operations, optimizing, device, distributed)
MINE: tuple[Rule, ...] = tuple(kind.rule for module in MODULES for kind in module.FINDINGS if kind.rule is not None)
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
SGEMM = "volta_sgemm_128x64_nn"
HMMA = "turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_nn"
BF16 = "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_nn"
A100_SGEMM = "ampere_sgemm_128x64_nn"
TF32 = "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x128_32x3_nn_align4>(Params)"
SOFTMAX = "void softmax_warp_forward<float>(float*)"
NCHW = "void cudnn::ops::nchwToNhwcKernel<float>(P)"
REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GIB = 1 << 30

Step = Callable[[Machine], None]


# Parts of a step


def row(*parts: Step) -> Step:
    """One after the other."""

    def step(machine: Machine) -> None:
        for part in parts:
            part(machine)

    return step


def many(count: int, name: str, kernel: str, gpu_us: float, host_us: float = 20, **extra: float) -> Step:
    def step(machine: Machine) -> None:
        for _ in range(count):
            machine.operator(name, kernel, gpu_us, host_us, **extra)

    return step


def own(kernel: str, gpu_us: float) -> Step:
    """A kernel that no operator starts."""
    return lambda machine: machine.launch(kernel, gpu_us)


def call(name: str, us: float, *, waits: bool = False) -> Step:
    return lambda machine: machine.call(name, us, waits=waits)


def load(us: float) -> Step:
    return lambda machine: machine.load(us)


def upload(us: float, pinned: bool) -> Step:
    return lambda machine: machine.upload(us, pinned)


def on_host(*times_us: tuple[str, float]) -> Step:
    return row(*(many(1, name, "", 0, us) for name, us in times_us))


def item(machine: Machine) -> None:
    machine.item()
    machine.python(400)  # what the program does with it, while the GPU has nothing to do


def event(machine: Machine) -> None:
    """It is read back with 2 ms of more work started, as a healthy loop does: the GPU never runs dry."""
    waiting = machine.host
    machine.host = max(machine.host, machine.free - 2_000)
    machine._span("cudaEventSynchronize", Category.CUDA_RUNTIME, waiting, machine.host)


def updating(style: str, zeroing: bool) -> Step:
    name = {"for-loop": "aten::add_", "foreach": "aten::_foreach_add_", "fused": "aten::_fused_sgd_"}[style]

    def step(machine: Machine) -> None:
        many(20, "aten::mm", HMMA, 100)(machine)
        machine.call("cudaDeviceSynchronize", 1, waits=True)
        start = machine.host
        many(30 if zeroing else 0, "aten::zero_", "void FillFunctor<float>(int)", 2)(machine)
        machine.mark("Optimizer.zero_grad#SGD.zero_grad", start)
        start = machine.host
        many({"for-loop": 60, "foreach": 4, "fused": 1}[style], name, ADD, 4)(machine)
        machine.mark("Optimizer.step#SGD.step", start)

    return step


SHORT = many(200, "aten::add", ADD, 4)
BUSY = many(50, "aten::mm", HMMA, 200)
PRODUCTS = many(40, "aten::mm", SGEMM, 30)
THRASHING = row(
    many(20, "aten::mm", HMMA, 100),
    call("cudaDeviceSynchronize", 1, waits=True), call("cudaFree", 300), call("cudaMalloc", 300),
)  # fmt: skip
ATTENTION = row(
    many(1, "aten::bmm", HMMA, 100, 10), many(1, "aten::mul", ADD, 50, 10), many(1, "aten::_softmax", SOFTMAX, 150, 10),
    many(1, "aten::bmm", HMMA, 100, 10), many(10, "aten::mm", HMMA, 60),
)  # fmt: skip
FAR_SOFTMAX = row(
    many(1, "aten::bmm", HMMA, 100), many(30, "aten::add", ADD, 20), many(1, "aten::_softmax", SOFTMAX, 150),
    many(1, "aten::bmm", HMMA, 100),
)  # fmt: skip
CPU_ATTENTION = on_host(
    ("aten::bmm", 300), ("aten::div", 200), ("aten::_softmax", 400), ("aten::bmm", 300), ("aten::linear", 800)
)
SHORT_ATTENTION = on_host(("aten::bmm", 100), ("aten::_softmax", 100), ("aten::bmm", 100))  # fused, as long
BY_HAND = row(  # the backward pass of a softmax
    on_host(("aten::bmm", 300)),
    many(20, "aten::as_strided", "", 0, 1),  # a view of it, as any number of them
    on_host(*((f"aten::{name}", 200) for name in ("div", "neg", "mul", "sum", "exp", "mul", "neg"))),
    on_host(*((f"aten::{name}", 200) for name in ("sum", "eq", "copy_", "div", "mul", "add_", "mul"))),
    on_host(("aten::bmm", 300), ("aten::linear", 800)),
)
CHAIN = row(
    on_host(("aten::linear", 300)),
    *[on_host(("aten::mul", 200), ("aten::copy_", 2))] * 5,  # the number that it is multiplied with
    on_host(("aten::tanh", 400)),
)
IMAGES = row(many(10, "aten::cudnn_convolution", HMMA, 100), many(10, "aten::cudnn_convolution", NCHW, 20))
TENSORS = 120


def lion(machine: Machine) -> None:
    """A small model, updated by an optimizer of the user's own, which loops over its tensors."""
    on_host(("aten::linear", 40), ("autograd::engine::evaluate_function: AddmmBackward0", 80))(machine)
    start = machine.host
    for _ in range(TENSORS):
        for name in ("mul", "mul", "add", "sign", "add_", "mul_", "add_"):
            machine.operator(f"aten::{name}", host_us=3)
            machine.python(5)
    machine.mark("Optimizer.step#Lion.step", start)


# What the rules are asked about


def of(step: Step, gpu: str = "V100", **more: Any) -> Callable[[], RuleContext]:
    return lambda: loop(step).case(gpu, **more)


def holding(peak: float | None) -> Memory:
    """Of 32 GiB; None: the peak was not measured."""
    return Memory(total_bytes=32 * GIB, peak_allocated_bytes=None if peak is None else int(peak * 32 * GIB))


def limits(**values: float) -> dict[str, Any]:
    return {"thresholds": DEFAULT.changed(values)}


def changed(step: Step, change: Callable[[Run], Run], gpu: str = "V100") -> Callable[[], RuleContext]:
    return lambda: RuleContext(facts(change(loop(step).facts(gpu).run)), DEFAULT)


def on_cpu(step: Step) -> Callable[[], RuleContext]:
    """The same loop where all is computed by the host: nothing is started anywhere."""
    return changed(step, lambda run: replace(run, device=synthetic.cpu_case().facts.run.device))


def with_loader() -> RuleContext:
    case = loop(SHORT).case(memory=holding(0.2))
    loader = Loader("Digits", 1000, 16, 0, None, False, False, 63, False)
    return RuleContext(replace(case.facts, run=replace(case.facts.run, loader=loader)), DEFAULT)


def lion_alone() -> RuleContext:
    """The update of it, which unprofiled steps show as long."""
    update_us = TENSORS * 7 * (3 + 5)
    run = loop(lion).facts(unprofiled_us=120 + update_us).run
    steps = replace(run.steps, optimizer_ns=np.full(len(run.steps), update_us * 1_000, np.int64))
    return RuleContext(facts(replace(run, steps=steps, device=synthetic.cpu_case().facts.run.device)), DEFAULT)


def with_sizes(m: int, n: int, k: int) -> Callable[[], RuleContext]:
    def make() -> RuleContext:
        made = loop(many(10, "aten::mm", "nvjet_tst_64x64", 100)).facts("H100")
        timeline = made.run.timeline
        assert timeline is not None and made.work is not None
        sides = {"m": m, "n": n, "k": k}
        product = np.array([timeline.names[i] == "aten::mm" for i in timeline.name_id])
        sizes = {f"product_{side}": np.where(product, float(sides[side]), np.nan) for side in sides}
        with_them = labels(replace(timeline, extra={**timeline.extra, **sizes}))
        return RuleContext(replace(made, work=replace(made.work, timeline=with_them)), DEFAULT)

    return make


def allocated_at_first() -> RuleContext:
    machine = Machine()
    machine.call("cudaMalloc", 30_000)
    for _ in range(6):
        many(20, "aten::mm", HMMA, 100)(machine)
        machine.end_step()
    return machine.case()


def read(**curves: list[float]) -> dict[str, Any]:
    """Readings of meters, one each millisecond."""
    return {
        "samples": Samples(
            tuple(
                Series(name, "", name, "NVML", np.arange(len(values)) * 1_000_000, np.array(values, np.float64))
                for name, values in curves.items()
            )
        )
    }


def unread(run: Run) -> Run:
    why = Missing("other processes on the GPU", "this container does not see them", key="curve")
    return replace(run, source="cell", missing=(why,))


def clocks_apart(step: Step) -> Callable[[], RuleContext]:
    """Kernels before their launch: what the host did while the GPU idled cannot be told."""

    def change(run: Run) -> Run:
        timeline = run.timeline
        assert timeline is not None
        shifted = np.where(timeline.lane_id == 2, timeline.start_ns - 60_000, timeline.start_ns)
        order = np.argsort(shifted, kind="stable")
        columns = ("duration_ns", "name_id", "category", "lane_id", "correlation")
        moved = replace(
            timeline,
            **{n: getattr(timeline, n)[order] for n in columns},
            start_ns=shifted[order],
            extra={n: c[order] for n, c in timeline.extra.items()},
        )
        return replace(run, timeline=moved)

    return changed(step, change)


def cut(run: Run) -> Run:
    assert run.origin is not None
    return replace(run, origin=replace(run.origin, damage=(Damage("truncated tail", 1),)))


OOM = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
AMP, TF32_RULE, SHAPES = operations.no_mixed_precision, operations.no_tf32, operations.odd_shapes
OPTIMIZER, THRASH = optimizing.unfused_optimizer, device.allocator_thrash
SLOW_START = row(call("cudaDeviceGetStreamPriorityRange", 50_000), many(20, "aten::add", ADD, 100))
OWN = "matmul_k(float*, float*, float*, int, int, int)"
ADDS, OWN_MM = many(30, "aten::add", ADD, 100), many(50, "aten::mm", "triton_tem_fused_mm_0", 100)
MM, NINE, FILLED = many(50, "aten::mm", SGEMM, 100), many(9, "aten::mm", HMMA, 100), holding(0.95)
A100_MM, TF32_MM = many(50, "aten::mm", A100_SGEMM, 100), many(50, "aten::mm", TF32, 100)
TILED = "void cutlass::Kernel2<cutlass_{}_tensorop_bf16_{}gemm_bf16_256x128_tn_{}>(P)"


def products(full: int, tf32: int) -> Callable[[], RuleContext]:
    return of(row(many(full, "aten::mm", A100_SGEMM, 200), many(tf32, "aten::mm", TF32, 100)), "A100")


def some_products(count: int) -> Callable[[], RuleContext]:
    return of(row(many(count, "aten::mm", SGEMM, 100), many(50, "aten::add", ADD, 100)))


def mm_of(kernel: str, **extra: float) -> Step:
    return many(20, "aten::mm", kernel, 100, **extra)


def clock(bits: list[float], mhz: list[float]) -> Callable[[], RuleContext]:
    return of(NINE, **read(throttle_reasons=bits, sm_clock_mhz=mhz))


CASES: dict[str, Case] = table(
    # Giving the GPU enough to do
    Rows(
        idle_gpu.launch_bound,
        {
            "short kernels of a slow host": (of(SHORT), 200 * (20 - 4), 0.05),
            "short is what the user says": (of(SHORT, **limits(short_kernel_us=3)), 3200, 0.05),
            "idle for 16 %": (of(many(200, "aten::add", ADD, 16.8)), 200 * 3.2, 0.05),
            "slow under the profiler": (of(many(200, "aten::add", ADD, 10)), 2000, 0.05),
        },
        {
            "idle for 14 %": of(many(200, "aten::add", ADD, 17.2)),
            "long kernels": of(row(many(50, "aten::add", ADD, 100), call("cudaDeviceSynchronize", 5, waits=True))),
            "waiting for data": of(row(load(20_000), SHORT)),
            "CUDA starts within one call": of(SLOW_START),
            "slow under the profiler alone": of(many(200, "aten::add", ADD, 10), unprofiled_us=2020),
        },
    ),
    Rows(
        idle_gpu.small_batch,
        {
            "a fifth full": (of(SHORT, memory=holding(0.2)), 1600, 0.05),
            "half full": (of(SHORT, memory=holding(0.49)), 1600, 0.05),
            "with a loader": (with_loader, 1600, 0.05),
            "not measured": (of(SHORT), UNTOLD),
        },
        {
            "more than half full": of(SHORT, memory=holding(0.51)),
            "waiting for data": of(row(load(20_000), SHORT), memory=holding(1 / 32)),
        },
    ),
    # Waiting for the GPU
    Rows(
        idle_gpu.sync_points,
        {
            "a value read in each step": (of(row(PRODUCTS, item)), 400 + 12),
            "while the GPU works": (of(row(many(40, "aten::mm", SGEMM, 300), event)), 11),  # of 12 ms: next to nothing
            "clocks apart": (clocks_apart(row(PRODUCTS, item)), UNTOLD),
        },
        {"no value read": of(PRODUCTS)},
    ),
    Rows(
        idle_gpu.blocking_copy,
        {
            "from ordinary memory": (of(row(upload(800, False), many(40, "aten::mm", SGEMM, 50))), 800),
            "counts once": (of(row(upload(800, False), many(150, "aten::add", ADD, 3))), 800, 0.1),
        },
        {
            "from pinned memory": of(row(upload(800, True), many(40, "aten::mm", SGEMM, 50))),
            "no batch copied": of(PRODUCTS),
        },
    ),
    # Number formats
    Rows(
        AMP,
        {
            "V100, 32 bits": (of(MM), 50 * 100 * (1 - 15.7 / 125)),
            "A100, 32 bits": (of(A100_MM, "A100"), 5000 * (1 - 19.5 / 312)),
            "A100, TF32": (of(TF32_MM, "A100"), 5000 / 2),
            "A100, mostly 32 bits": (products(40, 1), 8000 * (1 - 19.5 / 312) + 100 / 2),
            "A100, mostly TF32": (products(1, 40), 200 * (1 - 19.5 / 312) + 4000 / 2),
            "A100, both": (products(30, 20), 6000 * (1 - 19.5 / 312) + 2000 / 2),
            "products of 22 %": (some_products(14), 1400 * (1 - 15.7 / 125)),
            "Triton's on an A100": (of(OWN_MM, "A100"), UNTOLD),
            "a GPU that nobody names": (of(MM, "unknown"), UNTOLD),
            "broken kernels": (changed(MM, cut), UNTOLD),
        },
        {
            "products of 18 %": some_products(11),
            "no products": of(many(50, "aten::mm", ADD, 100)),
            "V100, 16 bits": of(mm_of(HMMA)),
            "H100, 16 bits": of(mm_of(BF16), "H100"),
            "GTX 1660, no matrix units": of(MM, "GTX 1660"),
            "Triton's on a GTX 1660": of(OWN_MM, "GTX 1660"),
        },
    ),
    Rows(
        TF32_RULE,
        {"A100, 32 bits": (of(A100_MM, "A100"), 5000 * (1 - 19.5 / 156))},
        {
            "V100, 32 bits": of(MM),
            "A100, TF32": of(TF32_MM, "A100"),
            "H100, 16 bits": of(mm_of(BF16), "H100"),
            "Triton's on an A100": of(OWN_MM, "A100"),
            "a GPU that nobody names": of(MM, "unknown"),
            "broken kernels": changed(MM, cut),  # it is told once
            "a kernel of one's own": of(row(many(1, "aten::add", ADD, 10), own(OWN, 5000)), "A100"),
        },
    ),
    Rows(
        operations.own_kernel,
        {"most of the step": (of(row(many(1, "aten::add", ADD, 10), own(OWN, 5000)), "A100"), "own_kernel")},
        {"of operators": of(MM), "some of the step": of(row(many(80, "aten::add", ADD, 100), own(OWN, 2000)))},
    ),
    # Operations that could be one
    Rows(
        operations.unfused_attention,
        {
            "in steps": (of(ATTENTION), 200),
            "on a CPU": (on_cpu(CPU_ATTENTION), 600),
            "short, on a CPU": (on_cpu(row(*[SHORT_ATTENTION] * 6)), "unfused_attention"),
            "a softmax by hand, backward": (on_cpu(BY_HAND), 14 * 200 + 20),
        },
        {
            "a softmax alone": of(row(mm_of(HMMA), many(1, "aten::_softmax", SOFTMAX, 150))),
            "products far from a softmax": of(FAR_SOFTMAX),
        },
    ),
    Rows(
        operations.memory_bound_ops,
        {"a chain": (of(ADDS), 2900), "on a CPU": (on_cpu(CHAIN), 1400 - 400)},  # the longest remains
        {
            "compiled": of(row(ADDS, many(1, "triton_poi_fused_add_0", "triton_poi_fused_add_0", 10))),
            "calls on a CPU": on_cpu(many(50, "aten::add", "", 0)),
            "products on a CPU": on_cpu(many(20, "aten::linear", "", 0, 300)),
            "of attention": on_cpu(BY_HAND),
            "differentiated twice": on_cpu(row(on_host((f"{EVALUATING}TanhBackwardBackward0", 1)), CHAIN)),
        },
    ),
    Rows(
        OPTIMIZER,
        {
            "zeroing one by one": (of(updating("fused", zeroing=True)), 30 * 20, 0.06),
            "updating one by one": (of(updating("for-loop", zeroing=False)), 60 * (20 - 4)),
            "a user's optimizer": (lion_alone, "unfused_optimizer"),
            "zeroing, clocks apart": (clocks_apart(updating("fused", zeroing=True)), UNTOLD),
            "updating, clocks apart": (clocks_apart(updating("for-loop", zeroing=False)), UNTOLD),
        },
        {
            "a fused update": of(updating("fused", zeroing=False)),
            "a fused update, clocks apart": clocks_apart(updating("fused", zeroing=False)),
        },
    ),
    # Layout and sizes
    Rows(operations.layout, {"images": (of(IMAGES), 200)}, {"nothing rearranged": of(mm_of(HMMA))}),
    Rows(
        SHAPES,
        {
            "a kernel for odd sizes": (of(mm_of(TILED.format(75, "s1688", "align1")), "H100"), "odd_shapes"),
            "a kernel that does not tell": (of(mm_of("nvjet_tst_64x64_64x16_2x1_2cta_v_bz_bias_TNT"), "H100"), UNTOLD),
            "a depth of 60": (with_sizes(64, 64, 60), "odd_shapes"),
            "a vocabulary of 50257": (with_sizes(64, 50257, 64), "odd_shapes"),
            "a vocabulary of 50264": (with_sizes(64, 50264, 64), "odd_shapes"),
        },
        {
            "a kernel for sizes that fit": of(mm_of(TILED.format(80, "s16816", "align8")), "H100"),
            "a kernel for TF32": of(mm_of(TF32), "H100"),
            "a kernel without matrix units": of(mm_of(SGEMM), "H100"),
            "7 rows": with_sizes(7, 64, 64),
            "a vocabulary of 50304": with_sizes(64, 50304, 64),
        },
    ),
    # Memory
    Rows(
        THRASH,
        {"in each step": (of(THRASHING), 600, 0.1), "clocks apart": (clocks_apart(THRASHING), UNTOLD)},
        {"at first": allocated_at_first, "clocks apart": clocks_apart(updating("fused", zeroing=False))},
    ),
    Rows(
        device.memory_pressure,
        {
            "91 % full": (of(NINE, memory=holding(0.91)), "memory_pressure"),
            "and requested again": (of(THRASHING, memory=FILLED), "memory_pressure"),
            "and it ended": (of(BUSY, memory=FILLED, outcome_detail=OOM), "memory_pressure"),
            "not measured, but requested again": (of(THRASHING, memory=holding(None)), UNTOLD),
        },
        {"89 % full": of(NINE, memory=holding(0.89)), "not measured": of(BUSY, memory=holding(None))},
    ),
    Rows(first, {"full on purpose": (of(BUSY, memory=FILLED), "healthy")}),
    Rows(
        device.memory_underused,
        {
            "a 32nd": (of(mm_of(HMMA, blocks_per_sm=0.2), memory=holding(1 / 32)), "memory_underused"),
            "not measured, with room": (of(mm_of(HMMA, blocks_per_sm=0.2)), UNTOLD),
        },
        {
            "not measured, without room": of(mm_of(HMMA, blocks_per_sm=2.0)),
            "waiting for data": of(row(load(20_000), SHORT), memory=holding(1 / 32)),
        },
    ),
    # A GPU that has nothing to do, or cannot give all it has
    Rows(
        device.gpu_shared,
        {
            "two other programs": (of(NINE, **read(other_gpu_processes=[0, 2, 2])), "gpu_shared"),
            "not read in a trace": (of(NINE), UNTOLD),
            "not seen": (changed(NINE, unread), UNTOLD),
        },
        {
            "no other program": of(NINE, **read(other_gpu_processes=[0, 0, 0])),
            "seldom": of(NINE, **read(other_gpu_processes=[0, 2, 2]), **limits(readings_notice=0.8)),
        },
    ),
    Rows(
        device.throttled,
        {
            "heat": (clock([0, 0x20, 0x20, 0x20], [1500, 1200, 1200, 1200]), 0.2 * 900),
            "power": (clock([0, 4, 4, 4], [1500, 1200, 1200, 1200]), 0.2 * 900),
            "not read in a trace": (of(NINE), UNTOLD),
        },
        {
            "no reason": clock([0, 0, 0, 0], [1500, 1500, 1500, 1500]),
            "power, and none the slower": clock([4, 4, 4, 4], [1500, 1500, 1500, 1500]),
            "idle": clock([1, 1, 1, 1], [1500, 300, 300, 300]),
        },
    ),
)


@cache
def answer(name: str) -> Answer:
    return check(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_a_rule_speaks_where_its_cause_is_and_only_there(name: str) -> None:
    answer(name)


def test_what_is_said_is_the_golden_text() -> None:
    assert_golden("findings_device", {name: answer(name) for name in CASES})


@pytest.mark.parametrize(
    "make",
    [
        lambda: loop(row(BUSY, call("cudaEventSynchronize", 1))).case(),
        lambda: RuleContext(synthetic.cpu_case().facts, DEFAULT),
        lambda: RuleContext(synthetic.no_trace_case().facts, DEFAULT),
    ],
    ids=["healthy", "on a CPU", "without a trace"],
)
def test_nobody_has_anything_to_say(make: Callable[[], RuleContext]) -> None:
    case = make()
    told = [a for rule in MINE if isinstance(a := rule(case), Finding)]
    assert [f.key for f in told if (f.recoverable_us_per_step or 0) >= DEFAULT.silence * (case.step_us or 0)] == []
    assert case.on_gpu or not [rule for rule in MINE if isinstance(rule(case), Undetermined)]


@given(st.lists(st.sampled_from("pmo"), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_chains_against_counting_them_one_by_one(kinds: list[str]) -> None:
    parts = [many(1, *(("aten::mm", SGEMM) if kind == "m" else ("aten::add", ADD)), 10, 10) for kind in kinds]
    work = loop(row(*parts), 1).facts().work
    assert work is not None
    lengths = [len(chain) for chain in "".join(kinds).replace("o", "p").split("m") if len(chain) >= 2]
    chains = pointwise_chains(work)
    assert (chains is None) is (not lengths)
    if chains is not None:
        assert (chains.chains, chains.kernels, chains.longest) == (len(lengths), sum(lengths), max(lengths))
        assert chains.share == pytest.approx(sum(lengths) / len(kinds))
        assert chains.saved_share == pytest.approx(sum(n - 1 for n in lengths) / len(kinds))


# Real traces

BATCHES = {"small_batch", "memory_underused"}
LOADING = {"data_starved", "cpu_preprocessing", "storage_bound", "slow_collate"}


@cache
def traced(name: str) -> Facts:
    return facts(load_run(path(name)))


@pytest.mark.parametrize(
    ("name", "headline", "also", "never"),
    [
        ("v100_resnet50_workers0", "data_starved", {"unfused_optimizer", "no_mixed_precision"}, BATCHES),
        ("v100_resnet50_workers4", "no_mixed_precision", {"unfused_optimizer"}, LOADING | BATCHES),
        ("v100_ddp_healthy", "no_mixed_precision", set(), LOADING | BATCHES | {"launch_bound"}),
        ("h100_owlv2_starved", "data_starved", {"unfused_attention", "odd_shapes"}, BATCHES | {"launch_bound"}),
        ("b200_moe_launch_bound", "launch_bound", set(), {"data_starved", "no_mixed_precision"}),
        ("mi300_resnet_healthy", "exposed_communication", {"layout"}, LOADING | {"launch_bound"}),
        ("a100_8ranks_rank3", "exposed_communication", set(), {"data_starved", "launch_bound"}),
        ("a100_alexnet_sync_events", "start_up", set(), {"launch_bound", "allocator_thrash"}),
        ("v100_dlrm_8ranks/rank0", "exposed_communication", {"launch_bound"}, {"data_starved"}),
    ],
)
def test_real_traces(name: str, headline: str, also: set[str], never: set[str]) -> None:
    result = diagnose(traced(name), predict_cures=False)
    keys = [f.key for f in result.findings]
    assert keys[0] == headline and also <= set(keys) and not never & set(keys)
    assert result.total_us is not None
    assert sum(f.recoverable_us_per_step or 0 for f in result.findings) <= result.total_us * (1 + 1e-9)
    assert not [u for u in result.untold if FAULT in u.record]
    if never >= BATCHES:
        advice = " ".join(f"{f.cure} {f.knob}" for f in result.findings)
        assert not any(words in advice for words in ("larger batch", "batch size", "batch_size"))


def test_the_starved_trace_gives_back_what_its_cure_saved() -> None:
    first = diagnose(traced("v100_resnet50_workers0")).first
    assert first.recoverable_us_per_step == pytest.approx(55e3, abs=5e3)  # four workers saved 50 ms of each step
    assert dict(first.settings) == {"workers": "2"}


def test_zeroing_the_gradients_of_a_real_resnet() -> None:
    """The folder's own table: 5.8 ms of each step idle under zero_grad."""
    updating = traced("v100_resnet50_workers0").optimizer
    assert updating is not None and updating.zeroing == 161
    assert updating.zero_idle_us == pytest.approx(5_800, rel=0.02)


def test_chains_stand_beside_what_takes_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they lie in it is not known: their own evidence comes first, and no line is theirs."""
    alone = operations.memory_bound_ops(on_cpu(CHAIN)())
    line = Place("cell", 6, "", "pairs = match(x)")
    part = Call(line, "match", 37, 100, 0.37, (0.3, 0.44), 100.0, np.empty((0, 2), np.int64))
    monkeypatch.setattr(operations, "leading_part", lambda _: part)
    beside = operations.memory_bound_ops(on_cpu(CHAIN)())
    assert alone is not None and beside is not None and not beside.source_line
    assert beside.summary == f"{alone.summary} `match`, called in your line 6, takes 37 % of each step."
    assert beside.evidence[:-2] == alone.evidence and beside.recoverable_us_per_step == alone.recoverable_us_per_step
