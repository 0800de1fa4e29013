"""One or two samples in a batch: what a larger one brings is a question, neither all is well nor an alarm."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from gpulab.diagnosis.diagnose import diagnose
from gpulab.diagnosis.finding import Finding
from tests.support.rule_cases import case_of, run_of


def _first(samples: int, *, gpu: bool = False, wait: float = 0.0) -> Finding:
    run = run_of(gpu=gpu, wait=wait)
    steps = replace(run.steps, sample_count=np.full(len(run.steps), samples, np.int64))
    shares = {"data_wait": wait} if wait else None
    return diagnose(case_of(replace(run, steps=steps), shares).facts).first


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("samples", [1, 2])
def test_a_tiny_batch_is_asked_about(samples: int, gpu: bool) -> None:
    found = _first(samples, gpu=gpu)
    assert found.key == "cannot_tell"
    assert found.level == "unknown"
    assert found.summary.startswith("Would a larger batch take less time per sample?")
    assert f"--sweep batch_size={samples},{2 * samples}," in found.evidence[0].words


@pytest.mark.parametrize("samples", [3, 64, -1])
def test_other_batches_and_unknown_ones_are_healthy(samples: int) -> None:
    assert _first(samples).key == "healthy"


def test_a_cause_comes_before_the_question() -> None:
    assert _first(1, wait=0.5).key == "data_starved"
