"""Rules as tables: what each case would give back, worked out by hand, and what is said of it in one golden text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import pytest

from gpulab.diagnosis.diagnose import diagnose
from gpulab.diagnosis.finding import Evidence, Finding, Rule, RuleContext, Undetermined
from tests.support import golden_text

Answer = Finding | Undetermined | None
UNTOLD = "untold"


class Case(NamedTuple):
    """A rule, what it is asked about, and its answer.

    `says`: the time per step (µs) that the finding gives back; its key where that time is not known by hand; `UNTOLD`
    where something was not recorded; None where the rule has nothing to say.
    """

    rule: Rule
    make: Callable[[], RuleContext]
    says: float | str | None = None
    rel: float = 0.03


Speaking = tuple[Callable[[], RuleContext], float | str] | tuple[Callable[[], RuleContext], float, float]


class Rows(NamedTuple):
    """The cases of one rule in which it speaks (what it says, and how exactly), and those in which it does not."""

    rule: Rule
    speaks: Mapping[str, Speaking]
    silent: Mapping[str, Callable[[], RuleContext]] = {}


def table(*rows: Rows) -> dict[str, Case]:
    """All cases by rule and name."""
    speaking = {f"{r.rule.__name__}: {name}": Case(r.rule, *row) for r in rows for name, row in r.speaks.items()}
    silent = {f"{r.rule.__name__}, none: {name}": Case(r.rule, make) for r in rows for name, make in r.silent.items()}
    return speaking | silent


def first(context: RuleContext) -> Finding:
    """The headline of all rules together."""
    diagnosis = diagnose(context.facts, context.thresholds, predict_cures=False)
    assert not [u for u in diagnosis.untold if "fault" in u.record]
    return diagnosis.first


def check(case: Case) -> Answer:
    """The answer, which is as the table says."""
    answer = case.rule(case.make())
    if case.says is None:
        assert answer is None, answer
    elif case.says == UNTOLD:
        assert isinstance(answer, Undetermined) and answer.key == case.rule.__name__, answer
    else:
        assert isinstance(answer, Finding), answer
        if isinstance(case.says, str):
            assert answer.key == case.says
        else:
            assert answer.key == case.rule.__name__ or case.rule is first, answer.key
            us = answer.recoverable_us_per_step
            assert us == pytest.approx(case.says, rel=case.rel), us
    return answer


def _where(evidence: Evidence) -> str:
    return "" if evidence.span is None else " [{:,.1f} to {:,.1f} µs]".format(*(ns / 1e3 for ns in evidence.span))


def words(answer: Answer) -> str:
    """All that is said, one statement a line."""
    if answer is None:
        return "nothing"
    if isinstance(answer, Undetermined):
        return f"{answer.key}: untold\n{answer.what}: {answer.record}"
    us = answer.recoverable_us_per_step
    given = f"{us:,.0f} µs" if us is not None else f"once {answer.once_us:,.0f} µs" if answer.once_us else "no time"
    lines = [
        f"{answer.key}: {answer.level}, {answer.confidence}, {given} of {', '.join(answer.parts) or 'nothing'}",
        answer.summary,
        *(f"- {evidence.words}{_where(evidence)}" for evidence in answer.evidence),
    ]
    more = {
        "cure": answer.cure,
        "otherwise": answer.otherwise if answer.otherwise != answer.cure else "",
        "set": answer.knob,
        "line": answer.source_line,
        "title": answer.title,
        "only after": ", ".join(answer.only_after),
    }
    return "\n".join([*lines, *(f"{name}: {value}" for name, value in more.items() if value)])


def assert_golden(name: str, answers: Mapping[str, Answer]) -> None:
    """What is said in these cases is what stands in the golden text of that name."""
    spoken = {case: answer for case, answer in answers.items() if answer is not None}
    golden_text.check(name, "\n".join(f"## {case}\n{words(answer)}\n" for case, answer in spoken.items()))
