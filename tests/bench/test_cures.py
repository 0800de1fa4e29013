"""What a click below a dead cell lets go of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpulab.api import memory as api
from gpulab.bench import cures
from gpulab.bench.cures import let_go
from gpulab.memory_record import MemoryAccount, OutOfMemory
from gpulab.tuning.code import Code

CELL = """
loss = model(x).sum()
for row in x:
    loss.backward()
features = model(x)
"""


@pytest.mark.parametrize("dead", [True, False])
def test_only_what_the_dead_cell_has_made_goes(monkeypatch: pytest.MonkeyPatch, dead: bool) -> None:
    graph = torch.ones(3, requires_grad=True) * 2
    names: dict[str, Any] = {"row": graph, "features": graph, "x": graph, "other": graph}
    failure = OutOfMemory("cpu", None, "line 4 of the cell: loss.backward()", 0, (), None, None)
    code = Code.of_text(CELL, names)
    run = SimpleNamespace(code=code.text, memory_account=MemoryAccount(failure=failure if dead else None))
    monkeypatch.setattr(cures, "last_run", lambda cell: run)
    monkeypatch.setattr(cures, "notebook", lambda: (SimpleNamespace(), names))
    let_go(code)
    gone = {"row"} if dead else set()
    assert {"row", "features", "x", "other"} - names.keys() == gone
    assert (api.failure_of(run) is failure) == dead  # type: ignore[arg-type]
