"""Scores gpulab on planted cases: compares its findings with what is known to be true of each case."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from planted.catalogue import HEALTHY, Planted, PlantedRanks, PlantedTrace

AGAIN = "as written, again"  # a healthy cell's own noise
NO_FINDING = (HEALTHY,)  # says that there is nothing to report
WORTH_A_CURE = 0.90  # a planted cause is one only if its cure saves a tenth of the time
STILL_HEALTHY = 0.95  # and a healthy cell has no knob that saves more than a twentieth
SIMULATED_CLEAR = 0.02  # of a simulated step: a cure that saves so little more than the planted one is as good
HOT_MARK = "# HOT"  # on the line of `lines/` that takes most of the time
_FUNCTION = ("def ", "async def ", "class ", "@")


class Case(Protocol):
    """A cell or a simulated loop whose causes are known because they were planted."""

    @property
    def causes(self) -> tuple[str, ...]:
        """The planted causes, the costliest first; none where it is healthy."""

    @property
    def also(self) -> tuple[str, ...]:
        """Other causes that are as true as the first."""

    @property
    def accepted(self) -> tuple[str, ...]:
        """Keys of the findings that are right as a headline."""


def said(diagnosis: Any) -> dict[str, Any]:
    """The findings as plain data, without the one about a single compute thread, which a benchmark sets on purpose."""
    findings = [f for f in diagnosis.findings if f.key != "idle_cores"]
    first = findings[0] if findings else None
    return {
        "headline": HEALTHY if first is None else first.key,
        "summary": "" if first is None else first.summary,
        "findings": [_finding(f) for f in findings],
        "untold": [u.key for u in diagnosis.untold],
    }


def judgement(planted: Case, told: Mapping[str, Any]) -> dict[str, Any]:
    """Whether the headline is right, and where the planted causes stand among the findings."""
    keys = [f["key"] for f in told["findings"]]
    ranks = {cause: _rank(keys, (cause, *(planted.also if i == 0 else ()))) for i, cause in enumerate(planted.causes)}
    false = [k for k in keys if k not in NO_FINDING] if not planted.causes else []
    return {
        "right": told["headline"] in planted.accepted and not false,
        "exact": told["headline"] == (*planted.causes, HEALTHY)[0],
        "ranks": ranks,
        "false_alarms": false,
    }


def trace_judgement(case: PlantedTrace, told: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a trace; `wrong` lists in words what the diagnosis should not say."""
    keys = {f["key"] for f in told["findings"]}
    wrong = []
    if case.headline and told["headline"] not in case.headline:
        wrong.append(f"headline {told['headline']}, not {' or '.join(case.headline)}")
    wrong += [f"{key} is not found" for key in case.found if key not in keys]
    wrong += [f"{key} is found" for key in case.never if key in keys]
    for finding in told["findings"]:
        wrong += [f"advises {k}" for k in case.never_settings if k in finding["settings"]]
    if case.recoverable_us is not None:
        low, high = case.recoverable_us
        saving = told["findings"][0]["recoverable_us_per_step"]
        if saving is None or not low <= saving <= high:
            wrong.append(f"{_ms(saving)} to give back, not {_ms(low)} to {_ms(high)}")
    return {"right": not wrong, "wrong": wrong}


def true_finding(planted: Case, told: Mapping[str, Any]) -> dict[str, Any] | None:
    """The first finding that names the planted cause."""
    return next((f for f in told["findings"] if planted.causes and f["key"] in planted.accepted), None)


def prediction_of(finding: Mapping[str, Any] | None, measured: Mapping[str, Any] | None) -> dict[str, Any]:
    """The finding's prediction beside the measured gain of its own knobs, else of the planted cure."""
    result: dict[str, Any] = {"predicted": None, "against": None, "error": None, "holds": None}
    if finding is None or finding["prediction"] is None:
        return result
    prediction = finding["prediction"]
    result["predicted"] = prediction
    against = "advised" if finding["settings"] else "cured"
    arm = (measured or {}).get("arms", {}).get(against)
    if arm is None or prediction["interval"] is None:
        return result
    low, high = prediction["interval"]
    result |= {"against": against, "holds": low <= arm["ratio"] <= high}
    if prediction["ratio"] is not None and not prediction["only_sign"]:
        result["error"] = abs(prediction["ratio"] / arm["ratio"] - 1)
    return result


def truth_of(planted: Planted, measured: Mapping[str, Any] | None) -> str:
    """Empty where the measurement confirms the planted cause, else what it shows instead."""
    arms = (measured or {}).get("arms", {})
    if planted.cure and "cured" in arms and arms["cured"]["ratio"] > WORTH_A_CURE:
        return f"the cure only gives ×{arms['cured']['ratio']:.3f}"
    if "both cured" in arms:
        first, both = arms["cured"]["ratio"], arms["both cured"]["ratio"]
        if both > WORTH_A_CURE * first:
            return f"the second cure only gives ×{both / first:.3f} more"
        if first - both > 1 - first:
            return f"the second cause costs more: {first - both:.2f} of the time, the first {1 - first:.2f}"
    labels = trials(planted, arms)
    gaining = [f"{label} ×{arms[label]['ratio']:.3f}" for label in labels if _gains(arms[label], arms[AGAIN])]
    return f"gains from {', '.join(gaining)}" if gaining else ""


