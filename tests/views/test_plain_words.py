"""Sentences that readers had to read twice are not written again."""

from __future__ import annotations

import ast

import pytest

from tests.support.paths import ROOT

WORN = (
    "Next comes ",
    "the batch of them",
    "made in turn by",
    "ready to go on and no core",
    "training is another one",
    "is the account of their time",
    "no core works",
    "as such: what it does",
    "Nothing that gpulab tried to measure",
    "taken from the others",
)
WRITTEN = [
    (path.relative_to(ROOT), node.value)
    for path in sorted((ROOT / "gpulab").rglob("*.py"))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
]


@pytest.mark.parametrize("words", WORN)
def test_a_worn_sentence_is_not_written_again(words: str) -> None:
    assert len(WRITTEN) > 5_000
    assert [path for path, text in WRITTEN if words in text] == []
