"""What the profiled steps show is doubted at once where they are not like the others; inference is not training."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpulab.diagnosis.diagnose import diagnose
from gpulab.views.report.report import Report
from tests.support import synthetic
from tests.support.loops import Machine, loop

KERNEL = "turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_nn"


def inferring(machine: Machine) -> None:
    machine.load(3_000)
    machine.operator("aten::mm", KERNEL, 7_000)


def training(machine: Machine) -> None:
    inferring(machine)
    machine.operator("autograd::engine::evaluate_function: MmBackward0", KERNEL, 1_000)


@pytest.mark.parametrize(
    ("unprofiled_us", "words"),
    [
        (3_000, "a traced step took 3.3× the time of an untraced one"),
        (33_000, "an untraced step took 3.3× the time of a traced one"),
        (21_000, "an untraced step took 2.1× the time of a traced one"),
        (19_000, ""),
        (5_500, ""),
        (None, ""),
    ],
)
def test_steps_far_apart_are_an_alarm_at_the_top(unprofiled_us: float | None, words: str) -> None:
    facts = loop(inferring).facts(unprofiled_us=unprofiled_us)
    report = Report(facts, diagnose(facts, predict_cures=False))
    first_lines = " ".join(" ".join(report.text().splitlines()[:9]).split())
    assert ("may be off" in first_lines) is bool(words) and words in first_lines
    headline = report.json()["headline"]
    assert isinstance(headline, dict) and words in headline["evidence"]
    assert words in report.diagnosis.alarm and bool(report.diagnosis.alarm) is bool(words)


def test_inference_has_steps_and_training_has_training_steps() -> None:
    figures = [loop(step).facts() for step in (inferring, training)]
    assert [known.step_name for known in figures] == ["step", "training step"]
    said = [diagnose(known, predict_cures=False).first.summary for known in figures]
    assert "30 % of each step waits" in said[0] and "27 % of each step waits" in said[1]


@pytest.mark.parametrize(
    ("times", "words"), [(0.4, "An untraced step took 2.5× the time"), (2.5, "A traced step took 2.5× the time")]
)
def test_how_far_apart_is_told_as_times_as_long(times: float, words: str) -> None:
    facts = synthetic.cpu_case().facts
    assert facts.step_us is not None
    profiled = replace(facts.step_us, median=facts.step_us.median * times)
    apart = replace(facts, traced_step_us=profiled)
    text = Report(apart, diagnose(apart, predict_cures=False)).text(full=True)
    assert words in " ".join(text.split())


@pytest.mark.parametrize(("cure", "again"), [("Wait until the machine is idle.", False), ("", True)])
def test_a_doubtful_report_has_one_next_step(cure: str, again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = loop(inferring).facts(unprofiled_us=33_000)
    ranked = [replace(finding, cure=cure) for finding in diagnose(facts, predict_cures=False).findings]
    monkeypatch.setattr("gpulab.diagnosis.diagnose.rank_findings", lambda context, found: tuple(ranked))
    assert diagnose(facts, predict_cures=False).alarm.endswith("Run it again.") is again
