"""Python code of the user's that calls PyTorch for single numbers, beside a model that trains."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
from torch import nn

import gpulab
from gpulab.run import Run


def confusion(of: torch.Tensor, by: torch.Tensor) -> float:
    table = torch.zeros(8, 8)
    for a, b in zip(of, by, strict=True):
        table[a, b] += 1
    return float(table.diag().sum())


def profiled(rows: int, measured: bool) -> Run:
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 8))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x, y = torch.randn(rows, 32), torch.randint(0, 8, (rows,))
    gc.disable()  # what the tests before have left takes longer to walk over than all steps
    try:
        with gpulab.profile(show=False, save=False, device="cpu", steps=40) as p:
            for _ in range(60):
                optimizer.zero_grad()
                said = model(x)
                if measured:
                    confusion(said.argmax(1), y)
                nn.functional.cross_entropy(said, y).backward()
                optimizer.step()
    finally:
        gc.enable()
    return p.run


def test_measuring_number_by_number_is_told_with_its_line_and_no_larger_batch() -> None:
    run = profiled(1024, measured=True)
    found = gpulab.diagnose(run)
    assert [f.key for f in found.findings] == ["logging_or_eval"]
    assert "hardly more than single numbers" in found.first.summary and "whole tensors" in found.first.cure
    assert "table[a, b] += 1" in found.first.source_line or "for a, b in" in found.first.source_line
    assert (found.first.recoverable_us_per_step or 0) > 0.5 * (found.step_us or 0)
    prediction = found.first.prediction
    assert prediction is not None and prediction.ratio is not None and prediction.ratio < 0.5
    unseen = gpulab.diagnose(dataclasses.replace(run, stack=None))
    assert "logging_or_eval" not in [f.key for f in unseen.findings], "nothing names the line"


@pytest.mark.parametrize("times", range(3))
def test_a_small_model_is_no_such_code(times: int) -> None:
    found = gpulab.diagnose(profiled(4, measured=False))
    assert [f.key for f in found.findings if "Python code of yours" in f.summary] == []
