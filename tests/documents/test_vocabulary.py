"""Names are words of the glossary, and nouns."""

from __future__ import annotations

import ast
import re

import gpulab
from tests.documents.vocabulary import (
    GLOSSARY,
    PACKAGE,
    dialect_names,
    explained,
    glossary_words,
    modules,
    words_of,
)
from tests.support.paths import TESTS

WORDS = glossary_words(GLOSSARY.read_text(encoding="utf-8"))


def unexplained(names: set[str]) -> dict[str, list[str]]:
    missing = {name: [word for word in words_of(name) if not explained(word, WORDS)] for name in names}
    return {name: words for name, words in missing.items() if words}


def test_every_module_and_folder_uses_words_of_the_glossary() -> None:
    names = {part for path in modules() for part in path.relative_to(PACKAGE).with_suffix("").parts}
    names -= {"__init__", "__main__"}
    assert len(names) > 150
    assert unexplained(names) == {}, "explain these words in docs/glossary.md, or use words that stand there"


def test_every_public_name_is_made_of_words_of_the_glossary() -> None:
    tree = ast.parse((PACKAGE / "run.py").read_text(encoding="utf-8"))
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assert {"Run", "Timeline"} <= classes
    assert unexplained({*gpulab.__all__, *classes}) == {}, "explain these words in docs/glossary.md"


def test_a_word_that_is_not_explained_is_noticed() -> None:
    assert words_of("device_peaks") == ["device", "peaks"]
    assert words_of("StepFlag") == ["step", "flag"]
    assert unexplained({"device_peaks", "riddle_of_steps"}) == {"riddle_of_steps": ["riddle", "of"]}


def test_no_name_is_a_participle() -> None:
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in modules()}
    names = {path: list(dialect_names(source)) for path, source in sources.items()}
    keys_of_stored_runs = {"run.py": ["found"]}
    assert {path: of_module for path, of_module in names.items() if of_module} == keys_of_stored_runs


def test_a_participle_is_noticed_wherever_it_stands() -> None:
    source = "def f(found, *told, known=1, **made): ...\nasync def made(x, /): ...\nh = lambda found: found"
    assert len(list(dialect_names(source))) == 6
    assert set(dialect_names("self._known = found = 1\nclass A:\n    told: int")) == {"found", "_known", "told"}
    assert not list(dialect_names("finding = found(known)"))


def test_no_name_of_a_test_is_over_60_characters() -> None:
    files = sorted(TESTS.rglob("test_*.py"))
    names = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text(encoding="utf-8"))}
    assert len(names) > 1500
    assert [name for name in sorted(names) if len(name) > 60] == []
