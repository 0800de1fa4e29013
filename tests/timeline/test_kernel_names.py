"""What the names of kernels say: those of all real traces, and those of Hopper, Blackwell and Triton from elsewhere."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gpulab.analysis.kernels import CLASSES, class_of, kernels
from gpulab.run import Category
from gpulab.timeline.kernel_names import KERNELS, PRODUCTS, Reading, reading
from gpulab.timeline.labels import What, labels
from tests.support import loaded_traces
from tests.support.paths import TESTS
from tests.support.timelines import MAIN, STREAM, Span, timeline

GOLDEN = TESTS / "golden" / "kernel_names.json"
UNITS = {True: "on tensor cores", False: "not on tensor cores", None: "tensor cores untold"}

# Names as written in public traces, issues and sources, by class, number format and use of tensor cores.
ELSEWHERE: dict[Reading, tuple[str, ...]] = {
    Reading("attention", "narrow", True): (
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
        "cudnn_generated_oss_sdpa_sm100_flash_fprop_f16_knob_7_128x128x64_4x1x1_cga1x1x1_kernel0_0",
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<2, cutlass::bfloat16_t>>>(Params)",
        "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm100FlashAttentionForwardSm100_object_at__tensorptrbf16gmem",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>",
    ),
    Reading("attention", "", False): (
        "void cudnn::fusion::compute_dot_do_o_specialized<true, 128, 128, 8>(int)",
        "void cudnn::fusion::convert_dq_to_16bits<true, 128, 8, 128>(float*, __half*)",
        "void cutlass::device_kernel<flash::FlashAttnBwdPreprocess<cute::tuple<int>, cutlass::half_t>>",
    ),
    Reading("other", "", False): (
        "void cask_plugin__5x_cudnn::xmma__5x_cudnn::init_device_workspace_kernel<implicit_gemm::fprop::P>",
    ),
    Reading("matrix", "", None): (
        "cudnn_generated_fort_native_sm80_convFwd_pointwise_pointwise_pointwise",
        "nvjet_sss_128x64_32x4_2x1_v_bz_TNT",
        "triton_mm",
        "_matmul_kernel",
    ),
    Reading("attention", "tf32", True): (
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float>)",
    ),
    Reading("matrix", "narrow", True): (
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT",
        "nvjet_sm100_ootst_128x256_256x4_2x1_2cta_v_Avec16UE4M3_Bvec16UE4M3_TNT",
        "cutlass3x_sm100_bstensorop_s256x128x64gemm_block_scaled_ue4m3xf4_ue4m3xf4_f32_f16_f16_256x128x256_2sm",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int>, cutlass::bfloat16_t, "
        "cute::TiledMMA<cute::MMA_Atom<cute::SM90_64x128x16_F32BF16BF16_SS>>>>",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 7168u, 2048u>(float*, int*)",
        "void marlin_moe_wna16::Marlin<1125899906909960l, 562949953487106l>(int4 const*)",
        "triton_tem_fused__scaled_mm_1",
        "volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn",
        "turing_h1688gemm_128x128_ldg8_nn",
        "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_64x3_tn",
    ),
    Reading("matrix", "tf32", True): (
        "nvjet_sss_tf32_128x256_32x4_2x1_v_bz_TNT",
        "cutlass3x_sm100_tensorop_s256x256x8tf32gemm_f32_f32_f32_f32_f32_256x256x32_0_tnn_align4_2sm_bias_f32_relu",
    ),
    Reading("matrix", "fp32", False): (
        "cutlass3x_sm100_simt_sgemm_f32_f32_f32_f32_f32_128x64x16_1x1x1_3_tnn_align1_bias_f32_relu",
        "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4_execute",
    ),
    Reading("attention", "", None): (
        "triton_tem_fused_flex_attention_0",
        "_attn_fwd",
    ),
    Reading("pointwise", "", False): (
        "triton_poi_fused__scaled_dot_product_flash_attention_2",
        "triton_poi_fused_all_gather_into_tensor_matmul_0",
        "triton_for_fused_0",
    ),
    Reading("reduction", "", False): (
        "triton_red_fused_mm_sum_4",
        "_ZN2at6native13reduce_kernelILi512E",
    ),
    Reading("normalization", "", False): ("triton_per_fused__softmax_5",),
    Reading("communication", "narrow", False): (
        "void (anonymous namespace)::multimem_one_shot_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)",
        "ncclSymkDevKernel_AllReduce_AGxLL_R_sum_f8e4m3(ncclSymkDevWorkArgs4K)",
        "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768>(__nv_bfloat16*)",
        "void sgl::internode_ll::dispatch<__nv_bfloat16, 7168>(__nv_bfloat16*)",
        "void (anonymous namespace)::low_latency::combine<__nv_bfloat16>(void*)",
        "mori::moe::EpDispatchIntraNodeKernel<hip_bfloat16>",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(RankData*)",
    ),
    Reading("communication", "fp32", False): (
        "void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<float, 16>(float*)",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
    ),
    Reading("communication", "", False): (
        "void c10d::symmetric_memory::barrier_kernel(unsigned int**)",
        "kuserbuffers_pushsend(int*, int*, int4*, int4*, int)",
    ),
    Reading("optimizer", "fp32", False): (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>, "
        "FusedAdamMathFunctor<float, 4>>",
    ),
    Reading("optimizer", "narrow", False): ("void kOptimizerStatic8bit2StateBlockwise<__nv_bfloat16, 0, 256, 1>",),
    Reading("matrix", "", False): ("volta_dgemm_64x64_nn",),
    Reading("attention", "fp32", False): (
        "fmha_cutlassF_f32_aligned_64x64_rf_sm70(PyTorchMemEffAttention::AttentionKernel)",
    ),
    Reading("copy", "", False): ("Memcpy HtoD (Pageable -> Device)",),
}


@pytest.mark.parametrize("expected", ELSEWHERE, ids=str)
def test_names_of_hopper_blackwell_and_triton(expected: Reading) -> None:
    assert {name: reading(name) for name in ELSEWHERE[expected]} == dict.fromkeys(ELSEWHERE[expected], expected)


def test_what_the_name_does_not_tell_the_operator_does() -> None:
    assert class_of("some_kernel") == "other"
    assert class_of("some_kernel", "aten::addmm") == "matrix"
    assert class_of("some_kernel", "aten::_softmax") == "normalization"


def test_every_class_of_the_table_is_one_of_the_classes() -> None:
    assert {rule.kind for rule in KERNELS} <= set(CLASSES)
    assert all(rule.pattern == rule.pattern.lower() or "\\w" in rule.pattern for rule in KERNELS)


def said(name: str) -> str:
    """The class, and of a product its number format and its use of tensor cores."""
    of = reading(name)
    return (
        f"{of.kind}, {of.numbers or 'format untold'}, {UNITS[of.tensor_cores]}" if of.kind in PRODUCTS else str(of.kind)
    )


def golden() -> dict[str, str]:
    """What each name of the real traces says."""
    groups = json.loads(GOLDEN.read_text())
    return {name: words for words, names in groups.items() for name in names}


def test_names_of_real_traces_say_what_they_said() -> None:
    wrong = {name: said(name) for name, words in golden().items() if said(name) != words}
    assert not wrong


@pytest.mark.parametrize("trace", loaded_traces.ALL)
def test_names_of_a_real_trace_are_among_them_and_agree(trace: str) -> None:
    """Breakdown and classes have the same communication."""
    t = labels(loaded_traces.trace(trace).timeline)
    kernel = t.category == Category.KERNEL
    assert {t.names[i] for i in np.unique(t.name_id[kernel]).tolist()} <= set(golden())
    counted = t.of(What.COMMUNICATION)
    classed = kernel & t.named(lambda name: class_of(name) == "communication")
    assert (counted == classed).all()


@pytest.mark.parametrize(("untold_us", "fraction"), [(0, 0.5), (1, 100 / 201), (10, None)])
def test_no_share_of_tensor_cores_where_names_do_not_tell_it(untold_us: int, fraction: float | None) -> None:
    def span(name: str, start_us: int, long_us: int) -> Span:
        return Span(name, Category.KERNEL, STREAM, start_us * 1000, long_us * 1000, 1)

    rows = [
        Span("cudaLaunchKernel", Category.CUDA_RUNTIME, MAIN, 0, 1000, 1),
        span("ampere_fp16_s16816gemm_fp16_128x128_nn", 10, 100),
        span("ampere_sgemm_128x64_nn", 200, 100),
        *([span("triton_tem_fused_mm_0", 400, untold_us)] if untold_us else []),
    ]
    assert kernels(timeline(rows), np.array([[-(2**62), 2**62]])).tensor_core_fraction == (
        pytest.approx(fraction) if fraction else None
    )
