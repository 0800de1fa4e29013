"""A job's ranks while they run: what their journals say, as rows of the live view, in a notebook or at a terminal."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gpulab.analysis.collectives import Arrived, rank_waits, straggler
from gpulab.errors import StoreError
from gpulab.store.folders import Store
from gpulab.store.live_job import LiveJob, LiveRank, running_jobs
from gpulab.thresholds import DEFAULT
from gpulab.views.running import live_ranks as view
from gpulab.views.running.live_ranks import RankRow

EVERY_S, LOG_EVERY_S = 1.0, 10.0  # at a terminal, and in a file


def live_rows(ranks: Sequence[LiveRank]) -> tuple[list[RankRow], int | None]:
    """What the live view shows of the ranks, and which of them holds up the others."""
    present = {
        rank.rank: Arrived(rank.arrivals["group"], rank.arrivals["sequence"], rank.arrivals["time_ns"])
        for rank in ranks
    }
    waits = rank_waits(present) if len({rank.node for rank in ranks}) == 1 else {}  # two nodes have two clocks
    rows = [
        RankRow(
            rank=rank.rank,
            node=rank.node if len({r.node for r in ranks}) > 1 else "",
            step_count=rank.step_count,
            step_us=rank.step_us,
            data_wait_us=rank.data_wait_us,
            busy=rank.busy,
            waits=waits.get(rank.rank),
            heard_s=rank.heard_s,
            has_ended=rank.has_ended,
        )
        for rank in ranks
    ]
    return rows, straggler(waits, DEFAULT.skew_notice)


def watch(root: Path, job_id: str = "", *, sleep: Callable[[float], None] = time.sleep) -> int:
    """Show a job's ranks at the terminal until all have ended; without `job_id` the one that began last.

    Returns 0. Raises StoreError where no such job runs.
    """
    store = Store(root)
    store.finish_killed()  # what has no process any more does not run
    running = running_jobs(root)
    chosen = job_id or next(reversed(running), "")
    chosen = next((job for job, number in running.items() if number and number == chosen), chosen)
    if chosen not in running:
        named = f"No job {chosen!r}" if chosen else "No job"
        start = "Start one with gpulab record --ranks N SCRIPT, or name its folder with --store"
        others = f"These run: {', '.join(running)}" if running else start
        raise StoreError(f"{named} runs in {str(root)!r}. {others}.")
    job, screen = LiveJob(root, chosen), _Screen()
    while True:
        store.finish_killed()
        ranks = job.look()
        screen.show(f"job {chosen}\n{view.text(*live_rows(ranks))}")
        if all(rank.has_ended for rank in ranks) and chosen not in running_jobs(root):
            screen.end(f"All ranks have ended. The report: gpulab report {chosen}")
            return 0
        sleep(EVERY_S if screen.renews else LOG_EVERY_S)


class _Screen:
    """A few lines that are renewed in place at a terminal, and written one below the other into a file."""

    def __init__(self) -> None:
        self.renews = sys.stdout.isatty()
        self._height = 0

    def show(self, text: str) -> None:
        if self.renews:  # a line that wraps would take the place of two
            width = shutil.get_terminal_size().columns - 1
            text = "\n".join(line[:width] for line in text.split("\n"))
        back = f"\x1b[{self._height}F\x1b[J" if self.renews and self._height else ""
        sys.stdout.write(f"{back}{text}\n")
        sys.stdout.flush()
        self._height = text.count("\n") + 1

    def end(self, text: str) -> None:
        sys.stdout.write(f"{text}\n")
