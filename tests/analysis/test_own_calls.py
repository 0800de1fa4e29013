"""Python code of the user's that calls PyTorch for single numbers, beside a model that trains."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import gpulab
from tests.support.scripted_looks import ScriptedWatcher, installed


def confusion(of: torch.Tensor, by: torch.Tensor, looking: ScriptedWatcher) -> float:
    table = torch.zeros(8, 8)
    for a, b in looking.each(zip(of, by, strict=True)):
        table[a, b] += 1
    return float(table.diag().sum())


def test_a_real_loop_that_measures_has_operators_and_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    looking = installed(monkeypatch.setattr)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 8))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x, y = torch.randn(1024, 32), torch.randint(0, 8, (1024,))
    with gpulab.profile(show=False, save=False, device="cpu", steps=40) as p:
        for _ in range(60):
            optimizer.zero_grad()
            said = model(x)
            confusion(said.argmax(1), y, looking)
            nn.functional.cross_entropy(said, y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    timeline, stack = p.run.timeline, p.run.stack
    assert timeline is not None and stack is not None and len(stack.calls_users) == len(stack.t_ns)
    called = np.bincount(timeline.name_id, minlength=len(timeline.names))
    assert called[timeline.names.index("aten::add_")] >= 1024 * len(p.run.traced_numbers)
    assert any("for a, b in" in place.text for place in p.run.places)
    told = [f for f in gpulab.diagnose(p.run).findings if f.key == "logging_or_eval"]
    assert all("for a, b in" in f.source_line for f in told)
