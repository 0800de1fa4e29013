"""The one sentence at the top of a report, with the figure that supports it."""

from __future__ import annotations

from msgspec import Struct

from gpulab.analysis.facts import too_few
from gpulab.diagnosis.finding import Diagnosis, Evidence, Finding
from gpulab.diagnosis.rules.catalogue import kind_of, title_for
from gpulab.formatting import capitalized, sentence


class Headline(Struct, frozen=True):
    """`sentence` is for a person who knows none of our words; `evidence` is the figure; `key` names the cause.

    `level`: "bad" (a clear bottleneck), "notice", "good" (nothing to report), "unknown" (cannot tell).
    """

    key: str
    sentence: str
    evidence: str
    level: str


def headline(diagnosis: Diagnosis, before: str = "") -> Headline:
    """How the run ended where that was early, `before` (what a setting brought), and the first finding: its sentence,
    and the first figure of its evidence; then the alarm. Of few steps no share is told.
    """
    finding = diagnosis.first
    said, evidence = summary(finding, diagnosis), [e.words for e in figures(finding, diagnosis)[:1]]
    below = " ".join(filter(None, (*map(sentence, evidence), diagnosis.alarm)))
    return Headline(finding.key, " ".join(filter(None, (diagnosis.ended, before, said))), below, finding.level)


def figures(finding: Finding, diagnosis: Diagnosis) -> tuple[Evidence, ...]:
    """The evidence that a reader is told: of few steps none with a share."""
    return tuple(e for e in finding.evidence if diagnosis.few_steps is None or "%" not in e.words)


def summary(finding: Finding, diagnosis: Diagnosis) -> str:
    """The sentence of a finding: of few steps without a share."""
    if diagnosis.few_steps is None or "%" not in finding.summary:
        return finding.summary
    few, kind = too_few(diagnosis.few_steps), kind_of(finding.key)
    if kind.role == "all is well":
        return f"Nothing stands out, but {few} to be sure."
    if kind.is_verdict:
        return f"{capitalized(few)} to say where the time goes."
    return f"Likely cause: {title_for(finding)}. {capitalized(few)} for percentages."
