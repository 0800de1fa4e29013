"""Weigh what the rules found against each other: no symptom of another, no time counted twice, the costliest first."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from gpulab.analysis.breakdown import PARTS
from gpulab.diagnosis.context import RuleContext
from gpulab.diagnosis.finding import BETWEEN, Finding
from gpulab.diagnosis.rules.catalogue import kind_of, title_for
from gpulab.formatting import factor, percent

# What an upper bound is worth when findings are ranked. Ours: idle time that was measured is there to be had, the time
# that faster kernels would save is a bound from peak figures, which programs reach half of at best
# (definitions.md, "Hardware table").
_WORTH = {"measured": 1.0, "likely": 0.5, "possible": 0.25}

_ALL = 0.99  # ours: of its own time; what is missing then is rounding, not another finding's
_LARGEST_GAIN = 10  # ours: a larger one hangs on a rest that is known too badly


def rank_findings(context: RuleContext, findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings worth telling, the first to cure first; at least one.

    `findings` holds at most one finding of each key, and `healthy` or `cannot_tell` where no other speaks. What is
    below the silence goes, and what hardly matters cannot take the headline from a healthy run.
    """
    verdicts = [f for f in findings if kind_of(f.key).is_verdict]
    ranked = _ranked(context, _without_symptoms([f for f in findings if not kind_of(f.key).is_verdict]))
    costly = [f for f in ranked if not _is_hint(f)]
    hints = [f for f in ranked if _is_hint(f)]
    if not costly:
        return (*verdicts[:1], *hints)
    return tuple(_with_sequels(context, [*costly, *hints]))


def total_us(context: RuleContext, findings: Sequence[Finding]) -> float | None:
    """The typical step and what the findings claim beside it, spread over the steps."""
    step, whole = context.step_us, context.whole_us
    return None if step is None else max(step + sum(_claimed_between(f) for f in findings), whole or 0.0)


def _is_hint(finding: Finding) -> bool:
    """Worth a line, but neither its time nor that it costs anything is known."""
    return finding.recoverable_us_per_step is None and finding.confidence == "possible"


def _without_symptoms(findings: list[Finding]) -> list[Finding]:
    """A symptom goes where its cause is measured: its time is the cause's, and the cause names it in its sentence."""
    symptoms = {key for f in findings if f.recoverable_us_per_step for key in kind_of(f.key).explains}
    return [f for f in findings if f.key not in symptoms]


# -- time, each part of it once ----------------------------------------------------------------------------------------


class _Budget(Struct):
    """What is left of each part of the step (µs), and what was claimed within a part and by whom."""

    left: dict[str, float]
    within: dict[str, float] = field(default_factory=dict)
    takers: dict[str, list[str]] = field(default_factory=dict)
    step_left: float = 0.0

    def available(self, finding: Finding) -> float | None:
        """Of what the finding would give back, what nobody stronger has claimed."""
        own = finding.recoverable_us_per_step
        if own is None or not finding.parts:
            return own if own is None else min(own, self.step_left)
        between = min(own, _claimed_between(finding))
        inside = own - between
        bases = {_base(p) for p in finding.parts if _base(p) != BETWEEN}
        same = max((self.within.get(p, 0.0) for p in finding.parts if "/" in p and _base(p) != BETWEEN), default=0.0)
        room = min(sum(self.left.get(b, 0.0) for b in bases), self.step_left)
        return between + max(0.0, min(inside - same, room))

    def take(self, finding: Finding) -> Finding:
        """The finding with its available time, which is then gone."""
        given, own = self.available(finding), finding.recoverable_us_per_step
        others = dict.fromkeys(k for p in finding.parts for k in self.takers.get(_base(p), ()))
        shares = tuple(others) if given is not None and own is not None and given < _ALL * own else ()
        inside = (given or 0.0) - min(given or 0.0, _claimed_between(finding))
        self._spend(finding, inside)
        return replace(finding, recoverable_us_per_step=given, shares_with=shares)

    def _spend(self, finding: Finding, time_us: float) -> None:
        """From its parts in proportion to what they hold."""
        self.step_left -= time_us
        bases = list(dict.fromkeys(_base(p) for p in finding.parts if _base(p) != BETWEEN))
        held = sum(self.left.get(b, 0.0) for b in bases)
        for base in bases:
            self.left[base] = self.left.get(base, 0.0) * (1 - time_us / held if held else 1.0)
        for part in finding.parts:
            self.within[part] = self.within.get(part, 0.0) + time_us
            if finding.recoverable_us_per_step:
                self.takers.setdefault(_base(part), []).append(finding.key)


