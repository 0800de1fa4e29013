"""Join findings with what their cures should bring: a cure gives back no more than its prediction allows at best."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from gpulab.analysis.facts import Facts
from gpulab.diagnosis.finding import BETWEEN, Evidence, Finding
from gpulab.diagnosis.rules.catalogue import kind_of
from gpulab.formatting import duration
from gpulab.prediction.baseline import Refused
from gpulab.prediction.predict import predict, predict_from
from gpulab.prediction.prediction import Prediction, PriorEvidence
from gpulab.prediction.removal import predict_removal
from gpulab.prediction.step import plan_of

NOTHING_GAINED = 0.99  # ours, of today's time: half of what a comparison can tell (2 %)
HARDLY_LESS = 0.9  # ours, of the finding's own bound: no word about so small a difference


def with_predictions(
    facts: Facts, findings: Sequence[Finding], step_us: float | None, evidence: PriorEvidence
) -> list[Finding]:
    """The findings with the prediction of their settings, or of leaving out what they are about."""
    try:
        projection = plan_of(facts)
    except Refused:
        projection = None
    predicted: list[Finding] = []
    for finding in findings:
        prediction: Prediction | None = None
        if finding.settings:
            settings = dict(finding.settings)
            if projection is None:
                prediction = predict(facts, settings, evidence)
            else:
                prediction = predict_from(projection, settings, evidence)
        elif (removal := kind_of(finding.key).removal) is not None:
            gone = np.array(finding.removed_ns, dtype=np.int64).reshape(-1, 2)
            today = None if projection is None else projection.today
            prediction = predict_removal(facts, removal, gone, evidence.errors.get(finding.key, ()), today)
        predicted.append(finding if prediction is None else _bounded(replace(finding, prediction=prediction), step_us))
    return predicted


def _bounded(finding: Finding, step_us: float | None) -> Finding:
    """With no more time to give back than the best that is predicted: what others hide is not gained.

    Time that the training waits for data stays what it is: workers are but one of its cures.
    """
    prediction, own = finding.prediction, finding.recoverable_us_per_step
    if "data_wait" in finding.parts:
        return _without_useless_setting(finding)
    if any(part.startswith(BETWEEN) for part in finding.parts):  # measured, and no part of the step that is predicted
        return finding
    if prediction is None or prediction.interval is None or not own or not step_us or not finding.settings:
        return finding
    best_us = max(0.0, (1 - prediction.interval[0]) * step_us)
    if best_us >= own:
        return finding
    if best_us >= HARDLY_LESS * own:
        return replace(finding, recoverable_us_per_step=best_us)
    hidden = Evidence(
        f"Of {duration(own)} per step at most {duration(best_us)} can be gained: the rest is hidden behind other work"
    )
    return replace(finding, recoverable_us_per_step=best_us, evidence=(*finding.evidence, hidden))


def _without_useless_setting(finding: Finding) -> Finding:
    """No setting is advised that is predicted to bring nothing, or to make it slower for certain."""
    prediction = finding.prediction
    if prediction is None or prediction.ratio is None or prediction.interval is None:
        return finding
    if prediction.interval[0] < 1 and (prediction.only_sign or prediction.ratio < NOTHING_GAINED):
        return finding
    return replace(finding, settings=(), prediction=None, cure=finding.otherwise or finding.cure)
