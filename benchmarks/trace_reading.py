"""Reading and accounting a trace file: gpulab against HolisticTraceAnalysis 0.5.0 and against `json.load` alone.

Each reading is a process of its own, so that its peak memory is its own; the tools take turns on one file. What is
timed is the work: each tool's imports come before. gpulab reads the file and computes every figure of its report; HTA
reads it and gives its temporal, kernel and idle breakdowns; `json.load` only parses. HTA needs an environment of its
own, see `peers-requirements.txt`; where it is absent its column is left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import synthetic_trace
from benchmarks.harness import ratio_with_interval

PEERS = Path(os.environ.get("PEERS", ".venv-peers/bin/python"))
TRACES = Path(os.environ.get("GPULAB_TRACES", "../shared/traces"))
LARGEST = "h100_owlv2_starved.pt.trace.json.gz"
LARGE = 5_000_000
SIZES = (250_000, 500_000, 1_000_000, 2_000_000, 4_000_000)
TURNS, MIDDLE_TURNS = 7, 3
MIDDLE = 500_000  # every tool several times; the large one once, for HTA needs minutes and gigabytes for it

ARMS = {
    "gpulab": (
        "from gpulab.analysis.facts import facts\nfrom gpulab.trace.load import load_run",
        "facts(load_run(sys.argv[1]))",
    ),
    "json.load": (
        "import gzip",
        "json.load(gzip.open(sys.argv[1]) if sys.argv[1].endswith('.gz') else open(sys.argv[1], 'rb'))",
    ),
    "HTA": (
        "import logging\nlogging.disable(logging.CRITICAL)\nfrom hta.trace_analysis import TraceAnalysis",
        "t = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir='')\n"
        "t.get_temporal_breakdown(visualize=False)\n"
        "t.get_gpu_kernel_breakdown(visualize=False)\n"
        "t.get_idle_time_breakdown(visualize=False)",
    ),
}
_PROGRAM = """
import json, resource, sys, time
{imports}
began = time.perf_counter()
{work}
seconds = time.perf_counter() - began
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print("RESULT:" + json.dumps([seconds, peak]))
"""


def measure() -> dict[str, object]:
    """Seconds and peak memory per tool and file, ratios to gpulab, and gpulab's time over the number of events."""
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        if (TRACES / LARGEST).exists():
            found["largest_real"] = {"name": LARGEST, "tools": _turns(TRACES / LARGEST, TURNS)}
        for size, turns in ((MIDDLE, MIDDLE_TURNS), (LARGE, 1)):
            file = Path(folder, "made.json")
            synthetic_trace.write(file, size)
            tools = _turns(file, turns)
            found[f"made_{size}"] = {"events": size, "bytes": file.stat().st_size, "tools": tools}
        found["growth"] = [_growth(Path(folder, "made.json"), events) for events in SIZES]
    return found


def _growth(file: Path, events: int) -> dict[str, float]:
    synthetic_trace.write(file, events)
    seconds, peak = min(read_once("gpulab", file) or (0.0, 0.0) for _ in range(2))
    return {"events": events, "seconds": seconds, "peak_bytes": peak}


def _turns(file: Path, turns: int) -> dict[str, object]:
    tools = [tool for tool in ARMS if tool != "HTA" or PEERS.exists()]
    taken: dict[str, list[tuple[float, float] | None]] = {tool: [] for tool in tools}
    for turn in range(turns):
        for tool in tools if turn % 2 == 0 else reversed(tools):
            taken[tool].append(read_once(tool, file))
    return {tool: _summary(rows, taken["gpulab"]) for tool, rows in taken.items()}


def _summary(rows: list[tuple[float, float] | None], ours: list[tuple[float, float] | None]) -> dict[str, object]:
    both = [(row, own) for row, own in zip(rows, ours, strict=True) if row is not None and own is not None]
    if not both:
        return {"failed": "it could not read the file: out of memory or an error of its own"}
    seconds = sorted(row[0] for row, _ in both)
    return {
        "seconds": seconds[len(seconds) // 2],
        "peak_bytes": max(row[1] for row, _ in both),
        "over_gpulab": ratio_with_interval([row[0] / own[0] for row, own in both]),
    }


def read_once(tool: str, file: Path) -> tuple[float, float] | None:
    """Seconds and peak memory in bytes of one reading in a fresh process; None where the tool failed."""
    python = str(PEERS) if tool == "HTA" else sys.executable
    imports, work = ARMS[tool]
    done = subprocess.run(
        [python, "-c", _PROGRAM.format(imports=imports, work=work), str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT:")), None)
    if line is None:
        return None
    seconds, peak = json.loads(line.removeprefix("RESULT:"))
    return float(seconds), float(peak)
