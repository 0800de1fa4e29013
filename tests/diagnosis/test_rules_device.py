"""The rules of the device's side: on loops with one planted cause each, on loops without, and on real traces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import gpulab
from gpulab.analysis.facts import facts
from gpulab.analysis.gpu.chains import pointwise_chains
from gpulab.analysis.gpu.kernel_classes import class_of
from gpulab.diagnosis.context import Rule, RuleContext
from gpulab.diagnosis.diagnose import diagnose
from gpulab.diagnosis.finding import Finding, Undetermined
from gpulab.diagnosis.rules import distributed, launches, memory, operations, precision, sharing, transfers
from gpulab.diagnosis.rules import optimizer as optimizing
from gpulab.run import Category, Damage, DeviceProperties, Loader, Memory, Missing, Samples, Series
from gpulab.thresholds import DEFAULT
from gpulab.timeline import kernel_names
from gpulab.trace.load import load_run
from tests.support import loaded_traces, synthetic
from tests.support.loops import Machine, loop
from tests.support.real_traces import path

MINE: tuple[Rule, ...] = (
    launches.launch_bound,
    launches.small_batch,
    transfers.sync_points,
    transfers.blocking_copy,
    precision.no_mixed_precision,
    precision.no_tf32,
    operations.unfused_attention,
    optimizing.unfused_optimizer,
    operations.memory_bound_ops,
    operations.layout,
    operations.odd_shapes,
    memory.allocator_thrash,
    memory.memory_pressure,
    memory.memory_underused,
    distributed.exposed_communication,
    sharing.gpu_shared,
    sharing.throttled,
)
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
SGEMM = "volta_sgemm_128x64_nn"
HMMA = "turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_nn"
BF16 = "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_nn"
TF32 = "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x128_32x3_nn_align4>(Params)"
SOFTMAX = "void softmax_warp_forward<float>(float*)"


def told(answer: Finding | Undetermined | None) -> Finding:
    assert isinstance(answer, Finding), answer
    return answer


def worth(case: RuleContext, answer: Finding | Undetermined | None) -> float:
    """Share of the step that a finding would give back; 0 without one."""
    return (answer.recoverable_us_per_step or 0.0) / (case.step_us or 1.0) if isinstance(answer, Finding) else 0.0


def many(count: int, name: str, kernel: str, gpu_us: float, host_us: float = 20) -> Callable[[Machine], None]:
    def step(machine: Machine) -> None:
        for _ in range(count):
            machine.operator(name, kernel, gpu_us, host_us)

    return step


# -- giving the GPU enough to do ---------------------------------------------------------------------------------------


def test_short_kernels_of_a_slow_host_are_launch_bound() -> None:
    case = loop(many(200, "aten::add", ADD, gpu_us=4)).case()
    finding = told(launches.launch_bound(case))
    assert case.step_us == pytest.approx(4000, rel=0.02)
    assert finding.recoverable_us_per_step == pytest.approx(200 * (20 - 4), rel=0.05)
    assert finding.confidence == "measured" and finding.level == "bad"
    assert dict(finding.settings) == {"compile": "reduce-overhead"}


def test_the_users_threshold_says_which_operations_are_short() -> None:
    def words(limit_us: float) -> str:
        case = loop(many(200, "aten::add", ADD, gpu_us=4)).case(
            thresholds=DEFAULT.changed({"short_kernel_us": limit_us})
        )
        return " ".join(e.words for e in told(launches.launch_bound(case)).evidence)

    assert "100 % of the GPU's operations last less than 10 µs" in words(10)
    assert "0 % of the GPU's operations last less than 3 µs" in words(3)


def test_long_kernels_are_not() -> None:
    def step(machine: Machine) -> None:
        many(50, "aten::add", ADD, gpu_us=100)(machine)
        machine.call("cudaDeviceSynchronize", 5, waits=True)

    assert launches.launch_bound(loop(step).case()) is None


def test_waiting_for_data_is_not_launch_bound_or_small_batch() -> None:
    def step(machine: Machine) -> None:
        machine.load(20_000)
        many(200, "aten::add", ADD, gpu_us=4)(machine)

    case = loop(step).case(memory=Memory(peak_allocated_bytes=1 << 30, total_bytes=32 << 30))
    for rule in (launches.launch_bound, launches.small_batch, memory.memory_underused):
        assert rule(case) is None


def test_one_long_gap_is_not_made_of_launches() -> None:
    """Starting up CUDA inside one call, as in a100_alexnet_sync_events."""

    def step(machine: Machine) -> None:
        machine.call("cudaDeviceGetStreamPriorityRange", 50_000)
        many(20, "aten::add", ADD, gpu_us=100)(machine)

    assert launches.launch_bound(loop(step).case()) is None


def test_what_only_the_profiler_makes_slow_is_not_told() -> None:
    """Without the profiler the step is as short as the GPU's work: there is nothing left to give back."""
    machine = loop(many(200, "aten::add", ADD, gpu_us=10))
    profiled = machine.case()
    assert worth(profiled, launches.launch_bound(profiled)) > 0.3
    assert launches.launch_bound(machine.case(unprofiled_us=2020)) is None


