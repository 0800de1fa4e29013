"""The budget is what the user waits: full runs, blocks and traces together, on a clock that the test holds."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gpulab.tuning import schedule
from gpulab.tuning.code import Code
from gpulab.tuning.record import Experiment
from gpulab.tuning.schedule import ENDING_S, Arm, Budget, Plan, Progress, default_budget_s
from tests.support.scripted_runs import PROFILER_S, ScriptedRuns

CODE = Code.of_text("workers = 0\n", {})


def arms(count: int) -> tuple[Arm, ...]:
    return tuple(Arm({"workers": number}) for number in range(1, count + 1))


def conducted(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, step_s: float, known: float | None = None
) -> tuple[ScriptedRuns, Experiment]:
    runs = ScriptedRuns(lambda label: step_s).install(monkeypatch)
    return runs, runs.conduct(CODE, plan, known)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("step_s", [0.003, 0.05, 0.27, 1.0])
@pytest.mark.parametrize(("budget_s", "count"), [(20.0, 1), (60.0, 6), (10.0, 3)])
def test_the_budget_is_all_that_the_user_waits(
    monkeypatch: pytest.MonkeyPatch, budget_s: float, count: int, step_s: float, known: bool
) -> None:
    plan = Plan(arms(count), budget_s=budget_s, save=False)
    runs, experiment = conducted(monkeypatch, plan, step_s, step_s if known else None)
    waited_s = runs.now_s - 1000.0
    assert waited_s <= budget_s + step_s + PROFILER_S, "the step and the trace in which it ended are the only excess"
    assert experiment.sides[0].facts is not None


@pytest.mark.parametrize(
    ("asked", "step_s", "pairs"),
    [
        ({"pairs": 30}, 0.05, 30),
        ({}, 1.0, schedule.FEWEST_TURNS),  # slow steps get the least without a budget
        ({"budget_s": 20.0, "pairs": 30}, 0.05, None),
    ],
)
def test_pairs_that_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], step_s: float, pairs: int | None
) -> None:
    runs, experiment = conducted(monkeypatch, Plan(arms(1), save=False, **asked), step_s)
    found = experiment.comparisons[0]
    if pairs is not None:
        assert (found.pairs, found.ended_early) == (pairs, "")
        return
    assert runs.now_s - 1000.0 <= 20.0 + step_s and 0 < found.pairs < 30
    assert found.ended_early == f"The budget of 20 s was over after {found.pairs} pairs of blocks"
    assert not experiment.stopped, "nobody has stopped it"


def test_a_short_budget_is_said_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, experiment = conducted(monkeypatch, Plan(arms(1), budget_s=10.0, save=False), 0.5, known=0.5)
    first = runs.told[0]
    assert (first.most_s, first.about_s, first.elapsed_s) == (10.0, None, 0.0), "blocks end as soon as they decide it"
    assert first.note.startswith("The budget of 10 s is short: the minimum takes about ")
    assert any("10 s is short" in note for note in experiment.notes)
    plan = Plan(arms(1), pairs=9, save=False)
    known, unknown = (conducted(monkeypatch, plan, 0.01, known=k)[0].told for k in (0.01, None))
    assert known[0].about_s is not None and 0 < known[0].about_s <= 60.0 and known[0].most_s == 60.0
    assert not known[0].note
    assert unknown[0].about_s is None and unknown[0].most_s == 60.0
    assert unknown[1].about_s is not None, "the baseline has run"


def test_steps_are_told_while_a_full_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = ScriptedRuns(lambda label: 0.05).install(monkeypatch)
    runner = runs.runner(CODE, Plan(arms(1), save=False))
    ticks: list[Progress] = []
    runner.tick = ticks.append
    runner.run()
    assert ticks[0].what.startswith("baseline: step 1 of ") and ticks[0].elapsed_s == pytest.approx(0.05)
    assert [tick.done for tick in ticks] == sorted(tick.done for tick in ticks)


def test_more_settings_have_more_time() -> None:
    assert [default_budget_s(Plan(arms(count))) for count in (1, 2, 6)] == [60.0, 90.0, 210.0]
    assert math.isinf(default_budget_s(Plan(arms(1), interleaved=False)))


def test_a_chosen_budget_grows_with_bounds() -> None:
    chosen, asked = Budget(Plan(arms(1)), lambda: 0.0), Budget(Plan(arms(1), budget_s=60.0), lambda: 0.0)
    for budget in (chosen, asked):
        budget.expect(100.0)
    assert chosen.limit_s == 100.0 + ENDING_S and not chosen.too_short
    assert asked.limit_s == 60.0 and asked.too_short
    chosen.expect(1000.0)
    assert chosen.limit_s == 300.0 and chosen.too_short


# -- screening: many settings in a few short blocks each, and no full run is spent on any ------------------------------


def screened(monkeypatch: pytest.MonkeyPatch, step_s: dict[int, float], budget_s: float = 600.0) -> ScriptedRuns:
    runs = ScriptedRuns(lambda label: step_s[int(label.partition("=")[2] or 0)]).install(monkeypatch)
    arms = tuple(Arm({"size": size}) for size in step_s if size)
    plan = Plan(arms=arms, budget_s=budget_s, screening=True, save=False)
    runs.experiment = runs.conduct(Code.of_text("size = 0\nx = size\n", {}), plan)  # type: ignore[attr-defined]
    return runs


def test_the_slower_half_drops_out(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = screened(monkeypatch, {0: 0.05, **{size: 0.05 + 0.001 * size for size in range(1, 9)}, 9: 0.03})
    counts = {size: runs.blocks.count(f"size={size}") for size in range(1, 10)}
    assert counts[9] == max(counts.values()) == counts[1] and counts[8] == min(counts.values()) == 2
    assert len(runs.full_runs) == 1, "the baseline alone ran in full"
    comparisons = runs.experiment.comparisons  # type: ignore[attr-defined]
    assert len(comparisons) == 9 and comparisons[8].ratio == pytest.approx(0.6, rel=0.01)
    assert all(comparison.ratio is not None for comparison in comparisons)


def test_a_budget_ends_it_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = screened(monkeypatch, {0: 1.0, 1: 1.0, 2: 0.5, 3: 1.0, 4: 1.0}, budget_s=20.0)
    comparisons = runs.experiment.comparisons  # type: ignore[attr-defined]
    assert len(comparisons) == 4
