"""`%%gpuprofile --ab … --ranks N`: the cell as written and changed, in turn in the same processes, then one result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from gpulab.api.cell_ranks import EVERY_S, KEPT, SHARED_S, STORED_S, Followed, Processes, RankedCell
from gpulab.api.experiment import HINT, ending, experiments
from gpulab.api.experiment_rank import places
from gpulab.api.reading import runs
from gpulab.errors import UsageError
from gpulab.store.folders import Store, new_id
from gpulab.tuning.interrupts import Interrupted
from gpulab.tuning.kept_experiment import decoded, joined
from gpulab.tuning.plan import Plan, Progress
from gpulab.tuning.plan_request import PlanRequest
from gpulab.tuning.record import Experiment
from gpulab.views.comparison.comparison import Compared
from gpulab.views.running.progress import Progressing, Stoppable

PLAN = "plan.json"


class RankedExperiment(Struct, frozen=True):
    """An experiment that is ready to run in so many ranks. `plan` is what `request` means in this notebook."""

    cell: RankedCell
    request: PlanRequest
    plan: Plan
    full: bool = False

    def run(self) -> Compared:
        """Run and show it. Raises UsageError where nothing was measured, Interrupted after one who stopped it."""
        own_id = f"cell-{new_id()}"
        with self.cell.folder(own_id) as folder, Stoppable(lambda: followed.stop(), HINT) as progressing:
            followed = Followed(lambda _, processes: _Watched(folder, self._tasks, processes, progressing))
            followed.to_end(lambda: self._begun(own_id, folder))
            if followed.may_go_on:
                (folder / KEPT).touch()
            result = self._result(folder, followed)
            compared = Compared(result)
            experiments.append(compared)
            progressing.put(compared, full=self.full)
        for side in result.sides:
            if side.facts is not None:
                runs.add(side.facts.run, Store().root / side.facts.run.id)
        if followed.interrupted:
            raise ending(KeyboardInterrupt(), shown=bool(result.comparisons))
        return compared

    @property
    def _tasks(self) -> Sequence[int | None]:
        """Of an array of jobs: one for each setting. (None,): there is one job."""
        if self.cell.allocation is None or len(self.plan.arms) < 2:
            return (None,)
        return range(len(self.plan.arms))

    def _begun(self, own_id: str, folder: Path) -> tuple[str, Processes]:
        (folder / PLAN).write_bytes(msgspec.json.encode(self.request))
        return self.cell.begun(own_id, folder, {"plan": folder / PLAN, "set": None}, tasks=len(self._tasks))

    def _result(self, folder: Path, followed: Followed) -> Experiment:
        results = [places(folder, task)[0] for task in self._tasks]
        until_s = time.monotonic() + (STORED_S if self.cell.allocation is None else SHARED_S)
        while not all(file.exists() for file in results) and time.monotonic() < until_s and not followed.interrupted:
            time.sleep(0.1)
        read = [decoded(file.read_bytes(), Store().load) if file.exists() else None for file in results]
        there = [one for one in read if one is not None and one.comparisons]
        if there:
            silent = [i for i, one in enumerate(read) if one is None or not one.comparisons]
            notes = [f"{self.plan.arms[i].label} brought no result: {self.cell.ending_words(followed)}" for i in silent]
            whole = joined(there)
            return msgspec.structs.replace(whole, notes=(*whole.notes, *notes))
        if followed.interrupted:
            raise Interrupted("Interrupted: nothing was compared yet.")
        raise UsageError(f"Nothing was compared. {self.cell.ending_words(followed)}")


class _Watched:
    """Where the experiment stands, from what its first rank has written."""

    def __init__(
        self, folder: Path, tasks: Sequence[int | None], processes: Processes, progressing: Progressing
    ) -> None:
        self._files = [places(folder, task)[1] for task in tasks]
        self._processes = processes
        self._progressing = progressing
        self._began_s = time.monotonic()
        self._due_s = self._began_s

    def look(self) -> None:
        """Show what is new."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + EVERY_S / 4
        now = [progress for progress in map(_read, self._files) if progress is not None]
        words = self._processes.status_words
        if not now:
            now = [Progress(f"starting the ranks{f'; {words}' if words else ''}", 0, 1, None)]
        slowest = min(now, key=lambda one: one.done / max(1, one.total))
        elapsed_s = now_s - self._began_s
        self._progressing.tell(msgspec.structs.replace(slowest, elapsed_s=elapsed_s))


def _read(file: Path) -> Progress | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Progress)
    except (OSError, msgspec.MsgspecError):
        return None
