"""Training loops whose cause is a library that gpulab does not list, or a module of the user's: is it named?

Each case is a cell of `planted/unlisted`; its line marked `# HOT` takes at least a quarter of a step, as a stopwatch
around that statement shows in the profiled run itself (`share_alone`: in a run without gpulab). `right`: the finding
line, and in its words the callee, with a share within five points of the stopwatch's. `python -m benchmarks.unlisted
NAME…` runs some and keeps no result.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.harness import Figure, in_own_process
from benchmarks.planted import folder_of_its_own, in_notebook
from planted.catalogue import FOLDER, code_of, header_and_code, split_at_mark
from planted.judge import HOT_MARK
from planted.stopwatch import Clock, Enough, by_optimizer, execute, hushed, notebook

CELLS = FOLDER / "unlisted"
CASES = tuple(sorted(path.stem for path in CELLS.glob("*.py")))
_STOPWATCH = "_stopwatch"
LEAST_SHARE, WITHIN = 0.25, 0.05  # of a step
WARMUP_PCT, STEPS = 10, 150


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
    watch = Stopwatch()
    setattr(builtins, _STOPWATCH, watch)
    with folder_of_its_own(gpu=False), _own_modules():
        alone, step_us = watch.share_of(case)
        run = in_notebook(*watch.texts(case))
    share = watch.share()
    return {
        "case": case,
        "because": header["because"],
        "own": "own" in header,
        "share": share,
        "share_alone": alone,
        "step_alone_us": step_us,
        **judgement(run, header["callee"], share),
    }


def judgement(run: Any, callee: str, share: float) -> dict[str, Any]:
    """The finding that names the marked line, as its own or in its words, else the first."""
    import gpulab

    numbers = [i for i, line in enumerate(run.code.splitlines(), start=2) if line.endswith(HOT_MARK)]  # below the magic
    in_words = tuple(f"called in your line {number}," for number in numbers)
    said_of = [(f, w) for f in gpulab.diagnose(run).findings for w in (f.summary, *(e.words for e in f.evidence))]
    named = [(f, w) for f, w in said_of if HOT_MARK in f.source_line or any(line in w for line in in_words)]
    finding, words = next((pair for pair in named if callee in pair[1]), (*named, *said_of)[0])
    percents = re.findall(r"(\d+(?:\.\d+)?) %", words)
    said = float(percents[0]) / 100 if percents else None
    row = {
        "finding": finding.key,
        "said": words,
        "named": finding.source_line,
        "line": bool(named),
        "callee": callee in words,
        "said_share": said,
        "close": said is not None and abs(said - share) <= WITHIN,
    }
    return row | {"right": bool(row["line"] and row["callee"] and row["close"])}


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


class Stopwatch:
    """Around the marked statement, which it leaves on its line; notes when each of its runs began and ended."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    def __enter__(self) -> None:
        self._began_s = perf_counter()

    def __exit__(self, *_: object) -> None:
        self._spans.append((self._began_s, perf_counter()))

    def share(self) -> float:
        """Of the time from one run of the statement to the next, after the warm-up, what it takes."""
        counted = self._spans[len(self._spans) * WARMUP_PCT // 100 :]
        return sum(end - begin for begin, end in counted[:-1]) / (counted[-1][0] - counted[0][0])

    def texts(self, case: str) -> tuple[str, str]:
        """The earlier cells and the cell with this around the statement. What was noted is forgotten."""
        self._spans.clear()
        text = re.sub(rf"^( *)(.+{HOT_MARK})$", rf"\1with {_STOPWATCH}: \2", code_of(CELLS / f"{case}.py"), flags=re.M)
        return split_at_mark(text)

    def share_of(self, case: str) -> tuple[float, float]:
        """The same of a run without gpulab, and the µs of a step."""
        before, cell = self.texts(case)
        names, clock = notebook(before, case), Clock(10, STEPS)
        with by_optimizer(clock), hushed(), contextlib.suppress(Enough):
            execute(cell, names, f"<{case}>")
        if clock.seconds is None:
            raise RuntimeError(f"{case} ended too early")
        return self.share(), clock.seconds / STEPS * 1e6


# -- for people --------------------------------------------------------------------------------------------------------


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """How many are named, by what is right of them."""
    rows = [row for row in results["rows"] if row["share"] >= LEAST_SHARE]
    yield Figure.share("line, callee and share right", sum(row["right"] for row in rows), len(rows), "right")
    for what, key in (("line", "line"), ("callee", "callee"), ("share within five points", "close")):
        yield Figure.share(f"… {what}", sum(row[key] for row in rows), len(rows))
    off = [abs(row["said_share"] - row["share"]) for row in rows if row["callee"]]
    yield Figure("share where a call is named, furthest off", max(off) if off else None, "%")


if __name__ == "__main__":
    measure(tuple(sys.argv[1:]) or CASES)
