"""The planted cells and what is said to be true of them; no clock is read but in two short runs."""

from __future__ import annotations

import ast
import gc
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.advisers.advice import NAMES, contradicted, keys_of, names_truth
from benchmarks.harness import RESULTS
from benchmarks.planted import first_runs, judging, named, row_of, skipped
from benchmarks.planted.catalogue import CELLS, cells_of, part_of, read
from benchmarks.planted.curing import AGAIN, arms_of
from benchmarks.planted.planted import FOLDER, Planted
from benchmarks.planted.results import NOT_RUN, settled, unmeasured
from benchmarks.planted.timing import Clock, Enough, notebook, seconds_per_step
from benchmarks.planted.traces import TRACES

ON_CPU = [planted for planted in CELLS if not planted.gpu]
KEYS = """
data_starved cpu_preprocessing storage_bound slow_collate worker_restart blocking_copy sync_points launch_bound
small_batch no_mixed_precision no_tf32 unfused_attention unfused_optimizer memory_bound_ops layout odd_shapes
allocator_thrash memory_pressure memory_underused checkpoint_save logging_or_eval recompilation gc_pause
cpu_oversubscribed cpu_shared exposed_communication straggler gpu_shared throttled wrong_device healthy cannot_tell
"""
FIRST_COHORTS = {"2026-11-21b", "2026-11-21c", "2026-11-21d", "2026-11-22b", "2026-11-22c"}
ISSUE_5 = set(KEYS.split())


def test_there_are_enough_of_each_kind() -> None:
    assert len(ON_CPU) >= 40
    assert sum(not planted.causes for planted in ON_CPU) >= 8
    assert sum(len(planted.causes) == 2 for planted in ON_CPU) >= 6
    assert len({planted.name for planted in CELLS}) == len(CELLS)
    assert sorted(FOLDER.rglob("*.py")) == sorted(planted.path for planted in CELLS), "each in its cause's folder"
    assert all(planted.cohort for planted in CELLS)
    assert {planted.framework for planted in ON_CPU} == {"torch", "lightning", "transformers", "accelerate"}
    keys = {key for planted in CELLS for key in (*planted.causes, *planted.also)}
    keys |= {key for case in TRACES for key in (*case.headline, *case.found, *case.never)}
    assert keys <= ISSUE_5


def test_at_least_a_third_is_kept_aside_and_spread() -> None:
    for cells in (CELLS, ON_CPU):
        aside = [planted for planted in cells if part_of(planted) == "aside"]
        assert len(aside) >= len(cells) / 3 - 1
    aside = [planted for planted in ON_CPU if part_of(planted) == "aside"]
    assert {planted.framework for planted in aside} == {planted.framework for planted in ON_CPU}
    assert sum(not planted.causes for planted in aside) >= 2
    by_cause = Counter(planted.causes[0] for planted in ON_CPU if planted.causes)
    assert {planted.causes[0] for planted in aside if planted.causes} == set(by_cause), "a cause has none kept aside"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("import torch\n", "begins with a header"),
        ("# /// cell\n# causes = []\nimport torch\n", "begins with a header"),
        ("# /// cell\n# causes = [\n# ///\n", "Invalid value"),
        ('# /// cell\n# causes = []\n# because = ""\n# colour = "red"\n# ///\n', "colour"),
        ('# /// cell\n# causes = []\n# because = ""\n# [[cure]]\n# old = "a"\n# ///\n', "new"),
        ("# /// cell\n# causes = []\n# ///\n", "because"),
    ],
)
def test_a_header_that_is_wrong_names_the_file(tmp_path: Path, text: str, wrong: str) -> None:
    file = tmp_path / "some_cell.py"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"some_cell.py.*{wrong}"):
        read(file)


def test_a_header_is_no_part_of_the_code(tmp_path: Path) -> None:
    file = tmp_path / "some_cell.py"
    file.write_text(
        '# /// cell\n# causes = ["layout"]\n# because = "a reason"\n# batch = 8\n# tries = { workers = "2" }\n#\n'
        "# [[cure]]\n# old = '''\n# a()\n#     b()\n# '''\n# new = \"\"\n# ///\na()\n    b()\n"
    )
    cell = read(file)
    assert (cell.name, cell.causes, cell.batch, dict(cell.tries)) == ("some_cell", ("layout",), 8, {"workers": "2"})
    assert cell.cure == (("a()\n    b()\n", ""),)
    for planted in CELLS:
        assert "# ///" not in "".join(planted.text)


