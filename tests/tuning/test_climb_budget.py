"""A climb takes what its budget says, all included, on a clock that the test holds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gpulab.diagnosis.finding import Diagnosis
from gpulab.tuning.climb import Climber
from gpulab.tuning.climb_record import Bounds, Climb
from gpulab.tuning.code import Code
from gpulab.tuning.execute import FullRun
from gpulab.tuning.runner import Runner
from gpulab.tuning.schedule import Arm, Listener, Plan, Progress
from gpulab.views.climb import Climbed
from tests.support.scripted_climb import finding, nothing_foretold
from tests.support.scripted_runs import PROFILER_S, ScriptedRuns

CODE = Code.of_text("workers = 0\n", {})


def climbed(runs: ScriptedRuns, budget_s: float, told: list[Progress] | None = None) -> Climb:
    def engine(code: Code, plan: Plan, tell: Listener, done: Sequence[tuple[Arm, FullRun]]) -> Runner:
        return Runner(code, plan, tell, done, clock=runs.clock)

    cause = finding("data_starved", 20_000.0, workers="2")
    bounds = Bounds(budget_s=budget_s, save=False)
    climber = Climber(
        CODE,
        bounds,
        lambda figures: Diagnosis((cause,)),
        lambda figures, settings: nothing_foretold(settings),
        engine=engine,
        clock=runs.clock,
    )
    if told is not None:
        climber.tell = told.append
    return climber.run()


@pytest.mark.parametrize("step_s", [0.05, 0.1, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("budget_s", [12.0, 16.0, 20.0, 24.0, 30.0, 300.0])
def test_a_climb_keeps_its_budget_and_only_what_blocks_show(
    monkeypatch: pytest.MonkeyPatch, budget_s: float, step_s: float
) -> None:
    """Even a setting that is three times as fast: where no pair of blocks fits the time, that is said."""
    runs = ScriptedRuns(lambda label: step_s / (1 + 2 * ("=" in label))).install(monkeypatch)
    record = climbed(runs, budget_s)
    assert runs.now_s - 1000.0 <= budget_s + step_s + 2 * PROFILER_S, "a trace may end after the last step"
    assert record.baseline is not None and (record.whole is None or record.whole.evidence == "interleaved")
    for rung in record.rungs:
        if rung.comparison is not None and rung.comparison.evidence == "sequential":
            assert not rung.kept
            shown = " ".join(Climbed(record).text(full=True).split())
            assert rung.outcome == "stopped" or "no time for interleaved blocks" in shown


def test_the_time_of_a_climb_is_told_as_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, told = ScriptedRuns(lambda label: 0.1).install(monkeypatch), list[Progress]()
    climbed(runs, 60.0, told)
    elapsed = [progress.elapsed_s for progress in told]
    assert {progress.most_s for progress in told} == {60.0} and elapsed == sorted(elapsed, key=lambda s: s or 0.0)
