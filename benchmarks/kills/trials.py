"""One recorded script that is killed: when, what a reader then finds in its store, and what is left of its processes.

The script keeps a log of its own, a line for each step with the time, which no kill takes back: it says what was true.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

MARK = "GPULAB_KILL_TRIAL"  # in the environment of everything that a trial starts
LOG = "KILL_TRIAL_LOG"
SHARE = 0.005  # s that each step sleeps: a step is about as long as a small training's
PATIENCE_S = 240.0  # beside whatever else runs
LATEST_S = 1.5  # a loss of the last second: what is measured is written once a second, by a thread that wakes at 10 Hz
STEPS, HOLD_AT = 500, 150

_LOG = f"""
import os, sys, time
log = open(os.environ["{LOG}"] + os.environ.get("RANK", "0"), "a", buffering=1)
def note(word):
    log.write(f"{{word}} {{time.time()}} {{os.getpid()}}\\n")
note("start")
import torch
"""
ONE = f"""{_LOG}
from torch.utils.data import DataLoader, TensorDataset
workers, steps = map(int, sys.argv[1:])
layer = torch.nn.Linear(64, 1)
optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.zeros(4 * steps, 64)), batch_size=4, num_workers=workers)
note("begin")
for (x,) in loader:
    layer(x).sum().backward()
    optimizer.step()
    time.sleep({SHARE})
    note("step")
note("end")
"""
TWO = f"""{_LOG}
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
steps, hold_at = map(int, sys.argv[1:])
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
note("begin")
for step in range(steps):
    if step == hold_at:
        note("hold")
        if dist.get_rank() == 1:
            time.sleep(3600)
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    time.sleep({SHARE})
    note("step")
note("end")
dist.destroy_process_group()
"""


class Log(Struct, frozen=True):
    """What a rank wrote of itself: times in s since 1970; 0.0 of what it did not come to."""

    pid: int
    start_s: float
    begin_s: float
    hold_s: float
    end_s: float
    steps_s: list[float]


class Trial(Struct):
    """A place for one run: its folder, and a mark by which its processes are known."""

    folder: Path
    mark: str
    ranks: int = 1

    @property
    def environment(self) -> dict[str, str]:
        own = {
            MARK: self.mark,
            LOG: str(self.folder / "log."),
            "GPULAB_DIR": str(self.folder / "store"),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        return {**os.environ, **own}

    def script(self) -> Path:
        """The training, written into the folder."""
        file = self.folder / "train.py"
        file.write_text(ONE if self.ranks == 1 else TWO)
        return file

    def log(self, rank: int) -> Log | None:
        """None before its first line is there."""
        with contextlib.suppress(OSError):
            lines = [line.split() for line in (self.folder / f"log.{rank}").read_text().splitlines()]
            whole = [(word, float(at), int(pid)) for word, at, pid in (line for line in lines if len(line) == 3)]
            if whole:
                first = {word: at for word, at, _ in reversed(whole)}
                times = [first.get(word, 0.0) for word in ("start", "begin", "hold", "end")]
                return Log(whole[0][2], *times, [at for word, at, _ in whole if word == "step"])
        return None

    def processes(self) -> dict[int, str]:
        """All that still run, with the beginning of their command."""
        alive = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{MARK}={self.mark}\0".encode() in (entry / "environ").read_bytes() + b"\0":
                    alive[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:160]
        alive.pop(os.getpid(), None)
        return alive

    def wait_for(self, until: Callable[[], Any]) -> Any:
        """What that gives, once it gives something; None after a long while."""
        deadline = time.monotonic() + PATIENCE_S
        while not (answer := until()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return answer

    def reached(self, since: str) -> float | None:
        """When the last of all ranks came to its "start", "begin" or "hold"; None where not all ever do."""

        def latest() -> float | None:
            logs = [self.log(rank) for rank in range(self.ranks)]
            if any(log is None for log in logs):
                return None
            times = [{"start": log.start_s, "begin": log.begin_s, "hold": log.hold_s}[since] for log in logs if log]
            return max(times) if min(times) > 0.0 else None

        result: float | None = self.wait_for(latest)
        return result

    def end(self) -> list[str]:
        """Wait until nothing of it runs; the commands of what had to be killed."""
        self.wait_for(lambda: not self.processes())
        left = self.processes()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return list(left.values())


def begin(trial: Trial, words: Sequence[str], recorded: bool = True) -> subprocess.Popen[bytes]:
    """Start the script with these arguments, recorded or as it is."""
    record = ["-m", "gpulab", "record", *(["--ranks", "2"] if trial.ranks == 2 else []), "--no-live"]
    bare = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if trial.ranks == 2 else []
    command = [sys.executable, *(record if recorded else bare), str(trial.script()), *words]
    with (trial.folder / "output").open("wb") as output:
        return subprocess.Popen(
            command, env=trial.environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL, cwd=trial.folder
        )


def read(trial: Trial, killed_s: float) -> dict[str, Any]:
    """What `gpulab runs` and a reader find, against the ranks' own logs. `problems`: one line for each."""
    from gpulab.store.folders import DOCUMENT, RUNNING_PREFIX, Store

    environment = trial.environment
    listed = subprocess.run(
        [sys.executable, "-m", "gpulab", "runs"], env=environment, capture_output=True, text=True, cwd=trial.folder
    )
    problems = [f"gpulab runs ends with {listed.returncode}: {listed.stderr[-200:]}"] if listed.returncode else []
    store = Store(trial.folder / "store" / "runs")
    entries = store.list()
    problems += [f"listed without its run: {entry.problem}" for entry in entries if entry.problem]
    of_rank: dict[int, list[str]] = {}
    for entry in entries:
        if not entry.problem:
            of_rank.setdefault(entry.job.rank if entry.job is not None else 0, []).append(entry.id)
            names = {path.name for path in entry.path.iterdir()}
            problems += [f"half written: {name}" for name in sorted(names) if name.startswith(("unfinished", "."))]
            problems += [f"it has no {DOCUMENT}"] if DOCUMENT not in names else []
    problems += [f"{len(ids)} runs of rank {rank}" for rank, ids in of_rank.items() if len(ids) > 1]
    ranks = []
    for rank in range(trial.ranks):
        log, ids = trial.log(rank), of_rank.get(rank, [])
        row = _row(store, ids[0] if ids else None, log, killed_s, problems)
        ranks.append(row)
    if all(row["stored"] is not None for row in ranks if row["logged"]):
        journals = [path.name for path in store.root.glob(f"{RUNNING_PREFIX}*")] if store.root.exists() else []
        problems += [f"a journal is left: {name}" for name in journals if any(row["logged"] for row in ranks)]
    return {"ranks": ranks, "problems": problems}


