"""Mixed precision and TF32 around unmodified code: what is cast, what is scaled, and what is left alone."""

from __future__ import annotations

from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gpulab.knobs.backend_settings import FP32_MATRIX_KERNELS, TF32, TF32_KERNELS
from gpulab.knobs.knob import KnobEffects
from gpulab.knobs.mixed_precision import AMP, KERNELS
from gpulab.knobs.observation import Observation
from gpulab.run import Category, Run
from tests.knobs.scenes import calling
from tests.support.knob_cells import H100, Cell, new_cell, same, traced
from tests.support.timelines import STREAM, Span, timeline

X = torch.ones(2, 4)
Pair = namedtuple("Pair", "a b")


class Giving(nn.Module):
    """Gives what `shape` makes of a linear layer's result; notes dtypes."""

    def __init__(self, shape: Callable[[Any], Any] = lambda x: x) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.shape = shape
        self.seen: list[torch.dtype] = []

    def forward(self, x: Any) -> Any:
        result = self.linear(x)
        self.seen.append(result.dtype)
        return self.shape(result)


@pytest.mark.parametrize(("value", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_amp_computes_in_it_and_gives_float32(value: str, dtype: torch.dtype) -> None:
    model = Giving(lambda x: {"out": x, "both": [x, (x, 3)], "pair": Pair(x, "text")})
    with AMP.applied(value) as log:
        out = model(X)
    model(X)
    assert model.seen == [dtype, torch.float32]
    assert out["out"].dtype == out["both"][0].dtype == out["both"][1][0].dtype == out["pair"].a.dtype == torch.float32
    assert isinstance(out["pair"], Pair) and out["pair"].b == "text" and out["both"][1][1] == 3
    assert log.counts == {"module calls": 1, "results of lower precision": 1}


def test_losses_are_autocast_and_transforms_and_bce_are_not() -> None:
    seen: list[bool] = []

    class Similarity(nn.Module):
        def forward(self, x: Any) -> Any:
            seen.append(torch.is_autocast_enabled("cpu"))
            return (x @ x.T).sum()

    needs = X.clone().requires_grad_()
    with AMP.applied("bf16") as log:
        Similarity()(needs)
        Similarity()(X)
        nn.BCELoss()(torch.full((2,), 0.5, requires_grad=True), torch.ones(2))
        assert not torch.is_autocast_enabled("cpu")
    assert seen == [True, False] and log.counts["module calls"] == 1


def test_the_regions_of_the_cell_take_the_value_too() -> None:
    model, seen = Giving(), []
    for value in ("off", "bf16", "fp16"):
        with AMP.applied(value):
            for enabled in (True, False):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                    seen.append((X @ X.T).dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen.append(model.linear(X).dtype)
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    assert seen == [f32, f32, bf16, f32, f16, f32, bf16]


def test_within_a_region_of_the_cell_results_are_as_there() -> None:
    with AMP.applied("bf16"), torch.autocast("cpu", dtype=torch.bfloat16):
        assert Giving()(X).dtype == torch.bfloat16


# -- loss scaling ------------------------------------------------------------------------------------------------------


def by_hand(cell: Cell, **options: Any) -> int:
    """The loop as the documentation writes it for fp16; returns how many steps were left out."""
    return _loop(cell, torch.amp.GradScaler("cpu"), **options)


def with_knob(cell: Cell, **options: Any) -> int:
    """The same loop without a word of fp16, under the knob."""
    with AMP.applied("fp16") as log:
        _loop(cell, None, **options)
    return log.counts.get("steps skipped", 0)


def _loop(cell: Cell, scaler: Any, clip: float | None = None, factor: float = 1.0, gather: int = 1) -> int:
    data, left_out = torch.Generator().manual_seed(1), 0
    for step in range(12):
        cell.optimizer.zero_grad()
        for _ in range(gather):
            x = torch.randn(4, 3, 6, 6, generator=data)
            y = torch.randint(4, (4,), generator=data)
            if scaler is None:
                loss = nn.CrossEntropyLoss()(cell.model(x), y)
                (loss * (factor if step % 5 == 0 else 1)).backward()
                continue
            with torch.autocast("cpu", dtype=torch.float16):
                out = cell.model(x)
            loss = nn.CrossEntropyLoss()(out.float(), y)
            scaler.scale(loss * (factor if step % 5 == 0 else 1)).backward()
        if scaler is not None:
            scaler.unscale_(cell.optimizer)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(cell.model.parameters(), clip)
        if scaler is None:
            cell.optimizer.step()
            continue
        before = [p.detach().clone() for p in cell.model.parameters()]
        scaler.step(cell.optimizer)
        left_out += all(torch.equal(a, b) for a, b in zip(before, cell.model.parameters(), strict=True))
        scaler.update()
    return left_out


@pytest.mark.parametrize(
    "options", [{}, {"clip": 0.1}, {"factor": 1e3}, {"factor": 1e3, "clip": 0.1}, {"gather": 2}], ids=str
)
def test_fp16_trains_as_a_loop_written_with_a_grad_scaler(options: dict[str, Any]) -> None:
    written, knob = new_cell(), new_cell()
    left_out = by_hand(written, **options)
    assert with_knob(knob, **options) == left_out == (3 if "factor" in options else 0)
    assert same(written.weights, knob.weights)


def test_gradients_too_small_for_half_precision_are_kept() -> None:
    def gradient(value: str | None) -> float:
        torch.manual_seed(0)
        model = Giving()
        optimizer = torch.optim.SGD(model.parameters())
        with AMP.applied(value or "off"):
            (model(X) * 1e-7).sum().backward()
            optimizer.step()
        assert model.linear.weight.grad is not None
        return float(model.linear.weight.grad.abs().mean())

    exact = gradient(None)
    assert exact > 0 and gradient("fp16") == pytest.approx(exact, rel=0.05)


def test_a_step_with_a_closure_leaves_overflows_out() -> None:
    cell = new_cell(torch.optim.SGD)
    before = cell.weights

    def closure(factor: float) -> Any:
        cell.optimizer.zero_grad()
        loss = cell.model(torch.ones(1, 3, 6, 6)).sum() * factor
        loss.backward()
        return loss

    with AMP.applied("fp16") as log:
        cell.optimizer.step(lambda: closure(1e4))
        assert same(before, cell.weights, exactly=True)
        cell.optimizer.step(lambda: closure(1.0))
    assert log.counts["steps skipped"] == 1 and not same(before, cell.weights)
    assert all(p.isfinite().all() for p in cell.weights)


def test_a_late_optimizer_step_ignores_an_old_overflow() -> None:
    a, b = Giving(), Giving()
    often = torch.optim.SGD(a.parameters(), lr=0.1)
    seldom = torch.optim.SGD(b.parameters(), lr=0.1)
    with AMP.applied("fp16") as log:
        for factor in (1e6, 1.0):
            often.zero_grad()
            ((a(X) + b(X)).mean() * factor).backward()
            often.step()
        seldom.step()
    assert log.counts["steps skipped"] == 2
    assert all(p.isfinite().all() for p in (*a.parameters(), *b.parameters()))


def test_parameters_of_no_module_are_unscaled_before_their_step() -> None:
    model, bare = Giving(), torch.zeros(2, 4, requires_grad=True)
    optimizer = torch.optim.SGD([bare, *model.parameters()], lr=1.0)
    with AMP.applied("fp16"):
        for _ in range(2):
            optimizer.zero_grad()
            (model(X) + bare).mean().backward()
            optimizer.step()
    assert torch.allclose(bare, torch.full((2, 4), -0.25))


def test_a_scale_serves_the_next_block_of_the_experiment() -> None:
    left_out = []
    try:
        for _ in range(2):
            cell = new_cell()
            with AMP.applied("fp16") as log:
                for _ in range(3):
                    cell.optimizer.zero_grad()
                    cell.model(torch.ones(1, 3, 6, 6)).mul(3.0).sum().backward()
                    cell.optimizer.step()
            left_out.append(log.counts.get("steps skipped", 0))
    finally:
        AMP.forget()
    with AMP.applied("fp16") as log:
        cell.model(torch.ones(1, 3, 6, 6)).mul(3.0).sum().backward()
        cell.optimizer.step()
    AMP.forget()
    assert left_out == [2, 0] and log.counts["steps skipped"] == 1


def test_gradients_of_gradients_are_not_scaled() -> None:
    model = Giving(lambda x: (x * x).sum())
    with AMP.applied("fp16") as log:
        model(X).backward(create_graph=True)
    assert "scaled backward passes" not in log.counts


def test_gradients_that_were_there_are_added_to() -> None:
    model = Giving()
    kept = model.linear.bias.grad = torch.ones(4)
    with AMP.applied("fp16"):
        model(X).mean().backward()
    assert model.linear.bias.grad is kept and torch.allclose(kept, torch.full((4,), 1.25))


# -- what is said ------------------------------------------------------------------------------------------------------


def test_amp_verifies_itself_and_says_when_it_was_there(seen: Observation) -> None:
    run, (log,) = traced(new_cell(), (AMP, "bf16"))
    said = AMP.verify(seen, "bf16", log, run)
    assert said.state == "took effect" and "bfloat16" in said.evidence
    inside = calling(autocast_dtype="bfloat16")
    for scene, value, effects, state in (
        (seen, "bf16", KnobEffects(), "no effect"),
        (seen, "off", KnobEffects(), "no effect"),
        (seen, "bf16", KnobEffects(Counter({"module calls": 2})), "cannot tell"),
        (inside, "bf16", log, "no effect"),
        (inside, "off", KnobEffects(Counter({"autocast regions": 3})), "took effect"),
        (inside, "off", KnobEffects(), "no effect"),
    ):
        assert AMP.verify(scene, value, effects, run).state == state


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        (KERNELS["bf16"], "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", True),
        (KERNELS["bf16"], "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", True),
        (KERNELS["fp16"], "ampere_fp16_s16816gemm_fp16_64x64_sliced1x2", True),
        (KERNELS["fp16"], "void at::native::elementwise_kernel<c10::Half>", True),
        (KERNELS["fp16"], "ampere_bf16_s16816gemm_bf16_128x128", False),
        (TF32_KERNELS, "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x64x16", True),
        (TF32_KERNELS, "cutlass_80_tensorop_s1688gemm_128x128_16x5_tn_align4", True),
        (TF32_KERNELS, "turing_fp16_s1688gemm_fp16_128x128_ldg8", False),
        (FP32_MATRIX_KERNELS, "ampere_sgemm_128x64_tn", True),
    ],
)
def test_kernels_are_known_by_their_names(pattern: Any, name: str, matches: bool) -> None:
    assert bool(pattern.search(name)) is matches


# -- TF32 --------------------------------------------------------------------------------------------------------------


def settings() -> dict[object, object]:
    """All of torch's switches; those that refuse to be read are that."""
    found: dict[object, object] = {}
    if hasattr(torch._C, "_get_fp32_precision_getter"):  # from torch 2.9 on
        for key in (
            ("generic", "all"),
            *((b, o) for b in ("cuda", "mkldnn") for o in ("all", "matmul", "conv", "rnn")),
        ):
            found[key] = torch._C._get_fp32_precision_getter(*key)
    for read in (torch._C._get_cublas_allow_tf32, torch._C._get_cudnn_allow_tf32, torch.get_float32_matmul_precision):
        try:
            found[read.__name__] = read()
        except RuntimeError:
            found[read.__name__] = "refused"
    return found


@pytest.fixture
def precision() -> Iterator[None]:
    """torch's switches are put back as a fresh process has them."""
    before = settings()
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    for key, value in before.items():
        if isinstance(key, tuple) and key[1] != "all":
            torch._C._set_fp32_precision_setter(*key, value)  # type: ignore[call-arg]
    assert settings() == before


def as_it_comes() -> None:
    """Nothing was set."""


def the_old_way() -> None:
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.allow_tf32 = False


def the_new_way() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]


