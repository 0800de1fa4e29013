"""Annotations of the program enclose work and are none; test_breakdown.py shows that they change no part of a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulab.analysis.breakdown import breakdown
from gpulab.analysis.facts import facts
from gpulab.analysis.operators import unknown_by_annotation
from gpulab.diagnosis.diagnose import diagnose
from gpulab.run import Category, Place
from gpulab.trace.load import load_run
from tests.support import trace_files
from tests.support.host_loops import HostLoop, played
from tests.support.loops import Machine, loop

KERNEL = "turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_nn"
HERE = Place("train.py", 7, "step")
LIGHTNING = "[pl][profile][Strategy]SingleDeviceStrategy.training_step"
NAMES = {
    "forward": "your",
    "## backward ##": "your",
    "DeepSpeedEngine.forward": "your",
    LIGHTNING: "Lightning's",
    "FullyShardedDataParallel.forward": "FSDP's",
}


def annotated(machine: Machine, name: str, python_us: float) -> None:
    start = machine.host
    machine.operator("aten::mm", KERNEL, 4_000)
    machine.host = max(machine.host, machine.free)
    machine.python(python_us)
    machine.mark(name, start)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_left_is_unknown_by_its_annotation(name: str) -> None:
    known = loop(lambda machine: annotated(machine, name, 6_000)).facts()
    first, words = diagnose(known, predict_cures=False).first, f'{NAMES[name]} annotation "{name}"'
    assert known.breakdown is not None and known.breakdown.share["other"] == 0
    assert first.key == "cannot_tell" and words in first.summary
    assert f"inside {words}, without operators: 60 % of a step" in first.evidence[0].words


def test_the_innermost_annotation_is_named() -> None:
    def step(machine: Machine) -> None:
        start = machine.host
        annotated(machine, "loss", 5_000)
        machine.python(1_000)
        machine.mark("training_step", start)

    named = loop(step).facts().of(unknown_by_annotation)
    assert [a.name for a in named] == ["loss", "training_step"]
    assert [a.share for a in named] == pytest.approx([0.5, 0.1], abs=0.01)


def test_an_annotation_after_the_update_is_no_logging() -> None:
    def step(machine: Machine) -> None:
        machine.load(10)
        machine.operator("aten::mm", KERNEL, 4_000)
        machine.host = max(machine.host, machine.free)
        start = machine.host
        machine.operator("aten::add_", KERNEL, 100)
        machine.mark("Optimizer.step#SGD.step", start)
        machine.host = max(machine.host, machine.free)
        annotated(machine, "forward of the next batch", 6_000)

    found = diagnose(loop(step).facts(), predict_cures=False)
    assert found.of("logging_or_eval") is None
    assert 'your annotation "forward of the next batch"' in found.first.summary


def test_stages_of_compiling_are_named_work() -> None:
    def step(loop: HostLoop) -> None:
        loop.operator("aten::mm", 1_000, 0)
        with loop.annotated("compile_fx_inner (dynamo_timed)"):
            loop.python(1_000, 0)

    account = breakdown(played(step, HERE).run())
    assert account is not None and account.share["other"] == pytest.approx(0.5)
    assert facts(played(step, HERE).run()).of(unknown_by_annotation) == ()


@pytest.mark.parametrize("name", ["## backward ##", "[pl][profile]run_training_batch", "forward"])
def test_annotations_of_old_versions_of_torch(name: str, tmp_path: Path) -> None:
    """They stand among the operators there."""
    events = [*trace_files.labels(), *trace_files.step(), trace_files.span("Operator", name, 0, 900)]
    timeline = load_run(trace_files.write(tmp_path, trace_files.text(events))).timeline
    assert timeline is not None
    rows = timeline.name_id == timeline.names.index(name)
    assert timeline.category[rows].tolist() == [Category.USER_ANNOTATION]
