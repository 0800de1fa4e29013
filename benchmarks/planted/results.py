"""The two result files of the planted cells: each cell has its row in exactly one, measured or "not run yet"."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from benchmarks.harness import RESULTS
from benchmarks.planted import judging
from benchmarks.planted.catalogue import Part, cells_of
from benchmarks.planted.planted import Planted

NOT_RUN = "not run yet"


def unmeasured(planted: Planted, reason: str) -> dict[str, Any]:
    """A cell's row before it has run, with the reason where it does not."""
    return {
        "name": planted.name,
        "framework": planted.framework,
        "because": planted.because,
        "causes": list(planted.causes),
        "also": list(planted.also),
        "skipped": reason,
        "failed": "",
    }


def settle(folder: Path = RESULTS) -> None:
    """Write both files anew: the measured row of a cell moves with it when its header names the other file."""
    files = {part: folder / f"planted_{part}.json" for part in get_args(Part)}
    kept = {part: json.loads(file.read_text(encoding="utf-8")) for part, file in files.items() if file.exists()}
    for part, result in settled(kept).items():
        files[part].write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def settled(kept: Mapping[Part, Mapping[str, Any]]) -> dict[Part, dict[str, Any]]:
    """The results with each cell in the file of its part. Of a cell that is in both the row of its own part counts."""
    rows = {part: {row["name"]: row for row in result["rows"]} for part, result in kept.items()}
    results: dict[Part, dict[str, Any]] = {}
    for part, result in kept.items():
        everywhere = {name: row for other in kept if other != part for name, row in rows[other].items()} | rows[part]
        mine = [everywhere.get(planted.name) or unmeasured(planted, NOT_RUN) for planted in cells_of(part)]
        results[part] = dict(result) | {"totals": judging.totals(mine), "rows": mine}
    return results
