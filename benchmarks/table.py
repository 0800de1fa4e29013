"""The results as one table for people, written from the kept JSON files."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import (
    climbing,
    growth_plot,
    kills,
    loaded_comparisons,
    loaded_planted,
    planted_ranks,
    simulated_loops,
    spool_cost,
    stragglers,
    waits,
)
from benchmarks.advisers import report as advisers_report
from benchmarks.harness import RESULTS
from benchmarks.hot_lines import report as hot_lines_report
from benchmarks.parity import report as parity_report
from benchmarks.planted import report as planted_report
from benchmarks.planted_knobs import holds

PAGE = Path(__file__).parent / "README.md"
INTRODUCTION = """\
# What gpulab costs

Written by `make bench` from `results/*.json`; do not edit. Ratios are medians of paired blocks within one run, with a
95 % bootstrap interval. Targets are kept beside the figures, met or not.
"""
FIRST_HOUR = """\
## First hour on a GPU

**Older than the code:** since the tables of planted cells, knobs and predictions were measured, special cases that at
most one cell needed were deleted, and prefetch, pin_memory, channels_last, compute_threads and, on the CPU, compile
lost their predictions. [What that changed](results/ablation.md): 173 of 180 headlines are right (177 before), 88 of
116 intervals hold (97 of 122), on runs recorded beside other work.

