"""Steps and kernels of loops whose host runs ahead of a real NVIDIA GPU, against CUDA events of our own."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from benchmarks.gpu_first.answer import Answer  # noqa: E402
from benchmarks.gpu_first.run_ahead import Case, judge, profiled  # noqa: E402
from benchmarks.gpu_first.stage import Stage  # noqa: E402
from gpulab.analysis.facts import facts  # noqa: E402

pytestmark = pytest.mark.gpu

CASES = (Case(40), Case(150), Case(150, graph=True), Case(150, item=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_steps_and_kernels_are_those_of_the_gpu(tmp_path: Path, case: Case) -> None:
    stage, answer = Stage(simulated=False), Answer(tmp_path / "answer.json", simulated=False)
    run, truth = profiled(stage, case)
    judge(answer, stage, case, facts(run), truth)
    checks = answer.contents["checks"]
    assert checks and [check for check in checks if check["verdict"] != "agrees"] == []
