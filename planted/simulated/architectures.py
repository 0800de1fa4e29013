"""Steps of well-known kinds of networks, operator by operator: forward pass, backward pass, update.

Kernel names and their proportions are those of recorded traces; `scale` makes all of them longer or shorter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from planted.simulated.program import Item, Kernel, Operator, Update

Precision = Literal["bf16", "tf32", "fp32"]

VECTORIZED = "void at::native::vectorized_elementwise_kernel<4, at::native::{}>"
KERNELS: dict[str, dict[str, str]] = {
    "gemm": {
        "bf16": "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nn",
        "tf32": "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x128_32x3_nn_align4>(Params)",
        "fp32": "ampere_sgemm_128x64_nn",
    },
    "bmm": {
        "bf16": "ampere_bf16_s16816gemm_bf16_64x64_sliced1x2_ldg8_f2f_stages_64x6_tn",
        "tf32": "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_32x6_tn_align4>(Params)",
        "fp32": "ampere_sgemm_64x64_tn",
    },
    "conv": {
        "bf16": "sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_kernel_cudnn",
        "tf32": "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16_kernel_cudnn",
        "fp32": "void implicit_convolve_sgemm<float, float, 128, 6, 7, 3, 3, 5, 1, false, true, true>(int, int)",
    },
    "flash": dict.fromkeys(("bf16", "tf32", "fp32"), "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>()"),
}
PLAIN = {
    "relu": VECTORIZED.format("launch_clamp_scalar(at::TensorIteratorBase&)"),
    "add": VECTORIZED.format("CUDAFunctor_add<float>, std::array<char*, 3ul>"),
    "mul": VECTORIZED.format("BinaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float>>"),
    "gelu": VECTORIZED.format("GeluCUDAKernelImpl(at::TensorIteratorBase&)"),
    "sigmoid": VECTORIZED.format("sigmoid_kernel_cuda(at::TensorIteratorBase&)"),
    "batch_norm": "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>(cudnnTensorStruct)",
    "layer_norm": "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float)",
    "group_norm": "void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float>(long, float, float const*)",
    "softmax": "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>(float*)",
    "embedding": "void at::native::(anonymous namespace)::indexSelectSmallIndex<float, long, unsigned int, 2, 2>(long)",
    "sum": "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float, at::native::func_wrapper_t<float>>>",
    "loss": "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float>",
    "pool": "void at::native::(anonymous namespace)::max_pool_forward_nhwc<float, int>(float const*, int, int, int)",
    "layout": "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true, (cudnnKernelDataType_t)2>(Params)",
    "adam": "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>",
    "foreach": "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<2>>",
    "addcdiv": VECTORIZED.format("addcdiv_cuda_kernel(at::TensorIteratorBase&)"),
}
OPERATORS = {
    "gemm": ("aten::addmm", "AddmmBackward0", "aten::mm"),
    "bmm": ("aten::bmm", "BmmBackward0", "aten::bmm"),
    "conv": ("aten::cudnn_convolution", "ConvolutionBackward0", "aten::convolution_backward"),
    "flash": (
        "aten::_flash_attention_forward",
        "ScaledDotProductFlashAttentionBackward0",
        "aten::_flash_attention_backward",
    ),
    "relu": ("aten::clamp_min", "ReluBackward0", "aten::threshold_backward"),
    "add": ("aten::add", "AddBackward0", "aten::add"),
    "mul": ("aten::mul", "MulBackward0", "aten::mul"),
    "gelu": ("aten::gelu", "GeluBackward0", "aten::gelu_backward"),
    "sigmoid": ("aten::sigmoid", "SigmoidBackward0", "aten::sigmoid_backward"),
    "batch_norm": ("aten::cudnn_batch_norm", "CudnnBatchNormBackward0", "aten::cudnn_batch_norm_backward"),
    "layer_norm": ("aten::native_layer_norm", "NativeLayerNormBackward0", "aten::native_layer_norm_backward"),
    "group_norm": ("aten::native_group_norm", "NativeGroupNormBackward0", "aten::native_group_norm_backward"),
    "softmax": ("aten::_softmax", "SoftmaxBackward0", "aten::_softmax_backward_data"),
    "embedding": ("aten::index_select", "EmbeddingBackward0", "aten::embedding_dense_backward"),
    "sum": ("aten::sum", "SumBackward0", "aten::sum"),
    "loss": ("aten::nll_loss_forward", "NllLossBackward0", "aten::nll_loss_backward"),
    "pool": ("aten::max_pool2d_with_indices", "MaxPool2DWithIndicesBackward0", "aten::max_pool2d_backward"),
    "layout": ("aten::contiguous", "ConvolutionBackward0", "aten::contiguous"),
}
TWICE = ("gemm", "bmm", "conv")  # backward: once for the weights, once for the input
FUSED_OF_FOREACH = 28 / 80  # definitions.md, "Bytes of an optimizer's update": AdamW


class Part(Struct, frozen=True):
    """One operator of a layer: a key of the tables above, and its kernel's µs at scale 1. `cured_by`: the finding
    whose cure takes it out."""

    kind: str
    us: float
    cured_by: str = ""


class Architecture(Struct, frozen=True):
    """Layers of one kind, one after the other, between a first and a last part."""

    name: str
    first: tuple[Part, ...]
    layer: tuple[Part, ...]
    last: tuple[Part, ...]
    layers: int

    def parts(self, extra: tuple[Part, ...] = ()) -> tuple[Part, ...]:
        """Its forward pass; `extra` parts follow each layer."""
        return (*self.first, *((*self.layer, *extra) * self.layers), *self.last)


_BLOCK = (
    Part("layer_norm", 15),
    Part("gemm", 110),
    Part("flash", 90),
    Part("gemm", 45),
    Part("add", 12),
    Part("layer_norm", 15),
    Part("gemm", 140),
    Part("gelu", 20),
    Part("gemm", 140),
    Part("add", 12),
)
ARCHITECTURES = {
    a.name: a
    for a in (
        Architecture("mlp", (), (Part("gemm", 120), Part("relu", 15)), (Part("gemm", 60), Part("loss", 5)), 12),
        Architecture(
            "resnet",
            (Part("conv", 150), Part("pool", 30)),
            (Part("conv", 120), Part("batch_norm", 40), Part("relu", 20)),
            (Part("gemm", 20), Part("loss", 5)),
            20,
        ),
        Architecture("gpt", (Part("embedding", 20),), _BLOCK, (Part("gemm", 300), Part("loss", 60)), 8),
        Architecture("vit", (Part("conv", 60),), _BLOCK, (Part("gemm", 10), Part("loss", 5)), 6),
        Architecture(
            "unet",
            (Part("conv", 80),),
            (Part("group_norm", 40), Part("sigmoid", 15), Part("conv", 220)),
            (Part("conv", 80), Part("sum", 10)),
            16,
        ),
        Architecture(
            "lstm",
            (Part("embedding", 15),),
            (Part("gemm", 60), Part("sigmoid", 8)),
            (Part("gemm", 200), Part("loss", 30)),
            40,
        ),
        Architecture(
            "dlrm",
            (Part("embedding", 400),),
            (Part("gemm", 90), Part("relu", 12)),
            (Part("bmm", 80), Part("loss", 10)),
            8,
        ),
        Architecture(
            "gnn",
            (Part("embedding", 60),),
            (Part("embedding", 80), Part("gemm", 70), Part("relu", 10), Part("sum", 50)),
            (Part("gemm", 30), Part("loss", 5)),
            8,
        ),
    )
}


class Build(Struct, frozen=True):
    """How an architecture becomes a step: kernels `scale` times as long, `host_us` per operator, in which numbers."""

    scale: float = 1.0
    host_us: float = 12.0
    precision: Precision = "bf16"
    blocks_per_sm: float = 4.0
    extra: tuple[Part, ...] = ()

    def forward(self, architecture: Architecture) -> tuple[Operator, ...]:
        """Every operator of the forward pass."""
        return tuple(self._operator(part, backward=False) for part in architecture.parts(self.extra))

    def backward(self, architecture: Architecture) -> tuple[Operator, ...]:
        """In the opposite order; products twice."""
        return tuple(self._operator(part, backward=True) for part in reversed(architecture.parts(self.extra)))

    def _operator(self, part: Part, *, backward: bool) -> Operator:
        forward_name, node, backward_name = OPERATORS[part.kind]
        ns = round(part.us * self.scale * 1_000)
        kernel = Kernel(self._kernel(part.kind), max(1_500, ns), blocks_per_sm=self.blocks_per_sm)
        count = 2 if backward and part.kind in TWICE else 1
        name = backward_name if backward else forward_name
        return Operator(name, round(self.host_us * 1_000), (kernel,) * count, node if backward else "", part.cured_by)

    def _kernel(self, kind: str) -> str:
        return KERNELS[kind][self.precision] if kind in KERNELS else PLAIN[kind]


def fused_update(us: float, host_us: float = 30.0) -> Update:
    """AdamW as one operation for all parameters."""
    return Update((Operator("aten::_fused_adamw_", round(host_us * 1e3), (_kernel("adam", us),)),), "AdamW")


def foreach_update(us: float, host_us: float = 40.0) -> Update:
    """AdamW in ten operations for all parameters, each of which goes through memory."""
    names = ("lerp_", "mul_", "addcmul_", "sqrt", "div_", "add_", "addcdiv_", "sub_", "pow_", "mul_")
    operators = tuple(
        Operator(f"aten::_foreach_{name}", round(host_us * 1e3), (_kernel("foreach", us / 10),)) for name in names
    )
    return Update(operators, "AdamW")


def loop_update(tensors: int, us_each: float, host_us: float = 8.0) -> Update:
    """AdamW tensor by tensor, six operators each."""
    names = ("lerp_", "mul_", "addcmul_", "sqrt", "add_", "addcdiv_")
    each = tuple(Operator(f"aten::{name}", round(host_us * 1e3), (_kernel("addcdiv", us_each / 6),)) for name in names)
    return Update(each * tensors, "AdamW")


def drop_gradients() -> Update:
    """`zero_grad()` as it is by default: no operator."""
    return Update((), "AdamW", "zero_grad")


def step_of(
    architecture: Architecture,
    build: Build,
    *,
    before: tuple[Item, ...] = (),
    between: Callable[[int], tuple[Item, ...]] = lambda _: (),
    after_backward: tuple[Item, ...] = (),
    update: Update | None = None,
    after: tuple[Item, ...] = (),
) -> tuple[Item, ...]:
    """A whole step; `between(i)` is what happens after operator i of the forward pass."""
    forward = build.forward(architecture)
    return (
        *before,
        drop_gradients(),
        *(item for i, operator in enumerate(forward) for item in (operator, *between(i))),
        *build.backward(architecture),
        *after_backward,
        update or fused_update(60 * build.scale),
        *after,
    )


def _kernel(kind: str, us: float) -> Kernel:
    return Kernel(PLAIN[kind], max(1_500, round(us * 1_000)))
