"""`%%gpuprofile --ab … --ranks N`: the baseline and other settings, interleaved in the same processes, as one result.

`%%gpuprofile --sweep ranks=1,2,4`: the cell with each number of ranks in turn, in several rounds.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpulab.analysis.facts import facts
from gpulab.api.cell_ranks import EVERY_S, SHARED_S, STORED_S, Follower, Processes, RankedCell
from gpulab.api.experiment import HINT, ending, remember_experiment
from gpulab.api.runs import runs
from gpulab.devices.machine import usable_cores
from gpulab.errors import StoreError, UsageError
from gpulab.formatting import plural
from gpulab.options import DEFAULT_BUDGET_S, FURTHER_BUDGET_S
from gpulab.run import Ranks
from gpulab.store.files import replace_whole, write_whole
from gpulab.store.folders import Store, new_id
from gpulab.tuning.agreement import RanksAgreement, decode, encode, joined
from gpulab.tuning.cell_code import Interrupted
from gpulab.tuning.code import Code
from gpulab.tuning.compare.statistics import scaling
from gpulab.tuning.record import Experiment
from gpulab.tuning.runner import Runner
from gpulab.tuning.schedule import Plan, Progress
from gpulab.user_code import runs_users_code
from gpulab.views.comparison import Compared, ScalingView
from gpulab.views.progress import Progressing, Stoppable

PLAN = "plan.msgpack"


class RankedExperiment(Struct, frozen=True):
    """An experiment that is ready to run in several ranks."""

    cell: RankedCell
    plan: Plan
    full: bool = False

    def run(self) -> Compared:
        """Run and show it. Raises UsageError if nothing was measured, Interrupted after an interrupt."""
        own_id = f"cell-{new_id()}"
        follower = Follower(lambda _, processes: _RankedProgress(folder, self._tasks, processes, progressing))
        with self.cell.folder(own_id, follower) as folder, Stoppable(follower.stop, HINT) as progressing:
            follower.to_end(lambda: self._begin(own_id, folder))
            result = self._result(folder, follower)
            compared = remember_experiment(result)
            progressing.put(compared, full=self.full)
        for side in result.sides:
            if side.facts is not None:
                runs.add(side.facts.run, Store().root / side.facts.run.id)
        if follower.interrupted:
            raise ending(KeyboardInterrupt(), has_result=bool(result.comparisons))
        return compared

    @property
    def _tasks(self) -> Sequence[int | None]:
        """The task numbers of a Slurm array, one for each setting; (None,) for a single job."""
        if self.cell.allocation is None or len(self.plan.arms) < 2:
            return (None,)
        return range(len(self.plan.arms))

    def _begin(self, own_id: str, folder: Path) -> tuple[str, Processes]:
        (folder / PLAN).write_bytes(msgspec.msgpack.encode(self.plan))
        return self.cell.begin(own_id, folder, {"plan": folder / PLAN, "set": None}, tasks=len(self._tasks))

    def _result(self, folder: Path, follower: Follower) -> Experiment:
        results = [places(folder, task)[0] for task in self._tasks]
        until_s = time.monotonic() + (STORED_S if self.cell.allocation is None else SHARED_S)
        while not all(file.exists() for file in results) and time.monotonic() < until_s and not follower.interrupted:
            time.sleep(0.1)
        read = [decode(file.read_bytes(), Store().load) if file.exists() else None for file in results]
        there = [one for one in read if one is not None and one.comparisons]
        if there:
            silent = [i for i, one in enumerate(read) if one is None or not one.comparisons]
            notes = [f"{self.plan.arms[i].label} gave no result: {self.cell.ending_words(follower)}" for i in silent]
            whole = joined(there)
            return msgspec.structs.replace(whole, notes=(*whole.notes, *notes))
        if follower.interrupted:
            raise Interrupted("Interrupted: nothing was compared yet.")
        raise UsageError(f"Nothing was compared. {self.cell.ending_words(follower)}")


class _RankedProgress:
    """The progress of the experiment, from the file that its first rank writes."""

    every_s = EVERY_S / 4

    def __init__(
        self, folder: Path, tasks: Sequence[int | None], processes: Processes, progressing: Progressing
    ) -> None:
        self._files = [places(folder, task)[1] for task in tasks]
        self._processes = processes
        self._progressing = progressing

    def refresh(self, elapsed_s: float) -> None:
        now = [progress for progress in map(_read, self._files) if progress is not None]
        words = self._processes.status_words
        if not now:
            now = [Progress(f"starting the ranks{f'; {words}' if words else ''}", 0, 1, None)]
        slowest = min(now, key=lambda one: one.done / max(1, one.total))
        self._progressing.tell(msgspec.structs.replace(slowest, elapsed_s=elapsed_s))


def _read(file: Path) -> Progress | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Progress)
    except (OSError, msgspec.MsgspecError):
        return None


# Code of one rank: it runs the cell under all settings in step with the other ranks; the first rank reports.


runs_users_code(__file__)

RESULT, PROGRESS, AGREED = "experiment.msgpack", "progress.json", "agreed"
ARRAY_TASK = "SLURM_ARRAY_TASK_ID"


def places(folder: Path, task: int | None) -> tuple[Path, Path, Path]:
    """The files of result, progress and agreement of a job, or of one task of a Slurm array."""
    suffix = "" if task is None else f".{task}"
    return folder / f"{RESULT}{suffix}", folder / f"{PROGRESS}{suffix}", folder / f"{AGREED}{suffix}"


def run_experiment(options: argparse.Namespace, code: Code) -> int:
    """Run the plan in `options.plan`; write the result next to the plan. Returns the exit status."""
    plan = msgspec.msgpack.decode(options.plan.read_bytes(), type=Plan)
    task = os.environ.get(ARRAY_TASK, "")
    number = int(task) if task.isdecimal() else None
    if number is not None:
        plan = msgspec.structs.replace(plan, arms=plan.arms[number : number + 1])
    result, progress, agreed = places(options.plan.parent, number)
    ranks = RanksAgreement(agreed)
    runner = Runner(code, plan, ranks=ranks)
    if ranks.rank == 0:
        runner.tell = _writer(progress)
        runner.tick = _writer(progress)
    with _terminated(runner.stop):
        experiment = runner.run()
        if ranks.rank == 0:
            replace_whole(result, encode(experiment))
    ranks.release()
    if runner.error is not None:
        if isinstance(runner.error, UsageError):
            raise runner.error
        sys.excepthook(type(runner.error), runner.error, runner.error.__traceback__)
        return 1
    return 0


def file_code(text: str, namespace: dict[str, Any], file: str, source: Literal["cell", "script"] = "cell") -> Code:
    """A cell or a script, with the file name to show for its lines. A clean `sys.exit` ends it."""

    def execute(tree: ast.Module, names: MutableMapping[str, Any]) -> None:
        try:
            exec(compile(tree, file, "exec", dont_inherit=True), namespace, names)
        except SystemExit as e:
            if e.code not in (None, 0):
                raise

    return Code(text, source, namespace, execute, ast.parse(text, file))


def _writer(file: Path) -> Callable[[Progress], None]:
    """A listener that writes the progress to this file, without fsync, because it runs next to the user's code."""

    def write(progress: Progress) -> None:
        with suppress(StoreError):  # without progress the user still gets the result
            write_whole(file, msgspec.json.encode(progress))

    return write


