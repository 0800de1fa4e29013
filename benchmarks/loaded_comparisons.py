"""Comparisons on a busy machine: nothing changed, and ten times the work, while other processes use the processor.

The cells are those of `calibration`, judged in blocks in turn. Ten times the work: arm B makes ten passes in a step.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.calibration import BLOCK_STEPS, KINDS
from benchmarks.own_process import in_own_process

BUSY = 4  # processes that only compute
SAME, TENFOLD = 32, 16  # experiments
PAIRS = 10
TIMES = 10

CELL = """
for epoch in range(1000):
    for x, y in loader:
        optimizer.zero_grad()
        for _ in range(passes):
            loss = F.mse_loss(model(x), y)
            loss.backward()
        optimizer.step()
        last = run_name
"""
_SPIN = "while True: pass"


def measure(busy: int = BUSY, same: int = SAME, tenfold: int = TENFOLD) -> dict[str, object]:
    """Coverage and false verdicts where nothing changed, and how often ten times the work is found."""
    with others(busy):
        rows = in_own_process(__name__, "experiments", same=same, tenfold=tenfold)["rows"]
    of_same = [row for row in rows if row["times"] == 1]
    of_ten = [row for row in rows if row["times"] == TIMES]
    return {
        "busy_processes": busy,
        "load_average": [min(row["load"] for row in rows), max(row["load"] for row in rows)],
        "pairs": PAIRS,
        "same": {
            "experiments": len(of_same),
            "holds_1": sum(row["interval"][0] <= 1 <= row["interval"][1] for row in of_same),
            **_said(of_same),
        },
        "tenfold": {"experiments": len(of_ten), **_said(of_ten)},
        "rows": rows,
    }


def experiments(same: int, tenfold: int) -> dict[str, Any]:
    """The kinds of cells in turn, each in a new notebook; tenfold work where the model is most of the step."""
    rows = []
    computing = [kind for kind in KINDS if kind not in ("waiting for data", "two workers")]
    plan = [(list(KINDS)[i % len(KINDS)], 1) for i in range(same)]
    plan += [(computing[i % len(computing)], TIMES) for i in range(tenfold)]
    for i, (kind, times) in enumerate(plan):
        rows.append(_experiment(kind, times))
        print(f"  {i + 1} of {len(plan)} {kind}, {times} times: {_words(rows[-1])}", file=sys.stderr, flush=True)
    return {"rows": rows}


@contextlib.contextmanager
def others(count: int) -> Iterator[None]:
    """So many processes compute meanwhile."""
    started = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def _experiment(kind: str, times: int) -> dict[str, Any]:
    from gpulab.api import experiment

    names: dict[str, Any] = {"__name__": "__main__"}
    exec(KINDS[kind] + "passes = 1\n", names)
    change = {"run_name": "second"} if times == 1 else {"passes": times}
    began = time.monotonic()
    compared = experiment.experiment(
        CELL, change, namespace=names, steps=BLOCK_STEPS, pairs=PAIRS, save=False, show=False
    )
    experiment.experiments.clear()
    found = compared.only
    return {
        "kind": kind,
        "times": times,
        "verdict": found.verdict,
        "ratio": found.ratio,
        "interval": found.interval,
        "noise_floor": found.noise_floor,
        "load": os.getloadavg()[0],
        "seconds": time.monotonic() - began,
    }


def _said(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    return {said: sum(row["verdict"] == said for row in rows) for said in ("faster", "slower", "undecided")}


def _words(row: dict[str, Any]) -> str:
    low, high = row["interval"]
    return (
        f"{row['ratio']:.3f} [{low:.3f}, {high:.3f}] {row['verdict']}, load {row['load']:.1f}, {row['seconds']:.0f} s"
    )


def section(kept: dict[str, Any]) -> list[str]:
    """Of the table for people."""
    same, ten = kept["same"], kept["tenfold"]
    low, high = kept["load_average"]
    count = same["experiments"]
    told = same["faster"] + same["slower"]
    return [
        "## Comparisons on a busy machine",
        "",
        f"{kept['busy_processes']} processes of the benchmark computed meanwhile, beside what else ran: load average",
        f"{low:.1f} to {high:.1f}. {kept['pairs']} pairs of blocks each. Target: the 95 % interval holds 1 in at least",
        "93 %, a difference is said in at most 5 % where nothing changed, and ten times the work is found in all.",
        "",
        "| | experiments | interval holds 1 | “faster” or “slower” | “undecided” |",
        "|---|---|---|---|---|",
        f"| nothing changed | {count} | {same['holds_1'] / count:.0%} | {told / count:.0%} "
        f"| {same['undecided'] / count:.0%} |",
        f"| ten times the work | {ten['experiments']} | | {ten['slower'] / ten['experiments']:.0%} “slower” "
        f"| {ten['undecided'] / ten['experiments']:.0%} |",
    ]
