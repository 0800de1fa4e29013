"""Many settings in a few short blocks each: the slower half drops out, and no full run is spent on any."""

from __future__ import annotations

import pytest

from gpulab.tuning.function_code import TextCode
from gpulab.tuning.plan import Arm, Plan
from tests.support.scripted_runs import ScriptedRuns


def screened(monkeypatch: pytest.MonkeyPatch, step_s: dict[int, float], budget_s: float = 600.0) -> ScriptedRuns:
    runs = ScriptedRuns(lambda label: step_s[int(label.partition("=")[2] or 0)]).install(monkeypatch)
    arms = tuple(Arm({"size": size}) for size in step_s if size)
    plan = Plan(arms=arms, budget_s=budget_s, screening=True, save=False)
    runs.experiment = runs.conduct(TextCode.parsed("size = 0\nx = size\n", {}), plan)  # type: ignore[attr-defined]
    return runs


def test_the_slower_half_drops_out(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = screened(monkeypatch, {0: 0.05, **{size: 0.05 + 0.001 * size for size in range(1, 9)}, 9: 0.03})
    counts = {size: runs.blocks.count(f"size={size}") for size in range(1, 10)}
    assert counts[9] == max(counts.values()) == counts[1] and counts[8] == min(counts.values()) == 2
    assert len(runs.trials) == 1, "the cell as written alone ran in full"
    comparisons = runs.experiment.comparisons  # type: ignore[attr-defined]
    assert len(comparisons) == 9 and comparisons[8].ratio == pytest.approx(0.6, rel=0.01)
    assert all(comparison.ratio is not None for comparison in comparisons)


def test_a_budget_ends_it_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = screened(monkeypatch, {0: 1.0, 1: 1.0, 2: 0.5, 3: 1.0, 4: 1.0}, budget_s=20.0)
    comparisons = runs.experiment.comparisons  # type: ignore[attr-defined]
    assert len(comparisons) == 4
