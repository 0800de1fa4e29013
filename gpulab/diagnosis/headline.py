"""Ranks the findings of a run, and forms the headline of the report from the first one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from gpulab.analysis.breakdown import PARTS
from gpulab.analysis.facts import too_few
from gpulab.diagnosis.catalogue import kind_of, title_for
from gpulab.diagnosis.finding import BETWEEN, Diagnosis, Evidence, Finding, RuleContext
from gpulab.formatting import capitalized, factor, percent, sentence

# Weights of upper bounds when findings are ranked. Ours: measured idle time can be saved in full; the time that faster
# kernels would save is a bound from peak figures, of which programs reach half at best
# (definitions.md, "Hardware table").
_WORTH = {"measured": 1.0, "likely": 0.5, "possible": 0.25}

_LEAST = 0.15  # ours, share of a step: healthy trainings have as much, by bytes, that no cure saves
_ALL = 0.99  # ours, share of its own time: the rest is rounding, not a claim of another finding
_LARGEST_GAIN = 10  # ours: a larger gain depends on a rest that is too uncertain


def rank_findings(context: RuleContext, findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings to report, in the order in which to cure them; at least one.

    `findings` holds at most one finding per key, and `healthy` or `cannot_tell` if there is no other. Findings below
    the silence are dropped, and a minor finding cannot take the headline from a healthy run. Context findings
    follow the costly causes and then claim no time; without such a cause they may lead. Hints come last.
    """
    ends = [f for f in findings if kind_of(f.key).role == "end of the run"]
    if ends:
        rest = [f for f in findings if kind_of(f.key).role == "context" or kind_of(f.key).beside_headline]
        return tuple(_without_time([*ends, *rest]))
    verdicts = [f for f in findings if kind_of(f.key).is_verdict]
    beside = [f for f in findings if kind_of(f.key).role == "context"]
    ranked = _ranked(context, _without_symptoms([f for f in findings if kind_of(f.key).role == "cause"]))
    costly = [f for f in ranked if not _is_hint(f)]
    hints = [f for f in ranked if _is_hint(f)]
    without_time = _without_time(beside)
    if not costly and beside and not any(kind_of(f.key).role == "open question" for f in verdicts[:1]):
        claims = {f.key: f for f in _ranked(context, beside)}
        return (*(claims.get(f.key, f) for f in without_time), *hints)
    beside = without_time
    if not costly:
        return (*verdicts[:1], *beside, *hints)
    leading = _leading(context, costly, verdicts[:1])
    first = [] if leading else verdicts[:1]
    ordered = [*leading, *(f for f in costly if f not in leading)]
    return (*first, *_with_sequels(context, ordered), *beside, *hints)


def _without_time(findings: Iterable[Finding]) -> list[Finding]:
    return [replace(f, recoverable_us_per_step=None, parts=()) for f in findings]


def _leading(context: RuleContext, costly: Sequence[Finding], verdicts: Sequence[Finding]) -> list[Finding]:
    """The findings that precede the verdict and the others: all costly findings if the first one may lead."""
    if _leads(context, costly[0], verdicts):
        return list(costly)
    leading = [f for f in costly if _leads(context, f, verdicts)]
    others = {f.key for f in costly} - {f.key for f in leading}
    return [f for f in leading if not others & set(f.only_after)]


def _leads(context: RuleContext, finding: Finding, verdicts: Sequence[Finding]) -> bool:
    """Whether the finding may precede the verdict: not if its cost is small and more time is unknown, nor if faster
    kernels would save only a little on a CPU.
    """
    if finding.cost_us >= _LEAST * (context.step_us):
        return True
    if any(v.parts == ("unknown",) for v in verdicts) and "unknown" not in map(_base, finding.parts):
        return False
    return context.on_gpu or finding.confidence == "measured" or not kind_of(finding.key).is_bound


def total_us(context: RuleContext, findings: Sequence[Finding]) -> float | None:
    """The typical step plus what the findings claim outside it, spread over the steps, in µs."""
    between_us = sum(_claimed_between(f) for f in findings)
    return max(context.step_us + between_us, context.whole_us) if context.step_us else None


