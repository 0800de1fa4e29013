"""Lesson 07: number formats, what autocast casts, gradients that vanish, and the order of a step with a scaler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import force_setattr

from gpulab.analysis.facts import Facts
from gpulab.analysis.operators import CostRow
from gpulab.lessons import mixed_precision
from gpulab.lessons.check import Speed
from gpulab.lessons.measured import product_share
from gpulab.lessons.mixed_precision import (
    FORMATS,
    SmallLoss,
    at_most,
    autocast_table,
    draw_gradients,
    format_table,
    lost_gradients,
    products,
)
from gpulab.lessons.training import default_device

DEVICE = default_device()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_range_and_digits_are_those_of_finfo(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    one = mixed_precision.Format.of("", dtype)
    assert one.bits == info.bits and 2.0**-one.fraction_bits == info.eps
    assert 2.0**one.largest_log2 == pytest.approx(info.max, rel=1e-6)
    assert 2.0**one.smallest_log2 == pytest.approx(info.smallest_normal * info.eps, rel=1e-6)


def test_tf32_has_the_range_of_fp32_and_digits_of_fp16() -> None:
    fp32, tf32, fp16, _ = FORMATS
    assert (tf32.bits, tf32.exponent_bits, tf32.fraction_bits) == (19, fp32.exponent_bits, fp16.fraction_bits)
    lines = repr(format_table()).splitlines()
    assert "6.0e-08" in lines[3] and "1.0078125" in lines[4]


def test_autocast_is_sorted_by_what_comes_out() -> None:
    lines = repr(autocast_table(DEVICE)).splitlines()
    groups = {title: names.split(", ") for title, names in zip(lines[::2], map(str.strip, lines[1::2]), strict=True)}
    lower, kept, _, widest = groups.values()
    assert {"matmul", "linear", "conv2d"} <= set(lower) and {"cross_entropy", "mse_loss"} <= set(kept)
    assert "add" in widest and not torch.is_autocast_enabled(DEVICE.type)
    counted = [name for names in list(groups.values())[:3] for name in names]
    assert len(counted) == len(set(counted)) == len(mixed_precision.OPERATORS)


@given(st.floats(0, 1), st.floats(1, 100))
def test_no_step_gains_more_than_its_products(share: float, times: float) -> None:
    assert 1 - 1e-9 <= at_most(share, times) <= min(times, 1 / max(1 - share, 1e-12)) + 1e-6


def facts_with(*rows: tuple[str, float], on_gpu: bool = False) -> Facts:
    """Facts of which only what `product_share` reads is filled in."""
    empty: Any = Facts(**dict.fromkeys(Facts.__struct_fields__))  # type: ignore[arg-type]
    costs = tuple(CostRow(name, 1.0, 1.0, 1.0, share, device_us=100 * share) for name, share in rows)
    force_setattr(empty, "operators", costs)
    if on_gpu:
        force_setattr(empty, "trace", object())
        force_setattr(empty, "traced_step_us", type("Spread", (), {"median": 200.0})())
    filled: Facts = empty
    return filled


def test_products_are_told_from_other_operators() -> None:
    rows = (("aten::mm", 0.4), ("aten::addmm", 0.2), ("aten::relu", 0.3))
    assert product_share(facts_with(*rows)) == pytest.approx(0.6)
    assert product_share(facts_with(*rows, on_gpu=True)) == pytest.approx(0.3), "of the device's time of a step"
    assert product_share(facts_with()) is None and product_share(None) is None


def test_a_table_of_products_says_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = Speed(2.5, (2.0, 3.0), 1e-3, 4e-4, 7)
    monkeypatch.setattr(mixed_precision, "_product_speed", lambda a, b, dtype: speed)
    lines = repr(products(DEVICE)).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["fp32", "bf16", "fp16"]
    assert "1.00 ms" in lines[1] and "400 µs" in lines[2] and "Speedup 2.5×" in lines[3]


def test_scaling_saves_gradients_until_they_overflow() -> None:
    study = SmallLoss()
    exact = study.gradients(None)
    plain, scaled, too_far = (study.gradients(torch.float16, 2.0**power) for power in (0, 16, 40))
    assert (exact != 0).all() and (plain == 0).double().mean() > 0.5
    assert (scaled == 0).double().mean() < 0.01
    assert torch.allclose(scaled / 2**16, exact, rtol=0.05, atol=0.01 * float(exact.abs().max()))
    assert not torch.isfinite(too_far).all()
    assert (study.gradients(torch.bfloat16) != 0).all(), "bf16 has the range of fp32"
    lines = repr(lost_gradients((0, 40))).splitlines()
    assert lines[2].split() == ["fp16", "2^40", "0", "%", "100", "%"] and lines[3].startswith("bf16")
    assert "lie below what fp16 can hold" in draw_gradients().axes[0].get_title(loc="left")


def test_only_fp16_without_a_scale_does_not_learn() -> None:
    study = SmallLoss()
    exact, plain = study.losses(None), study.losses(torch.float16)
    scaled, short = study.losses(torch.float16, scaled=True), study.losses(torch.bfloat16)
    assert exact[-1] < 1.7 < 2.0 < plain[-1]
    assert scaled[-1] == pytest.approx(exact[-1], abs=0.1) and short[-1] == pytest.approx(exact[-1], abs=0.1)
