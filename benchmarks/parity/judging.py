"""What a climb reaches unattended, and how much of the best that is: both in turn within one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import ratio_with_interval
from benchmarks.parity.limits import Limits
from benchmarks.parity.search import SEEDS, measured
from benchmarks.parity.staging import Staged
from gpulab.knobs.catalogue import parsed_value
from gpulab.tuning.code import Code
from gpulab.tuning.record import Side
from gpulab.tuning.runner import Runner
from gpulab.tuning.schedule import Arm, Plan


def climbed(staged: Staged, limits: Limits) -> dict[str, Any]:
    """The climb of the script's text as a cell, as plain data."""
    import gpulab

    began = time.monotonic()
    ladder = gpulab.climb(
        staged.text, namespace=dict(staged.namespace), budget_s=limits.climb_s, show=False, save=False
    )
    record = ladder.json()
    return {
        **{key: record[key] for key in ("headline", "ended", "kept", "edit", "rungs", "not_tried")},
        "seconds": time.monotonic() - began,
    }


def judgement(staged: Staged, limits: Limits, best: Mapping[str, Any], kept: Mapping[str, str]) -> dict[str, Any]:
    """Share of the best speed that the climb's setting has: time of a step with the best over that with the climb's."""
    chosen = {name: parsed_value(name, value) for name, value in kept.items()}
    arms = [Arm(dict(settings)) for settings in _distinct([dict(best), chosen])]
    if not arms:
        return {"share": {"ratio": 1.0, "interval": [1.0, 1.0], "pairs": 0}, "same_setting": True, "arms": []}
    plan = Plan(arms=tuple(arms), budget_s=limits.judgement_s, seeds=SEEDS, save=False)
    runner = Runner(Code.of_text(staged.text, dict(staged.namespace)), plan)
    experiment = runner.run()
    if runner.error is not None:
        raise runner.error
    rows = [
        {"settings": dict(arm.settings), **measured(comparison, arm.settings)}
        for arm, comparison in zip(arms, experiment.comparisons, strict=False)
    ]
    sides = {arm.label: side for arm, side in zip((Arm(), *arms), experiment.sides, strict=False)}
    same = chosen == dict(best)
    return {
        "share": _share(sides[Arm(dict(best)).label], sides[Arm(chosen).label]) if not same else _WHOLE,
        "same_setting": same,
        "arms": rows,
    }


_WHOLE = {"ratio": 1.0, "interval": [1.0, 1.0], "pairs": 0}


def _share(best: Side, chosen: Side) -> dict[str, object] | None:
    """None where no turn has a block of both."""
    of_best, of_chosen = _us_by_turn(best), _us_by_turn(chosen)
    shares = [of_best[turn] / of_chosen[turn] for turn in sorted(of_best.keys() & of_chosen.keys())]
    return ratio_with_interval(shares) if shares else None


def _us_by_turn(side: Side) -> dict[int, float]:
    turns: dict[int, list[float]] = {}
    for block in side.blocks:
        if block.step_count:
            turns.setdefault(block.turn, []).append(block.time_ns / block.step_count / 1e3)
    return {turn: statistics.fmean(times) for turn, times in turns.items()}


def _distinct(many: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    for settings in many:
        if settings and settings not in kept:
            kept.append(settings)
    return kept
