"""The planted scripts for two ranks and what their headers say; none is run, and no clock is read."""

from __future__ import annotations

import ast
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks import planted_ranks
from benchmarks.planted import first_runs
from benchmarks.planted.planted import HEALTHY
from benchmarks.planted_ranks.planted import CAUSES, CLEAR, FOLDER, STILL_HEALTHY, PlantedRanks, all_cells, read
from benchmarks.planted_ranks.recording import said

CELLS = all_cells()
HEADER = '# /// cell\n# cause = "straggler"\n# because = ""\n# cohort = ""\n# written_ms = 4\n# without_ms = 3\n'


def test_there_are_enough_of_each_cause() -> None:
    counts = Counter(planted.cause for planted in CELLS)
    assert set(counts) == set(CAUSES)
    assert min(counts.values()) >= 3
    assert len({planted.name for planted in CELLS}) == len(CELLS)
    assert sorted(FOLDER.rglob("*.py")) == sorted(planted.path for planted in CELLS), "each in its cause's folder"


@pytest.mark.parametrize("planted", CELLS, ids=lambda planted: planted.name)
def test_a_script_parses_with_and_without_its_cause(planted: PlantedRanks) -> None:
    written, without = planted.text(), planted.text(without=True)
    ast.parse(written)
    ast.parse(without)
    assert written != without and "# ///" not in written
    assert planted.because and planted.cohort and planted.ranks == 2


@pytest.mark.parametrize("planted", CELLS, ids=lambda planted: planted.name)
def test_the_header_bears_out_what_was_planted(planted: PlantedRanks) -> None:
    if planted.cause == HEALTHY:
        assert planted.share <= STILL_HEALTHY
    else:
        assert planted.share >= CLEAR


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("import torch\n", "begins with a header"),
        (f"{HEADER}# ///\n", "without"),
        (HEADER.replace("straggler", "bad_luck") + '# [[without]]\n# old = "a"\n# new = "b"\n# ///\na\n', "bad_luck"),
        (f'{HEADER}# colour = "red"\n# [[without]]\n# old = "a"\n# new = "b"\n# ///\na\n', "colour"),
    ],
)
def test_a_header_that_is_wrong_names_the_file(tmp_path: Path, text: str, wrong: str) -> None:
    file = tmp_path / "some_script.py"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"some_script.py.*{wrong}"):
        read(file)


def test_a_headline_is_held_against_the_planted_cause() -> None:
    sick = next(planted for planted in CELLS if planted.cause == "straggler")
    well = next(planted for planted in CELLS if planted.cause == HEALTHY)
    late = report("straggler", "exposed_communication")
    assert said(late, sick)["right"] and not said(late, well)["right"]
    assert said(late, well)["false_alarms"] == ["straggler", "exposed_communication"]
    assert said(report(HEALTHY), well)["right"] and not said(report(HEALTHY), sick)["right"]


@pytest.mark.parametrize(
    "document", [{"source": "script", "findings": []}, {"source": "ranks", "ranks": {"present": [0]}, "findings": []}]
)
def test_a_report_that_lacks_a_rank_is_a_failure(document: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="the report is of"):
        said(document, CELLS[0])


def report(*keys: str) -> dict[str, Any]:
    """A job's report as JSON."""
    return {"source": "ranks", "ranks": {"present": [0, 1]}, "findings": [{"key": key} for key in keys]}


def test_a_script_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(planted: PlantedRanks, store: Path | None) -> dict[str, Any]:
        raise RuntimeError("no report")

    monkeypatch.setattr(planted_ranks, "recorded", refuse)
    rows = [planted_ranks.row_of(planted) for planted in CELLS]
    totals = planted_ranks.totals(rows)
    assert totals["right"] == totals["healthy_right"] == 0
    assert totals["failed"] == [planted.name for planted in CELLS]


def test_the_first_run_is_that_of_the_cohort() -> None:
    kept = json.loads(planted_ranks.FILE.read_text(encoding="utf-8"))
    assert {entry["cohort"]: entry["cells"] for entry in kept["first_runs"]} == Counter(p.cohort for p in CELLS)
    for entry in kept["first_runs"]:
        assert set(entry["outcomes"]) == {planted.name for planted in CELLS if planted.cohort == entry["cohort"]}
        figures = first_runs.figures(list(entry["outcomes"].values()))
        assert figures == {key: entry["first_run"][key] for key in figures}
    lines = planted_ranks.section(kept)
    assert sum(line.startswith("| ") for line in lines) == 1 + len(CELLS)
