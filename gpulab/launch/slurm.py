"""A job on a Slurm cluster, by Slurm's own commands: writes the batch script, submits, follows and cancels the job.

Imports only the standard library, not PyTorch, because login nodes limit programs. Source: Slurm, "sbatch", "squeue",
"scancel", "scontrol"; PyTorch, "torchrun", with one agent per node, started by `srun`.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from gpulab.devices.own_processes import VARIABLE, marked
from gpulab.errors import UsageError
from gpulab.launch.launcher import (
    OF_THE_KERNEL,
    PREFIX_TEMPLATE,
    PREFIX_VARIABLE,
    THREADS,
    TORCHRUN,
    GrowingFile,
    Line,
    line_of,
)

POLL_S = 0.5  # between two reads of the output
QUERY_S = 2.0  # between two queries to Slurm's controller, which many users share
ANSWER_S = 30.0  # timeout of a Slurm command
SILENT_S = 15.0  # without an answer, before the user is told
_NUMBER = re.compile(r"^(\d+)(?:;(\S+))?$", re.MULTILINE)
OVER = frozenset(
    (
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
        *("REVOKED", "TIMEOUT"),
    )
)


class Allocation(Struct, frozen=True):
    """The resources that a job requests. `more`: options of sbatch in its own syntax."""

    ranks: int
    nodes: int = 1
    minutes: int = 10
    more: str = ""

    @property
    def words(self) -> list[str]:
        """The words of `more`. Raises UsageError for an open quote."""
        try:
            return shlex.split(self.more)
        except ValueError as e:
            raise UsageError(f"--sbatch {self.more!r}: {str(e).lower()}.") from None

    @property
    def of_each_node(self) -> int:
        """Ranks per node. Raises UsageError if the ranks cannot be divided evenly among the nodes."""
        if self.ranks % self.nodes:
            raise UsageError(
                f"--ranks {self.ranks} is not a multiple of --nodes {self.nodes}: "
                f"ask for {self.nodes * max(1, round(self.ranks / self.nodes))} ranks."
            )
        return self.ranks // self.nodes


class Job(Struct, frozen=True):
    """The state of a job: Slurm's word ("PENDING", "RUNNING", …), and the reason if there is one."""

    state: str
    reason: str = ""

    @property
    def is_over(self) -> bool:
        return self.state in OVER

    @property
    def words(self) -> str:
        """The state in words for the user."""
        why = self.reason if self.reason not in ("", "None") else ""
        return f"{self.state.lower().replace('_', ' ')}{f' ({why})' if why else ''}"


def batch_script(
    allocation: Allocation,
    job_id: str,
    target: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    tasks: int = 1,
) -> str:
    """The batch script for sbatch: one agent of torchrun on each node; the first node is the rendezvous.

    `target`: the command of each rank; `environment`: variables in addition to those that Slurm passes on; output goes
    to `folder`. Several `tasks` form an array: as many jobs from the same file, each on separate nodes.
    """
    quoted = shlex.quote
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", '"$address:$port"', "--rdzv-id", quoted(job_id)]
    agent = [
        *map(quoted, TORCHRUN),
        "--nnodes",
        str(allocation.nodes),
        "--nproc-per-node",
        str(allocation.of_each_node),
    ]
    command = [*agent, *meeting, "--tee", "3", "--log-dir", quoted(str(folder / "logs")), *map(quoted, target)]
    variables = {PREFIX_VARIABLE: PREFIX_TEMPLATE, "PYTHONUNBUFFERED": "1", **environment}
    lines = [
        "#!/bin/bash",
        "#SBATCH --job-name=gpulab",
        f"#SBATCH --nodes={allocation.nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --time={allocation.minutes}",
        *([f"#SBATCH --array=0-{tasks - 1}"] if tasks > 1 else []),
        "",
        f"unset {' '.join((VARIABLE, *OF_THE_KERNEL))}",
        *(f"export {name}={quoted(value)}" for name, value in variables.items()),
        f'export {THREADS}="${{{THREADS}:-1}}"',
        '[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',  # 22.05: not by itself
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "address=$(scontrol show node \"$first\" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)",
        "port=$((20000 + SLURM_JOB_ID % 20000))",
        f"cd {quoted(os.getcwd())}",
        f"srun {' '.join(command)}",
        "",
    ]
    return "\n".join(lines)


class Submitted(Struct, frozen=True):
    """The id of a job on its cluster; `cluster` is empty if there is only one."""

    number: str
    cluster: str = ""

    @property
    def place(self) -> list[str]:
        """The words that select the job in a Slurm command."""
        return [f"--clusters={self.cluster}"] if self.cluster else []


