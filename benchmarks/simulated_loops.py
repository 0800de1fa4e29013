"""Loops with a known cause, played on a simulated GPU: what gpulab says of each, held against the model's own truth.

Simulated: no GPU ran. The truth of a loop is what the model does without each of its parts (`simulated_gpu.cures`).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from benchmarks.harness import RESULTS
from benchmarks.planted import judging
from benchmarks.simulated_gpu.cures import CURES, SAMPLES
from benchmarks.simulated_gpu.loops import LOOPS, SimulatedLoop
from benchmarks.simulated_gpu.record import record
from benchmarks.simulated_gpu.truth import steady_step_ns

NAME = "simulated_loops"
CLEAR = 0.02  # of the step: a cure that saves so little more than the planted one is as good
STILL_HEALTHY = 0.95
WORTH_A_CURE = 0.95


def measure() -> dict[str, object]:
    """Diagnose every loop. The totals of the very first run are kept beside the latest."""
    rows = [row_of(planted) for planted in LOOPS]
    totals = judging.totals(rows)
    file = RESULTS / f"{NAME}.json"
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return {"simulated": True, "totals": totals, "first_run": before.get("first_run", totals), "rows": rows}


def row_of(planted: SimulatedLoop) -> dict[str, Any]:
    """What is true of one loop, what was said of it, and whether that is right."""
    told = judging.said(diagnosis_of(planted))
    ratios = ratios_of(planted)
    finding = judging.true_finding(planted, told)  # type: ignore[arg-type]
    cured = ratios.get(planted.causes[0]) if planted.causes else None
    arms: dict[str, Any] = {} if cured is None else {"cured": {"ratio": cured, "interval": [cured, cured]}}
    arms |= _advised(planted, finding)
    predicted = judging.prediction_of(finding, {"arms": arms})
    return {
        "name": planted.name,
        "because": planted.because,
        "causes": list(planted.causes),
        "skipped": "",
        "failed": "",
        "untrue": untrue(planted, ratios),
        "measured": {"ratios": ratios, "arms": arms},
        "headline": told["headline"],
        "findings": [f["key"] for f in told["findings"]],
        **judging.judged(planted, told),  # type: ignore[arg-type]
        **predicted,
    }


def diagnosis_of(planted: SimulatedLoop) -> Any:
    """gpulab's own, from the record of the loop."""
    from gpulab.analysis.facts import facts
    from gpulab.diagnosis.diagnose import diagnose

    recorded = record(planted.loop, planted.gpu, peak_memory_fraction=planted.peak_memory_fraction)
    return diagnose(facts(recorded.run))


def ratios_of(planted: SimulatedLoop) -> dict[str, float]:
    """Time per sample without each part that the loop has, over that of the loop as it is, in the model."""
    before = steady_step_ns(planted.loop, planted.gpu)
    cured = {key: cure(planted.loop) for key, cure in CURES.items()}
    return {
        key: steady_step_ns(loop, planted.gpu) / SAMPLES.get(key, 1.0) / before
        for key, loop in cured.items()
        if loop != planted.loop
    }


def untrue(planted: SimulatedLoop, ratios: Mapping[str, float]) -> str:
    """Empty where the model bears out what was planted, else what it says instead."""
    best = min(ratios, key=lambda key: ratios[key], default="")
    if not planted.causes:
        return f"{best} gives ×{ratios[best]:.3f}" if best and ratios[best] < STILL_HEALTHY else ""
    mine = ratios.get(planted.causes[0], 1.0)
    if mine > WORTH_A_CURE:
        return f"the cure only gives ×{mine:.3f}"
    better = [k for k, r in ratios.items() if r < mine - CLEAR and k not in planted.accepted]
    return f"{better[0]} gives ×{ratios[better[0]]:.3f}, the planted cure ×{mine:.3f}" if better else ""


def _advised(planted: SimulatedLoop, finding: Mapping[str, Any] | None) -> dict[str, Any]:
    """The loop with the knobs that the finding names, where the model has them."""
    settings = {} if finding is None else dict(finding["settings"])
    if set(settings) != {"workers"}:
        return {}
    loop = replace(planted.loop, workers=int(settings["workers"]))
    ratio = steady_step_ns(loop, planted.gpu) / steady_step_ns(planted.loop, planted.gpu)
    return {"advised": {"ratio": ratio, "interval": [ratio, ratio]}}


# -- for people --------------------------------------------------------------------------------------------------------


def section(kept: Mapping[str, Any]) -> list[str]:
    """The totals, a line for each cause, and every loop that was not judged right."""
    lines = ["## Loops on a simulated GPU", "", *_INTRODUCTION, "", *_TOTALS_HEAD]
    lines += [_totals_line("first run", kept["first_run"]), _totals_line("now", kept["totals"]), "", *_by_cause(kept)]
    wrong = [row for row in kept["rows"] if not row["right"] or row["false_alarms"]]
    if wrong:
        lines += ["", "Not right:", "", *_wrong(wrong)]
    return lines


_INTRODUCTION = (
    "**Simulated**: no GPU ran. A model of host, launch queue, streams, copies and CUDA graphs plays each loop and",
    "writes the trace that a profiler would; what is true of it is what the model does without each of its parts.",
)
_TOTALS_HEAD = (
    "| | loops with a cause | headline right | by its planted name | among the first three | healthy | false alarms "
    "| predictions | median error |",
    "|" + "---|" * 9,
)


def _totals_line(label: str, t: Mapping[str, Any]) -> str:
    error = "–" if t["median_error"] is None else f"{t['median_error']:.0%}"
    return (
        f"| {label} | {t['sick']} | **{t['headline_right']}** ({t['headline_right'] / max(1, t['sick']):.0%}) "
        f"| {t['headline_exact']} | {t['among_the_first_three']} | {t['healthy']} | **{t['false_alarms']}** "
        f"| {t['predictions']} | {error} |"
    )


def _by_cause(kept: Mapping[str, Any]) -> list[str]:
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in kept["rows"]:
        groups[row["causes"][0] if row["causes"] else "healthy"].append(row)
    lines = ["| planted | loops | right |", "|---|---|---|"]
    return lines + [f"| {cause} | {len(rows)} | {sum(r['right'] for r in rows)} |" for cause, rows in groups.items()]


def _wrong(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["| loop | planted | headline | findings |", "|---|---|---|---|"]
    for row in rows:
        planted = " + ".join(row["causes"]) or "healthy"
        lines.append(
            f"| {row['name']}: {row['because']} | {planted} | {row['headline']} | {', '.join(row['findings'])} |"
        )
    return lines
