"""A dozen runs of gpulab in one process, as in a notebook: no run may know less of the GPU than the first."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import gpulab
from benchmarks.gpu_first.answer import Answer
from benchmarks.gpu_first.stage import Stage
from gpulab.analysis.facts import Facts, facts

RUNS = 12
STEPS = 30


def measure(answer: Answer, stage: Stage) -> None:
    """The same training again and again."""
    rows: list[dict[str, Any]] = []
    for _ in range(stage.size(RUNS, 2)):
        rows.append(row_of(facts(_profiled(stage))))
        answer.figure("runs", rows)
    if stage.simulated:
        answer.unmeasured("figures withheld", "none in any run", "simulated")
        return
    withheld = [row["withheld"] for row in rows]
    answer.check("figures withheld", "none in any run", str(withheld), agrees=not any(withheld))
    counts = [round(row["kernels_per_step"], 2) for row in rows]
    agrees = counts[0] > 0 and max(counts) - min(counts) <= 0.01 * counts[0]
    answer.check("kernels per step", "the same in all runs, but for 1 %", str(counts), agrees=agrees)
    lost = [row["integrity"].get("launches_without_kernels", 0) for row in rows]
    answer.check("launches without a kernel", "0 in each run", str(lost), agrees=not any(lost))


def row_of(shown: Facts) -> dict[str, Any]:
    """What a report would say of the trace."""
    trust = shown.integrity
    return {
        "step_us": None if shown.step_us is None else shown.step_us.median,
        "traced_step_us": None if shown.traced_step_us is None else shown.traced_step_us.median,
        "kernels_per_step": sum(row.calls_per_step for row in shown.kernels),
        "integrity": {} if trust is None else {check.name: check.count for check in trust.checks if check.count},
        "withheld": [] if trust is None else sorted(trust.withheld),
        "missing": [f"{lost.what}: {lost.reason}" for lost in shown.run.missing],
    }


def _profiled(stage: Stage) -> gpulab.Run:
    torch.manual_seed(0)
    width = stage.size(1024, 16)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8))).to(stage.device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(256, width, device=stage.device)
    with gpulab.profile("notebook", device=stage.device, live=False, save=False, show=False) as door:
        for _ in range(STEPS):
            optimizer.zero_grad()
            F.mse_loss(model(x), x).backward()
            optimizer.step()
    return door.run
