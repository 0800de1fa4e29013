"""What a user calls to read a file or a folder from elsewhere; a long wait is said."""

from __future__ import annotations

from pathlib import Path

from gpulab.run import Ranks, Run
from gpulab.trace import ranks
from gpulab.views import wording
from gpulab.views.running.waiting import waiting


def load(path: str | Path) -> Run | Ranks:
    """A trace file or a stored run's folder as a `Run`, a folder of the traces of one job's ranks as `Ranks`.

    Raises TraceError or StoreError, in one sentence with the next step, where there is nothing to read.
    """
    with waiting(f"reading {wording.plain(str(path))}") as wait:
        return ranks.load(path, wait.tell)