def outputs(folder: Path, tasks: int = 1) -> list[Path]:
    """The files with the job's output, one for each task of an array."""
    return [folder / "output.txt"] if tasks == 1 else [folder / f"output-{task}.txt" for task in range(tasks)]


def submit_words(allocation: Allocation, script: Path, tasks: int = 1) -> list[str]:
    """The command that submits the script. Options that may contain spaces are here: `#SBATCH` lines have no quotes."""
    folder = str(script.parent).replace("%", "%%")
    output = f"{folder}/output.txt" if tasks == 1 else f"{folder}/output-%a.txt"
    return ["sbatch", "--parsable", f"--output={output}", *allocation.words, str(script)]


def submit(words: Sequence[str]) -> Submitted:
    """Hand a batch script to Slurm. Raises UsageError with Slurm's own words."""
    result = _slurm(*words)
    numbers = _NUMBER.findall(result.stdout)
    if result.returncode or not numbers:
        why = (result.stderr.replace("sbatch: error: ", "") or result.stdout).strip()
        raise UsageError(f"Slurm rejected the job: {why} Change --sbatch, --nodes or --time.")
    return Submitted(*numbers[-1])


def poll(job: Submitted) -> Job | None:
    """The state of a job; None if Slurm does not answer at the moment. An array is over when all its tasks are."""
    options = ["--noheader", "--states=all", "--jobs", job.number, "--format=%T|%r"]
    result = _slurm("squeue", *job.place, *options)
    lines = [line for line in result.stdout.splitlines() if "|" in line]
    if result.returncode == 0 and lines:
        jobs = [Job(state, reason) for state, _, reason in (line.strip().partition("|") for line in lines)]
        return min(jobs, key=lambda job: (job.is_over, job.state != "RUNNING", job.state == "COMPLETED"))
    if "Invalid job id" in result.stderr or (result.returncode == 0 and not lines):
        return Job("COMPLETED")  # it ended long ago and has left Slurm's list
    return None


def cancel(job: Submitted) -> None:
    """Ask Slurm to end the job: SIGTERM, and later SIGKILL."""
    _slurm("scancel", *job.place, job.number)


def _slurm(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a Slurm command. Raises UsageError if it is not installed."""
    try:
        return subprocess.run(
            words, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=marked(), timeout=ANSWER_S
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 1, "", f"no answer within {ANSWER_S:g} s")
    except FileNotFoundError:
        raise UsageError(
            f"{words[0]} is not installed here: --on slurm needs Slurm's commands, so run it on a login node."
        ) from None


class SlurmProcesses:
    """The ranks of a submitted job, followed through Slurm and the files with their output."""

    def __init__(self, submitted: Submitted, outputs: Sequence[Path]) -> None:
        self.job = Job("PENDING")
        self._submitted = submitted
        self._files = [GrowingFile(output) for output in outputs]
        self._last_query_s = 0.0
        self._answered_s = time.monotonic()
        self._gives_up = False

    @property
    def status_words(self) -> str:
        """The state of the job, in words for the user."""
        silent_s = time.monotonic() - self._answered_s
        silence = f"; Slurm has not answered for {silent_s:.0f} s" if silent_s > SILENT_S else ""
        return f"Slurm job {self._submitted.number}: {self.job.words}{silence}"

    @property
    def may_go_on(self) -> bool:
        """Whether the job may still need its files."""
        return not self.job.is_over

    def lines(self) -> Iterator[Line | None]:
        """The output, until the job is over; None after each read."""
        while not self.job.is_over:
            self._query()
            yield from self._new_lines()
            yield None
            if not self.job.is_over:
                time.sleep(POLL_S)
        yield from self._new_lines()
        for file in self._files:
            yield from (line_of(text, is_error=False) for text in file.rest())

    def stop(self) -> None:
        """Cancel the job."""
        cancel(self._submitted)

    def kill(self) -> None:
        """Cancel the job if it is not over, without waiting for an answer."""
        if not self.job.is_over:
            cancel(self._submitted)
            self._gives_up = True

    def end(self) -> str:
        """Wait until the job is over. Returns Slurm's word for its end."""
        while not self.job.is_over and not (self._gives_up and time.monotonic() - self._answered_s > SILENT_S):
            self._query()
            time.sleep(POLL_S)
        return self.job.words

    def _query(self) -> None:
        now_s = time.monotonic()
        if now_s - self._last_query_s < QUERY_S:
            return
        self._last_query_s = now_s
        job = poll(self._submitted)
        if job is not None:
            self.job, self._answered_s = job, time.monotonic()

    def _new_lines(self) -> Iterator[Line]:
        for file in self._files:
            yield from (line_of(text, is_error=False) for text in file.lines())
