"""One rank of an experiment: it runs the cell under all settings together with the others; the first one reports."""

from __future__ import annotations

import argparse
import ast
import os
import signal
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from gpulab.errors import StoreError, UsageError
from gpulab.store.atomic_write import replace_whole, write_whole
from gpulab.tuning.agreement import RanksAgreement
from gpulab.tuning.function_code import TextCode
from gpulab.tuning.kept_experiment import encoded
from gpulab.tuning.plan import Progress
from gpulab.tuning.plan_request import PlanRequest
from gpulab.tuning.runner import Runner
from gpulab.user_code import runs_users_code

runs_users_code(__file__)

RESULT, PROGRESS, AGREED = "experiment.msgpack", "progress.json", "agreed"
ARRAY_TASK = "SLURM_ARRAY_TASK_ID"


def places(folder: Path, task: int | None) -> tuple[Path, Path, Path]:
    """Of the result, the progress and the agreement of a job, or of one task of an array of jobs."""
    suffix = "" if task is None else f".{task}"
    return folder / f"{RESULT}{suffix}", folder / f"{PROGRESS}{suffix}", folder / f"{AGREED}{suffix}"


def run_experiment(options: argparse.Namespace, text: str, namespace: dict[str, Any], file: str) -> int:
    """Run the plan of `options.plan` on a cell; write what came of it beside the plan. Returns the exit status."""
    request = msgspec.json.decode(options.plan.read_bytes(), type=PlanRequest)
    task = os.environ.get(ARRAY_TASK, "")
    number = int(task) if task.isdecimal() else None
    if number is not None:
        request = msgspec.structs.replace(request, only=number)
    result, progress, agreed = places(options.plan.parent, number)
    code = cell_code(text, namespace, file)
    ranks = RanksAgreement(agreed)
    runner = Runner(code, request.plan(code.variables), ranks=ranks)
    if ranks.rank == 0:
        runner.tell = _writer(progress)
        runner.tick = _writer(progress)
    with _terminated(runner.stop):
        experiment = runner.run()
        if ranks.rank == 0:
            replace_whole(result, encoded(experiment))
    ranks.let_go()
    if runner.error is not None:
        if isinstance(runner.error, UsageError):
            raise runner.error
        sys.excepthook(type(runner.error), runner.error, runner.error.__traceback__)
        return 1
    return 0


def cell_code(text: str, namespace: dict[str, Any], file: str) -> TextCode:
    """The cell under the file name by which its lines are to be shown."""

    def execute(tree: ast.Module, names: MutableMapping[str, Any]) -> None:
        exec(compile(tree, file, "exec", dont_inherit=True), namespace, names)

    return TextCode(text, namespace, ast.parse(text, file), execute)


def _writer(file: Path) -> Callable[[Progress], None]:
    """Not onto the disk each time: it is called while the user's code runs."""

    def write(progress: Progress) -> None:
        with suppress(StoreError):  # who cannot be shown how far it is gets the result all the same
            write_whole(file, msgspec.json.encode(progress))

    return write


@contextmanager
def _terminated(stop: Callable[[], None]) -> Iterator[None]:
    """SIGTERM ends the experiment before its next run: the ranks have to agree on that."""

    def handle(number: int, frame: FrameType | None) -> None:
        stop()

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
