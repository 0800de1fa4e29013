"""The bench of hot lines, in the table for people."""

from __future__ import annotations

from typing import Any


def section(kept: dict[str, Any]) -> list[str]:
    """How many lines are right, wrong or not named, where a batch is made and in the loop's own step."""
    rows = [row for row in kept["rows"] if row["share"] >= kept["least_share"]]
    parts = (("dataset, no workers", 0), ("dataset, 2 workers", 2), ("the loop's own step", None))
    return [
        "## Hot lines",
        "",
        "Small datasets and loops with one line that takes most of the time, as a stopwatch around that line shows. Is",
        "`your line` that line? `function`: only the beginning of its function is named. Targets: none is wrong, and",
        f"{kept['target_right']:.0%} are right. One run each; load average at the end: {kept['load_average'][0]:.1f}.",
        "",
        "| where | asked | right | function | none | wrong |",
        "|---|---|---|---|---|---|",
        *(_row(name, [row for row in rows if row["workers"] == workers]) for name, workers in parts),
        _row("all", rows),
    ]


def _row(name: str, rows: list[dict[str, Any]]) -> str:
    scores = [row["score"] for row in rows]
    counts = [scores.count(score) for score in ("right", "function", "none", "wrong")]
    return f"| {name} | {len(rows)} | {' | '.join(str(count) for count in counts)} |"
