"""Diagnose a run: run all rules on its figures and rank their findings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from gpulab.analysis.facts import Facts, early_end_sentence
from gpulab.analysis.step_shares import own_shares
from gpulab.diagnosis.catalogue import kind_of, kinds
from gpulab.diagnosis.finding import BETWEEN, Diagnosis, Evidence, Finding, FindingKind, RuleContext, Undetermined
from gpulab.diagnosis.headline import rank_findings, total_us
from gpulab.formatting import duration, factor
from gpulab.prediction.predict import Predictor
from gpulab.prediction.prediction import NOTHING, PriorEvidence
from gpulab.run import Category
from gpulab.thresholds import DEFAULT, Thresholds

_MOST = 0.5  # ours, share of the profiled time
_APART = 2.0  # ours, in either direction
FAULT = "A fault of gpulab's own: please report it"


def diagnose(
    facts: Facts, thresholds: Thresholds = DEFAULT, evidence: PriorEvidence = NOTHING, *, predict_cures: bool = True
) -> Diagnosis:
    """All findings of a run, the costliest first; at least one, if only `healthy` or `cannot_tell`.

    For each finding the gain of its cure is predicted, which bounds what it can save (`predict_cures`).
    """
    context = RuleContext(facts, thresholds)
    if any(isinstance(_answer(kind, context), Finding) for kind in kinds() if kind.role == "context"):
        context = replace(context, own=own_shares(facts))
    answers = [_answer(kind, context) for kind in kinds()]
    always = {kind.key for kind in kinds() if kind.is_verdict or kind.role == "end of the run"}
    said = [a for a in answers if isinstance(a, Finding) and (a.key in always or not context.names_no_cause)]
    said = with_predictions(facts, said, context.step_us, evidence) if predict_cures else said
    ranked = rank_findings(context, said)
    later = [] if context.names_no_cause else _once_cured(context, ranked)
    if later:
        ranked = rank_findings(
            context, [*said, *(with_predictions(facts, later, context.step_us, evidence) if predict_cures else later)]
        )
    account = facts.breakdown
    if account is not None and account.start_up_ns >= _MOST * account.wall_ns:  # the rest is not a usual step
        ranked = tuple(sorted(ranked, key=lambda f: f.once_us is None))[: 1 if account.whole_window else None]
    return Diagnosis(
        findings=ranked,
        untold=() if context.is_cut_short else tuple(a for a in answers if isinstance(a, Undetermined)),
        step_us=context.step_us or None,
        total_us=total_us(context, ranked),
        whole_window=account is not None and account.whole_window,
        notes=_without_lines(context, ranked),
        alarm=" ".join(filter(None, (_measured_beside(ranked), _alarm(facts, ranked[0]), _growing(ranked)))),
        ended="" if kind_of(ranked[0].key).role == "end of the run" else early_end_sentence(facts.run),
        few_steps=facts.few_steps,
    )


def _alarm(facts: Facts, first: Finding) -> str:
    """A warning if traced steps take a different time from the others. The first finding's cure is the next step."""
    ratio = facts.profiled_over_unprofiled
    if ratio is None or 1 / _APART < ratio < _APART:
        return ""
    times = factor(max(ratio, 1 / max(ratio, 1e-9)))
    longer, other = ("a traced", "an untraced") if ratio > 1 else ("an untraced", "a traced")
    again = "" if first.cure else " Run it again."
    return f"The step breakdown may be off: {longer} step took {times}× the time of {other} one.{again}"


def _measured_beside(findings: Sequence[Finding]) -> str:
    """What else happened during the run, unless it is the first finding itself."""
    beside = [f.summary for f in findings[1:] if kind_of(f.key).role == "context"]
    return " ".join([*beside, "Shares are of this process's own time."]) if beside else ""


def _growing(findings: Sequence[Finding]) -> str:
    """That memory grows, unless it is the first finding itself: it costs no time now, and ends the work later."""
    return " ".join(f.summary for f in findings[1:] if kind_of(f.key).beside_headline and f.confidence == "measured")


