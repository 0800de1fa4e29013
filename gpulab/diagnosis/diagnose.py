"""From the figures of a run to what an expert would say: every rule asked, their answers weighed against each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpulab.analysis.facts import Facts
from gpulab.diagnosis.context import Rule, RuleContext, Undetermined
from gpulab.diagnosis.cure_predictions import with_predictions
from gpulab.diagnosis.finding import Diagnosis, Finding
from gpulab.diagnosis.names import name_of
from gpulab.diagnosis.ranking import VERDICTS, rank_findings, total_us
from gpulab.diagnosis.rules import PAUSES, RULES
from gpulab.prediction.evidence import NOTHING, Known
from gpulab.run import Category
from gpulab.thresholds import DEFAULT, Thresholds
from gpulab.timeline import spans

FAULT = "A fault of gpulab's own: please report it"


def diagnose(
    facts: Facts, thresholds: Thresholds = DEFAULT, known: Known = NOTHING, *, predict_cures: bool = True
) -> Diagnosis:
    """All findings of a run, the costliest first; at least one, if only `healthy` or `cannot_tell`.

    What its cure would bring is predicted for each, and bounds what it can give back; not with `predict_cures=False`.
    """
    context = RuleContext(facts, thresholds)
    answers = [_asked(rule, context) for rule in RULES]
    said = [a for a in answers if isinstance(a, Finding) and (a.key in VERDICTS or not context.too_few_steps)]
    said = with_predictions(facts, said, context.step_us, known) if predict_cures else said
    found = rank_findings(context, said)
    later = [] if context.too_few_steps else _once_cured(context, found)
    if later:
        found = rank_findings(
            context, [*said, *(with_predictions(facts, later, context.step_us, known) if predict_cures else later)]
        )
    account = facts.breakdown
    return Diagnosis(
        findings=found,
        untold=tuple(a for a in answers if isinstance(a, Undetermined)),
        step_us=context.step_us,
        total_us=total_us(context, found),
        whole_window=account is not None and account.whole_window,
        notes=_without_lines(context, found),
    )


def _without_lines(context: RuleContext, found: Sequence[Finding]) -> tuple[str, ...]:
    """Of a trace without Python's stacks: how to have it name lines."""
    run = context.facts.run
    if run.source != "trace" or run.timeline is None or found[0].key in VERDICTS:
        return ()
    if spans.in_category(run.timeline, Category.PYTHON_FUNCTION).any():
        return ()
    return ("No line of code is named: the trace holds no Python stacks. Record it with with_stack=True for them.",)


def _once_cured(context: RuleContext, found: Sequence[Finding]) -> list[Finding]:
    """Pauses that hardly matter beside the first cause, and do once it is cured: they come after it."""
    first, total = found[0], total_us(context, found)
    cured_us = first.recoverable_us_per_step or 0.0
    if not total or cured_us < context.thresholds.idle_notice * total:
        return []
    left, limits = max(0.0, 1 - cured_us / total), context.thresholds
    lower = replace(
        limits,
        pause_notice=max(limits.silence, limits.pause_notice * left),
        evaluation_notice=max(limits.silence, limits.evaluation_notice * left),
    )
    told = {f.key for f in found}
    answers = [_asked(rule, RuleContext(context.facts, lower)) for rule in PAUSES if rule.__name__ not in told]
    return [replace(a, only_after=(*a.only_after, first.key)) for a in answers if isinstance(a, Finding)]


def _asked(rule: Rule, context: RuleContext) -> Finding | Undetermined | None:
    """One rule's answer. Its fault must not lose the report, nor stay silent."""
    try:
        return rule(context)
    except Exception as e:
        name = getattr(rule, "__name__", str(rule))
        return Undetermined(name, f"Anything about {name_of(name)}", f"{FAULT} ({type(e).__name__}: {e})")


__all__ = ["FAULT", "diagnose"]
