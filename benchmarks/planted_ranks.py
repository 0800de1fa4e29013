"""Planted causes of a job: scripts for two ranks whose bottleneck is known beforehand, and what gpulab says of them.

Each script is recorded by `gpulab record --ranks`, and the first finding of the report of all ranks is held against
what was planted. What a script said at its first run is kept (`first_runs` in the result) and never measured again.
`python -m benchmarks.planted_ranks [NAME…] [--store FOLDER]` runs some while building and keeps no result;
`--stopwatch` measures instead, without gpulab, what the header of a script then says of its share.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import first_runs
from benchmarks.harness import RESULTS, ROOT, Figure
from planted.catalogue import HEALTHY, RANKS, PlantedRanks
from planted.judge import job_judgement
from planted.stopwatch import Clock, Enough, by_optimizer, execute, hushed

FILE = RESULTS / "planted_ranks.json"
LIMIT_S = 240.0
ROUNDS = 3  # of the stopwatch


def measure(store: Path | None = None) -> dict[str, object]:
    """All scripts, one after the other. `store`: where the runs and what was printed are kept; None: nowhere."""
    from gpulab.devices.machine import environment

    results, rows = _first_runs(), list[dict[str, Any]]()
    for planted in RANKS:
        rows.append(row_of(planted, store))
        when = f"{datetime.now(UTC):%Y-%m-%d}"
        results = first_runs.extended(results, rows, RANKS, date=when, cpu=environment().cpu)
        _keep(results)  # at once: no script has a second first run
    return {"totals": totals(rows), "rows": rows, "first_runs": results}


def row_of(planted: PlantedRanks, store: Path | None = None) -> dict[str, Any]:
    """What was planted and what was said. A script that fails is told, and does not end the others."""
    began = time.monotonic()
    row: dict[str, Any] = {
        "name": planted.name,
        "because": planted.because,
        "causes": list(planted.causes),
        "load": os.getloadavg()[0],
        "skipped": "",
        "failed": "",
    }
    try:
        row |= recorded(planted, store)
    except Exception as e:
        row["failed"] = f"{type(e).__name__}: {e}"
    row["seconds"] = time.monotonic() - began
    mark = "ok   " if row.get("right") else "WRONG"
    words = f"FAILED: {row['failed']}" if row["failed"] else ", ".join(row["findings"])
    about = f"{planted.name:26} {planted.cause:22} -> {words}, {row['seconds']:.0f} s, load {row['load']:.1f}"
    print(f"  {mark} {about}", file=sys.stderr, flush=True)
    return row


def totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A script that failed is not right."""
    sick, healthy = [row for row in rows if row["causes"]], [row for row in rows if not row["causes"]]
    return {
        "with_cause": len(sick),
        "right": sum(row.get("right", False) for row in sick),
        "healthy": len(healthy),
        "healthy_right": sum(row.get("right", False) for row in healthy),
        "failed": [row["name"] for row in rows if row["failed"]],
    }


def _first_runs() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if FILE.exists():
        found = json.loads(FILE.read_text(encoding="utf-8"))["first_runs"]
    return found


def _keep(cohorts: Sequence[Mapping[str, Any]]) -> None:
    """Into the result file, beside what else it has."""
    result = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {"rows": []}
    FILE.write_text(json.dumps({**result, "first_runs": cohorts}, indent=1) + "\n", encoding="utf-8")


# -- one script under gpulab ------------------------------------------------------------------------------------------


