"""The phases of a run: each has something, none overlaps, a long run is bounded."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gpulab.capture.windows import EARLY_TRACED, GPU_LEAD_IN, GPU_MEASURED, TRACED, plan
from gpulab.run import Settings


@given(st.integers(3, 100_000))
def test_a_run_of_known_length_has_three_phases(total: int) -> None:
    schedule = plan(Settings(), total)
    (window,) = schedule.windows
    assert schedule.warmup >= 1
    assert window.after > schedule.warmup or total == 3, "something is measured before the profiler starts"
    assert 1 <= window.length <= TRACED
    assert window.after + window.length <= total, "the window ends within the run"


def test_a_run_of_unknown_length_is_profiled_early_and_again() -> None:
    early, late = plan(Settings(), None).windows
    assert early.after + early.length <= 6 and early.length == EARLY_TRACED
    assert late.after > early.after + early.length and late.length == TRACED


def test_six_steps_leave_room_for_every_phase() -> None:
    schedule = plan(Settings(), 6)
    window = schedule.windows[0]
    assert schedule.warmup == 1 and window.after - schedule.warmup >= 2 and window.length >= 2


@given(st.integers(3, 500) | st.none(), st.integers(0, 5), st.integers(1, 8))
def test_what_is_asked_for_is_done(total: int | None, warmup: int, trace_steps: int) -> None:
    schedule = plan(Settings(warmup=warmup, trace_steps=trace_steps), total)
    assert schedule.warmup == warmup
    assert all(w.length <= trace_steps for w in schedule.windows)
    if total is not None and total >= warmup + 2 * trace_steps + 2:
        assert schedule.windows[-1].length == trace_steps


@given(st.integers(3, 100_000), st.booleans())
def test_on_a_gpu_steps_are_measured_before_the_profiler_comes(total: int, certain: bool) -> None:
    windows = plan(Settings(), total, certain=certain, on_gpu=True).windows
    first, warmup = windows[0], plan(Settings(), total, certain=certain, on_gpu=True).warmup
    if total >= 20:
        assert first.after - warmup >= GPU_MEASURED, "CUPTI slows all that follows a session"
    assert first.after < max(total, 4) and first.lead_in <= GPU_LEAD_IN
    if certain:
        assert first.after + first.lead_in + first.length <= total
    assert all(a.after + a.lead_in + a.length <= b.after for a, b in pairwise(windows))


def test_what_was_chosen_is_told_in_sentences() -> None:
    window = next(c for c in plan(Settings(), 56, certain=False).choices if c.what == "traced window")
    assert "; in their place " in window.value
    assert window.reason == "chosen for a run in which an epoch has 56 steps"
    assert plan(Settings(), 50).choices[0].reason == "chosen for a run in which 50 steps run"
    assert plan(Settings(), None).choices[0].reason == "chosen for a run in which the number of steps is unknown"
    assert all(c.reason for c in plan(Settings(), 50).choices)
