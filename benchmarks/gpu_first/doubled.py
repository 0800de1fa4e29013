"""Experiments whose result is certain: an arm that changes nothing, and one that does exactly twice the work."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import gpulab
from benchmarks.gpu_first.answer import Answer
from benchmarks.gpu_first.stage import Stage

PAIRS = 5
BLOCK_STEPS = 8
BATCHES = 40
PRODUCTS = 60  # of 4096³ in bf16: about 12 ms on an H200

ENDLESS = """
for epoch in range(100_000):
    for batch in loader:
        for _ in range(repeats):
            torch.mm(a, a, out=out)
        optimizer.step()
        last = run_name
"""
WAITING = ENDLESS + "        weight[0].item()\n"
LEFT_BY_BREAK = """
for step, batch in enumerate(loader):
    for _ in range(repeats):
        torch.mm(a, a, out=out)
    optimizer.step()
    last = run_name
    if step == 30:
        break
"""
NOT_SLOWER = ("no measurable difference", "no difference", "undecided")
CELLS = {"run ahead": ENDLESS, "waiting in each step": WAITING, "left by break": LEFT_BY_BREAK}
SMALL = {"left by break": LEFT_BY_BREAK}


def measure(answer: Answer, stage: Stage) -> None:
    """Twice the work and the same work, in cells whose GPU is always busy."""
    for name, cell in (CELLS if not stage.simulated else SMALL).items():
        repeats = stage.size(PRODUCTS, 20)
        for knob, value, truth in (("repeats", 2 * repeats, 2.0), ("run_name", "second", 1.0)):
            what = f"{'twice the work' if truth == 2.0 else 'the same work'}, {name}"
            with answer.guarded(f"ratio, {what}", f"{truth:g}"):
                _judge(answer, what, truth, _compared(stage, cell, {knob: value}, repeats))


def _compared(stage: Stage, cell: str, knob: dict[str, object], repeats: int) -> dict[str, Any]:
    began = time.monotonic()
    compared = gpulab.experiment(
        cell,
        knob,
        namespace=_names(stage, repeats),
        steps=BLOCK_STEPS,
        pairs=stage.size(PAIRS, 4),
        save=False,
        show=False,
    )
    only = compared.only
    return {
        "verdict": only.verdict,
        "ratio": only.ratio,
        "interval": only.interval,
        "noise_floor": only.noise_floor,
        "pairs": only.pairs,
        "us_per_step": [only.a.us_per_step, only.b.us_per_step],
        "notes": list(only.notes),
        "seconds": time.monotonic() - began,
    }


def _names(stage: Stage, repeats: int) -> dict[str, Any]:
    n = stage.size(4096, 64)
    dtype = torch.bfloat16 if not stage.simulated else torch.float32
    a = torch.randn(n, n, device=stage.device, dtype=dtype)
    weight = torch.nn.Parameter(torch.zeros(1024, device=stage.device))
    weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    loader = DataLoader(TensorDataset(torch.zeros(4 * BATCHES, 1)), batch_size=4)  # so that samples are counted
    values = {
        "loader": loader,
        "torch": torch,
        "a": a,
        "out": torch.empty_like(a),
        "weight": weight,
        "optimizer": optimizer,
    }
    return {**values, "repeats": repeats, "run_name": "first"}


def _judge(answer: Answer, what: str, truth: float, row: dict[str, Any]) -> None:
    answer.figure(what, row)
    answer.near(f"ratio, {what}", row["ratio"], truth, 0.03)
    if row["interval"] is None:
        answer.unmeasured(f"interval, {what}", f"holds {truth:g}", "gpulab gives no interval")
        return
    low, high = row["interval"]
    # what is launched besides the products does not double
    agrees = low * 0.99 <= truth <= high * 1.01
    answer.check(f"interval, {what}", f"holds {truth:g}, but for 1 %", f"{low:.3f} to {high:.3f}", agrees=agrees)
    expected = ("slower",) if truth == 2.0 else NOT_SLOWER
    answer.check(f"verdict, {what}", " or ".join(expected), row["verdict"], agrees=row["verdict"] in expected)