def trials(planted: Planted, arms: Mapping[str, Any]) -> list[str]:
    """The arms whose knobs a healthy cell must not gain from."""
    return [label for label in (f"{k}={v}" for k, v in planted.tries.items()) if label in arms]


def totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Totals over the cells that ran."""
    ran = [row for row in rows if not row["skipped"] and not row["failed"]]
    sick, healthy = [r for r in ran if r["causes"]], [r for r in ran if not r["causes"]]
    layered = [r for r in sick if len(r["causes"]) > 1]
    errors = [r["error"] for r in sick if r["error"] is not None]
    hits = [r["holds"] for r in sick if r["holds"] is not None]
    arms = [(r["measured"] or {}).get("arms", {}) for r in healthy]
    again = [abs(a[AGAIN]["ratio"] - 1) for a in arms if AGAIN in a]
    return {
        "cells": len(ran),
        "skipped": sum(bool(r["skipped"]) for r in rows),
        "failed": [r["name"] for r in rows if r["failed"]],
        "sick": len(sick),
        "headline_right": sum(r["right"] for r in sick),
        "headline_exact": sum(r["exact"] for r in sick),
        "among_the_first_three": sum((r["ranks"][r["causes"][0]] or 99) <= 3 for r in sick),
        "second_told": [sum(r["ranks"][r["causes"][1]] is not None for r in layered), len(layered)],
        "healthy": len(healthy),
        "false_alarms": sum(bool(r["false_alarms"]) for r in healthy),
        "predictions": len(errors),
        "median_error": statistics.median(errors) if errors else None,
        "interval_holds": [sum(hits), len(hits)],
        "median_noise": statistics.median(again) if again else None,
        "untrue": [r["name"] for r in ran if r["untrue"]],
    }


def untrue_of_loop(planted: Case, ratios: Mapping[str, float]) -> str:
    """Empty where the simulated GPU confirms the planted cause (its time without each part), else what it shows."""
    best = min(ratios, key=lambda key: ratios[key], default="")
    if not planted.causes:
        return f"{best} gives ×{ratios[best]:.3f}" if best and ratios[best] < STILL_HEALTHY else ""
    mine = ratios.get(planted.causes[0], 1.0)
    if mine > STILL_HEALTHY:
        return f"the cure only gives ×{mine:.3f}"
    better = [k for k, r in ratios.items() if r < mine - SIMULATED_CLEAR and k not in planted.accepted]
    return f"{better[0]} gives ×{ratios[better[0]]:.3f}, the planted cure ×{mine:.3f}" if better else ""


def job_judgement(planted: PlantedRanks, document: Mapping[str, Any]) -> dict[str, Any]:
    """The score of a job's report, from its JSON. Raises RuntimeError where ranks are missing from it."""
    present = document.get("ranks") or {}
    if document.get("source") != "ranks" or len(present.get("present") or ()) != planted.ranks:
        raise RuntimeError(f"the report is of {document.get('source')}, ranks {present.get('present')}")
    keys = [finding["key"] for finding in document["findings"]]
    return {
        "headline": keys[0],
        "findings": keys,
        "summary": document["findings"][0].get("summary", ""),
        "straggler": document.get("straggler"),
        "right": keys[0] == planted.cause,
        "false_alarms": [key for key in keys if key != HEALTHY] if planted.cause == HEALTHY else [],
    }


def verdict_holds(verdict: str, truth: str) -> bool:
    """Whether a verdict about a knob is true; "undecided" is true, too, where there is no difference."""
    return verdict == truth or (verdict, truth) == ("undecided", "no measurable difference")


def score_of_line(named: str, file: str, lines: range) -> str:
    """`right`: a line of the hot statement; `function`: only the head of its function; else `wrong` or `none`."""
    if not named:
        return "none"
    place, _, text = named.partition(": ")
    if any(place == f"{file}, line {line}" for line in lines):
        return "right"
    return "function" if text.startswith(_FUNCTION) and HOT_MARK not in text else "wrong"


def _finding(finding: Any) -> dict[str, Any]:
    p = finding.prediction
    prediction = None
    if p is not None:
        prediction = {
            "settings": dict(p.settings),
            "ratio": _number(p.ratio),
            "interval": None if p.interval is None else [float(end) for end in p.interval],
            "only_sign": bool(p.only_sign),
            "refused": p.refused,
        }
    return {
        "key": finding.key,
        "recoverable_us_per_step": _number(finding.recoverable_us_per_step),
        "settings": dict(finding.settings),
        "source_line": str(finding.source_line),
        "prediction": prediction,
    }


def _number(value: Any) -> float | None:
    """As a float of Python, which JSON can hold."""
    return None if value is None else float(value)


def _rank(keys: Sequence[str], expected: Sequence[str]) -> int | None:
    return next((i for i, key in enumerate(keys, start=1) if key in expected), None)


def _gains(arm: Mapping[str, Any], again: Mapping[str, Any]) -> bool:
    """Whether it is surely faster: the whole interval lies below the noise of the cell as written against itself."""
    nothing = min(1.0, again["ratio"])
    return bool(arm["ratio"] < STILL_HEALTHY * nothing and arm["interval"][1] < nothing)


def _ms(us: float | None) -> str:
    return "nothing" if us is None else f"{us / 1e3:.1f} ms"
