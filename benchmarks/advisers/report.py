"""The advisers side by side as a table for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TITLES = {
    "gpulab": "gpulab (headline)",
    "plugin": "TensorBoard plugin 0.4.3",
    "matcher": "torch.profiler._pattern_matcher",
}
QUOTE = 90  # characters of an advice


def section(kept: Mapping[str, Any]) -> list[str]:
    """Totals, then a line for each case."""
    lines = [
        "## Advisers side by side",
        "",
        "The same cells and traces. The plugin and the pattern matcher see the first 8 steps of a cell with shapes,",
        "stacks and memory. An advice names the cause its words stand for; it is contradicted where it says “larger",
        "batch” and the first cause is waiting for data, where it says “load data in other processes” and no cause is",
        "in the loading, where it is about a GPU and the cell ran without one, and where the case is healthy",
        "(`advisers/advice.py`). HTA gives figures and no advice.",
        "",
        "| adviser | cases it could be asked about | names the true cause | contradicted advice |",
        "|---|---|---|---|",
    ]
    for who, t in kept["totals"].items():
        lines.append(f"| {TITLES[who]} | {t['asked']} | {t['names_truth']} of {t['sick']} | {t['contradicted']} |")
    lines += [
        "",
        "In brackets: ✓ names the true cause, ✗ does not, ! contradicted.",
        "",
        f"| case | true cause | {' | '.join(TITLES.values())} | HTA 0.5.0 |",
        "|" + "---|" * 6,
    ]
    for row in kept["rows"]:
        truth = "healthy" if row["healthy"] else " + ".join(row["causes"]) or "not starved"
        cells = [_ours(row["gpulab"]), _said(row["plugin"]), _said(row["matcher"]), _figures(row["hta"])]
        lines.append(f"| {row['name'].replace('_', ' ')} | {truth} | {' | '.join(cells)} |")
    return lines


def _mark(answer: Mapping[str, Any]) -> str:
    truth = {True: "✓", False: "✗", None: ""}[answer["names_truth"]]
    marks = " ".join(m for m in (truth, "!" if answer["contradicted"] else "") if m)
    return f" ({marks})" if marks else ""


def _ours(answer: Mapping[str, Any] | None) -> str:
    return "–" if answer is None else answer["headline"] + _mark(answer)


def _said(answer: Mapping[str, Any]) -> str:
    if "cannot" in answer:
        return f"cannot: {answer['cannot']}"
    quotes = [f"“{a[:QUOTE]}{'…' if len(a) > QUOTE else ''}”" for a in answer["advice"]]
    return (" ".join(quotes).replace("|", "/") or "nothing") + _mark(answer)


def _figures(answer: Mapping[str, Any]) -> str:
    if "cannot" in answer:
        return f"cannot: {answer['cannot']}"
    f = answer["figures"]
    host = "" if f["host_wait_share_of_idle"] is None else f", {f['host_wait_share_of_idle']:.0%} of it host wait"
    overlap = "" if f["overlap_pct"] is None else f", overlap {f['overlap_pct']:.0f} %"
    return f"idle {f['idle_pct']:.0f} %{host}, other than compute {f['non_compute_pct']:.0f} %{overlap}"
