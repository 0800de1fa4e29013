"""Steps that wait by turns, because several workers hand their batches over at once: a round of them is what counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import gpulab
from gpulab.analysis.breakdown import StepParts
from gpulab.analysis.facts import facts
from gpulab.analysis.steps import spread_of_rounds, steps_per_round
from gpulab.diagnosis.diagnose import diagnose
from gpulab.prediction.step import Baseline
from gpulab.run import Run
from tests.support import rule_cases as made_cases
from tests.support import synthetic


def bunched(workers: int, every: int, waits_ms: float, *, more_ms: float = 0.0) -> Run:
    """60 steps of 20 ms; each `every`th waits that long besides, and each step `more_ms`."""
    waited = np.where(np.arange(60) % every == 0, waits_ms, 0.0) + more_ms
    found = synthetic.steps(20.0 + waited, waited, synthetic.phases(5, 40, 6, 9), optimizer_ms=0.2)
    return replace(made_cases.run_of(workers=workers), steps=found, timeline=None)


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 3)), min_size=1, max_size=40),
    st.integers(1, 9),
)
def test_means_of_steps_in_a_row(steps: list[tuple[int, int]], turns: int) -> None:
    values = np.array([value for value, _ in steps], np.int64)
    rows = np.cumsum([gap for _, gap in steps])
    means = [
        values[i : i + turns].mean()
        for i in range(len(values) - turns + 1)
        if all(rows[i + k] == rows[i] + k for k in range(turns))
    ] or values.tolist()
    found = spread_of_rounds(values, rows, turns)
    assert found is not None and found.count == len(values)
    assert [found.p10, found.median, found.p90] == pytest.approx(np.percentile(means, [10, 50, 90]) / 1e3)


@pytest.mark.parametrize(("workers", "every"), [(2, 2), (4, 4), (8, 8)])
def test_a_loop_that_waits_by_turns_starves(workers: int, every: int) -> None:
    run = bunched(workers, every, 60.0 * every)
    known = facts(run)
    assert known.step_us is not None and known.data_wait_us is not None
    assert known.round_steps == every
    assert known.step_us.median == pytest.approx(80e3) and known.data_wait_us.median == pytest.approx(60e3)
    found = diagnose(known).first
    assert found.key == "data_starved" and found.recoverable_us_per_step == pytest.approx(60e3)
    assert Baseline.of(known).compute_us == pytest.approx(20e3)
    assert f"Batches come {every} at once" in " ".join(gpulab.report(run).text(full=True).split())


@pytest.mark.parametrize(
    ("workers", "every", "waits_ms", "more_ms"),
    [
        (4, 30, 300.0, 0.0),  # one long wait in 30 steps is no turn of four workers
        (4, 4, 1.0, 0.0),  # and this none that matters
        (4, 1, 0.0, 30.0),  # they all wait
        (0, 2, 100.0, 0.0),
        (1, 2, 100.0, 0.0),
    ],
)
def test_other_steps_are_as_they_are(workers: int, every: int, waits_ms: float, more_ms: float) -> None:
    run = bunched(workers, every, waits_ms, more_ms=more_ms)
    known = facts(run)
    rows = known.selection.rows
    assert known.round_steps == steps_per_round(run, rows) == 1 and known.step_us is not None
    assert known.step_us.median == pytest.approx(np.median(run.steps.wall_ns[rows]) / 1e3)


def test_of_few_rounds_all_steps_are_one() -> None:
    """Four workers, five counted steps: the median would be that of the quick ones, 2 ms instead of 34."""
    waited = np.where(np.arange(14) % 4 == 1, 160.0, 0.0)
    found = synthetic.steps(2.0 + waited, waited, synthetic.phases(4, 5, 3, 2), optimizer_ms=0.2)
    run = replace(made_cases.run_of(workers=4), steps=found, timeline=None)
    known = facts(run)
    rows = known.selection.rows
    assert known.round_steps == len(rows) < 12 and known.step_us is not None
    assert known.step_us.median == pytest.approx(np.mean(run.steps.time_ns[rows]) / 1e3) and known.step_us.median > 2e4


def test_shares_of_a_profiled_window_are_those_of_its_rounds() -> None:
    known = synthetic.cpu_case().facts
    account = known.breakdown
    assert account is not None
    parts = account.steps[0].parts_ns

    def step(waited_ns: int) -> StepParts:
        mine = {**dict.fromkeys(parts, 0), "compute": 10**7, "data_wait": waited_ns}
        return replace(account.steps[0], start_ns=0, end_ns=10**7 + waited_ns, parts_ns=mine)

    steps = tuple(replace(step(9 * 10**7 if i % 3 == 0 else 0), number=i) for i in range(5))
    by_turns = replace(account, steps=steps).by(3)
    assert by_turns.median_step == 0  # one of the two that wait
    assert by_turns.by(1).typical_share("data_wait") == 0
    assert by_turns.typical_share("data_wait") == pytest.approx(90 / 120)
    assert by_turns.median_us["data_wait"] == pytest.approx(30e3)
    assert by_turns.by(8).typical_share("data_wait") == pytest.approx(180 / 230)  # all that was profiled
