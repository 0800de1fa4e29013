"""How often a comparison is wrong where nothing was changed: interleaved blocks, and beside them a plain before/after.

In each experiment arm B sets a variable that the cell reads and that changes nothing. In the same minute the same cell
runs twice more, one run after the other, each with as many unprofiled steps as one arm had in its blocks. Both are
judged by gpulab: does the 95 % interval hold 1, and is "faster" or "slower" said?
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.own_process import in_own_process
from benchmarks.planted_knobs.planted import IMPORTS

EXPERIMENTS = 64
PAIRS = 10
BLOCK_STEPS = 10

CELL = """
for epoch in range(1000):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        last = run_name
"""
IN_MEMORY = """
loader = DataLoader(TensorDataset(torch.randn(8192, 16), torch.randn(8192, 1)), batch_size=32, shuffle=True)
run_name = "first"
"""
WAITING = """
from benchmarks.planted_knobs.datasets import Stored
loader = DataLoader(Stored(4096, wait_s=0.001), batch_size=8, shuffle=True{workers})
run_name = "first"
"""
WIDE = """
model = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
"""
DEEP = """
model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(50)), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
"""
KINDS = {
    "matrix products": IMPORTS + IN_MEMORY + WIDE,
    "many small operations": IMPORTS + IN_MEMORY + DEEP,
    "waiting for data": IMPORTS + WAITING.format(workers="") + WIDE,
    "two workers": IMPORTS + WAITING.format(workers=", num_workers=2") + WIDE,
}
METHODS = ("interleaved", "sequential")


def measure() -> dict[str, object]:
    """Coverage and false verdicts of both methods, over all kinds of cells and for each."""
    rows = in_own_process(__name__, "experiments", count=EXPERIMENTS)["rows"]
    return {
        "experiments": len(rows),
        "pairs": PAIRS,
        "all": _summary(rows),
        "kinds": {kind: _summary([row for row in rows if row["kind"] == kind]) for kind in KINDS},
        "rows": rows,
    }


def experiments(count: int, pairs: int = PAIRS) -> dict[str, Any]:
    """The kinds in turn. Which of the two methods comes first alternates."""
    rows = []
    for i in range(count):
        kind = list(KINDS)[i % len(KINDS)]
        began = time.monotonic()
        methods = {"interleaved": _interleaved, "sequential": _sequential}
        order = METHODS if (i // len(KINDS)) % 2 else METHODS[::-1]
        row: dict[str, Any] = {"kind": kind, **{method: methods[method](kind, pairs) for method in order}}
        row["seconds"] = time.monotonic() - began
        rows.append(row)
        print(f"  {i + 1} of {count} {kind}: {_words(row)}  {row['seconds']:.0f} s", file=sys.stderr, flush=True)
    return {"rows": rows}


def _interleaved(kind: str, pairs: int) -> dict[str, Any]:
    from gpulab.api import experiment

    compared = experiment.experiment(
        CELL, {"run_name": "second"}, namespace=_notebook(kind), steps=BLOCK_STEPS, pairs=pairs, save=False, show=False
    )
    experiment.experiments.clear()
    return _judged(compared.only)


def _sequential(kind: str, pairs: int) -> dict[str, Any]:
    from gpulab.tuning.compare.sequential import compare_runs

    names = _notebook(kind)
    before, after = (_plain_run(names, BLOCK_STEPS * pairs) for _ in range(2))
    return _judged(compare_runs([before, after]))


def _plain_run(names: dict[str, Any], steps: int) -> Any:
    """As a user measures a cell once. The trace is left out: all steps but the warm-up count."""
    import gpulab

    with gpulab.profile(steps=steps + 5, warmup=5, trace=False, live=False, save=False, show=False, code=CELL) as found:
        exec(compile(CELL, "<cell>", "exec"), names)
    return found.run


def _notebook(kind: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(KINDS[kind], names)
    return names


def _judged(found: Any) -> dict[str, Any]:
    interval = found.interval
    return {
        "ratio": found.ratio,
        "interval": interval,
        "noise_floor": found.noise_floor,
        "verdict": found.verdict,
        "holds_1": interval is not None and interval[0] <= 1 <= interval[1],
        "us_per_step": found.a.us_per_step,
    }


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    return {method: _of([row[method] for row in rows]) for method in METHODS}


def _of(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    widths = sorted(f["interval"][1] - f["interval"][0] for f in found if f["interval"] is not None)
    return {
        "experiments": len(found),
        "holds_1": sum(f["holds_1"] for f in found),
        "faster_or_slower": sum(f["verdict"] in ("faster", "slower") for f in found),
        "median_width": widths[len(widths) // 2] if widths else float("nan"),
        "worst_ratio": max((f["ratio"] for f in found if f["ratio"]), key=lambda r: abs(r - 1), default=float("nan")),
    }


def _words(row: dict[str, Any]) -> str:
    told = []
    for method in METHODS:
        found = row[method]
        interval = found["interval"]
        shown = f"[{interval[0]:.3f}, {interval[1]:.3f}]" if interval else "no interval"
        told.append(f"{method} {found['ratio']:.3f} {shown} {found['verdict']}")
    return "; ".join(told)
