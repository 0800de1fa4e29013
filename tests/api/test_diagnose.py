"""From a run to its diagnosis through the doors: real traces, thresholds of the user's own, report, page and JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import gpulab
from gpulab import cli
from gpulab.analysis.kernels import SHORT_KERNEL_US
from gpulab.analysis.loader import WaitParts, WorkerRow
from gpulab.diagnosis.diagnose import diagnose
from gpulab.diagnosis.finding import Diagnosis
from gpulab.diagnosis.headline import headline
from gpulab.errors import UsageError
from gpulab.prediction.prediction import Prediction
from gpulab.run import Alert, Pause, PauseSum, Ranks, Run
from gpulab.thresholds import DEFAULT, Thresholds
from gpulab.views.report.findings import finding_sections, open_questions_section
from gpulab.views.report.report import Diagnosed, Report
from tests.support import real_traces, synthetic
from tests.support import trace_files as made_traces
from tests.support.paths import ROOT
from tests.support.rule_cases import case_of, finding, inside, run_of
from tests.views.every_view import full_finding

ASKED_FOR = {
    "key", "summary", "evidence", "recoverable_us_per_step", "confidence", "knob", "predicted_ratio",
    "predicted_interval", "source_line", "lesson",
}  # fmt: skip


@pytest.fixture
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, with the store in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPULAB_DIR", str(tmp_path / "own"))
    (tmp_path / "own").mkdir()
    return tmp_path


def test_the_ranks_of_a_job(somewhere: Path) -> None:
    real_traces.path("v100_dlrm_8ranks/rank0")
    found = gpulab.diagnose(real_traces.folder() / "v100_dlrm_8ranks")
    assert found.first.key == "straggler" and "Rank 7" in found.first.summary
    ranks = gpulab.load(real_traces.folder() / "v100_dlrm_8ranks")
    assert isinstance(ranks, Ranks)
    document = gpulab.report(ranks).json()
    assert document["findings"][0]["key"] == document["headline"]["key"] == "straggler"  # type: ignore[index]
    assert "1. WAITING FOR THE SLOWEST RANK" in gpulab.report(ranks).text(full=True)


# The door


def test_a_finding_carries_what_was_promised(somewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made_traces.write(
        somewhere, made_traces.text([e for i in range(6) for e in made_traces.step(i, i * 1000.0)])
    )
    for given in (str(path), path, gpulab.load(path)):
        found = gpulab.diagnose(given)
        assert isinstance(found, Diagnosed)
        assert all(hasattr(f, name) for f in found.findings for name in ASKED_FOR)
    assert found.first.key == found.headline.key and found.first.summary in " ".join(repr(found).split())
    assert found.of(found.first.key) is found.first and found.of("no such key") is None

    assert cli.main(["report", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["findings"] and all(set(f) >= ASKED_FOR for f in document["findings"])
    assert document["findings"][0]["key"] == document["headline"]["key"]
    assert all(set(u) == {"key", "what", "record"} for u in document["untold"])


def test_the_json_keys_of_a_whole_report_are_described() -> None:
    told = (ROOT / "docs" / "report-json.md").read_text(encoding="utf-8")
    run = replace(
        run_of(wait=0.5),
        pauses=(Pause("gc", 0, 1_000_000),),
        more_pauses=(PauseSum("gc", 3, 900_000),),
        alerts=(Alert("data_starved", "It waits.", 0),),
    )
    loading = replace(
        inside(read_ms=1), wait=WaitParts(1.0, 0.0, 0.0, 0.0, 0.0), workers=(WorkerRow(-1, 1, 1.0, None),)
    )
    case = case_of(run, {"data_wait": 0.5}, loading)
    made: Any = Report(case.facts, diagnose(case.facts, predict_cures=False)).json()
    found = replace(finding("launch_bound", 1.0), prediction=Prediction({}, 0.5, (0.4, 0.6), "so"))
    shown: Any = Diagnosed(Diagnosis((found,))).json()
    keys = [*made, *shown["findings"][0], *made["loading"], *made["loading"]["wait"], *made["loading"]["workers"][0]]
    keys += [key for rows in ("pauses", "more_pauses", "alerts") for key in made[rows][0]]
    assert [key for key in keys if f"`{key}`" not in told] == []


# Thresholds


def test_every_threshold_has_its_source() -> None:
    text = (ROOT / "gpulab" / "thresholds.py").read_text(encoding="utf-8")
    field = re.compile(r"^(?:    # (.+)\n)?    (\w+): float = [\d.]+(?:  # (.+))?$", re.MULTILINE)
    sources = {name: above or beside for above, name, beside in field.findall(text)}
    assert list(sources) == list(Thresholds.__struct_fields__)
    page = (ROOT / "docs" / "thresholds.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{name}` | {getattr(DEFAULT, name):g} | {source} |" for name, source in sources.items()]


def test_report_and_findings_count_the_same_short_kernels() -> None:
    assert DEFAULT.short_kernel_us == SHORT_KERNEL_US


def starving() -> Run:
    return run_of(wait=0.15)


def test_thresholds_decide_what_is_told(somewhere: Path) -> None:
    known = case_of(starving(), {"data_wait": 0.15}).facts
    assert diagnose(known).first.key == "data_starved"
    patient = DEFAULT.changed({"data_wait_notice": 0.2})
    assert diagnose(known, patient).first.key != "data_starved"
    assert gpulab.diagnose(synthetic.cpu_case().run, {"data_wait_notice": 0.9, "data_wait_bad": 0.95}).of("x") is None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"data_wait_notise": 0.2}, "Nearest: data_wait_notice"),
        ({"data_wait_notice": 0.3}, "contradict each other"),
        ({"silence": 1.5}, "a share from 0 to 1"),
        ({"silence": float("nan")}, "is a number"),
        ({"silence": "much"}, "is a number"),
        ({"silence": True}, "is a number"),
        ({"short_kernel_us": -1.0}, "a time in µs"),
        ({"small_collectives": -1.0}, "a number per step"),
    ],
)
def test_thresholds_that_cannot_be_are_one_line(values: dict[str, float], words: str, somewhere: Path) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        gpulab.diagnose(starving(), values)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("folder", [".", "own"])
def test_the_users_file_sets_thresholds(folder: str, somewhere: Path) -> None:
    (somewhere / folder / "gpulab.toml").write_text("[thresholds]\ndata_wait_notice = 0.4\ndata_wait_bad = 0.5\n")
    run = starving()
    assert gpulab.diagnose(run).of("data_starved") is None
    lower = {"data_wait_notice": 0.1}
    assert gpulab.diagnose(run, lower).of("data_starved") is not None
    (somewhere / "gpulab.toml").write_text("[alerts]\nwaits = 1\n")  # the current folder's file counts alone
    assert gpulab.diagnose(run).of("data_starved") is not None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[thresholds\n", "is not TOML"),
        (b"\xff\xfe", "cannot be read"),
        (b"thresholds = 3\n", r"write \[thresholds\]"),
        (b"[thresholds]\nnothing = 1\n", "There is no threshold 'nothing'"),
        (b"[thresholds]\ndata_wait_notice = 0.5\ndata_wait_bad = 0.2\n", "contradict"),
        (b"[thresholds]\nsilence = 'loud'\n", "is a number"),
    ],
)
def test_a_broken_file_is_one_line_and_loses_no_report(content: bytes, words: str, somewhere: Path) -> None:
    (somewhere / "gpulab.toml").write_bytes(content)
    run = starving()
    with pytest.raises(UsageError, match=words) as raised:
        gpulab.diagnose(run)
    assert "\n" not in str(raised.value)
    report = gpulab.report(run)
    assert report.headline.key == "data_starved"
    told = " ".join(report.text(full=True).split())
    assert "Your thresholds were not used, the usual ones were" in told
    assert "Your thresholds were not used" in report.html() and "Your thresholds were not used" in report.fragment()


# What is shown


def test_a_healthy_run_is_silent(somewhere: Path) -> None:
    found = diagnose(case_of(run_of()).facts)
    assert finding_sections(found, below_headline=True) == () and open_questions_section(found) is None
    assert headline(found).level == "good"


def test_the_findings_follow_the_headline() -> None:
    case = synthetic.cpu_case()
    report = Report(case.facts, full_finding())
    text, page = report.text(full=True), report.html()
    assert text.index("1. KERNEL LAUNCH OVERHEAD") < text.index("STEP TIME")
    assert page.index("</header>") < page.index('class="picture"') < page.index("1. Kernel launch overhead")
    assert report.fragment().index("1. Kernel launch") < report.fragment().index("<b>Step time</b>")


def test_what_could_not_be_told_is_grouped_by_what_to_do(somewhere: Path) -> None:
    found = diagnose(replace(case_of(run_of(wait=0.5), {"data_wait": 0.5}).facts))
    section = open_questions_section(found)
    assert section is not None
    assert len(section.rows) == 1 and "batches" in section.rows[0].cells[1]
    assert np.isfinite(found.step_us or 0)


def test_a_trace_without_stacks_says_how_to_have_lines_named() -> None:
    case = synthetic.gpu_case()
    run = replace(case.run, source="trace", stack=None)
    notes = diagnose(replace(case.facts, run=run)).notes
    assert len(notes) == 1 and "with_stack=True" in notes[0]
    assert not diagnose(case.facts).notes