@pytest.mark.parametrize(("peak", "said"), [(0.2, True), (0.8, False)])
def test_a_small_batch_is_half_idle_and_half_empty(peak: float, said: bool) -> None:
    loader = Loader("Digits", 1000, 16, 0, None, False, False, 63, False)
    held = Memory(peak_allocated_bytes=int(peak * (32 << 30)), total_bytes=32 << 30)
    machine = loop(many(100, "aten::add", ADD, gpu_us=4))
    case = RuleContext(machine.facts("V100", held, changes=None), DEFAULT)
    answer = launches.small_batch(case)
    assert isinstance(answer, Finding) == said
    if isinstance(answer, Finding):
        assert answer.settings == () and "Double" in answer.cure  # nothing is known of the loader
        assert launches._larger(_with_loader(case, loader)) == (("batch_size", "32"),)


def _with_loader(case: RuleContext, loader: Loader) -> RuleContext:
    return RuleContext(replace(case.facts, run=replace(case.facts.run, loader=loader)), DEFAULT)


def test_without_memory_figures_a_larger_batch_is_undetermined() -> None:
    answer = launches.small_batch(loop(many(100, "aten::add", ADD, gpu_us=4)).case())
    assert isinstance(answer, Undetermined) and "profile_memory=True" in answer.record


# -- waiting for the GPU -----------------------------------------------------------------------------------------------


def reading(every_step: bool, name: str = "aten::item") -> Callable[[Machine], None]:
    def step(machine: Machine) -> None:
        many(40, "aten::mm", SGEMM, gpu_us=30)(machine)
        if every_step:
            machine.item(name)
            machine.python(400)  # what the program does with it, while the GPU has nothing to do

    return step


def test_reading_a_value_costs_the_idle_time_that_follows() -> None:
    case = loop(reading(True)).case()
    finding = told(transfers.sync_points(case))
    idle = (case.idle or 0.0) * (case.step_us or 0.0)
    assert 400 <= (finding.recoverable_us_per_step or 0.0) <= idle + 1
    assert ".item()" in finding.evidence[0].words and "in each step" in finding.summary
    (calls,) = case.facts.blocking
    assert calls.per_step == 2 and 400 <= calls.idle_us <= idle  # the copy into ordinary memory, and the wait for it


def test_no_value_is_read() -> None:
    case = loop(reading(False)).case()
    assert transfers.sync_points(case) is None and transfers.blocking_copy(case) is None


def test_waiting_while_the_gpu_works_costs_nothing() -> None:
    """Read back with more work already started, as a healthy loop does: the GPU never runs dry."""

    def step(machine: Machine) -> None:
        many(40, "aten::mm", SGEMM, gpu_us=300)(machine)
        waiting = machine.host
        machine.host = max(machine.host, machine.free - 2_000)  # an event of work before the last 2 ms
        machine._span("cudaEventSynchronize", Category.CUDA_RUNTIME, waiting, machine.host)

    case = loop(step).case()
    assert worth(case, transfers.sync_points(case)) < DEFAULT.silence


@pytest.mark.parametrize("pinned", [False, True])
def test_batches_from_ordinary_memory(pinned: bool) -> None:
    def step(machine: Machine) -> None:
        machine.upload(800, pinned)
        many(40, "aten::mm", SGEMM, gpu_us=50)(machine)

    case = loop(step).case()
    answer = transfers.blocking_copy(case)
    assert isinstance(answer, Finding) != pinned
    if isinstance(answer, Finding):
        assert answer.settings == (("pin_memory", "True"),) and (answer.recoverable_us_per_step or 0) >= 800
        assert "MiB" in answer.evidence[0].words
        assert "does nothing" not in answer.cure  # pinned memory alone makes the copy faster


def test_a_copy_that_the_host_waits_for_counts_once() -> None:
    """The GPU idles for launches all the time: that is no time of the copy's."""

    def step(machine: Machine) -> None:
        machine.upload(800, pinned=False)
        many(150, "aten::add", ADD, gpu_us=3, host_us=20)(machine)

    case = loop(step).case()
    assert case.step_us == pytest.approx(800 + 150 * 20, rel=0.05)
    assert told(transfers.blocking_copy(case)).recoverable_us_per_step == pytest.approx(800, rel=0.1)


# -- number formats ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "kernel", "amp", "tf32"),
    [
        ("V100", SGEMM, "fp16", False),
        ("A100", "ampere_sgemm_128x64_nn", "bf16", True),
        ("A100", TF32, "bf16", False),
        ("V100", HMMA, None, False),
        ("H100", BF16, None, False),
        ("GTX 1660", SGEMM, None, False),
        ("V100", ADD, None, False),
    ],
)
def test_shorter_numbers(gpu: str, kernel: str, amp: str | None, tf32: bool) -> None:
    case = loop(many(50, "aten::mm", kernel, gpu_us=100)).case(gpu)
    answer = precision.no_mixed_precision(case)
    assert (dict(answer.settings).get("amp") if isinstance(answer, Finding) else None) == amp
    assert isinstance(precision.no_tf32(case), Finding) == tf32


