"""Proves the mark of a case: how much of the time goes to the marked statement, by a stopwatch around it."""

from __future__ import annotations

import ast
import linecache
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

MARK = "# HOT"
HERE = Path(__file__).parent
_WATCH = "_stopwatch"


class Stopwatch:
    """Runs while a marked statement does; of nested runs only the outermost counts."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._depth = 0
        self._began_s = 0.0

    def __enter__(self) -> None:
        if not self._depth:
            self._began_s = time.perf_counter()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.total_s += time.perf_counter() - self._began_s

    def within(self, call: Callable[[], Any]) -> Any:
        with self:
            return call()


def files_of(case: str) -> list[Path]:
    """The case's own file, and those of ours that it imports."""
    own = HERE / "cases" / f"{case}.py"
    return [HERE / "tokenizer.py", own] if "hot_lines.tokenizer" in own.read_text() else [own]


def marked(case: str) -> tuple[str, range]:
    """The file and the lines of the hot statement."""
    for path in files_of(case):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if line.endswith(MARK):
                statement = next(s for s in _statements(path) if s.lineno == number)
                return str(path), range(number, (statement.end_lineno or number) + 1)
    raise ValueError(f"no line of {case} is marked")


def _statements(path: Path) -> Iterator[ast.stmt]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.stmt))


def share(case: str) -> float:
    """Of the time that is asked about, what the hot statement takes, in the training process without gpulab."""
    watch = Stopwatch()
    module = _watched(case, watch)
    whole = Stopwatch()
    if module.KIND == "step":
        with whole:
            module.main(0)
    else:
        with _batches(whole):
            module.main(0)
    return watch.total_s / whole.total_s


@contextmanager
def _batches(watch: Stopwatch) -> Iterator[None]:
    """The stopwatch runs while a batch is made."""
    from torch.utils.data._utils.fetch import _MapDatasetFetcher as Fetcher

    fetch = Fetcher.fetch
    Fetcher.fetch = lambda *given: watch.within(lambda: fetch(*given))  # type: ignore[method-assign]
    try:
        yield
    finally:
        Fetcher.fetch = fetch  # type: ignore[method-assign]


def _watched(case: str, watch: Stopwatch) -> ModuleType:
    """The case's module with the stopwatch in it."""
    _, lines = marked(case)
    for path in files_of(case):
        name = "benchmarks.hot_lines." + ".".join(path.relative_to(HERE).with_suffix("").parts)
        module = ModuleType(name)
        module.__dict__[_WATCH], module.__file__ = watch, str(path)
        tree = ast.parse(path.read_text())
        if MARK + "\n" in path.read_text():
            tree = ast.fix_missing_locations(_Around(lines.start).visit(tree))
        sys.modules[name] = module
        linecache.checkcache(str(path))
        exec(compile(tree, str(path), "exec"), module.__dict__)
    return module


class _Around(ast.NodeTransformer):
    """Puts the statement of that line into `with _stopwatch:`; of a lambda, what it gives."""

    def __init__(self, line: int) -> None:
        self._line = line

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda) and node.lineno == self._line:
            inner = node.value
            given = ast.Lambda(ast.arguments([], [], None, [], [], None, []), inner.body)
            inner.body = ast.Call(ast.Attribute(ast.Name(_WATCH, ast.Load()), "within", ast.Load()), [given], [])
            return node
        if isinstance(node, ast.stmt) and node.lineno == self._line:
            return ast.With([ast.withitem(ast.Name(_WATCH, ast.Load()))], [node], None)
        return self.generic_visit(node)
