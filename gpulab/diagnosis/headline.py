"""The one sentence at the top of a report, with the figure that supports it."""

from __future__ import annotations

from msgspec import Struct

from gpulab.diagnosis.finding import Finding
from gpulab.formatting import sentence


class Headline(Struct, frozen=True):
    """`sentence` is for a person who knows none of our words; `evidence` is the figure; `key` names the cause.

    `level`: "bad" (a clear bottleneck), "notice", "good" (nothing to report), "unknown" (cannot tell).
    """

    key: str
    sentence: str
    evidence: str
    level: str


def headline(finding: Finding, alarm: str = "") -> Headline:
    """A report's headline is its first finding: the sentence, and the first figure of its evidence; then the alarm."""
    evidence = sentence(finding.evidence[0].words) if finding.evidence else ""
    return Headline(finding.key, finding.summary, " ".join(filter(None, (evidence, alarm))), finding.level)
