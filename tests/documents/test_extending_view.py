"""The view of docs/extending.md, run as it stands there: in the list of sections, as strings, as text and as a page."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from gpulab.views.report import report, sections
from tests.support import synthetic
from tests.support.paths import ROOT


@pytest.fixture(autouse=True)
def view(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the page; the report's sections are those of the module with the page's line in its list."""
    section = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8").split("\n## A view\n")[1]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    before, line = re.findall(r"```diff\n (.*?\n)\+(.*?\n)```", section)[0]
    module = ModuleType("slowest_steps")
    exec(compile(code, "slowest_steps", "exec"), vars(module))
    source = Path(str(sections.__file__)).read_text(encoding="utf-8")
    assert source.count(before) == 1
    changed = ModuleType(sections.__name__)
    vars(changed)["slowest_steps"] = vars(module)["slowest_steps"]
    exec(compile(source.replace(before, before + line), str(sections.__file__), "exec"), vars(changed))
    monkeypatch.setattr(report, "sections", vars(changed)["sections"])
    return module


def test_the_longest_steps_come_first(view: ModuleType) -> None:
    facts = synthetic.cpu_case().facts
    steps = facts.run.steps
    section = view.slowest_steps(facts)
    length_ns = (steps.end_ns - steps.start_ns).tolist()
    longest = sorted(range(len(steps)), key=lambda i: -length_ns[i])[: view.SHOWN]
    assert [row.cells[0] for row in section.rows] == [str(steps.number[i]) for i in longest]
    assert len(np.unique(length_ns)) > 1, "else any order would do"


def test_the_report_shows_it_after_the_parts() -> None:
    case = synthetic.cpu_case()
    text = report.Report(case.facts, case.diagnosis).text(full=True)
    assert text.index("STEP TIME") < text.index("SLOWEST STEPS") < text.index("WHAT GPULAB CHOSE")
    assert "Slowest steps" in report.Report(case.facts, case.diagnosis).html()


def test_a_run_without_steps_has_no_such_section(view: ModuleType) -> None:
    assert view.slowest_steps(synthetic.no_step_case().facts) is None
