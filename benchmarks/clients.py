"""Public trainings, unmodified, under `gpulab record`: right steps, the same printed lines, and what it costs.

GPULAB_CLIENTS names a folder with one folder per training: `run.sh`, whose arguments stand in place of the
interpreter, and `steps.txt`, which begins with the number of updates, counted or read without gpulab.
`python -m benchmarks.clients [NAME…]` runs some plainly and recorded, three times in turn: of each the fastest counts,
for whatever else a machine does only adds. Rows are kept by name.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, ROOT, Figure, save

FOLDER = "GPULAB_CLIENTS"
ROUNDS = 3
MOST_BYTES, MOST_S, MOST_FRACTION = 300 * 2**20, 2.0, 0.05
_TIMES = "|".join(
    (
        r"\d+(\.\d+)?(e[-+]?\d+)?\s*(it/s|m?s/it|m?s/step|seconds|secs?|ms|us|s)\b",
        r"\d+:\d\d(:\d\d)?(\.\d+)?|\d{4}-\d\d-\d\d|0x[0-9a-f]+|\d{9,}|mfu -?[\d.]+%",
        r"(ms/batch|SPS:?|fps|time\w*:?|\w*time'?:|Elapsed|iter_dt|speed:|\w*_per_second'?:)\W*[\d.e+-]+",
    )
)


def rows_of(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One row per training. Raises KeyError where GPULAB_CLIENTS is not set."""
    for name in names:
        folder = Path(os.environ[FOLDER], name)
        said = re.search(r"^# (\S+?),", (folder / "run.sh").read_text(encoding="utf-8"), re.MULTILINE)
        pairs = [(run(folder), run(folder, record=True)) for _ in range(ROUNDS)]
        plain, recorded = pairs[0]
        differing = _missing(plain["lines"], recorded["lines"])
        loose = _missing(plain["lines"], pairs[1][0]["lines"]) if differing else []
        yield {
            "name": name,
            "source": said[1].replace("+", "/") if said else "",
            "steps": int((folder / "steps.txt").read_text(encoding="utf-8").split()[0]),
            **recorded["figures"],
            "lines": len(plain["lines"]),
            "differing": [] if loose else differing,
            "not_reproducible": len(loose),
            **{f"plain_{key}": plain[key] for key in ("status", "peak_bytes")},
            **{key: recorded[key] for key in ("status", "peak_bytes")},
            **{f"plain_{key}": min(of_plain[key] for of_plain, _ in pairs) for key in ("wall_s", "cpu_s")},
            **{key: min(of_recorded[key] for _, of_recorded in pairs) for key in ("wall_s", "cpu_s")},
            "walls_s": [[of_plain["wall_s"], of_recorded["wall_s"]] for of_plain, of_recorded in pairs],
        }


def run(folder: Path, *, record: bool = False) -> dict[str, Any]:
    """One run: what it printed to stdout but times, its status, wall and CPU seconds, and the largest process' peak."""
    with tempfile.TemporaryDirectory() as scratch:
        figures, printed = Path(scratch, "run.json"), Path(scratch, "printed")
        words, environment = [str(folder / "run.sh"), sys.executable], {**os.environ, "PYTHONPATH": ""}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled
        if record:
            words[1] += f" -m gpulab record --json {figures}"
            environment |= {"GPULAB_DIR": str(Path(scratch, "runs")), "PYTHONPATH": str(ROOT)}
        began = time.monotonic()
        with printed.open("wb") as out, subprocess.Popen(
            words, stdout=out, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, env=environment
        ) as process:  # fmt: skip
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        report = json.loads(figures.read_text(encoding="utf-8")) if figures.exists() else {}
        headline = report.get("headline") or {}
        return {
            "status": process.returncode,
            "wall_s": time.monotonic() - began,
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "peak_bytes": usage.ru_maxrss * 1024,
            "lines": _lines(printed.read_text(encoding="utf-8", errors="replace")),
            "figures": {
                "step_count": report.get("step_count"),
                "step_source": report.get("step_source"),
                "finding": headline.get("key"),
                "said": (headline.get("sentence") or "").replace(f"{folder}/", ""),
            },
        }


def _lines(text: str) -> list[str]:
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x08", "", text)
    lines = (" ".join(re.sub(_TIMES, "#", line).split()) for line in re.split(r"[\n\r]", plain))
    return [line for line in lines if line]


def _missing(lines: Sequence[str], among: Sequence[str]) -> list[str]:
    """Those that do not follow there in this order."""
    same = difflib.SequenceMatcher(None, lines, among, autojunk=False).get_matching_blocks()
    there = {block.a + i for block in same for i in range(block.size)}
    return [line for i, line in enumerate(lines) if i not in there]


def more_s(row: Mapping[str, Any]) -> float:
    """Wall time that recording adds, beyond what is allowed; negative where it stays below."""
    return float(row["wall_s"] - row["plain_wall_s"] * (1 + MOST_FRACTION) - MOST_S)


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """How many keep each promise."""
    rows = results["rows"]
    added = [(row["peak_bytes"] - row["plain_peak_bytes"]) / 2**20 for row in rows]
    yield Figure.share(
        "ends as without gpulab", sum(r["status"] == r["plain_status"] for r in rows), len(rows), "lines"
    )
    yield Figure.share("right steps", sum(row["step_count"] == row["steps"] for row in rows), len(rows), "steps")
    alike = [row for row in rows if not row["not_reproducible"]]
    what = "same lines on stdout, where two plain runs print the same"
    yield Figure.share(what, sum(not row["differing"] for row in alike), len(alike), "lines")
    small = sum(a * 2**20 <= MOST_BYTES for a in added)
    yield Figure.share("at most 300 MiB more memory", small, len(rows), "memory")
    yield Figure("most memory added", max(added), "MiB")
    yield Figure.share("at most 5 % + 2 s more time", sum(more_s(row) <= 0 for row in rows), len(rows), "time")


def notes(results: Mapping[str, Any]) -> Iterator[str]:
    """What each is, and what was said of it."""
    for row in results["rows"]:
        steps = f"{row['step_count']} of {row['steps']} steps"
        yield f"- {row['source']}: {steps}, {row['plain_wall_s']:.0f} s → {row['wall_s']:.0f} s. “{row['said']}”"


def main() -> None:
    """Run the named ones, all without a name."""
    names = sys.argv[1:] or sorted(path.parent.name for path in Path(os.environ[FOLDER]).glob("*/steps.txt"))
    file = RESULTS / "clients.json"
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
    for row in rows_of(names):
        rows = [*(other for other in rows if other["name"] != row["name"]), row]
        save("clients", {"rows": rows})
        print(f"  {row['name']:22} {row['step_count']} of {row['steps']}, {row['said']}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
