"""Trainings rebuilt from public reports of slow training: is the cause named at first contact?

Each is a cell of `planted/reports`, written by somebody who has not read the rules, with the thread that it was built
from, its cause and how much faster it is without; or healthy. Each ran once before any rule was changed for it, then
the findings were read with the cause known. `verdict` in the result is what was decided: "right" (the first finding
names the cause, at its line or callee), "half" (a later one does, or the first names the part of the step without its
cause), "silent" (no cause is named), "false" (another is). `python -m benchmarks.reports NAME…` runs some and keeps no
result; `--keep` adds what a cell says at its first run, which is never measured again.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.harness import RESULTS, Figure, in_own_process
from benchmarks.planted import folder_of_its_own, in_notebook
from planted.catalogue import FOLDER, code_of, header_and_code, split_at_mark

CELLS = FOLDER / "reports"
CASES = tuple(sorted(path.stem for path in CELLS.glob("*.py")))
FILE = RESULTS / "reports.json"
VERDICTS = ("right", "half", "silent", "false")
_SAID = 3  # findings that are kept


def measure() -> dict[str, object]:
    """What was said at the first run; nothing is run again."""
    results: dict[str, object] = json.loads(FILE.read_text(encoding="utf-8"))
    return results


def row_of(case: str) -> dict[str, Any]:
    """What gpulab says of a cell."""
    import torch

    import gpulab
    from gpulab.devices.machine import usable_cores

    torch.set_num_threads(int(usable_cores() or 1))  # as at home: the harness gives a process one
    header = tomllib.loads(header_and_code((CELLS / f"{case}.py").read_text(encoding="utf-8"))[0])
    with folder_of_its_own(gpu=False):
        run = in_notebook(*split_at_mark(code_of(CELLS / f"{case}.py")))
        diagnosis = gpulab.diagnose(run)
    said = [
        {
            "finding": finding.key,
            "summary": finding.summary,
            "line": finding.source_line,
            "evidence": [evidence.words for evidence in finding.evidence],
        }
        for finding in diagnosis.findings[:_SAID]
    ]
    return {
        "case": case,
        **{key: header.get(key) for key in ("cohort", "because", "line", "callee", "faster")},
        "said": said,
    }


def run(cases: tuple[str, ...], *, keep: bool) -> None:
    """Each in a process of its own; printed."""
    results = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {"rows": []}
    known = {row["case"] for row in results["rows"]}
    for case in cases:
        row = in_own_process("benchmarks.reports", "row_of", case=case)
        print(f"\n## {case}: {row['because']} [{row['faster']}×] at {row['line']}")
        for finding in row["said"]:
            print(f"  - {finding['finding']}: {finding['summary']} | {finding['line']}", flush=True)
        if keep and case not in known:
            results["rows"].append(row)
            FILE.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """How many causes were named, missed and invented."""
    for cohort in ("first", "second", "third", "fourth"):
        rows = [row for row in results["rows"] if row.get("verdict") in VERDICTS and row["cohort"] == cohort]
        healthy = [r for r in rows if r["because"] == "healthy"]
        planted = [r for r in rows if r not in healthy]
        for verdict in VERDICTS:
            key = verdict if verdict in ("right", "false") else ""
            count = sum(r["verdict"] == verdict for r in planted)
            yield Figure.share(f"{cohort} set: {verdict}", count, len(planted), key)
        count = sum(r["verdict"] == "right" for r in healthy)
        yield Figure.share(f"{cohort} set: healthy, and no cause named", count, len(healthy), "healthy")


if __name__ == "__main__":
    names = tuple(name for name in sys.argv[1:] if not name.startswith("-"))
    run(names or CASES, keep="--keep" in sys.argv)