def _without_lines(context: RuleContext, findings: Sequence[Finding]) -> tuple[str, ...]:
    """How to record a trace that names lines, if this one has no Python stacks."""
    run = context.facts.run
    if run.source != "trace" or run.timeline is None or kind_of(findings[0].key).is_verdict:
        return ()
    if (run.timeline.category == Category.PYTHON_FUNCTION).any():
        return ()
    return ("No line of code is named: the trace holds no Python stacks. Record it with with_stack=True for them.",)


def _once_cured(context: RuleContext, findings: Sequence[Finding]) -> list[Finding]:
    """The findings, with pauses that matter only once the first cause is cured: they come after it."""
    first, total = findings[0], total_us(context, findings)
    cured_us = first.cost_us
    if not total or cured_us < context.thresholds.idle_notice * total:
        return []
    remaining, limits = max(0.0, 1 - cured_us / total), context.thresholds
    lower = replace(
        limits,
        pause_notice=max(limits.silence, limits.pause_notice * remaining),
        evaluation_notice=max(limits.silence, limits.evaluation_notice * remaining),
    )
    keys, again = {f.key for f in findings}, replace(context, thresholds=lower)
    answers = [_answer(kind, again) for kind in kinds() if kind.second_round and kind.key not in keys]
    return [replace(a, only_after=(*a.only_after, first.key)) for a in answers if isinstance(a, Finding)]


def _answer(kind: FindingKind, context: RuleContext) -> Finding | Undetermined | None:
    """The answer of the kind's rule. An error in the rule is reported and does not lose the report."""
    if kind.rule is None:
        return None
    try:
        answer = kind.rule(context)
    except Exception as e:
        return Undetermined(kind.key, f"Anything about {kind.title}", f"{FAULT} ({type(e).__name__}: {e})")
    if not isinstance(answer, Finding) or answer.lesson:
        return answer
    return replace(answer, lesson=kind_of(answer.key).lesson)


NOTHING_GAINED = 0.99  # ours, share of the current time: half of what a comparison can resolve (2 %)
HARDLY_LESS = 0.9  # ours, share of the finding's own bound: a smaller difference is not mentioned


def with_predictions(
    facts: Facts, findings: Sequence[Finding], step_us: float | None, evidence: PriorEvidence
) -> list[Finding]:
    """The findings with the predicted effect of their settings, or of leaving out their time."""
    predictor = Predictor(facts, evidence)
    predicted: list[Finding] = []
    for finding in findings:
        removal = kind_of(finding.key).removal
        if finding.settings:
            prediction = predictor.of(dict(finding.settings))
        elif removal is not None:
            times = np.array(finding.removed_ns, dtype=np.int64).reshape(-1, 2)
            prediction = predictor.without(removal, times, finding.key)
        else:
            predicted.append(finding)
            continue
        predicted.append(_bounded(replace(finding, prediction=prediction), step_us))
    return predicted


def _bounded(finding: Finding, step_us: float | None) -> Finding:
    """The finding with at most the best predicted gain: time that other work hides cannot be saved.

    The wait for data is not reduced, because workers are only one of its cures.
    """
    prediction, own = finding.prediction, finding.recoverable_us_per_step
    if "data_wait" in finding.parts:
        return _without_useless_setting(finding)
    if any(part.startswith(BETWEEN) for part in finding.parts):  # measured, and not part of the predicted step
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
    """The finding without a setting that is predicted to gain nothing or to be decidedly slower."""
    prediction = finding.prediction
    if prediction is None or prediction.ratio is None or prediction.interval is None:
        return finding
    if prediction.interval[0] < 1 and (prediction.only_sign or prediction.ratio < NOTHING_GAINED):
        return finding
    return replace(finding, settings=(), prediction=None, cure=finding.otherwise or finding.cure)
