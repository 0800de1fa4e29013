"""Reading a trace file into columns against `json.load` alone on the same file: time per event and peak memory.

Each reading runs in a process of its own, the arms in random order; the file is in the page cache for both.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import synthetic_trace
from benchmarks.harness import ratio_with_interval, shuffled_pairs

SIZES = (50_000, 100_000, 250_000, 500_000, 1_000_000)
REPEATS = 5
ARMS = {
    "gpulab": "from gpulab.sources.trace_file import read_trace; from pathlib import Path\n"
    "def read(path): return read_trace(Path(path)).origin.events_read",
    "json.load": "import gzip, json\ndef read(path): return len(json.load(gzip.open(path))['traceEvents'])",
}
_READ = """
import json, resource, sys, time
began = time.perf_counter()
events = read(sys.argv[1])
seconds = time.perf_counter() - began
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(json.dumps({"events": events, "seconds": seconds, "peak_rss_bytes": peak}))
"""


def measure(sizes: Sequence[int] = SIZES, repeats: int = REPEATS) -> dict[str, object]:
    """Per size: each arm's median seconds, µs per event and peak memory, and how many times faster gpulab reads."""
    with tempfile.TemporaryDirectory() as folder:
        return {f"{size}": _one_size(size, repeats, Path(folder) / f"{size}.json.gz") for size in sizes}


def _one_size(size: int, repeats: int, path: Path) -> dict[str, object]:
    synthetic_trace.write(path, size)
    taken: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for block in shuffled_pairs(repeats, tuple(ARMS), seed=size):
        for arm in block:
            taken[arm].append(read_once(arm, path))
    path.unlink()
    pairs = zip(taken["json.load"], taken["gpulab"], strict=True)
    return {
        **{arm: _middle(rows) for arm, rows in taken.items()},
        "json_load_over_gpulab": ratio_with_interval([j["seconds"] / g["seconds"] for j, g in pairs]),
    }


def read_once(arm: str, path: Path) -> dict[str, float]:
    """Events, seconds and peak resident memory of one reading in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", ARMS[arm] + _READ, str(path)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _middle(rows: list[dict[str, float]]) -> dict[str, float]:
    middle = sorted(rows, key=lambda r: r["seconds"])[len(rows) // 2]
    return {**middle, "us_per_event": middle["seconds"] / middle["events"] * 1e6}


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
