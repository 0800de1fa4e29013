"""Names are words of the glossary; parameters named by a past participle become fewer and never more."""

from __future__ import annotations

import ast

import gpulab
from tests.documents.vocabulary import (
    GLOSSARY,
    PACKAGE,
    allowed_counts,
    dialect_counts,
    dialect_parameters,
    explained,
    glossary_words,
    modules,
    words_of,
)

WORDS = glossary_words(GLOSSARY.read_text(encoding="utf-8"))


def unexplained(names: set[str]) -> dict[str, list[str]]:
    missing = {name: [word for word in words_of(name) if not explained(word, WORDS)] for name in names}
    return {name: words for name, words in missing.items() if words}


def test_every_module_and_folder_is_made_of_words_of_the_glossary() -> None:
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


def test_parameters_named_by_a_participle_become_fewer() -> None:
    today, allowed = dialect_counts(), allowed_counts()
    more = {path: (allowed[path], count) for path, count in today.items() if count > allowed[path]}
    assert not more, f"these modules have more parameters found, told, known or made than allowed: {more}"
    fewer = {path: (count, today[path]) for path, count in allowed.items() if today[path] < count}
    assert not fewer, f"well done; now run python -m tests.documents.vocabulary, which lowers the list: {fewer}"


def test_such_a_parameter_is_noticed_wherever_it_stands() -> None:
    source = "def f(found, *told, known=1, **made): ...\nasync def g(x, /, made): ...\nh = lambda found: found"
    assert dialect_parameters(source) == 6
    assert dialect_parameters("found = 1\ndef f(finding): known = finding") == 0
