"""Outcomes of planted cells over time: the first run of each cohort, and each cell's row in its result file.

The first run, with the rules as they were then, is kept once and never measured again: it is the honest figure. What it
shows is mended afterwards, so that later runs of the same cells look better.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, get_args

from benchmarks.harness import RESULTS, Figure
from planted import judge
from planted.catalogue import HEALTHY, Part, Planted, cells_of

FILE = RESULTS / "planted_first_runs.json"
NOT_RUN = "not run yet"


class Member(Protocol):
    """A planted case of a cohort."""

    @property
    def name(self) -> str:
        """Its own among all."""

    @property
    def cohort(self) -> str:
        """Those that were written together, and run first together."""


def kept() -> list[dict[str, Any]]:
    """One entry for each cohort, the earliest first.

    `first_run` has the figures, None where they are not complete. `outcomes` has those of single cells, as far as they
    were kept. `why_none`: why a cohort never gets a first run; empty where it has one or still waits for it.
    """
    cohorts: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))["cohorts"]
    return cohorts


def record(rows: Sequence[Mapping[str, Any]], cells: Sequence[Planted], cpu: str) -> None:
    """Keep what these rows say of cells that had no outcome before. What is kept already stays as it is."""
    cohorts = extended(kept(), rows, cells, date=f"{datetime.now(UTC):%Y-%m-%d}", cpu=cpu)
    FILE.write_text(json.dumps({"cohorts": cohorts}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def extended(
    cohorts: Iterable[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    cells: Sequence[Member],
    **circumstances: str,
) -> list[dict[str, Any]]:
    """The entries with the outcomes of these rows. The figures come when the last cell of a cohort has run."""
    entries = {entry["cohort"]: dict(entry) for entry in cohorts}
    for name in sorted({planted.cohort for planted in cells}):
        members = [planted for planted in cells if planted.cohort == name]
        entry = entries.setdefault(name, _new(name, len(members)))
        if entry["first_run"] is None and not entry["why_none"]:
            entries[name] = _with_outcomes(entry, rows, members, circumstances)
    return list(entries.values())


def totals(outcomes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The totals of single outcomes. A cell that failed is not right."""
    sick = [o for o in outcomes if o["planted"] != HEALTHY]
    healthy = [o for o in outcomes if o["planted"] == HEALTHY]
    errors = [o["error"] for o in sick if o["error"] is not None]
    return {
        "with_cause": len(sick),
        "right": sum(o["right"] for o in sick),
        "healthy": len(healthy),
        "false_alarms": sum(not o["right"] for o in healthy),
        "predictions": len(errors),
        "median_error": statistics.median(errors) if errors else None,
    }


def outcome(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a cell's row says of its first run."""
    return {
        "planted": (*row["causes"], HEALTHY)[0],
        "headline": row.get("headline"),
        "right": bool(row.get("right", False)),
        "error": row.get("error"),
        "failed": row["failed"],
    }


def summed(cohorts: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """All first runs together."""
    runs = [entry["first_run"] for entry in cohorts if entry["first_run"] is not None]
    return {key: sum(run[key] for run in runs) for key in ("with_cause", "right", "healthy", "false_alarms")}


def _new(cohort: str, cells: int) -> dict[str, Any]:
    return {"cohort": cohort, "about": "", "cells": cells, "first_run": None, "why_none": "", "outcomes": {}}


def _with_outcomes(
    entry: dict[str, Any], rows: Sequence[Mapping[str, Any]], members: Sequence[Member], circumstances: dict[str, str]
) -> dict[str, Any]:
    names = [planted.name for planted in members]
    ran = {row["name"]: outcome(row) for row in rows if row["name"] in names and not row["skipped"]}
    outcomes = ran | entry["outcomes"]
    complete = set(outcomes) == set(names)
    first_run = circumstances | totals(list(outcomes.values())) if complete else None
    return entry | {"cells": len(names), "outcomes": outcomes, "first_run": first_run}


# -- the two result files: each cell has its row in exactly one, measured or "not run yet" -----------------------------


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
    before = {part: json.loads(file.read_text(encoding="utf-8")) for part, file in files.items() if file.exists()}
    for part, result in settled(before).items():
        files[part].write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def settled(before: Mapping[Part, Mapping[str, Any]]) -> dict[Part, dict[str, Any]]:
    """The results with each cell in the file of its part. Of a cell that is in both the row of its own part counts."""
    rows = {part: {row["name"]: row for row in result["rows"]} for part, result in before.items()}
    results: dict[Part, dict[str, Any]] = {}
    for part, result in before.items():
        everywhere = {name: row for other in before if other != part for name, row in rows[other].items()} | rows[part]
        mine = [everywhere.get(planted.name) or unmeasured(planted, NOT_RUN) for planted in cells_of(part)]
        results[part] = dict(result) | {"totals": judge.totals(mine), "rows": mine}
    return results


# -- for people --------------------------------------------------------------------------------------------------------


def figures(result: Mapping[str, Any]) -> Iterator[Figure]:
    """All first runs together, then each cohort."""
    whole = summed(result["cohorts"])
    yield Figure.share("headline right at the first run", whole["right"], whole["with_cause"], "headline")
    yield Figure.count("false alarms", whole["false_alarms"], whole["healthy"], "false_alarms")
    for entry in result["cohorts"]:
        run = entry["first_run"]
        if run is None:
            yield Figure(f"{entry['cohort']}, {entry['cells']} cells: {entry['why_none'] or 'not all have run'}", None)
            continue
        yield Figure.share(f"{entry['cohort']}, {run['date']}: headline", run["right"], run["with_cause"])
        yield Figure.count(f"{entry['cohort']}: false alarms", run["false_alarms"], run["healthy"])
        if run["median_error"] is not None:
            yield Figure(
                f"{entry['cohort']}: median error of {run['predictions']} predictions", run["median_error"], "%"
            )
