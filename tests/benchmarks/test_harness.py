"""What all benchmarks rely on: their statistics, targets and table; and the two that judge by rules of their own."""

from __future__ import annotations

import importlib
import json
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks import ablate, parity, planted_busy, table
from benchmarks.ablate import Outcome
from benchmarks.harness import RESULTS, Figure, ratio_with_interval
from benchmarks.parity import search, settings
from benchmarks.parity.catalogue import named
from benchmarks.parity.limits import Limits
from benchmarks.parity.staging import CHECKOUTS
from benchmarks.special_cases import SWITCHES, Switch
from gpulab.store.folders import Store
from gpulab.tuning.compare.blocks import compare_blocks
from tests.support.comparisons import alike, as_written, blocks, faster
from tests.support.rule_cases import pauses, run_of
from tests.support.scripted_climb import SCENE


def test_the_ratio_of_blocks_is_a_median_with_an_interval() -> None:
    assert ratio_with_interval([1.1] * 5) == {"ratio": 1.1, "interval": [1.1, 1.1], "pairs": 5}
    found = ratio_with_interval([1.0, 1.1, 1.2, 1.3, 9.0])
    assert found["ratio"] == 1.2 and found["interval"] == [1.0, 9.0], "of five blocks nothing narrower is known"
    many = ratio_with_interval([1.0, 1.02, 1.04] * 30)["interval"]
    assert 1.0 <= many[0] <= 1.02 <= many[1] <= 1.04 and many == ratio_with_interval([1.0, 1.02, 1.04] * 30)["interval"]


@pytest.mark.parametrize(
    ("figure", "line"),
    [
        (Figure("a", 0.6, "s", target="most"), "| a | 0.60 s | ≤ 0.50 s | **missed** |"),
        (Figure("a", 0.5, "s", target="most"), "| a | 0.50 s | ≤ 0.50 s | met |"),
        (Figure("a", 11.0, "s"), "| a | 11 s | | |"),
        (Figure.of_ratio("a", {"ratio": 1.02, "interval": [0.99, 1.05]}, "+%", "ratio"),
         "| a | +2.00 % [-1.00, +5.00] | ≤ +1.00 % | **missed** |"),
        (Figure.of_ratio("a", None, "×", "ratio"), "| a | not measured | ≤ 1.01 | |"),
        (Figure.share("a", 3, 4, "least"), "| a | 3 of 4 (75%) | ≥ 70% | met |"),
        (Figure.count("a", 1, 4, "none"), "| a | 1 of 4 | ≤ 0 | **missed** |"),
    ],
)  # fmt: skip
def test_a_figure_stands_beside_its_target_met_or_not(figure: Figure, line: str) -> None:
    targets = {"most": "<= 0.5", "ratio": "<= 1.01", "least": ">= 0.7", "none": "<= 0"}
    assert table.row_of(figure, targets).replace("  |", " |") == line


def test_the_page_is_up_to_date_and_each_target_has_its_figure() -> None:
    assert table.PAGE.read_text(encoding="utf-8") == table.page(), "run python -m benchmarks --table-only"
    for name, benchmark in table.BENCHMARKS.items():
        assert callable(table.function_of(name, "measure")) or benchmark["measure"] == "", name
        figures = table.function_of(name, "figures")
        assert figures is not None
        used = {figure.target for figure in figures(json.loads((RESULTS / f"{name}.json").read_text("utf-8")))}
        assert set(benchmark["targets"]) == used - {""}, name


def test_only_deprived_cells_must_name_the_competition() -> None:
    def row(name: str, *findings: str, without: float = 0.5) -> dict[str, Any]:
        named = planted_busy.COMPETITION in findings
        own = {"headline": findings[0], "competition_named": named, "without_a_core": without}
        return {"name": name, "failed": "", "load": 5.0, **own}

    rows = [
        row("second", "slow_collate", "cpu_shared"), row("silent", "slow_collate"), row("green", "healthy"),
        row("asleep", "healthy", without=0.05), {"name": "broken", "failed": "RuntimeError: no"},
    ]  # fmt: skip
    totals = planted_busy.totals(rows)
    assert (totals["cells"], totals["deprived"], totals["named"]) == (4, 3, 1)
    assert totals["not_named"] == ["silent", "green"] and totals["false_green"] == ["green"]
    assert totals["failed"] == ["broken"]


# -- parity ------------------------------------------------------------------------------------------------------------


def kept(share: float, *, same_loss: bool = True, seconds: float = 200.0, **search: Any) -> dict[str, Any]:
    arm = {"ratio": 0.5, "interval": [0.45, 0.55], "failure": "", "same_loss": same_loss}
    return {
        "search": {"step_ms": 9.0, "best": {"workers": 2, "cache": True}, "seconds": 100.0, "thin": ["amp=bf16"]}
        | search,
        "climb": {
            "kept": search.get("best", {"cache": "on"}),
            "ended": "budget",
            "headline": {"sentence": "Faster."},
            "seconds": seconds,
        },
        "judgement": {
            "share": {"ratio": share, "interval": [share - 0.01, share + 0.01]},
            "arms": [arm | {"settings": {"workers": 2, "cache": True}}, arm | {"settings": {"cache": True}}],
        },
    }


