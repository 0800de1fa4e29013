"""What a user is told with a prediction about the run from which it is made."""

from __future__ import annotations

import gpulab
from gpulab.run import Run
from tests.support.core_readings import with_cores
from tests.support.rule_cases import run_of


def predicted_from(run: Run) -> str:
    shown = gpulab.predict(run, {"workers": 2})
    assert shown.headline.key in ("predicted", "nothing_predicted")
    return " ".join(repr(shown).split())


def test_a_prediction_says_that_its_run_was_disturbed() -> None:
    run = run_of(wait=0.5)
    disturbed = predicted_from(with_cores(run, computed=0.3, waited=0.68, got=0.3, others=1.7))
    assert "This run was disturbed: other programs take your CPU" in disturbed
    assert "disturbed" not in predicted_from(with_cores(run, computed=1.0, waited=0.0, got=1.0, others=0.0))
