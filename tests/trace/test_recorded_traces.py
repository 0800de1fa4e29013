"""The traces that the project ships, recorded by itself: read, accounted and summed up as what they are known to be."""

from __future__ import annotations

import pytest

import gpulab
from gpulab.run import Run
from tests.support.paths import TESTS

FOLDER = TESTS / "recorded"
STEPS = {"cpu_digits_starved": 5, "cpu_steps_memory": 3, "cpu_no_steps": 8}


def recorded(name: str) -> Run:
    run = gpulab.load(FOLDER / f"{name}.pt.trace.json.gz")
    assert isinstance(run, Run)
    return run


@pytest.mark.parametrize(("name", "steps"), STEPS.items())
def test_every_step_is_accounted_to_the_microsecond(name: str, steps: int) -> None:
    found = gpulab.report(recorded(name)).json()
    assert found["integrity"]["state"] == "ok"  # type: ignore[index]
    rows = found["steps"]
    assert isinstance(rows, list) and len(rows) == steps
    for row in rows:
        assert sum(row["parts_us"].values()) == pytest.approx(row["wall_us"], abs=1)
        assert row["parts_us"]["compute"] > 0


def test_the_starved_demo_waits_for_its_data() -> None:
    run = recorded("cpu_digits_starved")
    found = gpulab.report(run)
    assert found.headline.key == "data_starved"
    assert "of each step waits on the DataLoader" in found.text(full=True)
    # 32 images of at least 0.5 ms each, planted
    assert min(row["parts_us"]["data_wait"] for row in found.json()["steps"]) > 32 * 500  # type: ignore[attr-defined]


def test_memory_events_of_the_host_are_kept() -> None:
    events = recorded("cpu_steps_memory").memory_events
    assert events is not None and len(events) > 20
    assert set(events.device_index.tolist()) == {-1}
    (curve,) = gpulab.report(recorded("cpu_steps_memory")).json()["memory"]["recorded"]  # type: ignore[index]
    assert curve["device_index"] == -1 and curve["allocations"] > 10
    assert recorded("cpu_no_steps").memory_events is None


def test_steps_without_marks_are_found_by_the_loader() -> None:
    assert recorded("cpu_no_steps").step_source == "DataLoader"