@pytest.mark.parametrize(("gpu", "untold"), [("A100", True), ("GTX 1660", False)])
def test_products_of_triton_are_not_taken_for_full_precision(gpu: str, untold: bool) -> None:
    case = loop(many(50, "aten::mm", "triton_tem_fused_mm_0", gpu_us=100)).case(gpu)
    answer = precision.no_mixed_precision(case)
    assert isinstance(answer, Undetermined) if untold else answer is None
    assert precision.no_tf32(case) is None


def test_sixteen_bits_save_at_most_the_ratio_of_the_peaks() -> None:
    case = loop(many(50, "aten::mm", SGEMM, gpu_us=100)).case("V100")
    finding = told(precision.no_mixed_precision(case))
    assert finding.recoverable_us_per_step == pytest.approx(50 * 100 * (1 - 15.7 / 125), rel=0.02)


@pytest.mark.parametrize(
    ("full", "tf32", "told_of", "never"),
    [
        (1, 40, ["in TF32", "2.0 times as fast as those in TF32"], ["16 times", "no matrix unit"]),
        (40, 1, ["16 times as fast as those of 32 bits", "which uses no matrix unit"], ["TF32"]),
        (
            30,
            20,
            ["16 times as fast as those of 32 bits and 2.0 times as fast as those in TF32"],
            ["multiplies in TF32"],
        ),
    ],
)
def test_the_gain_that_is_told_is_over_the_format_that_is_used(
    full: int, tf32: int, told_of: list[str], never: list[str]
) -> None:
    def step(machine: Machine) -> None:
        many(full, "aten::mm", "ampere_sgemm_128x64_nn", gpu_us=200)(machine)
        many(tf32, "aten::mm", TF32, gpu_us=100)(machine)

    finding = told(precision.no_mixed_precision(loop(step).case("A100")))
    words = "; ".join([finding.summary, *(e.words for e in finding.evidence)])
    assert all(part in words for part in told_of) and not any(part in words for part in never)
    assert ("cutlass::Kernel" in words) is (tf32 > full) and ("ampere_sgemm" in words) is (full > tf32)


def test_few_matrix_products_are_not_worth_it() -> None:
    def step(machine: Machine) -> None:
        many(8, "aten::mm", SGEMM, gpu_us=100)(machine)
        many(50, "aten::add", ADD, gpu_us=100)(machine)

    assert precision.no_mixed_precision(loop(step).case()) is None


def test_a_gpu_that_nobody_names() -> None:
    case = loop(many(50, "aten::mm", SGEMM, gpu_us=100)).case("unknown")
    answer = precision.no_mixed_precision(case)
    assert isinstance(answer, Undetermined) and "deviceProperties" in answer.record
    assert precision.no_tf32(case) is None


@pytest.mark.parametrize(
    ("kernel", "kind", "numbers"),
    [
        (SGEMM, "matrix", "fp32"),
        ("void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int)", "matrix", "fp32"),
        ("sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw", "matrix", "tf32"),
        (TF32, "matrix", "tf32"),
        (BF16, "matrix", "narrow"),
        ("void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_256x128_tn_align1>(P)", "matrix", "narrow"),
        ("volta_dgemm_64x64_nn", "matrix", ""),
        ("void fbgemm_gpu::permute_indices_weights_kernel<false, int>(int)", "other", None),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512>(T)", "normalization", None),
        ("void cudnn::ops::nchwToNhwcKernel<float, float>(P)", "layout", None),
        ("batched_transpose_16x32_half", "layout", None),
        ("flash_fwd_kernel", "attention", None),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication", None),
        ("triton_poi_fused_add_0", "pointwise", None),
        ("Memcpy HtoD (Pageable -> Device)", "copy", None),
        ("_ZN2at6native13reduce_kernelILi512E", "reduction", None),
        ("some_kernel_of_a_user", "other", None),
    ],
)
def test_what_a_kernel_does_by_its_name(kernel: str, kind: str, numbers: str | None) -> None:
    assert class_of(kernel) == kind
    if numbers is not None:
        assert kernel_names.reading(kernel).numbers == numbers


def test_what_the_name_does_not_tell_the_operator_does() -> None:
    assert class_of("some_kernel", "aten::addmm") == "matrix"
    assert class_of("some_kernel", "aten::_softmax") == "normalization"


# -- operations that could be one --------------------------------------------------------------------------------------


def attention(machine: Machine) -> None:
    machine.operator("aten::bmm", HMMA, 100)
    machine.operator("aten::mul", ADD, 50)
    machine.operator("aten::_softmax", SOFTMAX, 150)
    machine.operator("aten::bmm", HMMA, 100)
    many(10, "aten::mm", HMMA, 60)(machine)


def test_attention_in_steps_by_the_time_between_its_products() -> None:
    case = loop(attention).case()
    finding = told(operations.unfused_attention(case))
    assert finding.recoverable_us_per_step == pytest.approx(200, rel=0.03) and finding.settings == ()
    assert "scaled_dot_product_attention" in finding.cure


