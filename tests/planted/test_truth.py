"""Planted truth: every file parses and its cure applies, a few run, and the judge judges."""

from __future__ import annotations

import ast
import gc
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import first_runs, planted_ranks
from benchmarks.curing import arms_of
from benchmarks.hot_lines import CASES, marked
from benchmarks.planted import row_of, skipped
from benchmarks.record_gpu.catalogue import every, read_lesson
from gpulab.diagnosis.catalogue import kinds
from planted import judge
from planted.catalogue import (
    CELLS,
    FOLDER,
    HEALTHY,
    KNOBS,
    RANK_CAUSES,
    RANKS,
    TRACES,
    Planted,
    PlantedRanks,
    cells_of,
    named,
    read,
)
from planted.stopwatch import Clock, Enough, notebook, seconds_per_step

ON_CPU = [planted for planted in CELLS if not planted.gpu]
KEYS = {kind.key for kind in kinds()} | {HEALTHY}
# the rest runs in `make bench`
ONE_OF_EACH = {((*p.causes, HEALTHY)[0], p.framework): p for p in reversed(ON_CPU)}


# -- every file --------------------------------------------------------------------------------------------------------


def test_each_cell_parses_and_its_cure_applies() -> None:
    for planted in CELLS:
        texts = [planted.text]
        if planted.causes:
            texts.append(planted.edited(planted.cure))
        if len(planted.causes) == 2:
            texts.append(planted.edited(planted.cure + planted.second_cure))
        for text in texts:
            assert [ast.parse(part) for part in text] and "# ///" not in "".join(text), planted.name
        assert len(set(texts)) == len(planted.causes) + 1, planted.name
        assert bool(planted.tries) != bool(planted.causes), planted.name


def test_each_script_for_ranks_parses_and_has_its_share() -> None:
    for planted in RANKS:
        written, without = planted.text(), planted.text(without=True)
        ast.parse(written)
        ast.parse(without)
        assert written != without, planted.name
        assert planted.share <= 0.05 if planted.cause == HEALTHY else planted.share >= 0.25, planted.name


def test_each_recording_for_a_lesson_parses_and_is_its_own() -> None:
    recordings = every()
    assert len({recording.text for recording in recordings}) == len(recordings) > 55
    for recording in recordings:
        for simulate in (False, True):
            for text in recording.cells(simulate=simulate):
                ast.parse(text)
        assert recording.truth is None or set(recording.truth.accepted) <= KEYS, recording.name


def test_each_hot_line_is_marked_and_each_knob_has_three_truths() -> None:
    for case in CASES:
        file, lines = marked(case)
        assert Path(file).is_relative_to(FOLDER) and lines
    truths = Counter((planted.knob, planted.truth) for planted in KNOBS)
    assert len(truths) == len(KNOBS) == 3 * len({knob for knob, _ in truths})


def test_each_cell_lies_in_its_folder_and_enough_are_kept_aside() -> None:
    assert sorted((FOLDER / "cells").rglob("*.py")) == sorted(planted.path for planted in CELLS)
    assert sorted((FOLDER / "ranks").rglob("*.py")) == sorted(planted.path for planted in RANKS)
    assert {planted.cause for planted in RANKS} == set(RANK_CAUSES)
    keys = {key for planted in CELLS for key in (*planted.causes, *planted.also)}
    assert keys | {key for case in TRACES for key in (*case.headline, *case.found, *case.never)} <= KEYS
    aside = [planted for planted in ON_CPU if planted.part == "aside"]
    assert len(aside) >= len(ON_CPU) / 3
    assert {planted.framework for planted in aside} == {planted.framework for planted in ON_CPU}
    assert {planted.causes[:1] for planted in aside} == {planted.causes[:1] for planted in ON_CPU}


@pytest.mark.parametrize(
    ("kind", "text", "wrong"),
    [
        (Planted, "import torch\n", "begins with a header"),
        (Planted, "# /// cell\n# causes = []\nimport torch\n", "begins with a header"),
        (Planted, "# /// cell\n# causes = [\n# ///\n", "Invalid value"),
        (Planted, '# /// cell\n# causes = []\n# because = ""\n# colour = "red"\n# ///\n', "colour"),
        (Planted, '# /// cell\n# causes = []\n# because = ""\n# [[cure]]\n# old = "a"\n# ///\n', "new"),
        (Planted, "# /// cell\n# causes = []\n# ///\n", "because"),
        (PlantedRanks, '# /// cell\n# cause = "straggler"\n# ///\n', "because"),
    ],
)
def test_a_header_that_is_wrong_names_the_file(
    tmp_path: Path, kind: type[Planted | PlantedRanks], text: str, wrong: str
) -> None:
    file = tmp_path / "some_cell.py"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"some_cell.py.*{wrong}"):
        read(file, kind)