def _is_hint(finding: Finding) -> bool:
    """Whether the finding is only a hint: neither its time nor any cost is known."""
    return finding.recoverable_us_per_step is None and finding.confidence == "possible"


def _without_symptoms(findings: list[Finding]) -> list[Finding]:
    """Drops each symptom of another finding with a known cost: that finding includes its time and names it."""
    symptoms = {key for f in findings if f.recoverable_us_per_step for key in kind_of(f.key).explains}
    return [f for f in findings if f.key not in symptoms]


# -- time, each part of it once ----------------------------------------------------------------------------------------


class _Budget(Struct):
    """The unclaimed time of each part of the step, and of the whole step (µs).

    `within` is the time claimed so far, by part or piece of one; `takers` are the findings that claimed from a part.
    """

    remaining: dict[str, float]
    within: dict[str, float] = field(default_factory=dict)
    takers: dict[str, list[str]] = field(default_factory=dict)
    step_remaining_us: float = 0.0

    def available(self, finding: Finding) -> float | None:
        """The part of the finding's time that no stronger finding has claimed."""
        own = finding.recoverable_us_per_step
        if own is None or not finding.parts:
            return own if own is None else min(own, self.step_remaining_us)
        between = min(own, _claimed_between(finding))
        inside = own - between
        bases = {_base(p) for p in finding.parts if _base(p) != BETWEEN}
        same = max((self.within.get(p, 0.0) for p in finding.parts if "/" in p and _base(p) != BETWEEN), default=0.0)
        room = min(sum(self.remaining.get(b, 0.0) for b in bases), self.step_remaining_us)
        return between + max(0.0, min(inside - same, room))

    def take(self, finding: Finding) -> Finding:
        """The finding with its available time, which is thereby claimed."""
        claim_us, own = self.available(finding), finding.recoverable_us_per_step
        others = dict.fromkeys(k for p in finding.parts for k in self.takers.get(_base(p), ()))
        shares = tuple(others) if claim_us is not None and own is not None and claim_us < _ALL * own else ()
        inside = (claim_us or 0.0) - min(claim_us or 0.0, _claimed_between(finding))
        self._spend(finding, inside)
        return replace(finding, recoverable_us_per_step=claim_us, shares_with=shares)

    def _spend(self, finding: Finding, time_us: float) -> None:
        """Claim time first from parts that the finding claims whole, then from pieces of parts; each in proportion."""
        self.step_remaining_us -= time_us
        inside = [p for p in finding.parts if _base(p) != BETWEEN]
        own = dict.fromkeys(p for p in inside if "/" not in p)
        remaining_us = time_us
        for bases in (list(own), list(dict.fromkeys(_base(p) for p in inside if _base(p) not in own))):
            available_us = sum(self.remaining.get(b, 0.0) for b in bases)
            claimed_us = min(remaining_us, available_us)
            for base in bases:
                self.remaining[base] = self.remaining.get(base, 0.0) * (
                    1 - claimed_us / available_us if available_us else 1.0
                )
            remaining_us -= claimed_us
        for part in finding.parts:
            self.within[part] = self.within.get(part, 0.0) + time_us
            if finding.recoverable_us_per_step:
                self.takers.setdefault(_base(part), []).append(finding.key)


def _ranked(context: RuleContext, findings: list[Finding]) -> list[Finding]:
    """The findings by the time that each can still save, weighted by certainty; none before one that it depends on."""
    step, waiting, done = context.step_us, list(findings), []
    floor = context.thresholds.silence * (total_us(context, findings) or 0.0)
    budget = _Budget(
        {part: context.part_us(part) for part in PARTS} if context.facts.breakdown is not None else {}, {}, {}
    )
    budget.step_remaining_us = step
    if context.facts.breakdown is None:  # no accounting: only the step itself bounds the gain
        budget.remaining = dict.fromkeys(PARTS, step)
    while waiting:
        keys = {f.key for f in waiting}
        ready = [f for f in waiting if not keys & (set(f.only_after) - {f.key})] or waiting
        best = max(ready, key=lambda f: _worth(f, budget.available(f)))
        waiting.remove(best)
        claim_us = budget.available(best)
        if claim_us is None or claim_us >= max(floor, 1e-9):
            done.append(budget.take(best))
    return done


