"""How often a slowdown that was planted is found: 5 % of a step of about 10 ms, in experiments of at most a minute.

The cell reads a variable `extra_us` and keeps the processor busy for so long at the end of each step; arm B sets it.
The step is measured first, in a plain run, and the slowdown is 5 % of that. A machine may be faster or slower later: an
interval is held against the share that the same time is of the steps which that experiment measured as written.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from benchmarks.own_process import in_own_process
from benchmarks.planted_knobs.planted import IMPORTS

EXPERIMENTS = 30
STEP_MS = 10.0
SLOWDOWN = 0.05

BEFORE = """
import time
loader = DataLoader(TensorDataset(torch.randn(16384, 16), torch.randn(16384, 1)), batch_size=64, shuffle=True)
model = nn.Sequential(
    nn.Linear(16, 256),
    *(layer for _ in range({depth}) for layer in (nn.ReLU(), nn.Linear(256, 256))),
    nn.Linear(256, 1),
)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
extra_us = 0.0
"""
CELL = """
for epoch in range(1000):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        until = time.perf_counter() + extra_us / 1e6
        while time.perf_counter() < until:
            pass
"""
STEPS_TIMED = 60


def measure() -> dict[str, object]:
    """How many of the experiments said "slower", and how long they took."""
    found = in_own_process(__name__, "experiments", count=EXPERIMENTS)
    rows = found["rows"]
    return {
        "experiments": len(rows),
        "found": sum(row["verdict"] == "slower" for row in rows),
        "step_ms": found["step_ms"],
        "slowdown": SLOWDOWN,
        "median_ratio": statistics.median(row["ratio"] for row in rows),
        "extra_us": found["extra_us"],
        "median_planted": statistics.median(planted(row, found["extra_us"]) for row in rows),
        "interval_holds_it": sum(holds(row, found["extra_us"]) for row in rows),
        "longest_s": max(row["seconds"] for row in rows),
        "rows": rows,
    }


def planted(row: dict[str, Any], extra_us: float) -> float:
    """The ratio that was planted, by the steps as written of this experiment."""
    return 1 + extra_us / float(row["us_per_step"][0])


def holds(row: dict[str, Any], extra_us: float) -> bool:
    """Whether the interval has the planted ratio in it."""
    low, high = row["interval"]
    return bool(low <= planted(row, extra_us) <= high)


def experiments(count: int) -> dict[str, Any]:
    """The same experiment again and again, each in a new notebook."""
    depth = round(8 * STEP_MS / _step_ms(8))
    step_ms = _step_ms(depth)
    extra_us = round(1e3 * step_ms * SLOWDOWN, 1)
    print(f"  {depth} layers, {step_ms:.2f} ms per step, {extra_us} µs more", file=sys.stderr, flush=True)
    rows = []
    for i in range(count):
        rows.append(_experiment(depth, extra_us))
        print(f"  {i + 1} of {count}: {_words(rows[-1])}", file=sys.stderr, flush=True)
    return {"step_ms": step_ms, "extra_us": extra_us, "depth": depth, "rows": rows}


def _experiment(depth: int, extra_us: float) -> dict[str, Any]:
    from gpulab.api import experiment

    began = time.monotonic()
    compared = experiment.experiment(CELL, {"extra_us": extra_us}, namespace=_notebook(depth), save=False, show=False)
    seconds = time.monotonic() - began
    experiment.experiments.clear()
    found = compared.only
    return {
        "verdict": found.verdict,
        "ratio": found.ratio,
        "interval": found.interval,
        "noise_floor": found.noise_floor,
        "pairs": found.pairs,
        "us_per_step": [found.a.us_per_step, found.b.us_per_step],
        "seconds": seconds,
    }


def _step_ms(depth: int) -> float:
    """The median step of the cell as written, in a run without a trace."""
    import gpulab

    warmup = 5
    with gpulab.profile(
        steps=STEPS_TIMED + warmup, warmup=warmup, trace=False, live=False, save=False, show=False, code=CELL
    ) as found:
        exec(CELL, _notebook(depth))
    return float(statistics.median(found.run.steps.wall_ns[warmup:])) / 1e6


def _notebook(depth: int) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(IMPORTS + BEFORE.format(depth=depth), names)
    return names


def _words(row: dict[str, Any]) -> str:
    low, high = row["interval"]
    return f"{row['ratio']:.3f} [{low:.3f}, {high:.3f}] {row['verdict']}, {row['pairs']} pairs, {row['seconds']:.0f} s"
