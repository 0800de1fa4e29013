"""The results for people: the verdict first, then what the rules missed, then every recording."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.conductor import row_of

COMPLETE = ("recorded", "there already")


def table(results: Mapping[str, Any], *, short: bool = False) -> str:
    """The page, in Markdown; a `short` one leaves out what went well."""
    rows = results["recordings"]
    lines = ["# Recordings", "", verdict(results), ""]
    if results.get("made_with"):
        lines += [", ".join(f"{name} {value}" for name, value in results["made_with"].items()) + ".", ""]
    missed = [
        [name, ", ".join(row["truth"]), row["headline"], ", ".join(row["findings"]), row["summary"]]
        for name, row in rows.items()
        if row.get("right") is False
    ]
    if missed:
        lines += [
            "## What the rules missed",
            "",
            *_table(["recording", "truth", "headline", "findings", "words"], missed),
        ]
    lacking = [
        [name, row["state"], f"{row['seconds']:.0f}", row["detail"]]
        for name, row in rows.items()
        if row["state"] not in COMPLETE
    ]
    if lacking:
        lines += ["## What is not there", "", *_table(["recording", "what became of it", "seconds", "why"], lacking)]
    problems = [[name, row["problem"]] for name, row in rows.items() if row.get("problem")]
    if problems:
        lines += ["## What could not be judged", "", *_table(["recording", "why"], problems)]
    there = [_row(name, row) for name, row in rows.items() if row["state"] in COMPLETE and not row.get("problem")]
    if there and not short:
        head = ["recording", "step, ms", "steps", "headline", "truth", "right", "kB", "seconds"]
        lines += ["## What is there", "", *_table(head, there)]
    return "\n".join(lines) + "\n"


def verdict(results: Mapping[str, Any]) -> str:
    """How much there is, and how often the rules were right."""
    rows, count = results["recordings"], results["totals"]
    there = sum(row["state"] in COMPLETE for row in rows.values())
    words = [
        f"{there} of {len(rows)} recordings are there ({results['bytes'] / 1e6:.1f} MB on disk), after "
        f"{results['seconds']:.0f} s.",
        f"The rules named the cause of {count['headline_right']} of {count['with_a_cause']} cells that have one.",
        f"They raised {count['false_alarms']} false alarms on {count['healthy']} healthy cells.",
    ]
    if count["misses"]:
        words.append(f"Missed: {', '.join(count['misses'])}.")
    if results["simulated"]:
        words.insert(0, "SIMULATED: the CPU stood in for a GPU, with tiny sizes. Nothing here says anything of a GPU.")
    return " ".join(words)


def _row(name: str, row: Mapping[str, Any]) -> list[str]:
    step_ms, truth, right = row.get("step_ms"), row["truth"], row["right"]
    return [
        name,
        "not measurable" if step_ms is None else f"{step_ms:.2f}",
        str(row["steps"]),
        row["headline"],
        "–" if truth is None else ", ".join(truth),
        "–" if right is None else "yes" if right else "NO",
        f"{row['bytes'] / 1e3:.0f}",
        f"{row['seconds']:.0f}",
    ]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [row_of(head), "|" + "---|" * len(head), *map(row_of, rows), ""]