def _worth(finding: Finding, time_us: float | None) -> tuple[float, float]:
    weight = _WORTH[finding.confidence]
    return (-1.0 if time_us is None else time_us * weight, weight)


def _claimed_between(finding: Finding) -> float:
    """The part of the finding's time between the steps: 0 unless it names `BETWEEN`, all if it names nothing else."""
    own = finding.cost_us
    if not any(_base(p) == BETWEEN for p in finding.parts):
        return 0.0
    return min(own, finding.between_us_per_step) if len({_base(p) for p in finding.parts}) > 1 else own


def _base(part: str) -> str:
    return part.partition("/")[0]


# -- what comes next ---------------------------------------------------------------------------------------------------


def _with_sequels(context: RuleContext, ranked: list[Finding]) -> list[Finding]:
    """Adds to each finding what comes once it and all before it are fixed, and the most that this would save."""
    remaining = total_us(context, ranked)
    if remaining is None:
        return ranked
    findings: list[Finding] = []
    for i, finding in enumerate(ranked):
        cured = finding.recoverable_us_per_step
        remaining -= cured or 0.0
        following = next((f for f in ranked[i + 1 :] if f.recoverable_us_per_step), None)
        findings.append(finding if not cured else replace(finding, after=_after(context, remaining, following)))
    return findings


def _after(context: RuleContext, remaining_us: float, following: Finding | None) -> str:
    if following is None:
        return f"No other known cause costs {percent(context.thresholds.silence)} of {context.unit} or more."
    rest = remaining_us - following.cost_us
    gain = (
        f"at most {factor(remaining_us / rest)}×"
        if rest > 1 / _LARGEST_GAIN * remaining_us
        else f"more than {_LARGEST_GAIN}×"
    )
    return f"Then {title_for(following)}: fixing it too speeds up the rest by {gain}."


class Headline(Struct, frozen=True):
    """`sentence` is for a reader who does not know gpulab's terms; `evidence` is the figure; `key` names the cause.

    `level`: "bad" (a clear bottleneck), "notice", "good" (nothing to report), "unknown" (cannot tell).
    """

    key: str
    sentence: str
    evidence: str
    level: str


def headline(diagnosis: Diagnosis, before: str = "") -> Headline:
    """The headline: how the run ended if early, `before` (the effect of a setting), the sentence of the first finding
    with its first figure, and the alarm. With few steps, no shares are shown.
    """
    finding = diagnosis.first
    said, evidence = summary(finding, diagnosis), [e.words for e in figures(finding, diagnosis)[:1]]
    below = " ".join(filter(None, (*map(sentence, evidence), diagnosis.alarm)))
    return Headline(finding.key, " ".join(filter(None, (diagnosis.ended, before, said))), below, finding.level)


def figures(finding: Finding, diagnosis: Diagnosis) -> tuple[Evidence, ...]:
    """The evidence to show: with few steps, none with a share."""
    return tuple(e for e in finding.evidence if diagnosis.few_steps is None or "%" not in e.words)


def summary(finding: Finding, diagnosis: Diagnosis) -> str:
    """The sentence of a finding: with few steps, without a share."""
    if diagnosis.few_steps is None or "%" not in finding.summary:
        return finding.summary
    few, kind = too_few(diagnosis.few_steps), kind_of(finding.key)
    if kind.role == "all is well":
        return f"Nothing stands out, but {few} to be sure."
    if kind.is_verdict:
        return f"{capitalized(few)} to say where the time goes."
    return f"Likely cause: {title_for(finding)}. {capitalized(few)} for percentages."
