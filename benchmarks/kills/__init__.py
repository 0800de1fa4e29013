"""Recorded runs are killed at random moments: is there a readable run each time, how much is lost, is anything left?

A fifth of the moments is drawn evenly from the script's first line to its loop, the others from there to the end of its
last process; in a collective all are drawn from when one rank waits for the other, which never comes.
`python -m benchmarks.kills CASE … [--count N] [--at-once N]` measures some cases again.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from msgspec import Struct

from benchmarks.harness import RESULTS, Figure, save
from benchmarks.kills import slurm
from benchmarks.kills.trials import (
    HOLD_AT,
    LATEST_S,
    STEPS,
    Trial,
    begin,
    child_with,
    end_words,
    kill,
    new_folder,
    read,
)

COUNT = 20
AT_ONCE = 2
COLLECTIVE_S = 4.0  # within so long of a collective's begin it is killed


class Case(Struct, frozen=True):
    """Who is sent which signal: "script", "rank" (0 and 1 by turns), "launcher" (ours and torchrun by turns)."""

    title: str
    target: str
    number: signal.Signals
    ranks: int = 2
    in_collective: bool = False


TERM, KILL = signal.SIGTERM, signal.SIGKILL
CASES = {
    "script_term": Case("a script: SIGTERM", "script", TERM, 1),
    "script_kill": Case("a script: SIGKILL", "script", KILL, 1),
    "rank_term": Case("one of two ranks: SIGTERM", "rank", TERM),
    "rank_kill": Case("one of two ranks: SIGKILL", "rank", KILL),
    "launcher_term": Case("their launcher: SIGTERM", "launcher", TERM),
    "launcher_kill": Case("their launcher: SIGKILL", "launcher", KILL),
    "held_rank_term": Case("one of two ranks, in a collective: SIGTERM", "rank", TERM, in_collective=True),
    "held_rank_kill": Case("one of two ranks, in a collective: SIGKILL", "rank", KILL, in_collective=True),
    "held_launcher_term": Case("their launcher, in a collective: SIGTERM", "launcher", TERM, in_collective=True),
    "held_launcher_kill": Case("their launcher, in a collective: SIGKILL", "launcher", KILL, in_collective=True),
}
SLURM = {"scancel": "a Slurm job: `scancel`", "limit": "a Slurm job: its time limit of a minute"}


def measure() -> dict[str, object]:
    """All cases: about an hour."""
    from tests.support.slurm_cluster import CannotRun

    cases, omissions = {}, []
    for name in (*CASES, *SLURM):
        try:
            cases[name] = _case(name, COUNT, AT_ONCE)
        except CannotRun as e:
            omissions.append(f"{SLURM[name]} ({e})")
    return {"latest_s": LATEST_S, "cases": cases, "left_out": omissions}


def _case(name: str, count: int, at_once: int) -> dict[str, Any]:
    if name in SLURM:
        spans_s = _spans_s(CASES["script_term"])
        rows = slurm.trials(name, count, spans_s)
        return {"spans_s": spans_s, "bare_statuses": [], **totals(rows), "rows": rows}
    case = CASES[name]
    spans_s = {"hold": COLLECTIVE_S} if case.in_collective else _spans_s(case)
    draw = random.Random(name)
    moments = []
    for i, (since, span_s) in enumerate(spans_s.items()):
        some = count if len(spans_s) == 1 else (count // 5, count - count // 5)[i]
        moments += [(since, span_s * (j + draw.random()) / some) for j in range(some)]
    with ThreadPoolExecutor(at_once) as pool:
        rows = list(pool.map(partial(_trial, name), range(count), moments))
    return {"spans_s": spans_s, "bare_statuses": _bare_statuses(name), **totals(rows), "rows": rows}


def totals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts over the trials of a case."""
    trained = [rank for row in rows for rank in row["ranks"] if rank["logged"]]
    ended_s = sorted(row["ended_s"] for row in rows if row["ended_s"] is not None)
    lost = sorted(rank["lost_s"] for rank in trained if rank["lost_s"] is not None)
    return {
        "trials": len(rows),
        "trained": sum(any(rank["logged"] for rank in row["ranks"]) for row in rows),
        "runs_expected": len(trained),
        "runs_readable": sum(rank["stored"] is not None for rank in trained),
        "outcomes": _counts(rank["outcome"] for rank in trained),
        "statuses": _counts(str(row["status"]) for row in rows),
        "lost_s": {"median": lost[len(lost) // 2], "most": lost[-1]} if lost else None,
        "ended_s": {"median": ended_s[len(ended_s) // 2], "most": ended_s[-1]} if ended_s else None,
        "misses": [f"{row['number']}: {problem}" for row in rows for problem in row["problems"]],
    }


def _trial(name: str, number: int, moment: tuple[str, float]) -> dict[str, Any]:
    case = CASES[name]
    with new_folder() as folder:
        trial = Trial(folder, f"{name}-{number}-{time.time_ns()}", case.ranks)
        process = begin(trial, _words(case, number))
        try:
            victim = _await_moment(trial, case, number, process.pid, moment)
            killed_s = time.time()
            was_there = victim is not None and kill(victim, case.number)
            status = _status(trial, process)
            ended_s = time.time() - killed_s
        finally:
            left = trial.end()
            process.wait()
        row = {"number": number, "moment": moment, "was_there": was_there, "status": status, "ended_s": ended_s}
        row |= read(trial, killed_s)
        row["problems"] += [f"a process is left: {command}" for command in left]
        if victim is None:
            row["problems"].append("it did not come to where it was to be killed")
        if row["problems"]:
            row["output"] = (folder / "output").read_text(errors="replace")[-2000:]
    print(f"  {name} {end_words(row)}", file=sys.stderr, flush=True)
    return row


def _words(case: Case, number: int) -> list[str]:
    """Arguments of the script: every other one loads in a worker."""
    if case.ranks == 1:
        return [str(number % 2), str(STEPS)]
    return [str(STEPS), str(HOLD_AT if case.in_collective else -1)]


def _await_moment(trial: Trial, case: Case, number: int, outermost: int, moment: tuple[str, float]) -> int | None:
    """Who is to be killed, when it is time. None where it never came so far."""
    since, moment_s = moment
    since_s = trial.reached(since)
    if since_s is None:
        return None
    victim = outermost
    if case.target == "rank":
        log = trial.log(number % 2)
        victim = log.pid if log is not None else outermost
    elif case.target == "launcher" and number % 2:
        victim = child_with(trial, "torch.distributed.run") or outermost
    time.sleep(max(0.0, since_s + moment_s - time.time()))
    return victim


def _status(trial: Trial, process: Any) -> int | None:
    """Of the outermost process, once everything has ended; None where it does not end."""
    trial.wait_for(lambda: process.poll() is not None and not trial.processes())
    status: int | None = process.poll()
    return status


def _spans_s(case: Case) -> dict[str, float]:
    """From the script's first line to its loop, and from there to the end of its last process, if nobody kills it."""
    with new_folder() as folder:
        trial = Trial(folder, f"span-{time.time_ns()}", case.ranks)
        process = begin(trial, _words(case, 1))
        process.wait()
        ended_s = time.time()
        log = trial.log(0)
        assert log is not None and log.end_s, (folder / "output").read_text()
        result = read(trial, ended_s)
        assert not result["problems"] and all(r["stored"] == STEPS for r in result["ranks"]), result
        return {"start": log.begin_s - log.start_s, "begin": ended_s - log.begin_s}


def _bare_statuses(name: str) -> list[int | None]:
    """How the script ends without gpulab where it is killed in the middle of its steps: each target once."""
    case, statuses = CASES[name], []
    for number in range(1 if case.ranks == 1 else 2):
        with new_folder() as folder:
            trial = Trial(folder, f"bare-{name}-{number}-{time.time_ns()}", case.ranks)
            process = begin(trial, _words(case, number), recorded=False)
            victim = _await_moment(
                trial,
                case,
                number if case.target == "rank" else 0,
                process.pid,
                ("hold" if case.in_collective else "begin", 0.0),
            )
            if not case.in_collective:
                trial.wait_for(lambda trial=trial: len(log.steps_s) > 50 if (log := trial.log(0)) else False)  # type: ignore[misc]
            else:
                time.sleep(0.5)
            if victim is not None:
                kill(victim, case.number)
            process.wait()
            statuses.append(process.returncode)
            for pid in trial.processes():  # torchrun leaves its ranks where it is killed
                kill(pid, KILL)
    return statuses


def _counts(words: Iterator[str] | Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for word in words:
        counts[str(word)] = counts.get(str(word), 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """For each case what was readable, how much was lost, and every miss."""
    titles = {**{name: case.title for name, case in CASES.items()}, **SLURM}
    for name, case in results["cases"].items():
        title = f"{titles[name]}, {case['trials']} times"
        yield Figure.share(f"{title}: runs readable", case["runs_readable"], case["runs_expected"], "readable")
        if case["lost_s"]:
            yield Figure(f"{title}: most lost", case["lost_s"]["most"], "s", target="lost")
        yield Figure(f"{title}: misses", len(case["misses"]), target="misses")


def notes(results: Mapping[str, Any]) -> Iterator[str]:
    """How the command ended, beside how the same script ends without gpulab."""
    titles = {**{name: case.title for name, case in CASES.items()}, **SLURM}
    for name, case in results["cases"].items():
        statuses = ", ".join(f"{status}: {count}" for status, count in case["statuses"].items())
        bare = ", ".join(dict.fromkeys(map(str, case["bare_statuses"]))) or "not measured"
        yield f"- {titles[name]}: exit status {statuses}; without gpulab {bare}"
    absent = [title for name, title in titles.items() if name not in results["cases"]]
    if absent:
        yield f"- not measured yet: {'; '.join(absent)}"


def main() -> None:
    """Some cases, into the kept results."""
    parser = argparse.ArgumentParser(prog="benchmarks.kills")
    parser.add_argument("names", nargs="*", metavar="CASE", help=", ".join((*CASES, *SLURM)))
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    options = parser.parse_args()
    file = RESULTS / "kills.json"
    for name in options.names or (*CASES, *SLURM):
        results = json.loads(file.read_text()) if file.exists() else {}
        cases = results.get("cases", {}) | {name: _case(name, options.count, options.at_once)}
        save("kills", {"latest_s": LATEST_S, "cases": {n: cases[n] for n in (*CASES, *SLURM) if n in cases}})
        print(json.dumps({k: v for k, v in cases[name].items() if k != "rows"}, indent=1))
