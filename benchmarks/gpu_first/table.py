"""The results for people: the verdict first, then what disagrees, what could not be measured, what agrees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.conductor import row_of
from benchmarks.gpu_first.answer import Check, Verdict

TITLES: dict[Verdict, str] = {
    "disagrees": "What does not agree",
    "not measured": "What could not be measured",
    "agrees": "What agrees",
}
HEAD = ["| part | what | expected | measured | note |", "|---|---|---|---|---|"]


def table(results: Mapping[str, Any], *, short: bool = False) -> str:
    """The page, in Markdown; a `short` one leaves out what agrees."""
    lines = ["# First hour on a GPU", "", _verdict(results), ""]
    versions = results["parts"].get("versions", {}).get("figures", {}).get("versions", {})
    if versions:
        lines += [", ".join(f"{name} {value}" for name, value in versions.items() if value is not None) + ".", ""]
    for verdict, title in TITLES.items():
        rows = [_row(name, check) for name, check in _checks(results) if check["verdict"] == verdict]
        if rows and not (short and verdict == "agrees"):
            lines += [f"## {title}", "", *HEAD, *rows, ""]
    lines += ["## The parts", "", "| part | what became of it | seconds | limit | detail |", "|---|---|---|---|---|"]
    for name, result in results["parts"].items():
        cells = [name, result["state"], f"{result['seconds']:.0f}", f"{result['limit_s']:.0f}", result["detail"]]
        lines.append(row_of(cells))
    return "\n".join(lines) + "\n"


def _verdict(results: Mapping[str, Any]) -> str:
    verdicts = [check["verdict"] for _, check in _checks(results)]
    counts = {verdict: verdicts.count(verdict) for verdict in TITLES}
    states = [result["state"] for result in results["parts"].values()]
    words = [
        f"{counts['disagrees']} of {len(verdicts)} checks disagree, {counts['not measured']} could not be measured.",
        f"{states.count('complete')} of {len(states)} parts ran to their end.",
    ]
    if any(result["simulated"] for result in results["parts"].values()):
        words.insert(0, "SIMULATED: there was no GPU, the CPU stood in its place. Nothing here says anything of a GPU.")
    return " ".join(words)


def _checks(results: Mapping[str, Any]) -> Iterator[tuple[str, Check]]:
    for name, result in results["parts"].items():
        yield from ((name, check) for check in result["checks"])
        if result["state"] != "complete":
            yield name, _unsaid(result)


def _unsaid(result: Mapping[str, Any]) -> Check:
    """A part that did not come to its end has left something out."""
    what = "the rest of the part" if result["checks"] else "the whole part"
    why = f"{result['state']}: {result['detail']}"
    return {"what": what, "expected": "an end", "measured": "–", "verdict": "not measured", "note": why}


def _row(name: str, check: Check) -> str:
    return row_of([name, check["what"], check["expected"], check["measured"], check["note"]])