@pytest.mark.skipif(not hasattr(torch._C, "_get_fp32_precision_getter"), reason="torch 2.9 brought the new switches")
@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("written", [as_it_comes, the_old_way, the_new_way])
def test_tf32_is_set_and_restored_by_either_switch(precision: None, written: Callable[[], None], value: bool) -> None:
    written()
    before = settings()
    with TF32.applied(value):
        inside = settings()
        assert [inside["cuda", op] == "tf32" for op in ("matmul", "conv", "rnn")] == [value] * 3
        if before["get_float32_matmul_precision"] != "refused":
            assert inside["_get_cublas_allow_tf32"] is inside["_get_cudnn_allow_tf32"] is value
    assert settings() == before


def test_tf32_is_not_told_from_a_run_of_the_cpu(plain_run: Run) -> None:
    with TF32.applied(True) as log:
        pass
    ampere = Observation(H100, tf32=False)
    assert TF32.verify(ampere, True, log, plain_run).state == "cannot tell"
    assert TF32.verify(ampere, False, KnobEffects(), plain_run).state == "no effect"


CONV = "sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw"
OTHER_CONV = "sm80_xmma_wgrad_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc"
PRODUCT = "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x64x16"
SGEMM = "ampere_sgemm_128x64_nn"


@pytest.mark.parametrize(
    ("before", "after", "value", "state"),
    [
        ([CONV, SGEMM], [CONV, PRODUCT], True, "took effect"),
        ([CONV, SGEMM], [CONV, SGEMM], True, "no effect"),  # cuDNN's convolutions use TF32 by default
        ([CONV, SGEMM], [OTHER_CONV, SGEMM], True, "no effect"),
        ([CONV], [CONV], True, "cannot tell"),
        ([SGEMM], [PRODUCT], True, "took effect"),
        (["implicit_convolve_sgemm"], [CONV], True, "took effect"),
        ([], [PRODUCT], True, "cannot tell"),  # nothing is known of the baseline
        ([SGEMM], ["nvjet_tst_128x256"], True, "cannot tell"),
        ([CONV, PRODUCT], ["implicit_convolve_sgemm", SGEMM], False, "took effect"),
        ([CONV, PRODUCT], [CONV, SGEMM], False, "no effect"),
        ([SGEMM], [SGEMM], False, "cannot tell"),
    ],
)
def test_tf32_took_effect_where_products_run_in_it_that_did_not(
    before: list[str], after: list[str], value: bool, state: str
) -> None:
    observation = Observation(H100, tf32=not value, operators=frozenset(before))
    spans = [Span(name, Category.KERNEL, STREAM, 10 * i, 5) for i, name in enumerate(after)]
    run: Any = SimpleNamespace(timeline=timeline(spans))
    assert TF32.verify(observation, value, KnobEffects(Counter({"settings": 3})), run).state == state


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No test begins with the scale of another."""
    yield
    AMP.forget()
