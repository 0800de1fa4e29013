"""A planted straggler of 20 ms, ten times: is it the headline, with its line, and how much of each rank is unknown?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.own_process import ROOT

TIMES, LATE_RANK, LATE_MS = 10, 1, 20
LINE = "prepare(0.020)"
SCRIPT = f"""
import time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def prepare(seconds):
    time.sleep(seconds)


dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(80):
    if dist.get_rank() == {LATE_RANK}:
        {LINE}
    loss = model(torch.randn(64, 512)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""


def measure() -> dict[str, object]:
    """One row for each time."""
    rows = [_row() for _ in range(TIMES)]
    right = sum(bool(row["right"]) for row in rows)
    return {
        "planted_ms": LATE_MS,
        "right": right,
        "times": TIMES,
        "with_line": sum(bool(row["line"]) for row in rows),
        "unknown_of_waiting": float(np.median([row["unknown"][0] for row in rows])),
        "unknown_of_late": float(np.median([row["unknown"][1] for row in rows])),
        "seconds": float(np.median([row["seconds"] for row in rows])),
        "rows": rows,
    }


def _row() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        script, answer = Path(folder, "train.py"), Path(folder, "report.json")
        script.write_text(SCRIPT, encoding="utf-8")
        began = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "gpulab", "record", "--no-live", "--ranks", "2", "--json", str(answer), str(script)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "GPULAB_DIR": folder, "OMP_NUM_THREADS": "1"},
            check=True,
            capture_output=True,
        )
        seconds = time.monotonic() - began
        report: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    first = report["findings"][0]
    waits = next((e["words"] for e in first["evidence"] if "They wait" in e["words"]), "")
    row = {
        "headline": report["headline"]["sentence"],
        "right": first["key"] == "straggler" and report["straggler"] == LATE_RANK,
        "line": first.get("source_line") or "",
        "waits": waits,
        "unknown": [_unknown(report["per_rank"][rank]) for rank in ("0", "1")],
        "seconds": seconds,
    }
    print(f"  {'ok   ' if row['right'] else 'WRONG'} {row['headline']} unknown {row['unknown']}", file=sys.stderr)
    return row


def _unknown(figures: dict[str, Any]) -> float | None:
    """The share of a profiled step that belongs to no part."""
    parts = figures.get("breakdown") or {}
    share: float | None = parts.get("share", {}).get("unknown")
    return share


def section(result: dict[str, Any]) -> list[str]:
    """Of benchmarks/README.md."""
    return [
        "## A planted straggler",
        "",
        f"Two gloo ranks under `gpulab record --ranks 2`; rank {LATE_RANK} sleeps {LATE_MS} ms in each step. How often "
        "is that rank the headline, with its line, and how much of each rank's step belongs to no part?",
        "",
        "| times | headline right | with its line | unknown where one waits | unknown of the late rank | in all |",
        "|---|---|---|---|---|---|",
        f"| {result['times']} | {result['right']} | {result['with_line']} | {result['unknown_of_waiting']:.1%} | "
        f"{result['unknown_of_late']:.0%} | {result['seconds']:.1f} s |",
        "",
        "The late rank's unknown time is its sleep: the finding names the line, the accounting has no part for it.",
    ]