@pytest.mark.parametrize(
    ("result", "reached"),
    [
        (kept(0.96), True),
        (kept(0.94), False),
        (kept(0.96, same_loss=False), False),
        (kept(0.96, seconds=400), False),
        (kept(1.0, best={}, thin=[]), True),
        (kept(1.0, best={}), False),  # as written is the best only where all knobs were measured
    ],
)
def test_reached_is_the_share_at_the_same_loss_in_time(result: dict[str, Any], reached: bool) -> None:
    assert parity.judgement_row(result)["reached"] is reached


def test_what_is_measured_needs_no_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CHECKOUTS, raising=False)
    assert CHECKOUTS in parity.row_of(named("nanogpt"), folder=tmp_path)["skipped"]
    (tmp_path / f"nanogpt{parity._suffix()}.json").write_text(json.dumps({"compiling": {}, **kept(0.96)}))
    assert parity.row_of(named("nanogpt"), folder=tmp_path)["share"]["ratio"] == 0.96
    assert parity.row_of(named("nanogpt"), folder=tmp_path, again=True)["skipped"], "it would have to climb anew"


def test_a_search_tries_what_keeps_the_training_the_same() -> None:
    single = settings.alone(SCENE, cores=2)
    assert {"workers": 2} in single and {"cache": True} in single
    assert not {name for select in single for name in select} & {"batch_size", "accumulate", "prefetch"}
    assert {"prefetch": 4} in settings.alone(SCENE, cores=2, base={"workers": 2})
    many: dict[str, list[Any]] = {
        "workers": [2, 1],
        "cache": [True],
        "fused_optimizer": [True],
        "amp": ["bf16", "fp16"],
    }
    assert all(len(select) == 2 for select in settings.together(many, SCENE)), "a grid that is too large is pairs"
    moved = search.measured(compare_blocks(as_written(), faster(losses=(1.0,) * 40)), {"amp": "bf16"})
    assert not moved["same_loss"]
    unknown = compare_blocks(as_written(losses=()), alike(losses=(), blocks=blocks(1, 20.0)))
    assert search.same_loss(unknown, {"workers": 2}) and not search.same_loss(unknown, {"amp": "bf16"})


class Measuring(search.Search):
    """Every second setting has too few pairs to tell anything at first; no time passes."""

    def _measure(self, stage: str, many: Any, budget_s: float, base: Any = None) -> None:
        for number, select in enumerate(many):
            pairs = 2 if len(many) > 1 and number % 2 else 9
            values = {"ratio": 0.97, "interval": None, "pairs": pairs, "verdict": "undecided", "failure": ""}
            self.rows.append({"stage": stage, "settings": select, "base": {}, "same_loss": True, **values})


def test_what_was_measured_too_briefly_is_measured_again() -> None:
    looking = Measuring(None, Limits(), lambda words: None)  # type: ignore[arg-type]
    looking._measure("alone", [{"cache": True}, {"workers": 2}, {"compute_threads": 1}], 1.0)
    looking._look_again()
    assert [row["stage"] for row in looking.rows if row["settings"] == {"workers": 2}] == ["glance", "alone"]
    assert sum(row["settings"] == {"workers": 2} for row in looking._ranked("alone")) == 1


# -- ablation ----------------------------------------------------------------------------------------------------------

NO_GC = Switch("garbage collections count", "gpulab.analysis.calls:_LEAST", 1_000_000)
NO_LAYOUT = Switch("layout counts", "gpulab.diagnosis.operations:_layout_on_cpu", lambda context: None)


def test_each_switch_replaces_what_is_there_and_puts_it_back() -> None:
    for switch in SWITCHES:
        module, path = switch.where.split(":")
        value = partial(attrgetter(path), importlib.import_module(module))
        before = value()
        assert before != switch.off, f"{switch.where}: turned off it is as it was"
        with switch.turned_off():
            assert value() is switch.off
        assert value() is before


def test_a_stored_run_whose_rule_is_turned_off_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablate, "measured_cures", dict)
    cell, run = "collected_every_eighth_step", run_of()
    collected = replace(run, pauses=pauses(run, "gc", range(5, 60), 4.0))
    for kept_run, name in ((collected, cell), (run, "no planted cell")):
        store = Store(tmp_path)
        store.save(replace(kept_run, id=name.replace(" ", "-"), settings=replace(kept_run.settings, name=name)))
    rule = next(switch for switch in SWITCHES if switch.name == "rule gc_pause")
    outcomes, (gc, layout, whole) = ablate.ablated(ablate.cells(tmp_path), (NO_GC, NO_LAYOUT, rule))
    assert list(outcomes) == [cell] and outcomes[cell].right == {"headline": True}
    assert gc.lost["headline"] == whole.lost["headline"] == [cell] and gc.cells == {cell}
    assert not gc.gained["headline"] and not layout.cells and not layout.differing and gc.differing == [cell]
    lines = ablate.table(outcomes, [gc, layout])
    assert lines[-2].startswith("| garbage collections count | 1, 0 | 0, 0 | 0, 0 | 0, 0 | 0, 0 | 1 |")
    assert lines[-1] == "| layout counts | 0, 0 | 0, 0 | 0, 0 | 0, 0 | 0, 0 | 0 |  |"
    on, off = {"b": Outcome({"headline": False}, "one")}, {"b": Outcome({"headline": True}, "other")}
    assert ablate.change_of(NO_GC, on, off).gained["headline"] == ["b"]