def test_each_cell_is_in_exactly_one_result_file() -> None:
    rows = {part: _rows(RESULTS / f"planted_{part}.json") for part in ("tuned", "aside")}
    for part in ("tuned", "aside"):
        assert Counter(row["name"] for row in rows[part]) == Counter(p.name for p in cells_of(part)), part
    assert sum(map(len, rows.values())) == len(CELLS)


def _rows(file: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["rows"]
    return rows


def test_a_cell_that_changes_its_part_takes_its_row_along() -> None:
    tuned, aside = (cells_of("tuned"), cells_of("aside"))
    moved, doubled, unknown = tuned[0], tuned[1], tuned[2]
    kept = {
        "tuned": {"measured": "a", "rows": [_row(p, "mine") for p in tuned[1:] if p is not unknown]},
        "aside": {"measured": "b", "rows": [_row(p, "theirs") for p in (*aside, moved, doubled)]},
    }
    now = settled(kept)  # type: ignore[arg-type]
    rows = {row["name"]: row for row in now["tuned"]["rows"]}
    assert [row["name"] for row in now["tuned"]["rows"]] == [p.name for p in tuned]
    assert [row["name"] for row in now["aside"]["rows"]] == [p.name for p in aside]
    assert rows[moved.name]["failed"] == "theirs" and rows[doubled.name]["failed"] == "mine"
    assert rows[unknown.name]["skipped"] == NOT_RUN
    assert now["tuned"]["totals"]["skipped"] == 1 and now["tuned"]["measured"] == "a"


def _row(planted: Planted, failed: str) -> dict[str, Any]:
    return unmeasured(planted, "") | {"failed": failed}


# -- first runs ----------------------------------------------------------------------------------------------------


def test_first_runs_are_those_of_the_cohorts() -> None:
    cohorts = first_runs.kept()
    assert {entry["cohort"]: entry["cells"] for entry in cohorts} == Counter(planted.cohort for planted in CELLS)
    for entry in cohorts:
        names = {planted.name for planted in CELLS if planted.cohort == entry["cohort"]}
        assert set(entry["outcomes"]) <= names
        if entry["first_run"] and entry["outcomes"]:
            figures = first_runs.figures(list(entry["outcomes"].values()))
            assert figures == {key: entry["first_run"][key] for key in figures}
        assert bool(entry["first_run"]) + bool(entry["why_none"]) <= 1
    until = [entry for entry in cohorts if entry["cohort"] in FIRST_COHORTS]
    assert first_runs.summed(until) == {"with_cause": 118, "right": 102, "healthy": 19, "false_alarms": 1}


def test_the_first_outcome_of_a_cell_stays() -> None:
    cells = [Planted(name, ("layout",), "", cohort="new") for name in ("one", "two", "three")]
    cells.append(Planted("well", (), "", cohort="new"))
    rows = [unmeasured(cell, "") for cell in cells]
    one, two, three, well = rows
    entries = first_runs.extended([], [one | _told(True, 0.1), two | {"skipped": "needs a GPU"}], cells, date="d1")
    assert entries[0]["first_run"] is None and set(entries[0]["outcomes"]) == {"one"}
    later = [
        one | _told(False, 0.5),
        two | {"failed": "it raised"},
        three | _told(True, 0.3),
        well | _told(False, None),
    ]
    entries = first_runs.extended(entries, later, cells, date="d2")
    figures = {"with_cause": 3, "right": 2, "healthy": 1, "false_alarms": 1, "predictions": 2, "median_error": 0.2}
    assert entries[0]["first_run"] == figures | {"date": "d2"}
    again = first_runs.extended(entries, [row | _told(True, 0.0) for row in rows], cells, date="d3")
    assert again == entries


def test_a_cohort_that_has_no_first_run_by_its_history_gets_none() -> None:
    cells = [Planted("one", ("layout",), "", cohort="old")]
    closed = {"cohort": "old", "about": "", "cells": 1, "first_run": None, "why_none": "built with it", "outcomes": {}}
    assert first_runs.extended([closed], [unmeasured(cells[0], "") | _told(True, None)], cells) == [closed]


def _told(right: bool, error: float | None) -> dict[str, Any]:
    return {"headline": "layout", "right": right, "error": error}


@pytest.mark.parametrize("planted", CELLS, ids=lambda planted: planted.name)
def test_the_text_and_its_cure_parse_and_differ(planted: Planted) -> None:
    texts = [planted.text]
    if planted.causes:
        texts.append(planted.edited(planted.cure))
    if len(planted.causes) == 2:
        texts.append(planted.edited(planted.cure + planted.second_cure))
    for before, cell in texts:
        ast.parse(before)
        ast.parse(cell)
    assert len(set(texts)) == len(planted.causes) + 1
    assert bool(planted.tries) != bool(planted.causes)


@pytest.mark.parametrize("planted", ON_CPU, ids=lambda planted: planted.name)
def test_the_earlier_cells_run_as_written_and_cured(
    planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := skipped(planted):
        pytest.skip(reason)
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    try:
        for before in dict.fromkeys(arm.text[0] for arm in arms_of(planted, {})):
            names = notebook(before, planted.name)
            assert len(names) > 3
            names.clear()
    finally:
        gc.collect()
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["two_samples_at_a_time", "collected_every_eighth_step"])
def test_a_cell_from_door_to_door(name: str) -> None:
    row = row_of(named(name))
    assert not row["failed"]
    assert row["measured"]["arms"]["cured"]["pairs"] >= 3
    assert row["findings"][0]["key"] == row["headline"]
    assert row["causes"] == list(named(name).causes)


def test_an_edit_that_does_not_fit_once_is_an_error() -> None:
    with pytest.raises(ValueError, match="is there 0 times"):
        named("short_epochs").edited((("no such text", ""),))
    with pytest.raises(ValueError, match="times"):
        named("short_epochs").edited((("loss", "error"),))


def test_the_clock_counts_the_first_optimizer_only() -> None:
    clock = Clock(warmup=2, steps=3)
    first, second = object(), object()
    for _ in range(4):
        clock(first, (), {})
        clock(second, (), {})
    assert clock.seconds is None
    with pytest.raises(Enough):
        clock(first, (), {})
    assert clock.seconds is not None


def test_the_clock_counts_backward_passes_of_updates_by_hand() -> None:
    cell = "import torch\nw = torch.zeros(1, requires_grad=True)\nfor _ in range(8):\n    (w - 1).square().backward()"
    backward = torch.Tensor.backward
    assert seconds_per_step(cell, {}, 2, 5, "by_hand", by_hand=True) > 0
    assert torch.Tensor.backward is backward
    with pytest.raises(RuntimeError, match="before its step 7"):
        seconds_per_step(cell, {}, 2, 5, "by_hand")


def test_a_cell_that_ends_too_soon_is_told() -> None:
    cell = "import torch\nw = torch.zeros(1, requires_grad=True)\nw.sum().backward()\ntorch.optim.SGD([w], 0.1).step()"
    with pytest.raises(RuntimeError, match="before its step 7"):
        seconds_per_step(cell, {}, 2, 5, "short")


# -- judging -------------------------------------------------------------------------------------------------------


def told(*keys: str, settings: tuple[tuple[str, str], ...] = (), ratio: float | None = None) -> dict[str, object]:
    """Findings as `judging.said` gives them."""
    prediction = None
    if ratio is not None:
        prediction = SimpleNamespace(
            settings=dict(settings), ratio=ratio, interval=(ratio - 0.1, ratio + 0.1), only_sign=False, refused=""
        )
    findings = tuple(
        SimpleNamespace(
            key=key, summary="", recoverable_us_per_step=1e3, settings=settings, source_line="", prediction=prediction
        )
        for key in keys
    )
    return judging.said(SimpleNamespace(findings=findings, first=findings[0], untold=()))


SICK = Planted("sick", ("storage_bound", "gc_pause"), "", also=("data_starved",))
WELL = Planted("well", (), "", tries={"workers": "2"})


def test_a_headline_is_right_by_first_cause_or_equal_name() -> None:
    assert judging.judged(SICK, told("data_starved"))["right"]
    assert not judging.judged(SICK, told("gc_pause", "storage_bound"))["right"]
    assert judging.judged(SICK, told("gc_pause", "data_starved"))["ranks"] == {"storage_bound": 2, "gc_pause": 1}
    assert judging.judged(SICK, told("layout"))["ranks"] == {"storage_bound": None, "gc_pause": None}


def test_every_finding_about_a_healthy_cell_is_a_false_alarm() -> None:
    assert judging.judged(WELL, told("healthy"))["right"]
    found = judging.judged(WELL, told("healthy", "layout"))
    assert not found["right"] and found["false_alarms"] == ["layout"]
    assert not judging.judged(WELL, told("cannot_tell"))["right"]


def test_a_prediction_is_judged_by_its_knobs_else_by_the_cure() -> None:
    arms = {"cured": {"ratio": 0.5, "interval": [0.4, 0.6]}, "advised": {"ratio": 0.8, "interval": [0.7, 0.9]}}
    measured = {"arms": arms}
    by_knob = told("storage_bound", settings=(("workers", "2"),), ratio=0.88)["findings"][0]  # type: ignore[index]
    found = judging.prediction_of(by_knob, measured)
    assert found["against"] == "advised" and found["error"] == pytest.approx(0.1) and found["holds"]
    by_edit = told("storage_bound", ratio=0.65)["findings"][0]  # type: ignore[index]
    found = judging.prediction_of(by_edit, measured)
    assert found["against"] == "cured" and found["error"] == pytest.approx(0.3) and not found["holds"]
    assert judging.prediction_of(None, measured)["error"] is None


def test_a_planted_truth_that_is_not_measured_is_reported() -> None:
    def measured(**ratios: float) -> dict[str, object]:
        arms = {label: {"ratio": r, "interval": [r - 0.01, r + 0.01]} for label, r in ratios.items()}
        return {"arms": {label.replace("_", " ").replace("workers 2", "workers=2"): a for label, a in arms.items()}}

    sick = Planted("sick", ("gc_pause", "layout"), "", cure=(("a", "b"),), second_cure=(("c", "d"),))
    assert judging.truth_of(sick, measured(cured=0.5, both_cured=0.3)) == ""
    assert "only gives" in judging.truth_of(sick, measured(cured=0.95, both_cured=0.3))
    assert "second cure only" in judging.truth_of(sick, measured(cured=0.5, both_cured=0.49))
    assert "costs more" in judging.truth_of(sick, measured(cured=0.8, both_cured=0.3))
    again = {AGAIN: 0.99}
    assert judging.truth_of(WELL, measured(workers_2=0.97, **again)) == ""
    assert "gains from workers=2" in judging.truth_of(WELL, measured(workers_2=0.8, **again))


def test_a_trace_is_held_against_all_that_is_said_of_it() -> None:
    case = next(case for case in TRACES if case.name == "h100_owlv2_starved")
    assert judging.judged_trace(case, told("data_starved"))["right"]
    assert judging.judged_trace(case, told("data_starved", "small_batch"))["wrong"] == ["small_batch is found"]
    wrong = judging.judged_trace(case, told("data_starved", settings=(("batch_size", "64"),)))["wrong"]
    assert wrong == ["advises batch_size"]
    starved = next(case for case in TRACES if case.name == "v100_resnet50_workers0")
    assert "to give back" in judging.judged_trace(starved, told("data_starved"))["wrong"][-1]


# -- other advisers ------------------------------------------------------------------------------------------------


def test_an_advice_is_recognised_by_its_words() -> None:
    batch = "GPU 0 has low utilization. You could try to increase batch size to improve."
    assert keys_of([batch]) == ["small_batch"]
    assert contradicted(["small_batch"], ["data_starved"], healthy=False, on_gpu=True) == ["small_batch"]
    assert contradicted(["small_batch"], ["small_batch"], healthy=False, on_gpu=True) == []
    assert contradicted(["data_starved"], ["gc_pause", "storage_bound"], healthy=False, on_gpu=True) == []
    assert contradicted(["data_starved"], ["gc_pause"], healthy=False, on_gpu=True) == ["data_starved"]
    assert contradicted(["no_tf32"], [], healthy=True, on_gpu=True) == ["no_tf32"]
    assert contradicted(["no_tf32"], ["gc_pause"], healthy=False, on_gpu=False) == ["no_tf32"]
    assert names_truth(["a", "b"], ("b",)) and not names_truth(["a"], ("b",))
    assert {key for _, keys in NAMES for key in keys} <= ISSUE_5
