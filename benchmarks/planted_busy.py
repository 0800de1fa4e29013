"""Planted cells on a busy machine: is the competition for the cores named, and is no deprived step called healthy?

A clock that gpulab does not own says what was true: the kernel's account of how long the training thread was ready and
had no core, read before and after the cell.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.comparisons import BUSY, others
from benchmarks.harness import Figure, in_own_process
from benchmarks.planted import folder_of_its_own, profiled, skipped
from planted.catalogue import CELLS, HEALTHY, named

COMPETITION = "cpu_shared"
DEPRIVED = 0.20  # of the cell's time without a core: the competition is to be named
EVERY = 8  # of the cells, in the order of their names


def measure(busy: int = BUSY, every: int = EVERY) -> dict[str, object]:
    """An eighth of the cells, from every cause, beside so many processes that only compute."""
    cells = [planted for planted in CELLS if not planted.gpu][::every]
    with others(busy):
        rows = [_row(planted.name) for planted in cells if not skipped(planted)]
    return {"busy_processes": busy, **totals(rows), "rows": rows}


def totals(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts over the cells that ran."""
    ran = [row for row in rows if not row["failed"]]
    deprived = [row for row in ran if row["without_a_core"] >= DEPRIVED]
    return {
        "cells": len(ran),
        "failed": [row["name"] for row in rows if row["failed"]],
        "deprived": len(deprived),
        "named": sum(row["competition_named"] for row in deprived),
        "not_named": [row["name"] for row in deprived if not row["competition_named"]],
        "false_green": [row["name"] for row in deprived if row["headline"] == HEALTHY],
        "load_average": [min(row["load"] for row in ran), max(row["load"] for row in ran)] if ran else None,
    }


def cell(name: str) -> dict[str, Any]:
    """One cell in this process: what was said of it, and what the system's own clock says."""
    with folder_of_its_own(gpu=False):
        return _judgement(name)


def _judgement(name: str) -> dict[str, Any]:
    import gpulab

    planted = named(name)
    waited_s, began = _waited_s(), time.perf_counter()
    run = profiled(planted)
    without = (_waited_s() - waited_s) / (time.perf_counter() - began)
    findings = [finding.key for finding in gpulab.diagnose(run).findings]
    return {
        "headline": findings[0] if findings else None,
        "findings": findings,
        "competition_named": COMPETITION in findings,
        "without_a_core": without,
        "load": os.getloadavg()[0],
    }


def _waited_s() -> float:
    """So long this thread was ready and had no core: second figure of Linux' schedstat, in ns."""
    text = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text(encoding="ascii")
    return int(text.split()[1]) / 1e9


def _row(name: str) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "planted": (*named(name).causes, HEALTHY)[0], "failed": ""}
    try:
        row |= in_own_process(__name__, "cell", name=name)
    except Exception as e:
        row["failed"] = f"{type(e).__name__}: {e}"
    words = row["failed"] or f"{row['without_a_core']:.0%} without a core: {', '.join(row['findings'])}"
    print(f"  {name}: {words}", file=sys.stderr, flush=True)
    return row


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """Of the cells that were deprived."""
    low, high = results["load_average"]
    words = f"{low:.1f} to {high:.1f}"
    yield Figure(f"load average, {results['busy_processes']} busy processes among it", high, words=words)
    yield Figure.share("deprived cells", results["deprived"], results["cells"])
    yield Figure.share("… whose competition is named", results["named"], results["deprived"], "named")
    yield Figure.count("… called healthy", len(results["false_green"]), results["deprived"], "false_green")
