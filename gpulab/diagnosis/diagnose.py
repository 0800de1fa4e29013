"""From the figures of a run to what an expert would say: every rule asked, their answers weighed against each other."""

from __future__ import annotations

from gpulab.analysis.facts import Facts
from gpulab.diagnosis.arbitration import VERDICTS, arbitrate, total_us
from gpulab.diagnosis.case import Case, Rule, Untold
from gpulab.diagnosis.finding import Diagnosis, Finding
from gpulab.diagnosis.foretold import foretold
from gpulab.diagnosis.names import name_of
from gpulab.diagnosis.rules import RULES
from gpulab.diagnosis.thresholds import DEFAULT, Thresholds
from gpulab.prediction.known import NOTHING, Known

FAULT = "A fault of gpulab's own: please report it"


def diagnose(
    facts: Facts, thresholds: Thresholds = DEFAULT, known: Known = NOTHING, *, foretell: bool = True
) -> Diagnosis:
    """All findings of a run, the costliest first; at least one, if only `healthy` or `cannot_tell`.

    What its cure would bring is predicted for each, and bounds what it can give back; not with `foretell=False`.
    """
    case = Case(facts, thresholds)
    answers = [_asked(rule, case) for rule in RULES]
    said = [a for a in answers if isinstance(a, Finding) and (a.key in VERDICTS or not case.too_few_steps)]
    found = arbitrate(case, foretold(facts, said, case.step_us, known) if foretell else said)
    account = facts.breakdown
    return Diagnosis(
        findings=found,
        untold=tuple(a for a in answers if isinstance(a, Untold)),
        step_us=case.step_us,
        total_us=total_us(case, found),
        whole_window=account is not None and account.whole_window,
    )


def _asked(rule: Rule, case: Case) -> Finding | Untold | None:
    """One rule's answer. Its fault must not lose the report, nor stay silent."""
    try:
        return rule(case)
    except Exception as e:
        name = getattr(rule, "__name__", str(rule))
        return Untold(name, f"Anything about {name_of(name)}", f"{FAULT} ({type(e).__name__}: {e})")


__all__ = ["FAULT", "diagnose"]
