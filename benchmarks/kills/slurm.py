"""Recorded runs that Slurm kills, on a real cluster of three nodes on this machine: `scancel`, and a time limit.

A limit is a minute at least, and Slurm looks at it every half a minute: so the moment is random by itself. The script
begins by a random delay after the job.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.kills.trials import LOG, STEPS, Trial, end_words, new_folder, read

LIMIT_STEPS = 12_000  # more than end before the limit
DELAY_S = (38.0, 60.0)
AT_ONCE = 3  # nodes
# Slurm signals this process as well, which must live to tell how the recorded one has ended.
_WRAPPER = f"""
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda number, frame: None)
ranks, port, *command = sys.argv[1:]
rank = os.environ.get("SLURM_PROCID", "0") if ranks == "2" else "0"
if ranks == "2":
    os.environ.update(RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
status = subprocess.Popen(command).wait()
with open(os.environ["{LOG}"] + "status." + rank, "w") as file:
    file.write(str(status))
"""


def trials(kind: str, count: int, spans_s: dict[str, float]) -> list[dict[str, Any]]:
    """So many jobs, of which Slurm kills each: "scancel" or "limit". Every fourth has a rank on each of two nodes."""
    from tests.support.slurm_cluster import cluster

    draw = random.Random(kind)
    moments = list[tuple[str, float]]()
    for i in range(count):
        since = "start" if i % 5 == 0 else "begin"
        at_scancel, at_limit = (since, spans_s[since] * draw.random()), ("job", draw.uniform(*DELAY_S))
        moments.append(at_scancel if kind == "scancel" else at_limit)
    with (
        tempfile.TemporaryDirectory() as folder,
        cluster(Path(folder) / "slurm") as own,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        return list(pool.map(lambda i: _trial(kind, i, moments[i], own), range(count)))


def _trial(kind: str, number: int, moment: tuple[str, float], own: dict[str, str]) -> dict[str, Any]:
    ranks = 2 if number % 4 == 3 else 1
    with new_folder() as folder:
        trial = Trial(folder, f"slurm-{kind}-{number}-{time.time_ns()}", ranks)
        environment = {**trial.environment, **own}
        job = _submit(trial, kind, number, moment[1], environment)
        killed_s, processes = 0.0, list[str]()
        try:
            if kind == "scancel":
                if trial.reached(moment[0]) is not None:
                    time.sleep(max(0.0, trial.reached(moment[0]) + moment[1] - time.time()))
                killed_s = time.time()
                subprocess.run(["scancel", job], env=environment, check=True)
            _wait_until_over(job, environment)
            ended_s = time.time() - killed_s if killed_s else None
        finally:
            subprocess.run(["scancel", "--quiet", job], env=environment, check=False)
            processes = trial.end()
        row = {"number": number, "moment": moment, "ranks_of_job": ranks, "ended_s": ended_s}
        row["status"] = " ".join(_statuses(folder, ranks)) or "none"
        row |= read(trial, killed_s or time.time())
        row["problems"] += [f"a process is left: {command}" for command in processes]
        if row["problems"]:
            row["output"] = (folder / "output").read_text(errors="replace")[-2000:]
    print(f"  slurm {kind} {end_words(row)}", file=sys.stderr, flush=True)
    return row


def _submit(trial: Trial, kind: str, number: int, delay_s: float, environment: dict[str, str]) -> str:
    """Its number. Jobs of one rank are started by `srun` and by the batch script itself by turns."""
    steps = STEPS if kind == "scancel" else LIMIT_STEPS
    words = [str(steps), "-1"] if trial.ranks == 2 else ["0", str(steps)]
    wrapper = trial.folder / "wrapper.py"
    wrapper.write_text(_WRAPPER)
    record = [sys.executable, "-m", "gpulab", "record", "--no-live", str(trial.script()), *words]
    command = [sys.executable, str(wrapper), str(trial.ranks), str(21000 + number), *record]
    if trial.ranks == 2:
        command = ["srun", "-N2", "-n2", *command]
    elif number % 2:
        command = ["srun", "-n1", *command]
    batch = trial.folder / "job.sh"
    quoted = " ".join(f"'{word}'" for word in command)
    batch.write_text(f"#!/bin/bash\nsleep {delay_s if kind == 'limit' else 0}\n{quoted}\n")
    options = ["--parsable", f"--nodes={trial.ranks}", "--time=1" if kind == "limit" else "--time=5"]
    output = str(trial.folder / "output")
    said = subprocess.run(
        ["sbatch", *options, f"--output={output}", str(batch)],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        cwd=trial.folder,
    )
    return said.stdout.strip().partition(";")[0]


def _wait_until_over(job: str, environment: dict[str, str]) -> None:
    while True:
        options = ["squeue", "--noheader", "--states=all", "--jobs", job, "--format=%T"]
        said = subprocess.run(options, env=environment, capture_output=True, text=True)
        state = said.stdout.strip()
        if said.returncode or not state or state in ("CANCELLED", "COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL"):
            return
        time.sleep(0.2)


def _statuses(folder: Path, ranks: int) -> Iterator[str]:
    for rank in range(ranks):
        with contextlib.suppress(OSError):
            yield (folder / f"log.status.{rank}").read_text()