def recorded(planted: PlantedRanks, store: Path | None = None) -> dict[str, Any]:
    """Headline and findings. `store`: where the runs are kept, in a folder by its name.

    Raises RuntimeError where the command fails or ends without one report of all ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        script, figures = Path(folder, f"{planted.name}.py"), Path(folder, "figures.json")
        script.write_text(planted.text(), encoding="utf-8")
        store_folder = Path(folder, "kept") if store is None else store / planted.name
        words = [sys.executable, "-m", "gpulab", "record", "--ranks", str(planted.ranks)]
        printed = _output([*words, "--json", str(figures), str(script)], folder, store_folder)
        if not figures.exists():
            raise RuntimeError(f"no report: {' | '.join(printed.splitlines()[-5:])}")
        if store is not None:
            (store_folder / "printed.txt").write_text(printed, encoding="utf-8")
        return job_judgement(planted, json.loads(figures.read_text(encoding="utf-8")))


def _output(words: list[str], folder: str, store_folder: Path) -> str:
    """What the command prints. It and all its ranks are ended where they take too long."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "GPULAB_DIR": str(store_folder),
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "120",
    }
    environment.pop("OMP_NUM_THREADS", None)  # as at home: the launcher gives each rank its threads
    with subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            printed, _ = process.communicate(timeout=LIMIT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise RuntimeError(f"status {process.returncode}: {' | '.join(printed.splitlines()[-5:])}")
    return printed


# -- one script without gpulab -----------------------------------------------------------------------------------------


def measured(planted: PlantedRanks, rounds: int = ROUNDS) -> dict[str, float]:
    """Milliseconds per step, `written_ms` and `without_ms`: medians of runs by turns, and the least ratio's range."""
    texts = {"written_ms": planted.text(), "without_ms": planted.text(without=True)}
    times: dict[str, list[float]] = {arm: [] for arm in texts}
    for _ in range(rounds):
        for arm, text in texts.items():
            times[arm].append(_once(planted, text))
    shares = [1 - without / written for written, without in zip(*times.values(), strict=True)]
    medians = {arm: 1e3 * statistics.median(values) for arm, values in times.items()}
    return medians | {"least_share": min(shares), "largest_share": max(shares)}


def launcher_words(ranks: int) -> list[str]:
    """torchrun, for so many ranks of this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def _once(planted: PlantedRanks, text: str) -> float:
    """Seconds per step, the mean of the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, f"{planted.name}.py")
        program.write_text(text, encoding="utf-8")
        count = (str(planted.warmup), str(planted.steps))
        words = [*launcher_words(planted.ranks), "-m", "benchmarks.planted_ranks", "--rank", str(program), *count]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run(words, cwd=folder, env=environment, check=True, timeout=LIMIT_S)
        seconds = [float(file.read_text()) for file in Path(folder).glob("*.seconds")]
    if len(seconds) != planted.ranks:
        raise RuntimeError(f"{planted.name} ended before its step {planted.warmup + planted.steps}")
    return statistics.mean(seconds)


def _time_this_rank(program: Path, warmup: int, steps: int) -> None:
    """Leaves the seconds per step beside the program."""
    import torch.distributed as dist

    clock = Clock(warmup, steps)
    with by_optimizer(clock), hushed():
        try:
            execute(program.read_text(encoding="utf-8"), {"__name__": "__main__"}, str(program))
        except Enough:
            dist.barrier()
            dist.destroy_process_group()
    if clock.seconds is not None:
        program.with_name(f"{os.environ['RANK']}.seconds").write_text(repr(clock.seconds / steps))


# -- for people --------------------------------------------------------------------------------------------------------


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """Now, and at the first run."""
    t = results["totals"]
    right, of = t["right"] + t["healthy_right"], t["with_cause"] + t["healthy"]
    yield Figure.share("headline right now", right, of, "headline")
    for entry in results["first_runs"]:
        run = entry["first_run"]
        right = run["right"] + run["healthy"] - run["false_alarms"]
        yield Figure.share(f"{entry['cohort']}: headline right at the first run", right, entry["cells"], "headline")
        yield Figure.share(f"{entry['cohort']}: … of the scripts with a cause", run["right"], run["with_cause"])
        yield Figure.count(f"{entry['cohort']}: false alarms", run["false_alarms"], run["healthy"])
    yield Figure("highest load average before a script", max(row["load"] for row in results["rows"]))


def notes(results: Mapping[str, Any]) -> Iterator[str]:
    """Each script that is not right now."""
    for row in results["rows"]:
        if not row.get("right"):
            said = row["failed"] or row["headline"]
            yield f"- {row['name']}: {row['because']}. Planted {(*row['causes'], HEALTHY)[0]}, said {said}"


def main() -> None:
    """Without a name all scripts."""
    if sys.argv[1:2] == ["--rank"]:
        return _time_this_rank(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    parser = argparse.ArgumentParser(prog="benchmarks.planted_ranks", description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--store", type=Path, metavar="FOLDER", help="keep the runs there, in a folder for each script")
    parser.add_argument("--stopwatch", action="store_true", help="time per step as written and without the cause")
    options = parser.parse_args()
    scripts = {planted.name: planted for planted in RANKS}
    if unknown := [name for name in options.names if name not in scripts]:
        parser.error(f"no script {unknown[0]!r}: {', '.join(scripts)}")
    for planted in (scripts[name] for name in options.names or scripts):
        if options.stopwatch:
            print(f"{planted.cause:22} {planted.name:26}", measured(planted), flush=True)
        else:
            print("       ", row_of(planted, options.store.absolute() if options.store else None).get("summary", ""))
    return None


if __name__ == "__main__":
    main()
