"""The results about planted causes as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.planted.first_runs import summed
from benchmarks.planted.results import NOT_RUN

FIRST_RUNS = (
    "Each cohort of cells when it was run for the first time, with the rules as they were then: the figure to go by.",
    "A first run is kept once. What it showed was mended afterwards, and the tables below are of later runs.",
    "Aims: the headline right in at least 95 % of the cells that have a cause, and no false alarm on a healthy one.",
)
ASIDE = (
    "**Survivors**: a cell that a mend came from leaves this table, so that nearly all are right here by construction.",
    "The first runs above are the figure to go by. Aim: median error of the predictions at most 10 %.",
)
TUNED = (
    "The rules were built or mended with a look at these cells (`looked_at` in the header of a cell's file), so that",
    "these figures show what the rules fit, not what they find in a new cell.",
)


def first_runs_section(kept: Mapping[str, Any]) -> list[str]:
    """A line for each cohort, and all of them together."""
    cohorts = kept["cohorts"]
    all_runs = summed(cohorts)
    share = _share(all_runs["right"], all_runs["with_cause"])
    return [
        "## Planted causes: the first run of each cohort",
        "",
        f"**{all_runs['right']} of {all_runs['with_cause']} headlines right at the first run ({share})**, "
        f"{all_runs['false_alarms']} of {all_runs['healthy']} healthy cells with a false alarm.",
        "",
        *FIRST_RUNS,
        "",
        "| cohort | cells | first run | with a cause | headline right | healthy | false alarms | predictions "
        "| median error |",
        "|" + "---|" * 9,
        *(_cohort(entry) for entry in cohorts),
    ]


def _cohort(entry: Mapping[str, Any]) -> str:
    name, run = f"{entry['cohort']}: {entry['about']}".rstrip(": "), entry["first_run"]
    if run is None:
        ran = len(entry["outcomes"])
        why = entry["why_none"] or (f"{ran} of {entry['cells']} have run" if ran else NOT_RUN)
        return f"| {name} | {entry['cells']} | {why} | | | | | | |"
    predictions = "–" if run["predictions"] is None else run["predictions"]
    return (
        f"| {name} | {entry['cells']} | {run['date']} | {run['with_cause']} "
        f"| **{run['right']}** ({_share(run['right'], run['with_cause'])}) | {run['healthy']} "
        f"| **{run['false_alarms']}** | {predictions} | {_percent(run['median_error'])} |"
    )


def section(kept: Mapping[str, Any], title: str, about: Sequence[str]) -> list[str]:
    """One part, tuned or kept aside: its totals, then a line for each cell, then the traces."""
    lines = [f"## Planted causes: {title}", "", *about, "", *_totals(kept), "", *_cells(kept["rows"])]
    if kept.get("traces"):
        lines += ["", "Traces recorded elsewhere:", "", *_traces(kept["traces"])]
    return lines


def _totals(kept: Mapping[str, Any]) -> list[str]:
    t = kept["totals"]
    held, of = t["interval_holds"]
    lines = [
        "| cells with a cause | headline right | by its planted name | true cause among the first three | healthy "
        "| false alarms | predictions | median error | interval holds |",
        "|" + "---|" * 9,
        f"| {t['sick']} | **{t['headline_right']}** ({_share(t['headline_right'], t['sick'])}) | {t['headline_exact']} "
        f"| {t['among_the_first_three']} | {t['healthy']} | **{t['false_alarms']}** | {t['predictions']} "
        f"| {_percent(t['median_error'])} | {held} of {of} |",
    ]
    notes = []
    if t.get("median_noise") is not None:
        notes.append(f"A healthy cell measured against itself is off by {t['median_noise']:.0%} (median).")
    if t.get("second_told", (0, 0))[1]:
        told, of = t["second_told"]
        notes.append(f"Of {of} cells with a second cause below the first it was told in {told}.")
    waiting = [row["name"] for row in kept["rows"] if row["skipped"] == NOT_RUN]
    if waiting:
        notes.append(f"Not run yet with the rules as they are: {', '.join(waiting)}.")
    if t["skipped"] > len(waiting):
        notes.append(f"{t['skipped'] - len(waiting)} cells did not run: they need a GPU or a package that is not here.")
    if t["failed"]:
        notes.append(f"Failed: {', '.join(t['failed'])}.")
    if t["untrue"]:
        notes.append(f"The measurement does not bear out what was planted in: {', '.join(t['untrue'])}.")
    return [*lines, "", *notes] if notes else lines


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
    """Its ratio and interval, where it is only a range that, else why nothing is predicted."""
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


def _percent(error: float | None) -> str:
    return "–" if error is None else f"{error:.0%}"
