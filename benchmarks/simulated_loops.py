"""Loops with a known cause, played on a simulated GPU: what gpulab says of each, held against the model's own truth.

Simulated: no GPU ran. The truth of a loop is what the model does without each of its parts (`planted.simulated.cures`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from benchmarks.harness import RESULTS, Figure
from planted import judge
from planted.simulated.cures import CURES, SAMPLES
from planted.simulated.loops import LOOPS, SimulatedLoop
from planted.simulated.record import record
from planted.simulated.truth import steady_step_ns

NAME = "simulated_loops"


def measure() -> dict[str, object]:
    """Diagnose every loop. The totals of the very first run are kept beside the latest."""
    rows = [row_of(planted) for planted in LOOPS]
    totals = judge.totals(rows)
    file = RESULTS / f"{NAME}.json"
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return {"simulated": True, "totals": totals, "first_run": before.get("first_run", totals), "rows": rows}


def row_of(planted: SimulatedLoop) -> dict[str, Any]:
    """What is true of one loop, what was said of it, and whether that is right."""
    findings = judge.said(diagnosis_of(planted))
    ratios = ratios_of(planted)
    finding = judge.true_finding(planted, findings)
    cured = ratios.get(planted.causes[0]) if planted.causes else None
    arms: dict[str, Any] = {} if cured is None else {"cured": {"ratio": cured, "interval": [cured, cured]}}
    arms |= _advised(planted, finding)
    predicted = judge.prediction_of(finding, {"arms": arms})
    return {
        "name": planted.name,
        "because": planted.because,
        "causes": list(planted.causes),
        "skipped": "",
        "failed": "",
        "untrue": judge.untrue_of_loop(planted, ratios),
        "measured": {"ratios": ratios, "arms": arms},
        "headline": findings["headline"],
        "findings": [f["key"] for f in findings["findings"]],
        **judge.judgement(planted, findings),
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


def _advised(planted: SimulatedLoop, finding: Mapping[str, Any] | None) -> dict[str, Any]:
    """The loop with the knobs that the finding names, where the model has them."""
    settings = {} if finding is None else dict(finding["settings"])
    if set(settings) != {"workers"}:
        return {}
    loop = replace(planted.loop, workers=int(settings["workers"]))
    ratio = steady_step_ns(loop, planted.gpu) / steady_step_ns(planted.loop, planted.gpu)
    return {"advised": {"ratio": ratio, "interval": [ratio, ratio]}}


# -- for people --------------------------------------------------------------------------------------------------------


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """The totals, at the first run and now."""
    for when, t in (("at the first run", results["first_run"]), ("now", results["totals"])):
        yield Figure.share(f"headline right {when}", t["headline_right"], t["sick"], "headline")
        yield Figure.count(f"false alarms {when}", t["false_alarms"], t["healthy"], "false_alarms")
        yield Figure(f"median error of {t['predictions']} predictions {when}", t["median_error"], "%", target="error")


def notes(results: Mapping[str, Any]) -> Iterator[str]:
    """Each loop that is not right."""
    for row in results["rows"]:
        if not row["right"] or row["false_alarms"]:
            planted = " + ".join(row["causes"]) or "healthy"
            yield f"- {row['name']}: {row['because']}. Planted {planted}, said {', '.join(row['findings'])}"
