"""The words of gpulab's names, and how often a name from a private dialect is left.

`python -m tests.documents.vocabulary` writes the counts that
`test_vocabulary.py` allows, and refuses to raise their sum.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import ROOT

PACKAGE = ROOT / "gpulab"
GLOSSARY = ROOT / "docs" / "glossary.md"
ALLOWED = Path(__file__).with_suffix(".txt")
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


def dialect_parameters(source: str) -> int:
    """Parameters of functions that are called `found`, `told`, `known` or `made`."""
    return sum(parameter.arg in DIALECT for parameter in _parameters(ast.parse(source)))


def _parameters(tree: ast.AST) -> Iterator[ast.arg]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.arg))


def dialect_counts() -> Counter[str]:
    """Per module how many such parameters there are; modules without one are left out."""
    counts = {
        path.relative_to(ROOT).as_posix(): dialect_parameters(path.read_text(encoding="utf-8")) for path in modules()
    }
    return Counter({path: count for path, count in counts.items() if count})


def allowed_counts() -> Counter[str]:
    """Per module how many the list allows."""
    lines = ALLOWED.read_text(encoding="utf-8").splitlines()
    return Counter({path: int(count) for path, count in (line.rsplit(maxsplit=1) for line in lines)})


def main() -> int:
    """Write the counts of today; 1 where there are more than the list allows."""
    today = dialect_counts()
    if ALLOWED.exists() and today.total() > allowed_counts().total():
        print(f"{today.total()} parameters are called {', '.join(sorted(DIALECT))}: more than before. Rename some.")
        return 1
    ALLOWED.write_text("".join(f"{path} {count}\n" for path, count in sorted(today.items())), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
