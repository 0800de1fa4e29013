"""What the runs of an experiment are called."""

from __future__ import annotations

from gpulab.tuning.plan import Arm, Plan


def test_the_reference_run_has_the_name_of_what_was_tried() -> None:
    plan = Plan((Arm({"workers": 2}), Arm({"workers": 4})))
    assert [plan.run_name(arm) for arm in (plan.base, *plan.arms)] == [
        "workers=2,4: as written",
        "workers=2",
        "workers=4",
    ]


def test_a_grid_names_each_value_once() -> None:
    arms = tuple(Arm({"workers": workers, "amp": amp}) for workers in (1, 2) for amp in ("off", "bf16"))
    assert Plan(arms).run_name(Arm()) == "workers=1,2, amp=off,bf16: as written"


def test_a_name_of_the_users_goes_before() -> None:
    plan = Plan((Arm({"workers": 2}),), name="monday")
    assert [plan.run_name(arm) for arm in (plan.base, *plan.arms)] == ["monday: as written", "monday: workers=2"]


def test_a_look_at_the_cell_is_as_written() -> None:
    assert Plan(()).run_name(Arm()) == "as written"
