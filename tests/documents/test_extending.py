"""The knob, reader, rule and figure of docs/extending.md, run as they stand there."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.paths import ROOT

torch = pytest.importorskip("torch")

import gpulab  # noqa: E402
from gpulab.analysis.facts import facts  # noqa: E402
from gpulab.errors import TraceError, UsageError  # noqa: E402
from gpulab.knobs.catalogue import KNOBS, parse_settings  # noqa: E402
from gpulab.knobs.knob import Knob  # noqa: E402
from gpulab.knobs.observation import Observation  # noqa: E402
from gpulab.run import Device, Run  # noqa: E402
from gpulab.trace import load  # noqa: E402
from gpulab.views.report import report, sections  # noqa: E402
from tests.support import synthetic  # noqa: E402

DOCUMENT = ROOT / "docs" / "extending.md"
MS = 1_000_000


def blocks(section: str, language: str = "python") -> list[str]:
    """The blocks of a section of the document in this language."""
    body = DOCUMENT.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    texts: list[str] = re.findall(rf"```{language}\n(.*?)```", body, re.DOTALL)
    return texts


def module_of(name: str, *code: str) -> ModuleType:
    module = ModuleType(name)
    for block in code:
        exec(compile(block, str(DOCUMENT), "exec"), vars(module))
    return module


# A knob


@pytest.fixture
def knob(monkeypatch: pytest.MonkeyPatch) -> Knob:
    """The knob of the document, in the catalogue as the document says."""
    code, line, _ = blocks("A knob")
    monkeypatch.setitem(sys.modules, "deterministic_knob", ModuleType("deterministic_knob"))
    module = module_of("deterministic_knob", code, line)
    (listed,) = vars(module)["_LIST"]
    assert isinstance(listed, Knob)
    monkeypatch.setitem(KNOBS, listed.name, listed)
    return listed


def train() -> None:
    """A tiny training."""
    weights = torch.ones(8, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=0.01)
    for _ in range(12):
        optimizer.zero_grad()
        (weights * 2).square().sum().backward()
        optimizer.step()


def test_the_knob_is_set_compared_and_put_back(knob: Knob, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"gpulab": gpulab, "train": train}
    usage = blocks("A knob")[-1]
    exec(usage, names)
    assert capsys.readouterr().out.splitlines() == re.findall(r"^# (.*)$", usage, re.MULTILINE)
    assert not torch.are_deterministic_algorithms_enabled()
    side = names["compared"].only.b
    assert side.label == "deterministic=on" and side.blocks and not side.failure
    assert "torch.use_deterministic_algorithms(True)" in side.edit
    assert side.prediction is not None and "no formula" in side.prediction.refused


def test_a_training_that_sets_the_switch_itself_shows_no_effect(knob: Knob) -> None:
    def train_without() -> None:
        torch.use_deterministic_algorithms(False)
        train()

    compared = gpulab.experiment(train_without, {knob.name: True}, pairs=2, save=False, show=False)
    check = compared.only.b.checks[0]
    assert (check.state, check.evidence) == ("no effect", "the code sets the switch itself")


def test_command_and_bench_know_the_knob(knob: Knob) -> None:
    from gpulab.bench.toggles import data, toggles_of
    from gpulab.magics import help_text

    assert f", {knob.name}, or any variable" in " ".join(help_text().split())
    assert parse_settings(["deterministic=on"], lambda name: False) == {"deterministic": True}
    with pytest.raises(UsageError, match=r"Did you mean deterministic\?"):
        parse_settings(["reproducible=on"], lambda name: False)
    observation = Observation(Device("cpu", "CPU"))
    (toggle,) = data(toggles_of([KNOBS[knob.name]], observation, None)[0], observation, {}, {})
    assert (toggle["title"], toggle["current"], toggle["reason"]) == (knob.title, False, "")


# A reader

TABLES = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE NVTX_EVENTS (start INT NOT NULL, end INT, text TEXT, globalTid INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT NOT NULL, end INT NOT NULL, globalTid INT, correlationId INT,
  nameId INT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT NOT NULL, end INT NOT NULL, deviceId INT NOT NULL,
  streamId INT NOT NULL, correlationId INT, demangledName INT NOT NULL);
INSERT INTO StringIds VALUES (1, 'cudaLaunchKernel'), (2, 'ampere_sgemm_128x64_tn'), (3, 'add_kernel');
"""
THREAD = 40 << 24 | 41  # of process 40


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> None:
    for ending, function in vars(module_of("nsight_systems", *blocks("A reader")))["READERS"].items():
        monkeypatch.setitem(load.READERS, ending, function)


