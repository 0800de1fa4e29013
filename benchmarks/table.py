"""The results as one table for people, written from the kept JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS

PAGE = Path(__file__).parent / "README.md"
INTRODUCTION = """\
# What gpulab costs

Written by `make bench` from `results/*.json`; do not edit. Ratios are medians of paired blocks within one run, with a
95 % bootstrap interval. Targets are kept beside the figures, met or not.
"""


def write() -> None:
    """Write benchmarks/README.md from the results that are there."""
    sections = [INTRODUCTION]
    for name, section in (
        ("overhead", _overhead),
        ("report_time", _report_time),
        ("imports", _imports),
        ("memory", _memory),
    ):
        file = RESULTS / f"{name}.json"
        if file.exists():
            kept = json.loads(file.read_text(encoding="utf-8"))
            sections.append("\n".join([*section(kept), "", _where(kept)]))
    PAGE.write_text("\n\n".join(s.strip() for s in sections) + "\n", encoding="utf-8")


def _where(kept: dict[str, Any]) -> str:
    machine, packages = kept["machine"], kept["machine"]["packages"]
    return (
        f"Measured {kept['measured']}: {machine['cpu']}, {machine['usable_cores']:g} usable cores, "
        f"Python {machine['python']}, torch {packages.get('torch', '–')}. No GPU."
    )


def _ratio(found: dict[str, Any]) -> str:
    low, high = found["interval"]
    return f"{(found['ratio'] - 1) * 100:+.2f} % [{(low - 1) * 100:+.2f}, {(high - 1) * 100:+.2f}]"


def _overhead(kept: dict[str, Any]) -> list[str]:
    cases = kept["step_ratio_to_bare"]
    arms = ["gpulab", "torch.profiler", "torch.profiler + tensorboard_trace_handler"]
    lines = [
        "## Added to a step",
        "",
        "gpulab: `%%gpuprofile` with live view, its unprofiled steps. Peers: every step, for they profile all of them.",
        "Target for gpulab: ≤ 1 % at 10 and 100 ms, ≤ 3 % at 1 ms. Each block is compared with the bare blocks before",
        "and after it; first line: median step, second line: the fastest tenth of the steps, which a busy neighbour of",
        "this machine disturbs less.",
        "",
        "| step | bare, measured | by | bare against bare | " + " | ".join(arms) + " |",
        "|" + "---|" * (4 + len(arms)),
    ]
    for case, found in cases.items():
        for by, title in (("median", "median"), ("fastest_tenth", "fastest tenth")):
            cells = [case, f"{found['bare_step_ms']:.3g} ms", title, _ratio(found["bare_against_bare"][by])]
            lines.append("| " + " | ".join(cells + [_ratio(found[arm][by]) for arm in arms]) + " |")
    lines += ["", "Seconds from the last step to the cell's end (median):", ""]
    lines += ["| step, steps in the cell | " + " | ".join(arms) + " |", "|" + "---|" * (1 + len(arms))]
    for case, found in cases.items():
        cells = [f"{found[arm]['after_last_step_s']:.2f} s" for arm in arms]
        lines.append(f"| {case}, {found['steps_per_block']} | " + " | ".join(cells) + " |")
    return lines


def _report_time(kept: dict[str, Any]) -> list[str]:
    m, peer = kept["median"], kept["key_averages_over_gpulab"]
    low, high = peer["interval"]
    return [
        "## From the cell's end to its report",
        "",
        "Without the display itself. Target: ≤ 1 s for a window of 100,000 events, ≥ 10 times faster than",
        "`prof.key_averages()` on the same one.",
        "",
        "| events | read, account and save | report (text, picture, tables) | sum | `key_averages()` | times faster |",
        "|---|---|---|---|---|---|",
        f"| {m['events']:,.0f} | {m['capture_and_save_s']:.2f} s | {m['report_s']:.2f} s | "
        f"{m['cell_end_to_report_s']:.2f} s | {m['key_averages_s']:.1f} s | "
        f"{peer['ratio']:.1f} [{low:.1f}, {high:.1f}] |",
    ]


def _imports(kept: dict[str, Any]) -> list[str]:
    lines = ["## Imports", "", "Target: ≤ 100 ms each.", "", "| | median | least | most |", "|---|---|---|---|"]
    for title, key in (
        ("`import gpulab`, without torch", "import_gpulab_ms"),
        ("`%load_ext gpulab`, torch already imported", "load_ext_after_torch_ms"),
    ):
        found = kept[key]
        lines.append(f"| {title} | {found['median']:.0f} ms | {found['least']:.0f} ms | {found['most']:.0f} ms |")
    return lines


def _memory(kept: dict[str, Any]) -> list[str]:
    lines = [
        "## Memory of the kernel over a long run",
        "",
        f"{kept['steps']:,} steps with live view; {kept['trace_events']:,} events in the trace. "
        "Target: flat after the first minute.",
        "",
        "| | seconds | after a minute | at the end |",
        "|---|---|---|---|",
    ]
    for arm in ("gpulab", "bare"):
        found = kept[arm]
        lines.append(
            f"| {arm} | {found['seconds']:.0f} | {found['after_a_minute_mib']:.1f} MiB "
            f"| {found['at_the_end_mib']:.1f} MiB |"
        )
    return lines
