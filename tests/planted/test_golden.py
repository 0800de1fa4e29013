"""The golden answers are a net: the same answer passes, and each kind of change is one line."""

from __future__ import annotations

from typing import Any

import pytest

from planted.golden import answers, cases
from tests.lint import SENTENCE_WORDS, words_of_sentences

KEPT: dict[str, Any] = {"report": {"step_us": 2.0, "findings": [{"key": "launch_bound"}], "unknown": None}, "count": 3}


@pytest.mark.parametrize(
    ("now", "line"),
    [
        (KEPT, None),
        ({**KEPT, "report": {**KEPT["report"], "step_us": 2.0 * (1 + 1e-12)}}, None),
        ({**KEPT, "report": {**KEPT["report"], "step_us": 2.0001}}, "report.step_us: 2.0 → 2.0001"),
        ({**KEPT, "report": {**KEPT["report"], "unknown": 0.0}}, "report.unknown: None → 0.0"),
        ({**KEPT, "count": True}, "count: 3 → True"),
        ({**KEPT, "count": 3.0}, None),
        ({"report": KEPT["report"]}, "count: 3 → absent"),
        (
            {**KEPT, "report": {**KEPT["report"], "findings": []}},
            "report.findings[0]: {'key': 'launch_bound'} → absent",
        ),
    ],
)
def test_each_change_is_one_line(now: dict[str, Any], line: str | None) -> None:
    assert list(answers.differences(KEPT, now)) == ([] if line is None else [line])


def test_no_sentence_of_a_headline_is_long() -> None:
    headlines = [kept["report"]["headline"] for kept in answers.load().values()]
    texts = {headline[key] for headline in headlines for key in ("sentence", "evidence")}
    sentences = [words for text in texts for _, words in words_of_sentences(text)]
    assert len(sentences) > 500 and [" ".join(words) for words in sentences if len(words) > SENTENCE_WORDS] == []


def test_a_simulated_loop_still_has_its_kept_answer() -> None:
    kept = answers.load()
    loops = [name for name in kept if name.startswith("loop ")]
    assert len(loops) > 250 and sum(name.startswith("run ") for name in kept) > 50
    name = loops[len(loops) // 2]
    assert list(answers.differences(kept[name], answers.answer(cases.Case(name, "loop")))) == []
