"""Putting a model of 100 million parameters with AdamW's state back, against one deepcopy of model and optimizer."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.harness import Figure, ratio_with_interval

PARAMETERS = 100_000_000
WIDTH = 2048
PAIRS = 12


def measure(parameters: int = PARAMETERS, pairs: int = PAIRS) -> dict[str, object]:
    """Seconds of both in turn, and their ratio; on the CPU. Needs 9 times the parameters' memory at its peak."""
    import torch

    from gpulab.snapshot.state import State

    torch.manual_seed(0)
    names = _trained(parameters)
    begun = time.perf_counter()
    state = State.of(names, None)
    taken_s = time.perf_counter() - begun
    rows = [_pair(state, names, restore_first=bool(i % 2)) for i in range(pairs + 1)][1:]
    middle = {key: sorted(r[key] for r in rows)[len(rows) // 2] for key in ("restore_s", "deepcopy_s")}
    return {
        "parameters": sum(p.numel() for p in names["model"].parameters()),
        "state_bytes": state.bytes,
        "snapshot_s": taken_s,
        "median": middle,
        "restore_over_deepcopy": ratio_with_interval([r["restore_s"] / r["deepcopy_s"] for r in rows]),
    }


def _trained(parameters: int) -> dict[str, Any]:
    """A stack of square layers after one step, so that AdamW has its state and no gradients are left."""
    import torch
    from torch import nn

    width = min(WIDTH, max(8, round((parameters / 2) ** 0.5)))
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(max(1, round(parameters / (width * (width + 1)))))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(2, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def _pair(state: Any, names: dict[str, Any], *, restore_first: bool) -> dict[str, float]:
    copies: list[object] = []
    arms: list[tuple[str, Callable[[], object]]] = [
        ("restore_s", state.restore),
        ("deepcopy_s", lambda: copies.append(copy.deepcopy((names["model"], names["optimizer"])))),
    ]
    row = {}
    for key, work in arms if restore_first else reversed(arms):
        gc.collect()
        begun = time.perf_counter()
        work()
        row[key] = time.perf_counter() - begun
        copies.clear()
    return row


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """Taking the state is done once for an experiment, restoring it before each block."""
    size = f"{results['parameters'] / 1e6:,.0f} million parameters, {results['state_bytes'] / 2**30:.2f} GiB"
    yield Figure(f"taking the state of {size}", results["snapshot_s"], "s")
    yield Figure("restoring it", results["median"]["restore_s"], "s")
    yield Figure("`copy.deepcopy` of model and optimizer", results["median"]["deepcopy_s"], "s")
    yield Figure.of_ratio("restoring over `copy.deepcopy`", results["restore_over_deepcopy"], "×", "ratio")