def _row(store: Any, run_id: str | None, log: Log | None, killed_s: float, problems: list[str]) -> dict[str, Any]:
    steps_s = log.steps_s if log is not None else []
    row: dict[str, Any] = {
        "logged": len(steps_s),
        "logged_at_kill": sum(at <= killed_s for at in steps_s),
        "stored": None,
        "outcome": None,
        "lost_s": None,
    }
    if run_id is None:
        if log is not None and steps_s:
            row["lost_s"] = steps_s[-1] - log.begin_s
            if row["lost_s"] > LATEST_S:
                problems.append(f"no run, and {len(steps_s)} steps in {row['lost_s']:.1f} s")
        return row
    try:
        from gpulab.api.reading import report

        run = store.load(run_id)
        run.check()
        report(run).text()
    except Exception as e:
        problems.append(f"not readable: {type(e).__name__}: {e}")
        return row
    stored = len(run.steps)
    row |= {"stored": stored, "outcome": f"{run.outcome}: {run.outcome_detail}".strip(": ")[:60]}
    if log is not None and steps_s:
        stored_s = [log.begin_s, *steps_s][min(stored, len(steps_s))]
        row["lost_s"] = steps_s[-1] - stored_s
        if stored > len(steps_s) + 1:
            problems.append(f"{stored} steps stored, {len(steps_s)} logged")
    if row["lost_s"] and row["lost_s"] > LATEST_S:
        problems.append(f"{row['lost_s']:.1f} s of steps lost")
    return row


def kill(pid: int, number: int) -> bool:
    """Whether there was somebody to kill."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def child_with(trial: Trial, words: str) -> int | None:
    """The first process of a trial with that in its command."""
    processes: Mapping[int, str] = trial.processes()
    return next((pid for pid, command in sorted(processes.items()) if words in command), None)


def end_words(row: Mapping[str, Any]) -> str:
    """Of a trial, for who waits for the next."""
    ranks = [(r["logged"], r["stored"], r["outcome"], r["lost_s"] and round(r["lost_s"], 2)) for r in row["ranks"]]
    since, moment_s = row["moment"]
    where = f"{row['number']}: {moment_s:.2f} s after {since}, {row['status']}, {row['ended_s'] or 0.0:.1f} s"
    return f"{where}, {ranks}: {'; '.join(row['problems']) or 'no miss'}"


@contextlib.contextmanager
def new_folder() -> Iterator[Path]:
    """Removed at the end, also where a process still writes to it. Its name has a space."""
    path = Path(tempfile.mkdtemp(prefix="gpulab kills "))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
