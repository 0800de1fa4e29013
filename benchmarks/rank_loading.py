"""Loading a folder of ranks against reading its slowest rank alone: readers run side by side, one per core."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from benchmarks import synthetic_trace
from benchmarks.harness import ratio_with_interval

EVENTS = 1_000_000
REPEATS = 5


def measure() -> dict[str, object]:
    """As many ranks as there are cores: seconds for all of them over seconds for the slowest one."""
    import gpulab

    ranks = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"rank{rank}.json.gz") for rank in range(ranks)]
        for file in files:
            synthetic_trace.write(file, EVENTS)
        rows = [(_seconds(lambda: gpulab.load(Path(folder))), _slowest(files)) for _ in range(REPEATS)]
    middle = sorted(rows)[REPEATS // 2]
    return {
        "ranks": ranks,
        "events_per_rank": EVENTS,
        "all_s": middle[0],
        "slowest_s": middle[1],
        "all_over_slowest": ratio_with_interval([a / s for a, s in rows]),
    }


def _slowest(files: list[Path]) -> float:
    import gpulab

    return max(_seconds(lambda file=file: gpulab.load(file)) for file in files)  # type: ignore[misc]


def _seconds(work: object) -> float:
    began = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - began
