"""The budget is what the user waits: full runs, blocks and traces together, on a clock that the test holds."""

from __future__ import annotations

import math

import pytest

from gpulab.tuning import schedule
from gpulab.tuning.budget import ENDING_S, Budget, default_budget_s
from gpulab.tuning.function_code import TextCode
from gpulab.tuning.plan import Arm, Plan, Progress
from gpulab.tuning.record import Experiment
from tests.support.scripted_runs import PROFILER_S, ScriptedRuns

CODE = TextCode.parsed("workers = 0\n", {})


def arms(count: int) -> tuple[Arm, ...]:
    return tuple(Arm({"workers": number}) for number in range(1, count + 1))


def conducted(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, step_s: float, known: float | None = None
) -> tuple[ScriptedRuns, Experiment]:
    runs = ScriptedRuns(lambda label: step_s).install(monkeypatch)
    return runs, runs.conduct(CODE, plan, known)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("step_s", [0.003, 0.05, 0.27, 1.0])
@pytest.mark.parametrize(("budget_s", "count"), [(20.0, 1), (60.0, 1), (60.0, 6), (10.0, 3)])
def test_the_budget_is_all_that_the_user_waits(
    monkeypatch: pytest.MonkeyPatch, budget_s: float, count: int, step_s: float, known: bool
) -> None:
    plan = Plan(arms(count), budget_s=budget_s, save=False)
    runs, experiment = conducted(monkeypatch, plan, step_s, step_s if known else None)
    waited_s = runs.now_s - 1000.0
    assert waited_s <= budget_s + step_s + PROFILER_S, "the step and the trace in which it ended are the only excess"
    assert experiment.sides[0].facts is not None


def test_a_budget_bounds_pairs_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, experiment = conducted(monkeypatch, Plan(arms(1), budget_s=20.0, pairs=30, save=False), 0.05)
    assert runs.now_s - 1000.0 <= 20.0 + 0.05 and 0 < experiment.comparisons[0].pairs < 30
    assert (
        experiment.comparisons[0].ended_early
        == f"The budget of 20 s was over after {experiment.comparisons[0].pairs} pairs of blocks"
    )
    assert not experiment.stopped, "nobody has stopped it"


def test_pairs_without_a_budget_all_run(monkeypatch: pytest.MonkeyPatch) -> None:
    _, experiment = conducted(monkeypatch, Plan(arms(1), pairs=30, save=False), 0.05)
    assert experiment.comparisons[0].pairs == 30 and not experiment.comparisons[0].ended_early


def test_slow_steps_get_the_least_without_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    _, experiment = conducted(monkeypatch, Plan(arms(1), save=False), 1.0)
    assert experiment.comparisons[0].pairs == schedule.FEWEST_TURNS and not experiment.comparisons[0].ended_early


def test_a_short_budget_is_said_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, experiment = conducted(monkeypatch, Plan(arms(1), budget_s=10.0, save=False), 0.5, known=0.5)
    first = runs.told[0]
    assert first.most_s == first.about_s == 10.0 and first.elapsed_s == 0.0
    assert first.note.startswith("The budget of 10 s is short: the least takes about ")
    assert any("10 s is short" in note for note in experiment.notes)


def test_the_time_in_all_is_told_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, _ = conducted(monkeypatch, Plan(arms(1), save=False), 0.01, known=0.01)
    first = runs.told[0]
    assert first.about_s is not None and 0 < first.about_s <= 60.0 and first.most_s == 60.0 and not first.note


def test_an_unknown_step_leaves_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, _ = conducted(monkeypatch, Plan(arms(1), save=False), 0.01)
    assert runs.told[0].about_s is None and runs.told[0].most_s == 60.0
    assert runs.told[1].about_s is not None, "the cell as written has run"


def test_steps_are_told_while_a_full_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = ScriptedRuns(lambda label: 0.05).install(monkeypatch)
    runner = runs.runner(CODE, Plan(arms(1), save=False))
    ticks: list[Progress] = []
    runner.tick = ticks.append
    runner.run()
    assert ticks[0].what.startswith("as written: step 1 of ") and ticks[0].elapsed_s == pytest.approx(0.05)
    assert [tick.done for tick in ticks] == sorted(tick.done for tick in ticks)


def test_more_settings_have_more_time() -> None:
    assert [default_budget_s(Plan(arms(count))) for count in (1, 2, 6)] == [60.0, 90.0, 210.0]
    assert math.isinf(default_budget_s(Plan(arms(1), interleaved=False)))


def test_a_chosen_budget_grows_with_bounds() -> None:
    chosen, asked = Budget(Plan(arms(1)), lambda: 0.0), Budget(Plan(arms(1), budget_s=60.0), lambda: 0.0)
    assert chosen.extend_to(100.0) and chosen.limit_s == 100.0 + ENDING_S
    assert not chosen.extend_to(1000.0) and chosen.limit_s == 300.0
    assert not asked.extend_to(100.0) and asked.limit_s == 60.0
