"""The one sentence at the top of a report, with the figure that supports it."""

from __future__ import annotations

from msgspec import Struct

from gpulab.diagnosis.finding import Diagnosis, Finding
from gpulab.diagnosis.rules.catalogue import kind_of, title_for
from gpulab.formatting import capitalized, plural, sentence


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
    said, evidence = finding.summary, [e.words for e in finding.evidence[:1]]
    if diagnosis.few_steps is not None and "%" in said:
        said = _without_shares(finding, diagnosis.few_steps)
    if diagnosis.few_steps is not None:
        evidence = [e.words for e in finding.evidence if "%" not in e.words][:1]
    figures = " ".join(filter(None, (*map(sentence, evidence), diagnosis.alarm)))
    return Headline(finding.key, " ".join(filter(None, (diagnosis.ended, before, said))), figures, finding.level)


def _without_shares(finding: Finding, count: int) -> str:
    few = f"{plural(count, 'counted step')} {'is' if count == 1 else 'are'} too few"
    kind = kind_of(finding.key)
    if kind.role == "all is well":
        return f"Nothing stands out, but {few} to be sure."
    if kind.is_verdict:
        return f"{capitalized(few)} to say where the time goes."
    return f"Likely cause: {title_for(finding)}. {capitalized(few)} for percentages."
