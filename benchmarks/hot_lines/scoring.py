"""Runs each case and says whether the line that gpulab names is the hot one."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.hot_lines.stopwatch import HERE, MARK, marked, share
from benchmarks.own_process import in_own_process

CASES = tuple(sorted(path.stem for path in (HERE / "cases").glob("*.py") if path.stem != "__init__"))
LEAST_SHARE = 0.7  # of a case's time, by the stopwatch; else the case has no hot line
TARGET_RIGHT = 0.95
WORKERS = (0, 2)
_FUNCTION = ("def ", "async def ", "class ", "@")


def measure(cases: tuple[str, ...] = CASES) -> dict[str, object]:
    """Every case in a process of its own; those with a dataset without workers and with two."""
    rows = []
    for case in cases:
        rows += in_own_process(__name__, "rows_of", case=case)["rows"]
        print("\n".join(f"  {r['case']}, {r['workers']}: {r['score']} {r['named']}" for r in rows[-2:]), flush=True)
    asked = [row for row in rows if row["share"] >= LEAST_SHARE]
    counts = Counter(row["score"] for row in asked)
    return {
        "load_average": os.getloadavg(),
        "asked": len(asked),
        "score": {score: counts[score] for score in ("right", "function", "none", "wrong")},
        "target_right": TARGET_RIGHT,
        "least_share": LEAST_SHARE,
        "rows": rows,
    }


def rows_of(case: str) -> dict[str, Any]:
    """A case's rows: what the stopwatch says, and what is named."""
    import importlib

    module = importlib.import_module(f"benchmarks.hot_lines.cases.{case}")
    file, lines = marked(case)
    named = {workers: _named(module, workers) for workers in (WORKERS if module.KIND == "items" else (0,))}
    taken = share(case)
    return {
        "rows": [
            {
                "case": case,
                "because": (module.__doc__ or "").strip(),
                "workers": workers if module.KIND == "items" else None,
                "share": taken,
                "named": line.replace(str(HERE.parent.parent) + os.sep, ""),
                "score": score(line, file, lines),
            }
            for workers, line in named.items()
        ]
    }


def score(named: str, file: str, lines: range) -> str:
    """`right`, `wrong`, `none`; `function` where only the beginning of a function is named."""
    if not named:
        return "none"
    place, _, text = named.partition(": ")
    if any(place == f"{file}, line {line}" for line in lines):
        return "right"
    return "function" if text.startswith(_FUNCTION) and MARK not in text else "wrong"


def _named(module: Any, workers: int) -> str:
    """The first line that the findings of a run name; empty for none."""
    import gpulab

    with tempfile.TemporaryDirectory() as folder:
        os.environ["GPULAB_DIR"] = folder
        here = Path.cwd()
        os.chdir(folder)
        try:
            with gpulab.profile(show=False, save=False) as profiled:
                module.main(workers)
        finally:
            os.chdir(here)
    findings = gpulab.diagnose(profiled.run).findings
    return next((finding.source_line for finding in findings if finding.source_line), "")