def test_an_edit_that_does_not_fit_once_is_an_error(tmp_path: Path) -> None:
    for old in ("no such text", "loss"):
        with pytest.raises(ValueError, match=r"is there \d+ times"):
            named("short_epochs").edited(((old, ""),))
    lesson = tmp_path / "cell.py"
    header = '# /// cell\n# lesson = "03"\n# because = "x"\n# small = { SIDE = "4" }\n# [[recording]]\n# name = "a"\n'
    lesson.write_text(f"{header}# ///\n# %% the training cell\n")
    with pytest.raises(ValueError, match=r"cell.py: the constant SIDE is set 0 times"):
        read_lesson(lesson)


# -- one of each cause and framework runs ------------------------------------------------------------------------------


@pytest.mark.parametrize("planted", ONE_OF_EACH.values(), ids=lambda planted: planted.name)
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


def test_a_cell_from_door_to_door() -> None:
    row = row_of(named("two_samples_at_a_time"))
    assert not row["failed"]
    assert row["measured"]["arms"]["cured"]["pairs"] >= 3
    assert row["findings"][0]["key"] == row["headline"] and row["causes"] == ["small_batch"]


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


# -- results -----------------------------------------------------------------------------------------------------------


def test_a_cell_that_changes_its_part_takes_its_row_along() -> None:
    tuned, aside = cells_of("tuned"), cells_of("aside")
    moved, doubled, unknown = tuned[:3]

    def row(planted: Planted, failed: str) -> dict[str, Any]:
        return first_runs.unmeasured(planted, "") | {"failed": failed}

    now = first_runs.settled({
        "tuned": {"measured": "a", "rows": [row(p, "mine") for p in tuned[1:] if p is not unknown]},
        "aside": {"measured": "b", "rows": [row(p, "theirs") for p in (*aside, moved, doubled)]},
    })  # fmt: skip
    rows = {row["name"]: row for row in now["tuned"]["rows"]}
    assert [row["name"] for row in now["aside"]["rows"]] == [p.name for p in aside] and len(rows) == len(tuned)
    assert rows[moved.name]["failed"] == "theirs" and rows[doubled.name]["failed"] == "mine"
    assert rows[unknown.name]["skipped"] == first_runs.NOT_RUN
    assert now["tuned"]["totals"]["skipped"] == 1 and now["tuned"]["measured"] == "a"


def test_the_first_outcome_of_a_cell_stays() -> None:
    cells = [Planted(name, ("layout",), "", cohort="new") for name in ("one", "two", "three")]
    cells.append(Planted("well", (), "", cohort="new"))
    rows = [first_runs.unmeasured(cell, "") for cell in cells]
    one, two, three, well = rows

    def said(right: bool, error: float | None) -> dict[str, Any]:
        return {"headline": "layout", "right": right, "error": error}

    entries = first_runs.extended([], [one | said(True, 0.1), two | {"skipped": "needs a GPU"}], cells, date="d1")
    assert entries[0]["first_run"] is None and set(entries[0]["outcomes"]) == {"one"}
    later = [one | said(False, 0.5), two | {"failed": "it raised"}, three | said(True, 0.3), well | said(False, None)]
    entries = first_runs.extended(entries, later, cells, date="d2")
    figures = {"with_cause": 3, "right": 2, "healthy": 1, "false_alarms": 1, "predictions": 2, "median_error": 0.2}
    assert entries[0]["first_run"] == figures | {"date": "d2"}
    assert first_runs.extended(entries, [row | said(True, 0.0) for row in rows], cells, date="d3") == entries
    closed = entries[0] | {"first_run": None, "why_none": "built with them", "outcomes": {}}
    assert first_runs.extended([closed], later, cells) == [closed]


def test_kept_first_runs_are_those_of_the_cohorts() -> None:
    assert {e["cohort"]: e["cells"] for e in first_runs.kept()} == Counter(planted.cohort for planted in CELLS)
    for entry in first_runs.kept():
        assert set(entry["outcomes"]) <= {planted.name for planted in CELLS if planted.cohort == entry["cohort"]}
        if entry["first_run"] and entry["outcomes"]:
            figures = first_runs.totals(list(entry["outcomes"].values()))
            assert figures == {key: entry["first_run"][key] for key in figures}


def test_a_script_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(planted: PlantedRanks, store: Path | None) -> dict[str, Any]:
        raise RuntimeError("no report")

    monkeypatch.setattr(planted_ranks, "recorded", refuse)
    totals = planted_ranks.totals([planted_ranks.row_of(planted) for planted in RANKS])
    assert totals["right"] == totals["healthy_right"] == 0
    assert totals["failed"] == [planted.name for planted in RANKS]


# -- the judge ---------------------------------------------------------------------------------------------------------


def told(*keys: str, settings: tuple[tuple[str, str], ...] = (), ratio: float | None = None) -> dict[str, Any]:
    """Findings as `judge.said` gives them."""
    prediction = None
    if ratio is not None:
        interval = (ratio - 0.1, ratio + 0.1)
        prediction = SimpleNamespace(settings=settings, ratio=ratio, interval=interval, only_sign=False, refused="")
    of = {"summary": "", "recoverable_us_per_step": 1e3, "settings": settings, "source_line": ""}
    findings = tuple(SimpleNamespace(key=key, prediction=prediction, **of) for key in keys)
    return judge.said(SimpleNamespace(findings=findings, first=findings[0], untold=()))


