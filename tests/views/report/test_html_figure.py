"""The HTML picture of a run: one bar whose parts are the step, the steps over time, no colour of its own for text."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from gpulab.formatting import percent
from gpulab.views.report.html_figure import picture, segments
from tests.support import synthetic

CASES = synthetic.cases()
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@EVERY_CASE
def test_the_parts_fill_the_bar(case: synthetic.Case) -> None:
    parts = segments(case.facts)
    if parts:
        assert sum(part.share for part in parts) == pytest.approx(1)
        assert [p.share for p in parts] == sorted(
            (p.share for p in parts), reverse=True
        ) or case.facts.breakdown is None


def test_waiting_in_the_bar_is_that_of_the_unprofiled_steps() -> None:
    facts = CASES["cpu"].facts
    assert facts.data_wait_us is not None and facts.breakdown is not None
    longer = replace(facts.data_wait_us, median=1.3 * facts.data_wait_us.median)
    changed = replace(facts, data_wait_us=longer)
    wait = next(part for part in segments(changed) if part.label == "waiting for the DataLoader")
    assert wait.share == pytest.approx(changed.data_wait_fraction)
    assert percent(wait.share) != percent(facts.breakdown.share["data_wait"])
    assert sum(part.share for part in segments(changed)) == pytest.approx(1)
    of_gpu = next(part for part in segments(CASES["gpu"].facts) if part.label == "waiting for the DataLoader")
    assert of_gpu.words.endswith("(GPU idle)") and not wait.words.endswith("(GPU idle)")


def test_steps_are_drawn_as_high_as_they_took() -> None:
    drawn = picture(CASES["gpu"].facts)
    boxes = re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h", drawn)
    assert len(boxes) >= len(CASES["gpu"].run.steps)
    assert all(float(top) + float(height) <= 100.11 for _, top, _, height in boxes)


def test_a_late_first_step_begins_the_drawing() -> None:
    """A script imports for seconds before it trains: its steps are not pressed into the last part of the width."""
    case = CASES["cpu"]
    steps, wall_ns = case.run.steps, case.run.wall_ns
    late = replace(steps, start_ns=steps.start_ns + 9 * wall_ns, end_ns=steps.end_ns + 9 * wall_ns)
    run = replace(case.run, steps=late, wall_ns=10 * wall_ns)
    drawn = picture(replace(case.facts, run=run, breakdown=None))
    left = [float(x) for x in re.findall(r"M([\d.]+) [\d.]+h[\d.]+v", drawn)]
    assert min(left) == 0 and max(left) <= 1000 and "after the start" in drawn
    assert "from the start to" in picture(case.facts)
