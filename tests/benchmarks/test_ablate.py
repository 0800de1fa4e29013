"""What each special case of the rules serves: switches that point at something, and cells lost and gained."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks import ablate
from benchmarks.ablate import Outcome
from benchmarks.special_cases import SWITCHES, Switch
from gpulab.analysis.facts import facts
from gpulab.diagnosis.diagnose import diagnose
from gpulab.run import Run
from gpulab.store.folders import Store
from tests.support.rule_cases import pauses, run_of

CELL = "collected_every_eighth_step"
NO_GC = Switch("garbage collections count", "gpulab.diagnosis.rules.pauses:_LEAST", 1_000_000)
NO_LAYOUT = Switch("layout counts", "gpulab.diagnosis.rules.operations:_layout_on_cpu", lambda context: None)


@pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: switch.where)
def test_a_switch_replaces_what_is_there_and_puts_it_back(switch: Switch) -> None:
    before = _value(switch)
    assert before != switch.off, "turned off it is as it was"
    with switch.turned_off():
        assert _value(switch) is switch.off
    assert _value(switch) is before


def _value(switch: Switch) -> object:
    module, path = switch.where.split(":")
    value: object = importlib.import_module(module)
    for name in path.split("."):
        value = getattr(value, name)
    return value


def test_a_stored_run_whose_rule_is_turned_off_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablate, "measured_cures", dict)
    store = Store(tmp_path)
    run = run_of()
    collected = replace(run, pauses=pauses(run, "gc", range(5, 60), 4.0))
    store.save(_named(collected, CELL))
    store.save(_named(run, "no planted cell"))
    outcomes, (gc, layout) = ablate.ablated(ablate.cells(tmp_path), (NO_GC, NO_LAYOUT))
    assert list(outcomes) == [CELL] and outcomes[CELL].right == {"headline": True}
    assert gc.lost["headline"] == [CELL] and gc.cells == {CELL}
    assert not gc.gained["headline"] and not layout.cells
    assert gc.differing == [CELL] and not layout.differing
    lines = ablate.table(outcomes, [gc, layout])
    assert "headline 1 of 1" in lines[0]
    assert (
        lines[-2].startswith("| garbage collections count | 1, 0 | 0, 0 | 0, 0 | 0, 0 | 0, 0 | 1 |")
        and CELL in lines[-2]
    )
    assert lines[-1] == "| layout counts | 0, 0 | 0, 0 | 0, 0 | 0, 0 | 0, 0 | 0 |  |"


def _named(run: Run, name: str) -> Run:
    return replace(run, id=name.replace(" ", "-"), settings=replace(run.settings, name=name))


def test_what_is_lost_and_gained_by_question() -> None:
    on = {
        "a": Outcome({"headline": True, "interval": True}, "as before"),
        "b": Outcome({"headline": False}, "one"),
        "c": Outcome({"headline": True}, "two"),
    }
    off = {
        "a": Outcome({"headline": True}, "as before"),
        "b": Outcome({"headline": True}, "other"),
        "c": Outcome({"headline": False}, "another"),
    }
    change = ablate.change_of(NO_GC, on, off)
    assert change.differing == ["b", "c"]
    assert {q: names for q, names in change.lost.items() if names} == {"headline": ["c"], "interval": ["a"]}
    assert {q: names for q, names in change.gained.items() if names} == {"headline": ["b"]}
    assert change.cells == {"a", "c"}


def test_a_special_case_is_watched_before_it_is_turned_off() -> None:
    run = run_of()
    collected = replace(run, pauses=pauses(run, "gc", range(5, 60), 4.0))
    rule = next(switch for switch in SWITCHES if switch.name == "rule gc_pause")
    notes: list[str] = []
    with rule.watched(lambda: notes.append("has a say")):
        assert diagnose(facts(run)).of("gc_pause") is None and not notes
        assert diagnose(facts(collected)).of("gc_pause") is not None and notes


def test_what_is_no_function_is_always_turned_off() -> None:
    notes: list[str] = []
    with NO_GC.watched(lambda: notes.append("has a say")):
        assert notes


def test_a_simulated_loop_is_a_case() -> None:
    loop = next(case for case in ablate.simulated() if "loads" in case.name)
    outcomes, (change,) = ablate.ablated(iter([loop]), [s for s in SWITCHES if s.name == "rule data_starved"])
    assert outcomes[loop.name].right == {"simulated loop": True}
    assert change.lost["simulated loop"] == [loop.name]


def test_a_store_without_planted_cells_has_none(tmp_path: Path) -> None:
    assert ablate.stored_runs(tmp_path / "none") == {}
