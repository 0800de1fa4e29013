"""Training loops whose cause is a library that gpulab does not list, or a module of the user's: is it named?

Each case is a cell of `planted/unlisted`; its line marked `# HOT` takes at least a quarter of a step, as a stopwatch
around that statement shows in runs without gpulab, before and after the profiled one. `right`: the finding names this
line, and in its words the callee, with a share within five points of the stopwatch's. `python -m benchmarks.unlisted
NAME…` runs some and keeps no result.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import Figure, in_own_process
from benchmarks.hot_lines import _WATCH, Stopwatch, _Around
from benchmarks.planted import folder_of_its_own, in_notebook
from planted.catalogue import FOLDER, code_of, header_and_code, parted
from planted.judge import HOT_MARK
from planted.stopwatch import Clock, Enough, by_optimizer, execute, hushed, notebook

CELLS = FOLDER / "unlisted"
CASES = tuple(sorted(path.stem for path in CELLS.glob("*.py")))
LEAST_SHARE, WITHIN = 0.25, 0.05  # of a step
WARMUP, STEPS = 10, 150


def measure(cases: tuple[str, ...] = CASES) -> dict[str, object]:
    """Every case in a process of its own."""
    rows = []
    for case in cases:
        rows.append(row := in_own_process("benchmarks.unlisted", "row_of", case=case))
        print(f"  {'ok   ' if row['right'] else 'WRONG'} {case:26} {row['share']:.1%} {row['said']}", flush=True)
    return {"load_average": os.getloadavg(), "rows": rows}


def row_of(case: str) -> dict[str, Any]:
    """What the stopwatch says of a case, and what gpulab does."""
    header = tomllib.loads(header_and_code((CELLS / f"{case}.py").read_text())[0])
    with folder_of_its_own(gpu=False), _own_modules():
        before = _share(case)
        run = in_notebook(*_texts(case))
        after = _share(case)
    share, step_us = (before["share"] + after["share"]) / 2, (before["step_us"] + after["step_us"]) / 2
    return {
        "case": case,
        "because": header["because"],
        "own": "own" in header,
        "share": share,
        "shares": [before["share"], after["share"]],
        "step_us": step_us,
        **judged(run, header["callee"], share),
    }


def judged(run: Any, callee: str, share: float) -> dict[str, Any]:
    """The finding that names the marked line, else the first."""
    import gpulab

    findings = gpulab.diagnose(run).findings
    finding = next((f for f in findings if HOT_MARK in f.source_line), findings[0])
    words = next((w for w in (finding.summary, *(e.words for e in finding.evidence)) if callee in w), finding.summary)
    percents = re.findall(r"(\d+(?:\.\d+)?) %", words)
    said = float(percents[0]) / 100 if percents else None
    row = {
        "finding": finding.key,
        "said": words,
        "named": finding.source_line,
        "line": HOT_MARK in finding.source_line,
        "callee": callee in words,
        "said_share": said,
        "close": said is not None and abs(said - share) <= WITHIN,
    }
    return row | {"right": bool(row["line"] and row["callee"] and row["close"])}


def _texts(case: str) -> tuple[str, str]:
    return parted(code_of(CELLS / f"{case}.py"))


@contextlib.contextmanager
def _own_modules() -> Iterator[None]:
    """The user's modules lie beside the notebook."""
    for path in (CELLS / "modules").glob("*.py"):
        shutil.copy(path, ".")
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        sys.path.pop(0)


class _Both(Clock):
    """Beside the steps it notes what the stopwatch has counted when they begin."""

    def __init__(self, watch: Stopwatch) -> None:
        super().__init__(WARMUP, STEPS)
        self._watch, self.before_s = watch, 0.0

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        super().__call__(optimizer, args, kwargs)
        if self._count == self._warmup:
            self.before_s = self._watch.total_s


def _share(case: str) -> dict[str, float]:
    """Of a step, what the marked statement takes, without gpulab."""
    watch = Stopwatch()
    clock = _Both(watch)
    names = notebook(_watched(_texts(case)[0]), case)
    names[_WATCH] = watch
    with by_optimizer(clock), hushed(), contextlib.suppress(Enough):
        execute(_watched(_texts(case)[1]), names, f"<{case}>")
    if clock.seconds is None:
        raise RuntimeError(f"{case} ended before its step {WARMUP + STEPS}")
    return {"share": (watch.total_s - clock.before_s) / clock.seconds, "step_us": clock.seconds / STEPS * 1e6}


def _watched(text: str) -> str:
    """With the stopwatch around the marked statement."""
    lines = text.splitlines()
    hot = next((i for i, line in enumerate(lines, start=1) if line.endswith(HOT_MARK)), 0)
    return ast.unparse(ast.fix_missing_locations(_Around(hot).visit(ast.parse(text)))) if hot else text


# -- for people --------------------------------------------------------------------------------------------------------


def figures(kept: Mapping[str, Any]) -> Iterator[Figure]:
    """How many are named, by what is right of them."""
    rows = [row for row in kept["rows"] if row["share"] >= LEAST_SHARE]
    yield Figure.share("line, callee and share right", sum(row["right"] for row in rows), len(rows), "right")
    for what, key in (("line", "line"), ("callee", "callee"), ("share within five points", "close")):
        yield Figure.share(f"… {what}", sum(row[key] for row in rows), len(rows))
    off = [abs(row["said_share"] - row["share"]) for row in rows if row["right"]]
    yield Figure("share, furthest off", max(off) if off else None, "%")


if __name__ == "__main__":
    measure(tuple(sys.argv[1:]) or CASES)
