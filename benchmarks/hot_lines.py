"""Small datasets and loops with one hot line each: which line does gpulab name?

Each case is a file of `planted/lines` whose hot statement is marked `# HOT`; `KIND` says what runs it. A stopwatch
around that statement, in a run without gpulab, proves the mark: the statement takes most of the time that is asked
about (making the batches, or the loop's own step). A named line is right where it lies in the marked statement, wrong
elsewhere; to name none, or only the function, is neither.
"""

from __future__ import annotations

import ast
import importlib
import linecache
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.harness import ROOT, Figure, in_own_process
from planted.catalogue import FOLDER
from planted.judge import HOT_MARK, score_of_line

LINES = FOLDER / "lines"
SHARED = ("common", "tokenizer")  # what cases import
CASES = tuple(sorted(path.stem for path in LINES.glob("*.py") if path.stem not in SHARED))
LEAST_SHARE = 0.7  # of a case's time, by the stopwatch; else the case has no hot line
WORKERS = (0, 2)
_STOPWATCH = "_stopwatch"


def measure(cases: tuple[str, ...] = CASES) -> dict[str, object]:
    """Every case in a process of its own; those with a dataset without workers and with two."""
    rows = []
    for case in cases:
        rows += in_own_process(__name__, "rows_of", case=case)["rows"]
        print("\n".join(f"  {r['case']}, {r['workers']}: {r['score']} {r['named']}" for r in rows[-2:]), flush=True)
    hot = [row for row in rows if row["share"] >= LEAST_SHARE]
    counts = Counter(row["score"] for row in hot)
    return {
        "load_average": os.getloadavg(),
        "asked": len(hot),
        "score": {score: counts[score] for score in ("right", "function", "none", "wrong")},
        "least_share": LEAST_SHARE,
        "rows": rows,
    }


def rows_of(case: str) -> dict[str, Any]:
    """A case's rows: what the stopwatch says, and what is named."""
    module = importlib.import_module(f"planted.lines.{case}")
    file, lines = marked(case)
    named = {workers: _named(module, workers) for workers in (WORKERS if module.KIND == "items" else (0,))}
    truth = share(case)
    return {
        "rows": [
            {
                "case": case,
                "because": (module.__doc__ or "").strip(),
                "workers": workers if module.KIND == "items" else None,
                "share": truth,
                "named": line.replace(str(ROOT) + os.sep, ""),
                "score": score_of_line(line, file, lines),
            }
            for workers, line in named.items()
        ]
    }


def _named(module: Any, workers: int) -> str:
    """The first line that the findings of a run name; empty for none."""
    import gpulab

    with tempfile.TemporaryDirectory() as folder:
        os.environ["GPULAB_DIR"] = folder
        here = Path.cwd()
        os.chdir(folder)
        try:
            with gpulab.profile(show=False, save=False) as profiled:
                module.main(workers)
        finally:
            os.chdir(here)
    findings = gpulab.diagnose(profiled.run).findings
    return next((finding.source_line for finding in findings if finding.source_line), "")


# -- the stopwatch around the marked statement -------------------------------------------------------------------------


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
    own = LINES / f"{case}.py"
    return [LINES / "tokenizer.py", own] if "lines.tokenizer" in own.read_text() else [own]


def marked(case: str) -> tuple[str, range]:
    """The file and the lines of the hot statement."""
    for path in files_of(case):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if line.endswith(HOT_MARK):
                statement = next(s for s in _statements(path) if s.lineno == number)
                return str(path), range(number, (statement.end_lineno or number) + 1)
    raise ValueError(f"no line of {case} is marked")


def _statements(path: Path) -> Iterator[ast.stmt]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.stmt))


def share(case: str) -> float:
    """Of the time that is asked about, what the hot statement takes, in the training process without gpulab."""
    stopwatch = Stopwatch()
    module = _with_stopwatch(case, stopwatch)
    whole = Stopwatch()
    if module.KIND == "step":
        with whole:
            module.main(0)
    else:
        with _batches(whole):
            module.main(0)
    return stopwatch.total_s / whole.total_s


@contextmanager
def _batches(stopwatch: Stopwatch) -> Iterator[None]:
    """The stopwatch runs while a batch is made."""
    from torch.utils.data._utils.fetch import _MapDatasetFetcher as Fetcher

    fetch = Fetcher.fetch
    Fetcher.fetch = lambda *given: stopwatch.within(lambda: fetch(*given))  # type: ignore[method-assign]
    try:
        yield
    finally:
        Fetcher.fetch = fetch  # type: ignore[method-assign]


def _with_stopwatch(case: str, stopwatch: Stopwatch) -> ModuleType:
    """The case's module with the stopwatch in it."""
    _, lines = marked(case)
    for path in files_of(case):
        name = f"planted.lines.{path.stem}"
        module = ModuleType(name)
        module.__dict__[_STOPWATCH], module.__file__ = stopwatch, str(path)
        tree = ast.parse(path.read_text())
        if HOT_MARK + "\n" in path.read_text():
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
            inner.body = ast.Call(ast.Attribute(ast.Name(_STOPWATCH, ast.Load()), "within", ast.Load()), [given], [])
            return node
        if isinstance(node, ast.stmt) and node.lineno == self._line:
            return ast.With([ast.withitem(ast.Name(_STOPWATCH, ast.Load()))], [node], None)
        return self.generic_visit(node)


# -- for people --------------------------------------------------------------------------------------------------------


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """How many lines are right, wrong or not named, where a batch is made and in the loop's own step."""
    rows = [row for row in results["rows"] if row["share"] >= results["least_share"]]
    for name, workers in (("dataset, no workers", 0), ("dataset, 2 workers", 2), ("the loop's own step", None)):
        some = [row["score"] for row in rows if row["workers"] == workers]
        yield Figure.share(f"line right, {name}", some.count("right"), len(some))
    scores = [row["score"] for row in rows]
    yield Figure.share("line right, all", scores.count("right"), len(scores), "right")
    yield Figure.count("only the function is named", scores.count("function"), len(scores))
    yield Figure.count("none is named", scores.count("none"), len(scores))
    yield Figure.count("another line is named", scores.count("wrong"), len(scores), "wrong")
