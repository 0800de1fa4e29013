"""From the figures of a run to what an expert would say: every rule asked, their answers weighed against each other."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from gpulab.analysis.facts import Facts
from gpulab.diagnosis.context import FindingKind, RuleContext, Undetermined
from gpulab.diagnosis.cure_predictions import with_predictions
from gpulab.diagnosis.finding import Diagnosis, Finding
from gpulab.diagnosis.ranking import rank_findings, total_us
from gpulab.diagnosis.rules.catalogue import kind_of, kinds
from gpulab.formatting import factor
from gpulab.prediction.prediction import NOTHING, PriorEvidence
from gpulab.run import Category
from gpulab.thresholds import DEFAULT, Thresholds
from gpulab.timeline import spans

_MOST = 0.5  # ours, of the profiled time
_APART = 2.0  # ours, in either direction
FAULT = "A fault of gpulab's own: please report it"


def diagnose(
    facts: Facts, thresholds: Thresholds = DEFAULT, evidence: PriorEvidence = NOTHING, *, predict_cures: bool = True
) -> Diagnosis:
    """All findings of a run, the costliest first; at least one, if only `healthy` or `cannot_tell`.

    What its cure would bring is predicted for each, and bounds what it can give back; not with `predict_cures=False`.
    """
    context = RuleContext(facts, thresholds)
    answers = [_answer(kind, context) for kind in kinds()]
    said = [a for a in answers if isinstance(a, Finding) and (kind_of(a.key).is_verdict or not context.names_no_cause)]
    said = with_predictions(facts, said, context.step_us, evidence) if predict_cures else said
    ranked = rank_findings(context, said)
    later = [] if context.names_no_cause else _once_cured(context, ranked)
    if later:
        ranked = rank_findings(
            context, [*said, *(with_predictions(facts, later, context.step_us, evidence) if predict_cures else later)]
        )
    account = facts.breakdown
    if account is not None and account.start_up_ns >= _MOST * account.wall_ns:  # the rest of it is no usual step
        ranked = tuple(sorted(ranked, key=lambda f: f.once_us is None))
    return Diagnosis(
        findings=ranked,
        untold=() if context.is_cut_short else tuple(a for a in answers if isinstance(a, Undetermined)),
        step_us=context.step_us,
        total_us=total_us(context, ranked),
        whole_window=account is not None and account.whole_window,
        notes=_without_lines(context, ranked),
        alarm=_alarm(facts),
    )


def _alarm(facts: Facts) -> str:
    """Where profiled steps are not like the others: what the trace shows may not hold for those."""
    ratio = facts.profiled_over_unprofiled
    if ratio is None or 1 / _APART < ratio < _APART:
        return ""
    times = factor(max(ratio, 1 / max(ratio, 1e-9)))
    which = (
        f"a profiled step took {times} times as long as an unprofiled one"
        if ratio > 1
        else f"an unprofiled step took {times} times as long as a profiled one"
    )
    return f"Take care: {which}, so what the profiled steps show may not hold for the others. Run it again."


def _without_lines(context: RuleContext, findings: Sequence[Finding]) -> tuple[str, ...]:
    """Of a trace without Python's stacks: how to have it name lines."""
    run = context.facts.run
    if run.source != "trace" or run.timeline is None or kind_of(findings[0].key).is_verdict:
        return ()
    if spans.in_category(run.timeline, Category.PYTHON_FUNCTION).any():
        return ()
    return ("No line of code is named: the trace holds no Python stacks. Record it with with_stack=True for them.",)


def _once_cured(context: RuleContext, findings: Sequence[Finding]) -> list[Finding]:
    """Pauses that hardly matter beside the first cause, and do once it is cured: they come after it."""
    first, total = findings[0], total_us(context, findings)
    cured_us = first.recoverable_us_per_step or 0.0
    if not total or cured_us < context.thresholds.idle_notice * total:
        return []
    left, limits = max(0.0, 1 - cured_us / total), context.thresholds
    lower = replace(
        limits,
        pause_notice=max(limits.silence, limits.pause_notice * left),
        evaluation_notice=max(limits.silence, limits.evaluation_notice * left),
    )
    keys, again = {f.key for f in findings}, RuleContext(context.facts, lower)
    answers = [_answer(kind, again) for kind in kinds() if kind.asked_again and kind.key not in keys]
    return [replace(a, only_after=(*a.only_after, first.key)) for a in answers if isinstance(a, Finding)]


def _answer(kind: FindingKind, context: RuleContext) -> Finding | Undetermined | None:
    """What the rule of that kind answers. Its fault must not lose the report, nor stay silent."""
    if kind.rule is None:
        return None
    try:
        answer = kind.rule(context)
    except Exception as e:
        return Undetermined(kind.key, f"Anything about {kind.title}", f"{FAULT} ({type(e).__name__}: {e})")
    return replace(answer, lesson=answer.lesson or kind.lesson) if isinstance(answer, Finding) else answer
