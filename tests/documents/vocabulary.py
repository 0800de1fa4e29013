"""The words of gpulab's names, and names that are no nouns."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import ROOT

PACKAGE = ROOT / "gpulab"
GLOSSARY = ROOT / "docs" / "glossary.md"
DIALECT = frozenset({"found", "told", "known", "made"})  # past participles in place of a noun

_CAMEL = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+")


def modules() -> list[Path]:
    """Every Python file of the package."""
    return sorted(path for path in PACKAGE.rglob("*.py") if "node_modules" not in path.parts)


def words_of(name: str) -> list[str]:
    """`device_peaks` and `StepFlag` as their words, in lower case."""
    return [word.lower() for word in _CAMEL.findall(name)]


def glossary_words(text: str) -> set[str]:
    """Every word that stands in the first column of a table."""
    first = re.findall(r"^\| ([^|]+) \|", text, flags=re.MULTILINE)
    return {word for cell in first for word in re.findall(r"[a-z0-9]+", cell.lower())} - {"word"}


def explained(word: str, glossary: set[str]) -> bool:
    """Whether the glossary has the word, in singular or plural."""
    return not glossary.isdisjoint(
        {word, f"{word}s", word.removesuffix("s"), word.removesuffix("es"), re.sub("ies$", "y", word)}
    )


def dialect_names(source: str) -> Iterator[str]:
    """Variables, parameters, fields, functions and classes that are called `found`, `told`, `known` or `made`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        else:
            continue
        if name.strip("_") in DIALECT:
            yield name
