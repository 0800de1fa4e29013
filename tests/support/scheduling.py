"""Which of several processes runs which test: a file stays whole, a long lesson is shared out, what takes long begins.

A file that takes minutes and comes last leaves all other processes idle. So the files that take longest come first; the
lessons, which take longest of all, are shared out one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from xdist.scheduler import LoadFileScheduling

SHARED_OUT = "::test_a_lesson_runs_on_binder_and_takes_its_solutions["
# The lessons come after the first file: one process runs that file while the other makes the lessons' environment.
FIRST = (
    "tests/planted/test_truth.py",
    SHARED_OUT,
    "tests/launch/test_doors.py",
    "tests/launch/test_slurm.py",
    "tests/board/test_hub_service.py",
    "tests/api/test_cell_ranks.py",
    "tests/api/test_ranked_experiment.py",
    "tests/cli/test_ranks.py",
    "tests/capture/test_kernel_session.py",
    "tests/diagnosis/test_simulated_loops.py",
    "tests/knobs/test_dataloader_knobs.py",
    "tests/capture/test_unmodified_cells.py",
    "tests/tuning/test_climb.py",
    "tests/tuning/test_experiment_magics.py",
    "tests/benchmarks/test_conductor.py",
    "tests/documents/test_book.py",
    "tests/demo/test_demo.py",
    "tests/documents/test_packaging.py",
    "tests/views/test_one_figure.py",
)


class Scheduling(LoadFileScheduling):  # type: ignore[misc] # it ships no types
    """Whole files, but each lesson by itself; in the order in which they were collected."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if SHARED_OUT in nodeid else str(super()._split_scope(nodeid))


def sort_longest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Files that take long, then the others from many tests to few; each file's tests in their own order."""
    counts = Counter(item.path for item in items)
    return sorted(items, key=lambda item: (_rank(item.nodeid), -counts[item.path], item.path))


def _rank(nodeid: str) -> int:
    return next((i for i, words in enumerate(FIRST) if words in nodeid), len(FIRST))
