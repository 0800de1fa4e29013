"""What the report says of processor cores, and of pauses where nothing was trained."""

from __future__ import annotations

from msgspec.structs import replace

from gpulab.analysis.cores import core_share
from gpulab.analysis.facts import Facts
from gpulab.run import Pause, PauseSum, Run, Steps
from gpulab.views.report.run_sections import core_section, pause_sections
from tests.support.core_readings import with_cores
from tests.support.rule_cases import run_of
from tests.support.synthetic import MS, facts_of


def facts(run: Run) -> Facts:
    return replace(facts_of(run), cores=core_share(run))


def cells(run: Run) -> dict[str, str]:
    section = core_section(facts(run))
    assert section is not None
    return {row.cells[0]: row.cells[1] for row in section.rows}


def test_the_report_says_who_had_the_cores() -> None:
    shown = cells(with_cores(run_of(), got=0.3, others=1.6, waited=0.68))
    assert shown["usable by this process"] == "2"
    assert shown["used by this process and its workers"] == "0.3 (mean during the steps)"
    assert shown["used by all other programs"] == "1.6 (mean during the steps)"
    assert shown["waiting for a CPU core, loading or not"] == "13.6 ms per step (mean)"
    assert core_section(facts(run_of())) is None


def test_a_containers_quota_is_shown() -> None:
    shown = cells(with_cores(run_of(), cores=8, quota=1.5, throttled=0.4))
    assert shown["usable by this process"] == "1.5: the quota of its container, on 8 cores"
    assert shown["CPU quota ran out"] == "in 40 % of its periods"


def test_where_no_step_ran_no_training_stood_still() -> None:
    pauses = (Pause("gc", 0, 200 * MS), Pause("gc", 300 * MS, 500 * MS))
    (with_steps,) = pause_sections(run_of(pauses=pauses))
    assert "Training paused" in with_steps.lines[0]
    (without,) = pause_sections(replace(run_of(pauses=pauses), steps=Steps.empty()))
    assert "Training paused" not in " ".join(without.lines)


def test_pauses_of_milliseconds_are_not_told() -> None:
    for longest_ms, told in ((3, False), (300, True)):
        pauses = (Pause("gc", 100 * MS, (100 + longest_ms) * MS),)
        shown = pause_sections(replace(run_of(pauses=pauses), more_pauses=(PauseSum("gc", 3, 900_000),)))
        assert bool(shown) is told