SICK = Planted("sick", ("storage_bound", "gc_pause"), "", also=("data_starved",))
WELL = Planted("well", (), "", tries={"workers": "2"})


@pytest.mark.parametrize(
    ("planted", "keys", "right", "ranks", "alarms"),
    [
        (SICK, ("data_starved",), True, {"storage_bound": 1, "gc_pause": None}, []),
        (SICK, ("gc_pause", "data_starved"), False, {"storage_bound": 2, "gc_pause": 1}, []),
        (SICK, ("layout",), False, {"storage_bound": None, "gc_pause": None}, []),
        (WELL, ("healthy",), True, {}, []),
        (WELL, ("healthy", "layout"), False, {}, ["layout"]),
        (WELL, ("cannot_tell",), False, {}, ["cannot_tell"]),
    ],
)
def test_a_headline_is_right_by_first_cause_or_equal_name(
    planted: Planted, keys: tuple[str, ...], right: bool, ranks: dict[str, int | None], alarms: list[str]
) -> None:
    found = judge.judgement(planted, told(*keys))
    assert (found["right"], found["ranks"], found["false_alarms"]) == (right, ranks, alarms)


def test_a_prediction_is_judged_by_its_knobs_else_by_the_cure() -> None:
    arms = {"cured": {"ratio": 0.5, "interval": [0.4, 0.6]}, "advised": {"ratio": 0.8, "interval": [0.7, 0.9]}}
    by_knob = told("storage_bound", settings=(("workers", "2"),), ratio=0.88)["findings"][0]
    by_edit = told("storage_bound", ratio=0.65)["findings"][0]
    for finding, against, error, holds in ((by_knob, "advised", 0.1, True), (by_edit, "cured", 0.3, False)):
        found = judge.prediction_of(finding, {"arms": arms})
        assert (found["against"], found["holds"]) == (against, holds) and found["error"] == pytest.approx(error)
    assert judge.prediction_of(None, {"arms": arms})["error"] is None


TWICE = Planted("sick", ("gc_pause", "layout"), "", cure=(("a", "b"),), second_cure=(("c", "d"),))


@pytest.mark.parametrize(
    ("planted", "ratios", "words"),
    [
        (TWICE, {"cured": 0.5, "both cured": 0.3}, ""),
        (TWICE, {"cured": 0.95, "both cured": 0.3}, "only gives"),
        (TWICE, {"cured": 0.5, "both cured": 0.49}, "second cure only"),
        (TWICE, {"cured": 0.8, "both cured": 0.3}, "costs more"),
        (WELL, {"workers=2": 0.97, judge.AGAIN: 0.99}, ""),
        (WELL, {"workers=2": 0.8, judge.AGAIN: 0.99}, "gains from workers=2"),
    ],
)
def test_a_planted_truth_that_is_not_measured_is_reported(
    planted: Planted, ratios: dict[str, float], words: str
) -> None:
    arms = {label: {"ratio": r, "interval": [r - 0.01, r + 0.01]} for label, r in ratios.items()}
    said = judge.truth_of(planted, {"arms": arms})
    assert words in said and bool(said) == bool(words)


def test_a_trace_is_held_against_all_that_is_said_of_it() -> None:
    starved, resnet = (
        next(case for case in TRACES if case.name == name) for name in ("h100_owlv2_starved", "v100_resnet50_workers0")
    )
    assert judge.trace_judgement(starved, told("data_starved"))["right"]
    assert judge.trace_judgement(starved, told("data_starved", "small_batch"))["wrong"] == ["small_batch is found"]
    advised = told("data_starved", settings=(("batch_size", "64"),))
    assert judge.trace_judgement(starved, advised)["wrong"] == ["advises batch_size"]
    assert "to give back" in judge.trace_judgement(resnet, told("data_starved"))["wrong"][-1]


def test_a_jobs_report_is_held_against_the_planted_cause() -> None:
    def report(*keys: str, ranks: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
        return {"source": "ranks", "ranks": {"present": ranks}, "findings": [{"key": key} for key in keys]}

    sick = next(planted for planted in RANKS if planted.cause == "straggler")
    well = next(planted for planted in RANKS if planted.cause == HEALTHY)
    late = report("straggler", "exposed_communication")
    assert judge.job_judgement(sick, late)["right"] and not judge.job_judgement(well, late)["right"]
    assert judge.job_judgement(well, late)["false_alarms"] == ["straggler", "exposed_communication"]
    assert judge.job_judgement(well, report(HEALTHY))["right"]
    with pytest.raises(RuntimeError, match="the report is of"):
        judge.job_judgement(sick, report(HEALTHY, ranks=(0,)))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", "none"),
        ("items.py, line 7: for i in range(3):", "right"),
        ("items.py, line 8: total += i", "right"),
        ("items.py, line 9: return total", "wrong"),
        ("other.py, line 7: for i in range(3):", "wrong"),
        ("items.py, line 5: def __getitem__(self, index):", "function"),
    ],
)
def test_a_line_is_right_within_the_marked_statement(line: str, expected: str) -> None:
    assert judge.score_of_line(line, "items.py", range(7, 9)) == expected
