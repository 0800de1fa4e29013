"""To which statement and which loop a line of the user's belongs, as its source text tells."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence

Unit = tuple[int, int]  # first and last line

_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_COMPOUND = (*_LOOPS, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.Match)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_LONGEST = 50_000  # lines: a longer source is not looked at


def units_of(lines: Sequence[str], line: int) -> tuple[Unit, ...]:
    """What encloses this line within its function, the innermost first: its statement of several lines, and loops."""
    if len(lines) > _LONGEST:
        return ()
    within = [unit for unit in _units("".join(_ended(lines))) if unit[0] <= line <= unit[1]]
    scope = max((unit for unit in within if unit[2] == "scope"), key=lambda unit: unit[0], default=(0, 0, "scope"))
    return tuple(
        sorted(((a, b) for a, b, kind in within if kind == "unit" and a > scope[0]), key=lambda u: u[1] - u[0])
    )


def _ended(lines: Sequence[str]) -> Iterator[str]:
    return (line if line.endswith("\n") else line + "\n" for line in lines)


@functools.lru_cache(maxsize=16)
def _units(source: str) -> tuple[tuple[int, int, str], ...]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    return tuple(_of_tree(tree))


def _of_tree(tree: ast.AST) -> Iterator[tuple[int, int, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or node.end_lineno is None:
            continue
        if isinstance(node, _SCOPES):
            yield node.lineno, node.end_lineno, "scope"
        elif isinstance(node, _LOOPS) or (not isinstance(node, _COMPOUND) and node.end_lineno > node.lineno):
            yield node.lineno, node.end_lineno, "unit"
