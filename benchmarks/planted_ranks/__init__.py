"""Planted causes of a job: scripts for two ranks whose bottleneck is known beforehand, and what gpulab says of them.

Each script (`cells/CAUSE/NAME.py`) describes itself in its header. It is recorded by `gpulab record --ranks`, and the
first finding of the report of all ranks is held against what was planted. What a script said at its first run is kept
(`first_runs` in the result) and never measured again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS
from benchmarks.planted import first_runs
from benchmarks.planted.planted import HEALTHY
from benchmarks.planted_ranks.planted import PlantedRanks, all_cells
from benchmarks.planted_ranks.recording import recorded

FILE = RESULTS / "planted_ranks.json"


def measure(store: Path | None = None) -> dict[str, object]:
    """All scripts, one after the other. `store`: where the runs and what was printed are kept; None: nowhere."""
    from gpulab.devices.machine import environment

    cells, kept, rows = all_cells(), _kept_first_runs(), []
    for planted in cells:
        rows.append(row_of(planted, store))
        when = f"{datetime.now(UTC):%Y-%m-%d}"
        kept = first_runs.extended(kept, rows, cells, date=when, cpu=environment().cpu)
        _keep(kept)  # at once: no script has a second first run
    return {"totals": totals(rows), "rows": rows, "first_runs": kept}


def row_of(planted: PlantedRanks, store: Path | None = None) -> dict[str, Any]:
    """What was planted and what was said. A script that fails is told, and does not end the others."""
    began = time.monotonic()
    row: dict[str, Any] = {
        "name": planted.name,
        "because": planted.because,
        "causes": list(planted.causes),
        "load": os.getloadavg()[0],
        "skipped": "",
        "failed": "",
    }
    try:
        row |= recorded(planted, store)
    except Exception as e:
        row["failed"] = f"{type(e).__name__}: {e}"
    row["seconds"] = time.monotonic() - began
    mark = "ok   " if row.get("right") else "WRONG"
    words = f"FAILED: {row['failed']}" if row["failed"] else ", ".join(row["findings"])
    about = f"{planted.name:26} {planted.cause:22} -> {words}, {row['seconds']:.0f} s, load {row['load']:.1f}"
    print(f"  {mark} {about}", file=sys.stderr, flush=True)
    return row


def totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A script that failed is not right."""
    sick, healthy = [row for row in rows if row["causes"]], [row for row in rows if not row["causes"]]
    return {
        "with_cause": len(sick),
        "right": sum(row.get("right", False) for row in sick),
        "healthy": len(healthy),
        "healthy_right": sum(row.get("right", False) for row in healthy),
        "failed": [row["name"] for row in rows if row["failed"]],
    }


def section(kept: Mapping[str, Any]) -> list[str]:
    """Of the table for people."""
    lines = [
        "## Planted causes of a job of two ranks",
        "",
        "Training scripts over gloo, written without a look at the rules and recorded by `gpulab record --ranks 2`.",
        "Share: of a step, what the planted cause takes, or the exchange of a healthy script, by a stopwatch without",
        "gpulab. First run: what was said when the script was recorded for the first time, with the rules as they were",
        "then, on two cores that other work shared, so that some of what was said is about that work.",
        "Aim: the headline right in at least 95 % at the first run.",
        "",
    ]
    outcomes = {name: told for entry in kept["first_runs"] for name, told in entry["outcomes"].items()}
    lines += [_first_run(entry) for entry in kept["first_runs"]]
    lines += [
        "",
        "| script | planted | share | headline, first run | headline, now |",
        "|" + "---|" * 5,
    ]
    shares = {planted.name: planted.share for planted in all_cells()}
    for row in kept["rows"]:
        planted = (*row["causes"], HEALTHY)[0]
        lines.append(
            f"| {row['name'].replace('_', ' ')}: {row['because']} | {planted} | {shares[row['name']]:.0%} "
            f"| {_headline(outcomes.get(row['name']), planted)} | {_headline(row, planted)} |"
        )
    loads = [row["load"] for row in kept["rows"]]
    return [*lines, "", f"Load average before a script: {min(loads):.1f} to {max(loads):.1f}."] if loads else lines


def _first_run(entry: Mapping[str, Any]) -> str:
    run = entry["first_run"]
    if run is None:
        return f"{entry['cohort']}: {len(entry['outcomes'])} of {entry['cells']} have run."
    right = run["right"] + run["healthy"] - run["false_alarms"]
    return (
        f"{entry['cohort']}: **{right} of {entry['cells']} headlines right at the first run "
        f"({right / entry['cells']:.0%})**: {run['right']} of {run['with_cause']} with a cause, "
        f"{run['healthy'] - run['false_alarms']} of {run['healthy']} healthy."
    )


def _headline(told: Mapping[str, Any] | None, planted: str) -> str:
    """Bold where it is not what was planted."""
    if told is None:
        return "not run yet"
    if told["failed"]:
        return "**failed**"
    return str(told["headline"]) if told["headline"] == planted else f"**{told['headline']}**"


def _kept_first_runs() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if FILE.exists():
        found = json.loads(FILE.read_text(encoding="utf-8"))["first_runs"]
    return found


def _keep(cohorts: Sequence[Mapping[str, Any]]) -> None:
    """Into the result file, beside what else it has."""
    result = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {"rows": []}
    FILE.write_text(json.dumps({**result, "first_runs": cohorts}, indent=1) + "\n", encoding="utf-8")
