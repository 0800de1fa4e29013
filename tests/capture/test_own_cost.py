"""What gpulab itself costs is no part of a step nor of its wait for data: with marks and clocks set by the script."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from gpulab.analysis.facts import facts
from gpulab.capture.steps.step_boundaries import StepTracker
from gpulab.run import Steps
from tests.support.rule_cases import run_of

US = 1_000


def _steps(own_us: int) -> Steps:
    """Ten steps of 100 µs, of which a loader takes 40; each mark and each timing of a batch costs `own_us` more."""
    tracker, now = StepTracker(0), 0
    for _ in range(10):
        tracker.loader_asked(1, now)
        now += own_us * US
        tracker.spent(own_us * US)
        tracker.waits_from(now)
        now += (40 + own_us) * US
        tracker.loader_answered(now, "batch", 4, own_us * US)
        now += 30 * US
        tracker.backward(now)
        now += own_us * US
        tracker.spent(own_us * US)
        now += 10 * US
        tracker.optimized(1, now, now + 20 * US)
        now += 20 * US
    return tracker.finish(now)


@pytest.mark.parametrize("own_us", [0, 7, 70])
def test_steps_are_as_long_as_without_gpulab(own_us: int) -> None:
    steps = _steps(own_us)
    assert (steps.time_ns == 100 * US).all()
    assert (steps.data_wait_ns == 40 * US).all()
    assert (steps.own_ns == 3 * own_us * US).all()
    assert (steps.wall_ns == (100 + 3 * own_us) * US).all()


def test_our_time_never_exceeds_what_a_step_has() -> None:
    tracker = StepTracker(0)
    tracker.loader_asked(1, 0)
    tracker.loader_answered(60, "batch", 4)
    tracker.spent(1_000)  # a core was taken away from us
    tracker.optimized(1, 80, 90)
    steps = tracker.finish(100)
    assert (steps.own_ns <= steps.wall_ns - steps.data_wait_ns).all()


def test_the_figures_are_without_our_time() -> None:
    run = run_of(wait=0.25)
    assert not len(run.steps.own_ns) and (run.steps.time_ns == run.steps.wall_ns).all(), "as an older record"
    wall_us = float(np.median(run.steps.wall_ns)) / 1e3
    own = np.full(len(run.steps), 2_000 * US, np.int64)
    figures = facts(replace(run, steps=replace(run.steps, own_ns=own)))
    assert figures.step_us is not None
    assert figures.step_us.median == pytest.approx(wall_us - 2_000)
    assert figures.observer_us_per_step == pytest.approx(2_000)
    outside = facts(run).outside_steps_fraction
    assert figures.outside_steps_fraction == pytest.approx(outside)
