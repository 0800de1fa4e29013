"""`GPULAB_QUICK=1`: less is measured, nothing is left out, and no answer is called slow for that."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpulab.api.profile import profile
from gpulab.errors import UsageError
from gpulab.lessons.catalogue import LESSONS
from gpulab.lessons.check import Speed, judge_speed, time_pairs
from gpulab.lessons.search import Trial, endless, run_trials
from gpulab.options import QUICK_NOTE, QUICK_VARIABLE
from gpulab.tuning.code import Code
from gpulab.tuning.runner import Runner
from gpulab.tuning.schedule import Arm, Plan
from tests.lessons.whole import chosen

ASKED = Plan((Arm({"workers": 2}),), pairs=30, block_steps=10, seeds=3)


@pytest.mark.parametrize(
    ("value", "asked", "planned"),
    [
        ("1", ASKED, (1, 2, 1)),
        ("1", replace(ASKED, pairs=None, block_steps=1, seeds=0), (1, 1, 0)),
        ("1", replace(ASKED, interleaved=False), (30, 10, 1)),
        ("0", ASKED, (30, 10, 3)),
        ("", ASKED, (30, 10, 3)),
    ],
)
def test_a_plan_is_bounded(
    monkeypatch: pytest.MonkeyPatch, value: str, asked: Plan, planned: tuple[int, int, int]
) -> None:
    monkeypatch.setenv(QUICK_VARIABLE, value)
    runner = Runner(Code.of_function(lambda: None), asked)
    plan = runner._plan
    assert (plan.pairs, plan.block_steps, plan.seeds) == planned
    assert runner._notes == ([QUICK_NOTE] if value == "1" else []), "who forgets it is told"


def test_a_run_ends_early_and_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(QUICK_VARIABLE, "1")
    assert [profile(steps=steps).settings.steps for steps in (None, 50, 5)] == [12, 12, 5]
    with pytest.raises(UsageError, match="--steps"):
        profile(steps="many")  # type: ignore[arg-type]
    assert len([*endless(["a", "b", "c"])]) == 16  # type: ignore[list-item]
    assert len(run_trials(16, lambda so_far: Trial({}, 1.0, 1.0))) == 4
    assert time_pairs(lambda: 2.0, lambda: 1.0).count == 2


@pytest.mark.parametrize(("times", "state"), [(3.0, "right"), (1.0, "undecided")])
def test_no_answer_is_slow(monkeypatch: pytest.MonkeyPatch, times: float, state: str) -> None:
    monkeypatch.setenv(QUICK_VARIABLE, "1")
    assert judge_speed(Speed(times, (times, times), 1.0, 1.0, 3), 2.0).state == state


def test_whole_runs_are_of_what_changed_and_come_to_each() -> None:
    names = [entry.name for entry in LESSONS]
    assert set().union(*(chosen((), turn) for turn in range(16))) == set(names)
    changed = ("gpulab/lessons/memory.py", "notebooks/lessons/00_quick_start.md", "gpulab/lessons/check.py")
    assert [chosen(changed, turn) for turn in (9, 6)] == [
        {"00_quick_start", "09_host"},
        {"00_quick_start", "06_memory"},
    ]
    assert chosen(changed, 1) == {"01_utilization", "06_memory"}, "what changed takes turns, too"