@contextmanager
def _terminated(stop: Callable[[], None]) -> Iterator[None]:
    """Inside, SIGTERM ends the experiment before its next run, because the ranks must agree on the end."""

    def handle(number: int, frame: FrameType | None) -> None:
        stop()

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


ROUNDS = 3
NAME = "ranks"  # in --sweep


class RanksSweep(Struct, frozen=True):
    """A cell, and the numbers of ranks to run it with. `rounds` and `budget_s`: None: gpulab chooses."""

    cell: RankedCell
    counts: tuple[int, ...]
    rounds: int | None = None
    budget_s: float | None = None
    full: bool = False

    @property
    def limit_s(self) -> float:
        """The time after which no further round begins."""
        return DEFAULT_BUDGET_S + FURTHER_BUDGET_S * len(self.counts) if self.budget_s is None else self.budget_s

    def run(self) -> ScalingView:
        """Run and show it. Raises UsageError if a number of ranks cannot run, Interrupted after an interrupt."""
        times: dict[int, list[float]] = {count: [] for count in self.counts}
        rounds, began_s, stopped = self.rounds or ROUNDS, time.monotonic(), False
        numbers = random.Random()  # a generator of its own: the user's random state is untouched
        total = rounds * len(self.counts)
        with Progressing(None) as progressing:
            for done in range(total):
                number, place = divmod(done, len(self.counts))
                elapsed_s = time.monotonic() - began_s
                if not place:
                    if done and elapsed_s + elapsed_s / number > self.limit_s:
                        break
                    order = numbers.sample(self.counts, len(self.counts))
                about_s = elapsed_s / done * total if done else None
                what = f"round {number + 1} of {rounds}: {plural(order[place], 'rank')}"
                progressing.tell(Progress(what, done, total, None, elapsed_s=elapsed_s, about_s=about_s))
                try:
                    ranks = replace(self.cell, ranks=order[place]).record(quiet=number > 0)
                except Interrupted:
                    stopped = True
                    break
                times[order[place]].append(_step_us(ranks))
            view = ScalingView(
                scaling({count: t for count, t in times.items() if t}),
                min((len(t) for t in times.values() if t), default=0),
                int(usable_cores()),
                stopped,
            )
            if len(view.points) > 1:
                progressing.put(view, full=self.full)
            else:
                progressing.clear()
        if stopped:
            raise Interrupted(
                "Interrupted: what was measured so far is above." if len(view.points) > 1 else "Interrupted."
            )
        return view


def _step_us(ranks: Ranks) -> float:
    """The median step of the slowest rank. Raises UsageError if no step was counted."""
    steps = [figures.step_us for figures in map(facts, ranks.runs.values()) if figures.step_us is not None]
    if not steps:
        raise UsageError(f"No step counts in {len(ranks.runs)} ranks: run more steps, or mark them with gpulab.step().")
    return max(step.median for step in steps)


def counts_of(words: Sequence[str]) -> tuple[int, ...] | None:
    """The numbers of ranks in `--sweep ranks=1,2,4`; None if there is no such sweep. Raises UsageError."""
    lists = [word.partition("=")[2] for word in words if word.partition("=")[0].strip() == NAME]
    if not lists:
        return None
    if len(words) > 1:
        raise UsageError("--sweep ranks=… cannot be combined with other sweeps: sweep those with --ranks N.")
    numbers = [text.strip() for text in lists[0].split(",")]
    if len(numbers) < 2 or not all(text.isdecimal() and int(text) > 0 for text in numbers):
        raise UsageError(f"--sweep ranks={lists[0]}: expected two or more integers, e.g. --sweep ranks=1,2,4.")
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"--sweep ranks={lists[0]}: a number appears twice, name it once.")
    return tuple(sorted(map(int, numbers)))
