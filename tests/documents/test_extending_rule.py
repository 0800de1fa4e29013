"""The example of the page about extending gpulab is a rule that works as it stands there."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from gpulab.diagnosis.diagnose import diagnose
from gpulab.diagnosis.finding import Diagnosis
from gpulab.diagnosis.rules import catalogue
from gpulab.thresholds import DEFAULT, Thresholds
from gpulab.views.report.findings import finding_sections
from tests.support import synthetic
from tests.support.paths import ROOT
from tests.support.rule_cases import case_of, run_of

DOCS = ROOT / "docs"
KEY = "zero_filling"


def _example() -> str:
    """The first Python block of the section "A rule", on whichever page that is."""
    for page in sorted(DOCS.glob("extending*.md")):
        _, heading, section = page.read_text(encoding="utf-8").partition("## A rule\n")
        block = re.search(r"```python\n(.*?)```", section, re.DOTALL)
        if heading and block is not None:
            return block[1]
    raise AssertionError("no page of docs/ has a section 'A rule' with an example")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module, in the list of rules."""
    module = ModuleType(KEY)
    exec(compile(_example(), KEY, "exec"), module.__dict__)
    monkeypatch.setattr(catalogue, "RULE_MODULES", (*catalogue.RULE_MODULES, module))
    return module


def _diagnosis(memset: float, thresholds: Thresholds = DEFAULT) -> Diagnosis:
    context = case_of(run_of(gpu=True), {"memset": memset, "compute": 1 - memset}, thresholds=thresholds)
    return diagnose(context.facts, thresholds)


def test_the_example_is_as_short_as_the_page_says() -> None:
    assert len(_example().splitlines()) <= 35


def test_the_example_names_the_cause_with_its_evidence_and_cure(example: ModuleType) -> None:
    diagnosis = _diagnosis(0.3)
    finding = diagnosis.first
    assert finding.key == KEY and finding.recoverable_us_per_step == pytest.approx(0.3 * 20_000, rel=1e-3)
    assert "30 % of each step" in finding.summary and "6.00 ms of 20.0 ms" in finding.evidence[0].words
    section = finding_sections(diagnosis, below_headline=False)[0]
    assert section.title == "1. Filling memory with zeros"
    assert any("torch.empty" in str(row) for row in section.rows)


@pytest.mark.parametrize("memset", [0.0, 0.05])
def test_the_example_leaves_a_healthy_run_alone(example: ModuleType, memset: float) -> None:
    assert _diagnosis(memset).first.key == "healthy"
    for case in synthetic.cases().values():
        assert diagnose(case.facts).of(KEY) is None


def test_the_users_threshold_decides(example: ModuleType) -> None:
    assert _diagnosis(0.05, DEFAULT.changed({"idle_notice": 0.04})).first.key == KEY
    assert _diagnosis(0.2, DEFAULT.changed({"idle_notice": 0.25})).of(KEY) is None