`make gpu-first OUT=folder` measures what gpulab says of a GPU beside a truth of its own, in at most ten minutes.
**On an H100, 158 of 172 checks agreed** (2026-11-26, torch 2.11, CUDA 13.0; [results](results/gpu_first.json), read in
[accuracy.md](../docs/accuracy.md#the-first-minutes-on-a-gpu)). Its parts, the most informative first, each in a process
with a time limit of its own:

| part | beside which truth |
|---|---|
| versions of driver, CUPTI, cuDNN and torch; every NVML query with its code and duration | – |
| hardware counters, power, energy: idle, products, copies, uploads; alone and beside CUPTI | what the load must do |
| step times and kernels per step while the host runs ahead: 40, 150 and 600 kernels, CUDA graphs | CUDA events |
| kernels lost, early or shifted in 12 profiler sessions, with and without sacrificial kernels | the launches |
| a dozen runs in one notebook | the first run |
| graph capture, device-side assert, out of memory, an overwritten loss, a second GPU | the code without gpulab |
| class and number format of every kernel, by name | operator and input types in the trace |
| experiments with the same work and with exactly twice the work | ratios 1 and 2 |
| `tests/gpu` | – |

`results.json` has all figures, `table.md` the verdict: what agrees, what does not, what could not be measured. Two
small traces are kept with the true times of their steps.

## Recordings for the lessons

`make record-gpu OUT=folder` records every cell of the lessons before and after its knob, a GPT-2 ladder and the planted
cells that need a GPU: 63 runs, without IPython and without a network. **On an H100, 41 of them took five and a half
minutes**, and the rules named the cause of 12 of 13 cells that have a certain one ([results](results/record_gpu.json));
16 are shipped. Each cell is a process with a time limit of its own. A call that was cut short is called again and makes
what is missing.
The folder then has `MACHINE/NAME`, each a stored run with `recording.json` (machine, date, versions, the earlier cells
and the cell), all of them packed in `recordings-*.tar.gz`, and `table.md`: what the rules say of each cell whose cause
is certain. `python -m benchmarks.record_gpu --collect folder` copies them into gpulab, where they may take 20 MB.
"""

ABLATION = """
## What each special case serves

Each special case of the diagnosis, each rule and each prediction was turned off by itself. Stored runs of the planted
cells, recorded traces and simulated loops were then diagnosed again: [the table](results/ablation.md).
"""


def write() -> None:
    """Write benchmarks/README.md from the results that are there."""
    sections = [INTRODUCTION]
    for name, section in (
        ("waits", waits.section),
        ("overhead", _overhead),
        ("report_time", _report_time),
        ("imports", _imports),
        ("memory", _memory),
        ("spool_cost", spool_cost.section),
        ("live_look", spool_cost.look_section),
        ("kills", kills.section),
        ("stragglers", stragglers.section),
        ("trace_reading", _trace_reading),
        ("live_window", _live_window),
        ("loading_clock", _loading_clock),
        ("rank_loading", _rank_loading),
        ("replay", _replay),
        ("diagnosing", _diagnosing),
        ("fuzz", _fuzz),
        ("restoring", _restoring),
        ("calibration", _calibration),
        ("power", _power),
        ("loaded_comparisons", loaded_comparisons.section),
        ("loaded_planted", loaded_planted.section),
        ("hot_lines", hot_lines_report.section),
        ("planted_knobs", _planted_knobs),
        ("climbing", climbing.section),
        ("parity", parity_report.section),
        ("planted_first_runs", planted_report.first_runs_section),
        ("planted_aside", partial(planted_report.section, title="survivors, kept aside", about=planted_report.ASIDE)),
        ("planted_tuned", partial(planted_report.section, title="cells looked at", about=planted_report.TUNED)),
        ("planted_ranks", planted_ranks.section),
        ("simulated_loops", simulated_loops.section),
        ("advisers", advisers_report.section),
    ):
        file = RESULTS / f"{name}.json"
        if file.exists():
            kept = json.loads(file.read_text(encoding="utf-8"))
            measured = [_where(kept)] if "machine" in kept else []
            sections.append("\n".join([*section(kept), "", *measured]))
    sections += [ABLATION, FIRST_HOUR]
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
        f"MiB after so many of {kept['steps']:,} steps with live view, which last {kept['gpulab']['seconds']:.0f} s "
        f"({kept['bare']['seconds']:.0f} s without gpulab); {kept['trace_events']:,} events in the trace. "
        "Target: flat after the first 100,000.",
        "",
        "| steps | gpulab | bare |",
        "|---|---|---|",
    ]
    for number, (ours, bare) in enumerate(zip(kept["gpulab"]["mib"], kept["bare"]["mib"], strict=True)):
        lines.append(f"| {number * kept['each']:,} | {ours:.1f} | {bare:.1f} |")
    return lines


def _trace_reading(kept: dict[str, Any]) -> list[str]:
    lines = [
        "## Reading and accounting a trace file",
        "",
        "gpulab: the file read and every figure of its report. HTA 0.5.0: the file read, temporal, kernel and idle "
        "breakdowns.",
        "`json.load`: parsed only. Imports come before. Targets: 10 times faster than HTA with half its memory, twice "
        "as fast as",
        "`json.load`; 5 million events in 15 s and 3 GB.",
        "",
        "| file | tool | seconds | peak memory | times gpulab's seconds |",
        "|---|---|---|---|---|",
    ]
    for found in kept.values():
        if isinstance(found, dict) and "tools" in found:
            title = found.get("name") or f"made, {found['events']:,} events, {found['bytes'] / 1e6:,.0f} MB"
            lines += [_tool_row(title, tool, row) for tool, row in found["tools"].items()]
    lines += ["", "| events | seconds | µs per event | peak memory |", "|---|---|---|---|"]
    for row in kept["growth"]:
        each = 1e6 * row["seconds"] / row["events"]
        lines.append(
            f"| {row['events']:,} | {row['seconds']:.2f} | {each:.2f} | {row['peak_bytes'] / 2**20:,.0f} MiB |"
        )
    growth_plot.draw(kept["growth"])
    return [*lines, "", "![seconds over events: a straight line](results/growth.png)"]


def _tool_row(title: str, tool: str, row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"| {title} | {tool} | {row['failed']} | | |"
    low, high = row["over_gpulab"]["interval"]
    ratio = f"{row['over_gpulab']['ratio']:.1f} [{low:.1f}, {high:.1f}]" if tool != "gpulab" else "1"
    return f"| {title} | {tool} | {row['seconds']:.2f} | {row['peak_bytes'] / 2**20:,.0f} MiB | {ratio} |"


def _live_window(kept: dict[str, Any]) -> list[str]:
    m, peer = kept["median"], kept["key_averages_over_gpulab"]
    low, high = peer["interval"]
    return [
        "## A large live window",
        "",
        "From the stopped profiler to finished accounting. Target: 15 times faster than `key_averages()`.",
        "",
        "| events | gpulab | `key_averages()` | times faster |",
        "|---|---|---|---|",
        f"| {m['events']:,.0f} | {m['accounting_s']:.2f} s | {m['key_averages_s']:.1f} s "
        f"| {peer['ratio']:.1f} [{low:.1f}, {high:.1f}] |",
    ]


def _loading_clock(kept: dict[str, Any]) -> list[str]:
    found, item = kept["epoch_ratio_to_bare"], kept["us_per_item"]
    rows = [f"| {case} | {_ratio(r['clock'])} | {_ratio(r['bare_against_bare'])} |" for case, r in found.items()]
    return [
        "## Timing inside the DataLoader",
        "",
        f"Time of an epoch whose items take {1e3 * kept['item_s']:g} ms each, timed inside over not timed, while "
        f"nothing else is done. Target: {kept['target_ratio']:g} at most.",
        "",
        "| | timed over not timed | not timed against itself |",
        "|---|---|---|",
        *rows,
        "",
        f"An item that goes through a transform costs {item['median']:.1f} µs of processor time.",
    ]


def _rank_loading(kept: dict[str, Any]) -> list[str]:
    low, high = kept["all_over_slowest"]["interval"]
    return [
        "## A folder of ranks",
        "",
        f"{kept['ranks']} ranks of {kept['events_per_rank']:,} events on as many cores. Target: 1.3 times the slowest.",
        "",
        "| all ranks | the slowest alone | ratio |",
        "|---|---|---|",
        f"| {kept['all_s']:.2f} s | {kept['slowest_s']:.2f} s "
        f"| {kept['all_over_slowest']['ratio']:.2f} [{low:.2f}, {high:.2f}] |",
    ]


def _replay(kept: dict[str, Any]) -> list[str]:
    return [
        "## Replay",
        "",
        f"A window of {kept['tasks']:,} tasks of a GPU on two streams, played again with all of them half as long. "
        "Target: 2 s.",
        "",
        "| reading the tasks and playing | playing again |",
        "|---|---|",
        f"| {kept['read_and_play_s']:.2f} s | {kept['play_again_s']:.2f} s |",
    ]


def _fuzz(kept: dict[str, Any]) -> list[str]:
    return [
        "## Mutated trace files",
        "",
        f"{kept['inputs']:,} files with changed bytes: {kept['reports']:,} gave a report "
        f"({kept['with_damage_noted']:,} with damage noted), {kept['sentences']:,} one sentence, "
        f"**{len(kept['unhandled'])} anything else**. Slowest: {kept['slowest_s']:.2f} s.",
    ]


def _restoring(kept: dict[str, Any]) -> list[str]:
    low, high = kept["restore_over_deepcopy"]["interval"]
    return [
        "## Putting a training back",
        "",
        f"{kept['parameters'] / 1e6:,.0f} million parameters with AdamW's state "
        f"({kept['state_bytes'] / 2**30:.2f} GiB), on the CPU. Target: at most 1.5 times one `copy.deepcopy` of model",
        "and optimizer. Taking the state is done once for an experiment, restoring it before each block.",
        "",
        "| taking the state | restoring it | `copy.deepcopy` | ratio |",
        "|---|---|---|---|",
        f"| {kept['snapshot_s']:.2f} s | {kept['median']['restore_s']:.2f} s | {kept['median']['deepcopy_s']:.2f} s "
        f"| {kept['restore_over_deepcopy']['ratio']:.2f} [{low:.2f}, {high:.2f}] |",
    ]


def _calibration(kept: dict[str, Any]) -> list[str]:
    lines = [
        "## Comparisons where nothing was changed",
        "",
        f"{kept['experiments']} experiments in which arm B changes nothing, {kept['pairs']} pairs of blocks each, and",
        "as many plain before/afters: the same code run twice, one run after the other. Target for the blocks: the",
        "95 % interval holds 1 in at least 93 %, “faster” or “slower” is said in at most 5 %.",
        "",
        "| cell | how | experiments | interval holds 1 | “faster” or “slower” | median width | farthest ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, found in (*kept["kinds"].items(), ("**all**", kept["all"])):
        for method, title in (("interleaved", "blocks in turn"), ("sequential", "before, after")):
            row = found[method]
            held, said = row["holds_1"] / row["experiments"], row["faster_or_slower"] / row["experiments"]
            lines.append(
                f"| {kind} | {title} | {row['experiments']} | {held:.0%} | {said:.0%} "
                f"| {row['median_width'] * 100:.1f} % | {row['worst_ratio']:.2f} |"
            )
    return lines


def _power(kept: dict[str, Any]) -> list[str]:
    count, slowdown = kept["experiments"], kept["slowdown"]
    return [
        "## A planted slowdown",
        "",
        f"{slowdown:.0%} of a step of {kept['step_ms']:.1f} ms, kept busy at the end of each step. Target: “slower” is",
        "said in at least 90 % of experiments, each within 60 s.",
        "",
        "| experiments | “slower” | median ratio | median planted | interval holds it | longest |",
        "|---|---|---|---|---|---|",
        f"| {count} | {kept['found']} ({kept['found'] / count:.0%}) | {kept['median_ratio']:.3f} "
        f"| {kept['median_planted']:.3f} | {kept['interval_holds_it']} | {kept['longest_s']:.0f} s |",
    ]


def _planted_knobs(kept: dict[str, Any]) -> list[str]:
    lines = [
        "## Knobs against planted truth",
        "",
        "Cells for the CPU in which it is certain what a knob does. Ratio: time per step with the knob over that of",
        "the cell as written, per sample where the batch differs, with its 95 % interval. Target: all verdicts right.",
        f"Right: **{kept['right']} of {kept['cells']}**.",
        "Predicted: before the knob was turned, from the cell's own run, for a batch size also from short runs at",
        f"others. {_predicted_knobs(kept['predictions'])}",
        "",
        "| knob | the cell | must be | verdict | predicted | ratio | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in kept["rows"]:
        ratio = row["failure"] or "–"
        if row["ratio"] is not None and row["interval"] is not None:
            ratio = "{:.3f} [{:.3f}, {:.3f}]".format(row["ratio"], *row["interval"])
        verdict = row["verdict"] if holds(row["verdict"], row["truth"]) else f"**{row['verdict']}**"
        error = "" if row["error"] is None else f"{row['error']:.0%}"
        lines.append(
            f"| {row['knob']}={row['value']} | {row['because']} | {row['truth']} | {verdict} "
            f"| {planted_report.predicted(row['predicted'])} | {ratio} | {error} |"
        )
    return lines


def _predicted_knobs(kept: dict[str, Any]) -> str:
    held, of = kept["interval_holds"]
    return (
        f"Median error of {kept['count']} predictions that name a figure: **{kept['median_error']:.0%}** (aim: 10 %); "
        f"{held} of {of} intervals hold what was measured."
    )


def _diagnosing(kept: dict[str, Any]) -> list[str]:
    costliest = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in kept["costliest_s"].items())
    return [
        "## Diagnosis of a large window",
        "",
        f"All {kept['rules']} rules over {kept['events']:,} events, once the report has its figures. Target: ≤ 1 s.",
        "",
        "| the rules | with their predictions | the figures, which the report has in any case | costliest rules |",
        "|---|---|---|---|",
        f"| {kept['rules_s']:.2f} s | {kept['diagnosis_s']:.2f} s | {kept['figures_s']:.2f} s | {costliest} |",
    ]