def _ranked(context: RuleContext, findings: list[Finding]) -> list[Finding]:
    """By the time that each can still give back, as far as that is sure; none before what it depends on."""
    step, waiting, done = context.step_us or 0.0, list(findings), []
    floor = context.thresholds.silence * (total_us(context, findings) or 0.0)
    budget = _Budget(
        {part: context.part_us(part) for part in PARTS} if context.facts.breakdown is not None else {}, {}, {}
    )
    budget.step_left = step
    if context.facts.breakdown is None:  # nothing is accounted: only the step itself bounds what can be given back
        budget.left = dict.fromkeys(PARTS, step)
    else:
        budget.left["data_wait"] = max(budget.left["data_wait"], _waited_us(context))
        _without_core(context, budget.left)
    while waiting:
        keys = {f.key for f in waiting}
        ready = [f for f in waiting if not keys & (set(f.only_after) - {f.key})] or waiting
        best = max(ready, key=lambda f: _worth(f, budget.available(f)))
        waiting.remove(best)
        given = budget.available(best)
        if given is None or given >= max(floor, 1e-9):
            done.append(budget.take(best))
    return done


def _worth(finding: Finding, time_us: float | None) -> tuple[float, float]:
    weight = _WORTH[finding.confidence]
    return (-1.0 if time_us is None else time_us * weight, weight)


def _waited_us(context: RuleContext) -> float:
    """On a CPU all waiting shows, and unprofiled steps may wait for a larger share than profiled ones."""
    share = context.facts.data_wait_fraction
    return share * (context.step_us or 0.0) if share is not None and not context.on_gpu else 0.0


def _without_core(context: RuleContext, left: dict[str, float]) -> None:
    """On a CPU unprofiled steps may wait longer for a core than profiled ones: then less of them is anything else."""
    step, cores = context.step_us, context.facts.cores
    if context.on_gpu or not step or cores is None or cores.thread_wait_fraction is None:
        return
    before, now = left["core_wait"] / step, cores.thread_wait_fraction
    if before < now:
        for part in left.keys() - {"core_wait", "data_wait"}:
            left[part] *= (1 - now) / (1 - before)
        left["core_wait"] = now * step


def _claimed_between(finding: Finding) -> float:
    """Of its time what lies beside the typical step: all of it where no part of the step is named."""
    own = finding.recoverable_us_per_step or 0.0
    if not any(_base(p) == BETWEEN for p in finding.parts):
        return 0.0
    return min(own, finding.between_us_per_step) if len({_base(p) for p in finding.parts}) > 1 else own


def _base(part: str) -> str:
    return part.partition("/")[0]


# -- what comes next ---------------------------------------------------------------------------------------------------


def _with_sequels(context: RuleContext, ranked: list[Finding]) -> list[Finding]:
    """Each finding says what is next once it and all before it are cured, and the most that would bring."""
    left = total_us(context, ranked)
    if left is None:
        return ranked
    findings: list[Finding] = []
    for i, finding in enumerate(ranked):
        cured = finding.recoverable_us_per_step
        left -= cured or 0.0
        following = next((f for f in ranked[i + 1 :] if f.recoverable_us_per_step), None)
        findings.append(finding if not cured else replace(finding, after=_after(context, left, following)))
    return findings


def _after(context: RuleContext, left_us: float, following: Finding | None) -> str:
    if following is None:
        return f"Nothing else is known that costs {percent(context.thresholds.silence)} of {context.unit} or more."
    rest = left_us - (following.recoverable_us_per_step or 0.0)
    gain = f"at most {factor(left_us / rest)}" if rest > 1 / _LARGEST_GAIN * left_us else f"more than {_LARGEST_GAIN}"
    return f"The next cause is {title_for(following)}. If you cure it too, what remains becomes {gain} times as fast."
