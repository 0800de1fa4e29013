"""The bench as a section of the table for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def section(kept: dict[str, Any]) -> list[str]:
    """Of the table: a row for each training, then what was not measured."""
    target = kept["target"]
    rows = kept["rows"]
    finished = [row for row in rows if "reached" in row]
    lines = [
        "## Expert parity: public training code, climbed",
        "",
        "Public training scripts, unmodified, with tiny sizes. Best: by search over every value of every knob that can",
        "act on the script and leaves its training the same: each alone, then combinations of what helped, then what",
        "completes the best of them. Climb: `gpulab.climb` on the script's text, unattended, "
        f"{target['climb_s']:.0f} s.",
        "Ratios: time of a step over that of the script as written. Share of the best: time of a step with the best",
        "setting over that with the climb's, from blocks of both in turn within one run. Same loss: equal, or no",
        f"further apart than other seeds bring it. Target: {target['share']:.0%} of the best at the same loss, in",
        f"{target['trainings']} of 10.",
        f"Reached: **{kept['reached']} of {kept['tried']}**.",
        "",
        "| training | step | best setting | its ratio | climb's setting | its ratio | share of the best | climb took "
        "| same loss | reached |",
        "|" + "---|" * 10,
        *(_row(row) for row in finished),
    ]
    thin = [row for row in finished if row["thin"]]
    if thin:
        lines += [
            "",
            "Measured in fewer than 5 pairs of blocks by the search, which without a best setting shows nothing:",
            "",
        ]
        lines += [f"- {row['title']}: {', '.join(row['thin'])}" for row in thin]
    others = [row for row in rows if "reached" not in row]
    if others:
        lines += ["", "Not finished:", ""]
        lines += [f"- {row['title']}: {row.get('skipped') or row.get('failed')}" for row in others]
    return lines


def _row(row: Mapping[str, Any]) -> str:
    cells = (
        row["title"],
        f"{row['step_ms']:.3g} ms" if row["step_ms"] else "–",
        _words(row["best"]),
        _ratio(row["best_now"]),
        _words(row["kept"]),
        _ratio(row["kept_now"]),
        _share(row["share"], the_same=_words(row["best"]) == _words(row["kept"])),
        f"{row['seconds']:.0f} s",
        "yes" if row["same_loss"] else "no",
        "yes" if row["reached"] else "**no**",
    )
    return f"| {' | '.join(cells)} |"


def _words(settings: Mapping[str, object]) -> str:
    shown = {True: "on", False: "off"}
    pairs = sorted((n, shown[v] if isinstance(v, bool) else str(v)) for n, v in settings.items())
    return ", ".join(f"{name}={value}" for name, value in pairs) or "as written"


def _ratio(arm: Mapping[str, Any] | None) -> str:
    """Of an arm of the judgement; none where nothing is set."""
    if arm is None:
        return "1"
    if arm["ratio"] is None:
        return str(arm["failure"] or "–")
    return f"{arm['ratio']:.2f}{_between(arm['interval'])}"


def _share(share: Mapping[str, Any] | None, *, the_same: bool) -> str:
    if the_same:
        return "100%, the same"
    if share is None:
        return "–"
    low, high = share["interval"]
    return f"{share['ratio']:.0%} [{low:.0%}, {high:.0%}]"


def _between(interval: list[float] | None) -> str:
    return f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""