@pytest.mark.usefixtures("reader")
def test_the_reader_gives_the_figures_of_the_file(tmp_path: Path) -> None:
    """Five steps of 10 ms that begin at 1 s: each launches two kernels, which take 3 ms and 2 ms."""
    path = tmp_path / "train.sqlite"
    with sqlite3.connect(path) as database:
        database.executescript(TABLES)
        for step in range(5):
            begin = 1000 * MS + step * 10 * MS
            mark = (begin, begin + 10 * MS, f"ProfilerStep#{step}", THREAD)
            database.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?)", mark)
            for number, (name, took) in enumerate([(2, 3 * MS), (3, 2 * MS)]):
                at, key = begin + number * 4 * MS, 2 * step + number + 1
                launch, kernel = (at, at + 5000, THREAD, key, 1), (at + 20_000, at + 20_000 + took, 0, 7, key, name)
                database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", launch)
                database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?)", kernel)
    database.close()
    run = gpulab.load(path)
    assert isinstance(run, Run) and run.timeline is not None
    assert run.steps.number.tolist() == [0, 1, 2, 3, 4] and run.step_source == "ProfilerStep"
    assert run.device.kind == "cuda" and run.device.index == 0
    frame = run.timeline.to_frame()
    kernels = frame[frame["category"] == "kernel"].groupby("name")["duration_ns"].sum()
    assert kernels.to_dict() == {"ampere_sgemm_128x64_tn": 15 * MS, "add_kernel": 10 * MS}
    breakdown = facts(run).breakdown
    assert breakdown is not None and breakdown.busy_fraction == pytest.approx(0.5, abs=0.01)


@pytest.mark.usefixtures("reader")
def test_the_reader_refuses_another_database(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    path.write_text("no database at all, but long enough that SQLite looks at it" * 20)
    with pytest.raises(TraceError, match="no export of Nsight Systems"):
        gpulab.load(path)


# A rule

_REPORT = """
from gpulab.diagnosis.diagnose import diagnose
from gpulab.thresholds import DEFAULT
from gpulab.views.report.report import Report
from tests.support import synthetic
from tests.support.rule_cases import case_of, run_of

def told(memset, **limits):
    thresholds = DEFAULT.changed(limits)
    context = case_of(run_of(gpu=True), {"memset": memset, "compute": 1 - memset}, thresholds=thresholds)
    return context, diagnose(context.facts, thresholds)

context, diagnosis = told(0.3)
assert diagnosis.first.key == "zero_filling", diagnosis
assert abs(diagnosis.first.recoverable_us_per_step - 0.3 * 20_000) < 6
assert told(0.05)[1].first.key == "healthy"
assert told(0.05, zero_filling_notice=0.04)[1].first.key == "zero_filling"
assert told(0.2, zero_filling_notice=0.25)[1].of("zero_filling") is None
assert not [case for case in synthetic.cases().values() if diagnose(case.facts).of("zero_filling")]
print(Report(context.facts, diagnosis).text(full=True))
"""


def changed(source: str, difference: str) -> str:
    """The text with a difference of the page put into it, at the one place where it fits."""
    lines = difference.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] == " ")
    assert source.count(before) == 1, before
    return source.replace(before, "".join(line[1:] for line in lines))


def test_a_copy_with_the_finding_reports_it(tmp_path: Path) -> None:
    """In a copy of the package with nothing but the three changes of the page."""
    copied = tmp_path / "gpulab"
    shutil.copytree(ROOT / "gpulab", copied, ignore=shutil.ignore_patterns("__pycache__", "data"))
    (copied / "diagnosis" / "zero_filling.py").write_text(blocks("A rule")[0], encoding="utf-8")
    *listed, threshold = blocks("A rule", "diff")
    for name, differences in (("diagnosis/catalogue.py", listed), ("thresholds.py", [threshold])):
        source = (copied / name).read_text(encoding="utf-8")
        (copied / name).write_text(reduce(changed, differences, source), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", _REPORT]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert not ran.returncode, ran.stderr
    words = " ".join(ran.stdout.split())
    assert "The GPU fills memory with zeros for 30 % of each step." in words
    assert "Write torch.empty in place of torch.zeros where every number is overwritten anyway." in words


# A figure


def with_line(module: ModuleType, difference: str, **names: object) -> ModuleType:
    """The module with the document's line in it, which knows these names, too."""
    before, line = re.findall(r" (.*?\n)\+(.*?\n)", difference, re.DOTALL)[0]
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    assert source.count(before) == 1
    made = ModuleType(module.__name__)
    vars(made).update(names)
    exec(compile(source.replace(before, before + line), str(module.__file__), "exec"), vars(made))
    vars(made).update(names)
    return made


def test_a_figure_is_analysed_shown_and_in_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    code, section_code = blocks("A figure")
    analysis = module_of("gpulab.analysis.slowest_steps", code)
    monkeypatch.setitem(sys.modules, analysis.__name__, analysis)
    section = module_of("slowest_section", "from gpulab.analysis.facts import Facts", section_code)
    listed, documented = blocks("A figure", "diff")
    shown = with_line(sections, listed, slowest_section=section.slowest_section)
    whole = with_line(report, documented, slowest_steps=analysis.slowest_steps, sections=shown.sections)
    case = synthetic.cpu_case()
    steps = case.facts.run.steps
    length_ns = (steps.end_ns - steps.start_ns).tolist()
    longest = sorted(range(len(steps)), key=lambda i: -length_ns[i])[: analysis.MOST]
    slowest = analysis.slowest_steps(case.facts)
    assert [step.number for step in slowest] == [steps.number[i] for i in longest]
    assert section.slowest_section(synthetic.no_step_case().facts) is None
    made = whole.Report(case.facts, case.diagnosis)
    text = made.text(full=True)
    assert text.index("STEP TIME") < text.index("SLOWEST STEPS") < text.index("WHAT GPULAB CHOSE")
    assert [step["number"] for step in made.json()["slowest_steps"]] == [step.number for step in slowest]
