"""The results about planted causes as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

AIMS = (
    "Aims: the headline right in at least 95 % of the cells that have a cause, no false alarm on a healthy one, median",
    "error of the predictions at most 10 %. A third of the cells is kept aside: the rules were not tried on them while",
    "they were built, and cells that a mend came from are no longer among them (`planted/kept_aside.py`).",
)


def section(kept: Mapping[str, Any], title: str) -> list[str]:
    """One part, tuned or kept aside: its totals, then a line for each cell, then the traces."""
    lines = [f"## Planted causes: {title}", "", *AIMS, "", *_totals(kept["totals"])]
    if kept.get("first_runs"):
        lines += ["", *_first_runs(kept["first_runs"])]
    lines += ["", *_cells(kept["rows"])]
    if kept.get("traces"):
        lines += ["", "Traces recorded elsewhere:", "", *_traces(kept["traces"])]
    return lines


def _totals(t: Mapping[str, Any]) -> list[str]:
    error = "–" if t["median_error"] is None else f"{t['median_error']:.0%}"
    held, of = t["interval_holds"]
    lines = [
        "| cells with a cause | headline right | by its planted name | true cause among the first three | healthy "
        "| false alarms | predictions | median error | interval holds |",
        "|" + "---|" * 9,
        f"| {t['sick']} | **{t['headline_right']}** ({_share(t['headline_right'], t['sick'])}) | {t['headline_exact']} "
        f"| {t['among_the_first_three']} | {t['healthy']} | **{t['false_alarms']}** | {t['predictions']} | {error} "
        f"| {held} of {of} |",
    ]
    notes = []
    if t.get("median_noise") is not None:
        notes.append(f"A healthy cell measured against itself is off by {t['median_noise']:.0%} (median).")
    if t.get("second_told", (0, 0))[1]:
        told, of = t["second_told"]
        notes.append(f"Of {of} cells with a second cause below the first it was told in {told}.")
    if t["skipped"]:
        notes.append(f"{t['skipped']} cells did not run: they need a GPU or a package that is not here.")
    if t["failed"]:
        notes.append(f"Failed: {', '.join(t['failed'])}.")
    if t["untrue"]:
        notes.append(f"The measurement does not bear out what was planted in: {', '.join(t['untrue'])}.")
    return [*lines, "", *notes] if notes else lines


def _first_runs(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is right of cells that no earlier state of gpulab was ever run on."""
    lines = [
        "Each set of cells when it was run for the first time, with the rules as they were then. What was wrong was",
        "mended afterwards, and the cells that a mend came from are no longer kept aside.",
        "",
        "| cells | with a cause | headline right | healthy | false alarms | predictions | median error |",
        "|" + "---|" * 7,
    ]
    for run in runs:
        error = "–" if run["error"] is None else f"{run['error']:.0%}"
        lines.append(
            f"| {run['cells']} | {run['with_cause']} | **{run['right']}** ({_share(run['right'], run['with_cause'])}) "
            f"| {run['healthy']} | **{run['alarms']}** | {run['predictions'] or '–'} | {error} |"
        )
    return lines


def _cells(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "Measured: time per sample cured over as written, and with the knobs that the finding names where it names",
        "some; predicted: of the finding that names the cause. Rank: of the true causes among the findings.",
        "",
        "| cell | by | planted | headline | rank | predicted | measured, its knobs | measured, cured | error |",
        "|" + "---|" * 9,
    ]
    for row in rows:
        name = f"{row['name'].replace('_', ' ')}: {row['because']}"
        planted = " + ".join(row["causes"]) or "healthy"
        if row["skipped"] or row["failed"]:
            lines.append(f"| {name} | {row['framework']} | {planted} | {row['skipped'] or 'failed'} | | | | | |")
            continue
        headline = row["headline"] if row["right"] else f"**{row['headline']}**"
        ranks = ", ".join(str(rank or "–") for rank in row["ranks"].values())
        arms = (row["measured"] or {}).get("arms", {})
        error = "" if row["error"] is None else f"{row['error']:.0%}"
        lines.append(
            f"| {name} | {row['framework']} | {planted} | {headline} | {ranks} | {predicted(row['predicted'])} "
            f"| {_ratio(arms.get('advised'))} | {_ratio(arms.get('cured'))} | {error} |"
        )
    return lines


def _traces(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["| trace | what is known of it | headline | |", "|---|---|---|---|"]
    for row in rows:
        if row["skipped"] or row["failed"]:
            lines.append(f"| {row['name']} | {row['because']} | | {row['skipped'] or row['failed']} |")
        else:
            verdict = "right" if row["right"] else f"**{'; '.join(row['wrong'])}**"
            lines.append(f"| {row['name']} | {row['because']} | {row['headline']} | {verdict} |")
    return lines


def predicted(prediction: Mapping[str, Any] | None) -> str:
    """Its ratio and interval, where it is only a range that, else why nothing is foretold."""
    if prediction is None:
        return ""
    if prediction["interval"] is None:
        return f"refused: {prediction['refused']}"
    low, high = prediction["interval"]
    middle = "" if prediction["ratio"] is None or prediction.get("only_sign") else f"{prediction['ratio']:.2f} "
    return f"{middle}[{low:.2f}, {high:.2f}]"


def _ratio(arm: Mapping[str, Any] | None) -> str:
    return "" if arm is None else "{:.2f} [{:.2f}, {:.2f}]".format(arm["ratio"], *arm["interval"])


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "–"
