"""Lesson 07: number formats as PyTorch has them, and the order of a step with a scaler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from gpulab.lessons.mixed_precision import (
    amdahl,
    amdahl_table,
    autocast_casts,
    check_step,
    number_formats,
    vanishing_gradients,
)


def test_tables_say_what_this_torch_does() -> None:
    assert "65504" in repr(number_formats()).replace("6.55e+04", "65504")
    rows = {line[:26].strip(): line[26:].strip() for line in repr(autocast_casts()).splitlines()}
    assert rows["matmul"] == rows["linear"] == "bfloat16" and rows["relu of 32 bits"] == "float32"
    lines = repr(vanishing_gradients()).splitlines()
    assert lines[1].split()[1:] == ["0", "0"] and float(lines[3].split()[2]) == pytest.approx(1e-8, rel=0.01)
    assert lines[-1].endswith("inf in float16")


@given(st.floats(0, 1), st.floats(1, 100), st.floats(1, 4))
def test_no_step_gains_more_than_its_products(share: float, products: float, rest: float) -> None:
    gain = amdahl(share, products, rest)
    assert 1 - 1e-9 <= gain <= max(products, rest) + 1e-9
    assert amdahl(share, products) <= 1 / max(1 - share, 1e-12) + 1e-6
    assert "4.71 times" in repr(amdahl_table(8.0)) or amdahl(0.9, 8.0) == pytest.approx(4.705, rel=0.01)


def forward(model: Any, inputs: Any, labels: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return functional.cross_entropy(model(inputs), labels)


def correct(model: Any, optimizer: Any, scaler: Any, inputs: Any, labels: Any) -> None:
    optimizer.zero_grad()
    loss = forward(model, inputs, labels)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()


def dots(model: Any, optimizer: Any, scaler: Any, inputs: Any, labels: Any) -> None: ...


def not_scaled(model: Any, optimizer: Any, scaler: Any, inputs: Any, labels: Any) -> None:
    forward(model, inputs, labels).backward()
    scaler.step(optimizer)


def own_step(model: Any, optimizer: Any, scaler: Any, inputs: Any, labels: Any) -> None:
    scaler.scale(forward(model, inputs, labels)).backward()
    optimizer.step()


def no_update(model: Any, optimizer: Any, scaler: Any, inputs: Any, labels: Any) -> None:
    scaler.scale(forward(model, inputs, labels)).backward()
    scaler.step(optimizer)


def wide(model: Any, optimizer: Any, scaler: Any, inputs: Any, labels: Any) -> None:
    scaler.scale(functional.cross_entropy(model(inputs), labels)).backward()
    scaler.step(optimizer)
    scaler.update()


def backward_inside(model: Any, optimizer: Any, scaler: Any, inputs: Any, labels: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        scaler.scale(functional.cross_entropy(model(inputs), labels)).backward()
    scaler.step(optimizer)
    scaler.update()


def not_clipped(model: Any, optimizer: Any, scaler: Any, inputs: Any, labels: Any) -> None:
    scaler.scale(forward(model, inputs, labels)).backward()
    scaler.step(optimizer)
    scaler.update()


def clipped_scaled(model: Any, optimizer: Any, scaler: Any, inputs: Any, labels: Any) -> None:
    optimizer.zero_grad()
    scaler.scale(forward(model, inputs, labels)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()


def clipped_late(model: Any, optimizer: Any, scaler: Any, inputs: Any, labels: Any) -> None:
    scaler.scale(forward(model, inputs, labels)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.update()


def never_zeroed(model: Any, optimizer: Any, scaler: Any, inputs: Any, labels: Any) -> None:
    scaler.scale(2 * forward(model, inputs, labels)).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 50.0)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize(
    ("answer", "state", "hint"),
    [
        (..., "unanswered", "in place of the dots"),
        (dots, "unanswered", "in place of the dots"),
        (not_scaled, "wrong", "scaler.scale(loss).backward()"),
        (own_step, "wrong", "does not know of the scale"),
        (no_update, "wrong", "scaler.update() is missing"),
        (wide, "wrong", "runs in 32 bits"),
        (backward_inside, "wrong", "inside autocast"),
        (not_clipped, "wrong", "not clipped"),
        (clipped_scaled, "wrong", "1024 times too large"),
        (clipped_late, "wrong", "after the step"),
        (never_zeroed, "wrong", "zero_grad()"),
        (correct, "right", "unscaled before they are clipped"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_step_gets_a_hint(answer: Any, state: str, hint: str) -> None:
    backward, clip = torch.Tensor.backward, torch.nn.utils.clip_grad_norm_
    checked = check_step(answer)
    assert (checked.state, hint in checked.hint) == (state, True), checked
    assert torch.Tensor.backward is backward and torch.nn.utils.clip_grad_norm_ is clip is clip_grad_norm_