def test_a_softmax_alone_is_no_attention() -> None:
    def step(machine: Machine) -> None:
        many(10, "aten::mm", HMMA, 60)(machine)
        machine.operator("aten::_softmax", SOFTMAX, 150)

    assert operations.unfused_attention(loop(step).case()) is None


def test_products_far_away_from_a_softmax_are_not_its_own() -> None:
    def step(machine: Machine) -> None:
        machine.operator("aten::bmm", HMMA, 100)
        many(30, "aten::add", ADD, 20)(machine)
        machine.operator("aten::_softmax", SOFTMAX, 150)
        machine.operator("aten::bmm", HMMA, 100)

    assert operations.unfused_attention(loop(step).case()) is None


@given(st.lists(st.sampled_from("pmo"), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_chains_against_counting_them_one_by_one(kinds: list[str]) -> None:
    def step(machine: Machine) -> None:
        for kind in kinds:
            machine.operator("aten::mm" if kind == "m" else "aten::add", SGEMM if kind == "m" else ADD, 10)

    work = loop(step, 1).facts().work
    assert work is not None
    runs, current = [], 0
    for kind in [*kinds, "m"]:
        if kind != "m":
            current += 1
        else:
            runs += [current] if current >= 2 else []
            current = 0
    found = pointwise_chains(work)
    if not runs:
        assert found is None
        return
    assert found is not None
    assert (found.chains, found.kernels, found.longest) == (len(runs), sum(runs), max(runs))
    assert found.share == pytest.approx(sum(runs) / len(kinds))
    assert found.saved_share == pytest.approx(sum(n - 1 for n in runs) / len(kinds))


def test_a_compiled_model_is_not_told_to_compile() -> None:
    def step(machine: Machine) -> None:
        many(30, "aten::add", ADD, 100)(machine)
        machine.operator("triton_poi_fused_add_0", "triton_poi_fused_add_0", 10)

    assert operations.memory_bound_ops(loop(step).case()) is None
    assert told(operations.memory_bound_ops(loop(many(30, "aten::add", ADD, 100)).case())).key == "memory_bound_ops"


def on_cpu(step: Callable[[Machine], None]) -> RuleContext:
    """The same loop where all is computed by the host: nothing is started anywhere."""
    found = loop(step).facts()
    run = replace(found.run, device=synthetic.cpu_case().facts.run.device)
    return RuleContext(facts(run), DEFAULT)


def chain(machine: Machine) -> None:
    machine.operator("aten::linear", host_us=300)
    for _ in range(5):
        machine.operator("aten::mul", host_us=200)
        machine.operator("aten::copy_", host_us=2)  # the number that it is multiplied with
    machine.operator("aten::tanh", host_us=400)


def test_chains_on_a_cpu_are_told_where_they_weigh() -> None:
    finding = told(operations.memory_bound_ops(case := on_cpu(chain)))
    assert (
        finding.recoverable_us_per_step == pytest.approx(1400 - 400, rel=0.02) and case.idle is None
    )  # the longest remains
    assert (
        operations.memory_bound_ops(on_cpu(many(50, "aten::add", "", 0, host_us=20))) is None
    )  # only their calls cost
    assert operations.memory_bound_ops(on_cpu(many(20, "aten::linear", "", 0, host_us=300))) is None


def test_attention_on_a_cpu() -> None:
    def step(machine: Machine) -> None:
        machine.operator("aten::bmm", host_us=300)
        machine.operator("aten::div", host_us=200)
        machine.operator("aten::_softmax", host_us=400)
        machine.operator("aten::bmm", host_us=300)
        machine.operator("aten::linear", host_us=800)

    finding = told(operations.unfused_attention(on_cpu(step)))
    assert finding.recoverable_us_per_step == pytest.approx(600, rel=0.02)


def test_the_backward_pass_of_a_softmax_by_hand_is_attention_too() -> None:
    def step(machine: Machine) -> None:
        machine.operator("aten::bmm", host_us=300)
        for _ in range(20):
            machine.operator("aten::as_strided", host_us=1)  # a view of it, as any number of them
        for name in ("aten::div", "aten::neg", "aten::mul", "aten::sum", "ExpBackward0", "aten::mul", "aten::neg"):
            machine.operator(name, host_us=200)
        for name in ("aten::sum", "aten::eq", "aten::copy_", "aten::div", "aten::mul", "aten::add_", "aten::mul"):
            machine.operator(name, host_us=200)
        machine.operator("aten::bmm", host_us=300)
        machine.operator("aten::linear", host_us=800)

    case = on_cpu(step)
    assert told(operations.unfused_attention(case)).recoverable_us_per_step == pytest.approx(14 * 200 + 20, rel=0.02)
    assert operations.memory_bound_ops(case) is None, "its pointwise operations go where attention becomes one"


# -- the optimizer -----------------------------------------------------------------------------------------------------


def updating(style: str, zeroing: bool) -> Callable[[Machine], None]:
    def step(machine: Machine) -> None:
        many(20, "aten::mm", HMMA, gpu_us=100, host_us=20)(machine)
        machine.call("cudaDeviceSynchronize", 1, waits=True)
        start = machine.host
        for _ in range(30 if zeroing else 0):
            machine.operator("aten::zero_", "void FillFunctor<float>(int)", 2, 20)
        machine.mark("Optimizer.zero_grad#SGD.zero_grad", start)
        start = machine.host
        name = {"for-loop": "aten::add_", "foreach": "aten::_foreach_add_", "fused": "aten::_fused_sgd_"}[style]
        for _ in range({"for-loop": 60, "foreach": 4, "fused": 1}[style]):
            machine.operator(name, ADD, 4, 20)
        machine.mark("Optimizer.step#SGD.step", start)

    return step


def test_zeroing_gradients_one_by_one_costs_idle_gpu_time() -> None:
    case = loop(updating("fused", zeroing=True)).case()
    finding = told(optimizing.unfused_optimizer(case))
    assert "30 calls per step set gradients to zero" in finding.evidence[0].words
    assert finding.recoverable_us_per_step == pytest.approx(30 * 20, rel=0.06)
    assert "set_to_none=True" in finding.cure and finding.settings == ()


def test_an_update_parameter_by_parameter() -> None:
    case = loop(updating("for-loop", zeroing=False)).case()
    finding = told(optimizing.unfused_optimizer(case))
    assert finding.settings == (("fused_optimizer", "True"),) and "one by one" in finding.evidence[0].words
    assert 60 * 16 <= (finding.recoverable_us_per_step or 0) <= 60 * 20


def test_a_fused_update_is_left_alone() -> None:
    assert optimizing.unfused_optimizer(loop(updating("fused", zeroing=False)).case()) is None


def lion(tensors_us: Sequence[float]) -> Callable[[Machine], None]:
    """A small model, updated by an optimizer of the user's own; so long takes each of its operators on each tensor."""

    def step(machine: Machine) -> None:
        machine.operator("aten::linear", host_us=40)
        machine.operator("autograd::engine::evaluate_function: AddmmBackward0", host_us=80)
        start = machine.host
        for us in tensors_us:
            for name in ("mul", "mul", "add", "sign", "add_", "mul_", "add_"):
                machine.operator(f"aten::{name}", host_us=us)
                machine.python(5)
        machine.mark("Optimizer.step#Lion.step", start)

    return step


def test_a_users_optimizer_that_loops_over_tensors() -> None:
    tensors_us = [3.0] * 120
    update_us = sum(7 * (us + 5) for us in tensors_us)
    run = loop(lion(tensors_us)).facts(unprofiled_us=120 + update_us).run
    steps = replace(run.steps, optimizer_ns=np.full(len(run.steps), int(update_us * 1e3), np.int64))
    device = synthetic.cpu_case().facts.run.device
    case = RuleContext(facts(replace(run, steps=steps, device=device)), DEFAULT)
    assert case.facts.optimizer is not None and case.facts.optimizer.style == "for-loop"
    assert case.facts.optimizer.operators == 7 * len(tensors_us)
    finding = told(optimizing.unfused_optimizer(case))
    assert finding.settings == () and "torch._foreach_ operators" in finding.cure and "Lion.step" in finding.cure
    saved_us = finding.recoverable_us_per_step or 0
    assert saved_us > 0.15 * (case.step_us or 0)


def test_a_real_users_optimizer_shows_each_operator() -> None:
    class Lion(torch.optim.Optimizer):
        def __init__(self, params: Iterable[torch.nn.Parameter]) -> None:
            super().__init__(params, {"lr": 1e-4})

        @torch.no_grad()
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.add_((0.9 * mean + 0.1 * p.grad).sign(), alpha=-1e-4)
                mean.mul_(0.99).add_(p.grad, alpha=0.01)

    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    optimizer = Lion(model.parameters())
    with gpulab.profile(show=False, save=False, live=False, device="cpu") as p:
        for _ in range(25):
            optimizer.zero_grad()
            model(torch.ones(8, 16)).sum().backward()
            optimizer.step()
    found = facts(p.run).optimizer
    assert found is not None and (found.name, found.style) == ("Lion", "for-loop")
    assert found.operators >= 7 * 8, "of eight tensors"


# -- layout and sizes --------------------------------------------------------------------------------------------------


def test_images_rearranged_around_convolutions() -> None:
    def step(machine: Machine) -> None:
        many(10, "aten::cudnn_convolution", HMMA, 100)(machine)
        many(10, "aten::cudnn_convolution", "void cudnn::ops::nchwToNhwcKernel<float>(P)", 20)(machine)

    finding = told(operations.layout(loop(step).case()))
    assert finding.recoverable_us_per_step == pytest.approx(200, rel=0.03)
    assert finding.settings == (("channels_last", "True"),)
    assert operations.layout(loop(many(10, "aten::mm", HMMA, 100)).case()) is None


@pytest.mark.parametrize(
    ("kernel", "answer"),
    [
        ("void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_256x128_tn_align1>(P)", Finding),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_tn_align8>(P)", type(None)),
        (TF32, type(None)),
        (SGEMM, type(None)),
        ("nvjet_tst_64x64_64x16_2x1_2cta_v_bz_bias_TNT", Undetermined),
    ],
)
def test_sizes_that_do_not_fit_as_kernels_tell(kernel: str, answer: type) -> None:
    assert isinstance(operations.odd_shapes(loop(many(10, "aten::mm", kernel, 100)).case("H100")), answer)


@pytest.mark.parametrize(("m", "n", "k", "odd"), [(7, 64, 64, False), (64, 64, 60, True), (64, 50257, 64, True),
                                                 (64, 50304, 64, False), (64, 50264, 64, True)])  # fmt: skip
def test_sizes_that_do_not_fit_as_shapes_tell(m: int, n: int, k: int, odd: bool) -> None:
    found = loop(many(10, "aten::mm", "nvjet_tst_64x64", 100)).facts("H100")
    timeline = found.run.timeline
    assert timeline is not None and found.work is not None
    product = np.array([timeline.names[i] == "aten::mm" for i in timeline.name_id])
    sizes = {
        f"product_{name}": np.where(product, float(size), np.nan) for name, size in zip("mnk", (m, n, k), strict=True)
    }
    with_sizes = replace(timeline, extra={**timeline.extra, **sizes})
    work = replace(found.work, timeline=with_sizes)
    answer = operations.odd_shapes(RuleContext(replace(found, work=work), DEFAULT))
    assert isinstance(answer, Finding) == odd and not isinstance(answer, Undetermined)
    if isinstance(answer, Finding):
        assert f"{m} × {n} × {k}" in answer.evidence[1].words


# -- memory ------------------------------------------------------------------------------------------------------------


def test_memory_requested_in_every_step() -> None:
    def step(machine: Machine) -> None:
        many(20, "aten::mm", HMMA, 100)(machine)
        machine.call("cudaDeviceSynchronize", 1, waits=True)
        machine.call("cudaFree", 300)
        machine.call("cudaMalloc", 300)

    finding = told(memory.allocator_thrash(loop(step).case()))
    assert finding.recoverable_us_per_step == pytest.approx(600, rel=0.1) and finding.parts == ("allocator",)


def test_memory_requested_in_the_first_step_only() -> None:
    machine = Machine()
    machine.call("cudaMalloc", 30_000)
    for _ in range(6):
        many(20, "aten::mm", HMMA, 100)(machine)
        machine.end_step()
    assert memory.allocator_thrash(machine.case()) is None


@pytest.mark.parametrize(("peak", "said"), [(0.95, True), (0.85, False)])
def test_memory_that_is_nearly_full(peak: float, said: bool) -> None:
    held = Memory(peak_allocated_bytes=int(peak * (32 << 30)), total_bytes=32 << 30)
    answer = memory.memory_pressure(loop(many(9, "aten::mm", HMMA, 100)).case(memory=held))
    assert isinstance(answer, Finding) == said


def full(step: Callable[[Machine], None], peak: float | None = 0.95, outcome: str = "", count: int = 6) -> RuleContext:
    held = Memory(total_bytes=32 << 30)
    if peak is not None:
        held = replace(held, peak_allocated_bytes=int(peak * (32 << 30)))
    return loop(step, count).case(memory=held, outcome_detail=outcome)


def thrashing(machine: Machine) -> None:
    many(20, "aten::mm", HMMA, 100)(machine)
    machine.call("cudaDeviceSynchronize", 1, waits=True)
    machine.call("cudaFree", 300)
    machine.call("cudaMalloc", 300)


def test_memory_that_is_filled_on_purpose_is_a_hint() -> None:
    case = full(many(50, "aten::mm", HMMA, 200))
    finding = told(memory.memory_pressure(case))
    assert finding.confidence == "possible" and finding.cure.startswith("Nothing, as long as it fits")
    assert diagnose(case.facts, predict_cures=False).first.key == "healthy"


@pytest.mark.parametrize(
    ("step", "outcome", "shown"),
    [
        (thrashing, "", "memory from the driver"),
        (
            many(50, "aten::mm", HMMA, 200),
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
            "ended with",
        ),
    ],
)
def test_memory_that_was_too_little_is_none(step: Callable[[Machine], None], outcome: str, shown: str) -> None:
    finding = told(memory.memory_pressure(full(step, outcome=outcome)))
    assert finding.confidence == "measured" and shown in finding.evidence[1].words
    assert "smaller batch" in finding.cure and "Nothing" not in finding.cure


@pytest.mark.parametrize(("step", "said"), [(thrashing, True), (many(50, "aten::mm", HMMA, 200), False)])
def test_memory_shortage_needs_evidence_where_figures_lack(step: Callable[[Machine], None], said: bool) -> None:
    answer = memory.memory_pressure(full(step, peak=None))
    assert isinstance(answer, Undetermined) is said and (answer is None) is not said
    if isinstance(answer, Undetermined):
        assert "profile_memory=True" in answer.record


@pytest.mark.parametrize(("blocks", "said"), [(0.2, True), (2.0, False)])
def test_a_larger_batch_needs_room_where_figures_lack(blocks: float, said: bool) -> None:
    def step(machine: Machine) -> None:
        for _ in range(20):
            machine.operator("aten::mm", HMMA, 100, 20, blocks_per_sm=blocks)

    assert isinstance(memory.memory_underused(loop(step).case()), Undetermined) is said


def test_memory_that_is_hardly_used_is_a_hint() -> None:
    held = Memory(peak_allocated_bytes=1 << 30, total_bytes=32 << 30)

    def step(machine: Machine) -> None:
        for _ in range(20):
            machine.operator("aten::mm", HMMA, 100, 20, blocks_per_sm=0.2)

    finding = told(memory.memory_underused(loop(step).case(memory=held)))
    assert finding.recoverable_us_per_step is None and finding.confidence == "possible"


# -- GPUs that have nothing to do --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "origin", "kernel", "waits_us", "said"),
    [
        (1, {}, HMMA, 0, False),
        (4, {}, HMMA, 0, True),
        (4, {}, HMMA, 20_000, False),  # more of them would wait, too
        (4, {"rank": 0, "world_size": 4, "backend": "nccl"}, HMMA, 0, False),
        (4, {}, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 0, False),
    ],
)
def test_further_gpus_that_nobody_used_are_a_hint(
    gpus: int, origin: dict[str, Any], kernel: str, waits_us: float, said: bool
) -> None:
    def step(machine: Machine) -> None:
        machine.load(waits_us)
        many(50, "aten::mm", HMMA, 200)(machine)
        machine.operator("aten::mm", kernel, 10)

    found = loop(step).facts()
    assert found.run.origin is not None
    seen = tuple(DeviceProperties(i, "Tesla V100-SXM2-32GB") for i in range(gpus))
    run = replace(found.run, origin=replace(found.run.origin, device_properties=seen, **origin))
    result = diagnose(facts(run), predict_cures=False)
    assert result.first.key == ("data_starved" if waits_us else "healthy")
    hint = result.of("wrong_device")
    assert (hint is not None and hint.confidence == "possible" and "3 further GPUs" in hint.summary) is said


# -- a GPU that cannot give all it has ---------------------------------------------------------------------------------


def series(name: str, values: list[float]) -> Series:
    times = np.arange(len(values), dtype=np.int64) * 1_000_000
    return Series(name, "", name, "NVML", times, np.array(values, dtype=np.float64))


@pytest.mark.parametrize(("values", "said"), [([0, 0, 0], False), ([0, 2, 2], True)])
def test_other_programs_on_the_gpu(values: list[float], said: bool) -> None:
    samples = Samples((series("other_gpu_processes", values),))
    answer = sharing.gpu_shared(loop(many(9, "aten::mm", HMMA, 100)).case(samples=samples))
    assert isinstance(answer, Finding) == said
    seldom = DEFAULT.changed({"readings_notice": 0.8})
    assert sharing.gpu_shared(loop(many(9, "aten::mm", HMMA, 100)).case(samples=samples, thresholds=seldom)) is None
    if isinstance(answer, Finding):
        assert "2 other programs" in answer.summary and answer.evidence[0].span == (1_000_000, 2_000_000)


@pytest.mark.parametrize(
    ("bits", "clock", "said"),
    [
        ([0, 0, 0, 0], [1500, 1500, 1500, 1500], False),
        ([0, 0x20, 0x20, 0x20], [1500, 1200, 1200, 1200], True),
        ([4, 4, 4, 4], [1500, 1500, 1500, 1500], False),  # at its limit of power, and none the slower
        ([0, 4, 4, 4], [1500, 1200, 1200, 1200], True),
        ([1, 1, 1, 1], [1500, 300, 300, 300], False),  # it idles
    ],
)
def test_a_clock_that_is_held_down(bits: list[float], clock: list[float], said: bool) -> None:
    samples = Samples((series("throttle_reasons", bits), series("sm_clock_mhz", clock)))
    case = loop(many(9, "aten::mm", HMMA, 100)).case(samples=samples)
    answer = sharing.throttled(case)
    assert isinstance(answer, Finding) == said
    if isinstance(answer, Finding):
        assert answer.recoverable_us_per_step == pytest.approx(0.2 * case.part_us("compute"))
        assert answer.confidence == "likely"  # not all that computes goes by the clock


def test_meters_that_were_not_read() -> None:
    case = loop(many(9, "aten::mm", HMMA, 100)).case()
    for rule in (sharing.gpu_shared, sharing.throttled):
        answer = rule(case)
        assert isinstance(answer, Undetermined) and "under gpulab" in answer.record
    why = Missing("other processes on the GPU", "this container does not see them", key="curve")
    live = replace(case.facts.run, source="cell", missing=(why,))
    answer = sharing.gpu_shared(RuleContext(replace(case.facts, run=live), DEFAULT))
    assert isinstance(answer, Undetermined) and why.reason in answer.record


# -- what cannot be told, and who has nothing to say -------------------------------------------------------------------


def test_a_healthy_loop_is_left_alone() -> None:
    def step(machine: Machine) -> None:
        many(50, "aten::mm", HMMA, 200)(machine)
        machine.call("cudaEventSynchronize", 1, waits=False)

    case = loop(step).case()
    assert [r.__name__ for r in MINE if worth(case, r(case)) >= DEFAULT.silence] == []


def test_a_run_on_a_cpu_hears_nothing_of_a_gpu() -> None:
    case = RuleContext(synthetic.cpu_case().facts, DEFAULT)
    assert [rule.__name__ for rule in MINE if rule(case) is not None] == []


def test_a_run_without_a_trace() -> None:
    case = RuleContext(synthetic.no_trace_case().facts, DEFAULT)
    assert [rule.__name__ for rule in MINE if isinstance(rule(case), Finding)] == []


def clocks_apart(step: Callable[[Machine], None]) -> RuleContext:
    """Kernels before their launch: what the host did while the GPU idled cannot be told."""
    found = loop(step).facts()
    timeline = found.run.timeline
    assert timeline is not None
    shifted = np.where(timeline.lane_id == 2, timeline.start_ns - 60_000, timeline.start_ns)
    order = np.argsort(shifted, kind="stable")
    moved = replace(
        timeline,
        **{n: getattr(timeline, n)[order] for n in ("duration_ns", "name_id", "category", "lane_id", "correlation")},
        start_ns=shifted[order],
        extra={n: c[order] for n, c in timeline.extra.items()},
    )
    case = RuleContext(facts(replace(found.run, timeline=moved)), DEFAULT)
    assert case.withheld("idle_causes") is not None
    return case


@pytest.mark.parametrize(
    ("step", "rule"),
    [
        (reading(True), transfers.sync_points),
        (thrashing, memory.allocator_thrash),
        (updating("for-loop", zeroing=False), optimizing.unfused_optimizer),
        (updating("fused", zeroing=True), optimizing.unfused_optimizer),
    ],
)
def test_clocks_that_are_apart_withhold_what_depends_on_them(step: Callable[[Machine], None], rule: Rule) -> None:
    answer = rule(clocks_apart(step))
    assert isinstance(answer, Undetermined) and "record the trace again" in answer.record


def test_what_is_withheld_is_told_only_where_it_matters() -> None:
    case = clocks_apart(updating("fused", zeroing=False))
    assert optimizing.unfused_optimizer(case) is None and memory.allocator_thrash(case) is None


def test_a_trace_with_broken_kernels_has_no_kernel_counts() -> None:
    found = loop(many(50, "aten::mm", SGEMM, gpu_us=100)).facts()
    assert found.run.origin is not None
    origin = replace(found.run.origin, damage=(Damage("truncated tail", 1),))
    case = RuleContext(facts(replace(found.run, origin=origin)), DEFAULT)
    assert case.withheld("kernels") is not None
    answer = precision.no_mixed_precision(case)
    assert isinstance(answer, Undetermined) and "record the trace again" in answer.record
    assert precision.no_tf32(case) is None  # it is told once


# -- real traces -------------------------------------------------------------------------------------------------------


def ranked(name: str) -> list[str]:
    result = diagnose(facts(load_run(path(name))), predict_cures=False)
    assert not [u for u in result.untold if "fault" in u.record]
    return [f.key for f in result.findings]


@pytest.mark.parametrize(
    ("name", "first", "also", "never"),
    [
        ("v100_resnet50_workers0", "data_starved", {"unfused_optimizer", "no_mixed_precision"}, {"small_batch"}),
        ("v100_resnet50_workers4", "no_mixed_precision", {"unfused_optimizer"}, {"data_starved", "small_batch"}),
        ("v100_ddp_healthy", "no_mixed_precision", set(), {"data_starved", "launch_bound", "small_batch"}),
        ("h100_owlv2_starved", "data_starved", {"unfused_attention", "odd_shapes"}, {"small_batch", "launch_bound"}),
        ("b200_moe_launch_bound", "launch_bound", set(), {"data_starved", "no_mixed_precision"}),
        ("mi300_resnet_healthy", "exposed_communication", {"layout"}, {"data_starved", "launch_bound"}),
        ("a100_8ranks_rank3", "exposed_communication", set(), {"data_starved", "launch_bound"}),
        ("a100_alexnet_sync_events", "start_up", set(), {"launch_bound", "allocator_thrash"}),
        ("v100_dlrm_8ranks/rank0", "exposed_communication", {"launch_bound"}, {"data_starved"}),
    ],
)
def test_real_traces(name: str, first: str, also: set[str], never: set[str]) -> None:
    keys = ranked(name)
    assert keys[0] == first and also <= set(keys) and not never & set(keys)


def test_zeroing_the_gradients_of_a_real_resnet() -> None:
    """The folder's own table: 5.8 ms of each step idle under zero_grad."""
    found = facts(load_run(path("v100_resnet50_workers0")))
    assert found.optimizer is not None
    assert found.optimizer.zero_idle_us == pytest.approx(5_800, rel=0.02) and found.optimizer.zeroing == 161


def test_every_claim_of_a_real_trace_fits_into_its_step() -> None:
    for name in loaded_traces.ALL:
        case = RuleContext(facts(load_run(path(name))), DEFAULT)
        for rule in MINE:
            answer = rule(case)
            if isinstance(answer, Finding) and answer.recoverable_us_per_step is not None:
                assert 0 <= answer.recoverable_us_per_step <= (case.step_us or 0.0), (name, answer.key)
